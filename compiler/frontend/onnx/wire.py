"""Protobuf's wire format, read by a schema of the fields that are wanted.

A message is a row of fields; each has a number and a kind in front of it, and fields that the
schema does not have are passed over. Whatever a file says of lengths is held to the bytes there
are. Source: protobuf's encoding page; fields of ONNX: `onnx.proto` of ONNX 1.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

Message = dict[str, Any]


class DamagedError(ValueError):
    """Bytes that are no message of the schema; the text says what was found."""


class Kind(StrEnum):
    """What a field holds, unless that is a message."""

    INTEGER = "integer"
    FLOAT = "float"
    DOUBLE = "double"
    TEXT = "text"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its name, its kind or the message that it holds, and whether it stands for many."""

    name: str
    kind: Kind | str
    is_many: bool = False


_VARINT, _WORD64, _LENGTH, _WORD32 = 0, 1, 2, 5
_WIRES: dict[str, int] = {Kind.INTEGER: _VARINT, Kind.FLOAT: _WORD32, Kind.DOUBLE: _WORD64}
_WIDTHS = {_WORD32: 4, _WORD64: 8}
_NUMPY: dict[str, np.dtype[Any]] = {Kind.FLOAT: np.dtype("<f4"), Kind.DOUBLE: np.dtype("<f8")}
_EMPTY: dict[str, Any] = {
    Kind.INTEGER: 0,
    Kind.FLOAT: 0.0,
    Kind.DOUBLE: 0.0,
    Kind.TEXT: "",
    Kind.BYTES: b"",
}
MOST_NESTED = 64  # our choice; protobuf's own readers take 100
Schema = Mapping[str, Mapping[int, Field]]


def read(data: bytes, message: str, schema: Schema) -> Message:
    """A message of a schema; fields that are not there are empty, messages that are not None.

    Raises DamagedError.
    """
    return _Reader(memoryview(data), schema).message(0, len(data), message, 0)


def fields(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(number, its bytes, those of its content) of every field of a message. Raises
    DamagedError."""
    before = 0
    for number, _, start, stop in _Reader(memoryview(data), {})._fields(0, len(data)):
        yield number, data[before:stop], data[start:stop]
        before = stop


@dataclass(frozen=True, slots=True)
class _Reader:
    data: memoryview
    schema: Schema

    def message(self, at: int, end: int, name: str, depth: int) -> Message:
        if depth > MOST_NESTED:
            raise DamagedError(f"messages within each other, more than {MOST_NESTED}")
        fields = self.schema[name]
        found: Message = {
            field.name: [] if field.is_many else _EMPTY.get(str(field.kind))
            for field in fields.values()
        }
        for number, wire, start, stop in self._fields(at, end):
            field = fields.get(number)
            if field is not None:
                self._take(found, field, wire, start, stop, depth)
        return found

    def _fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, wire type, first byte, byte behind the last) of every field."""
        while at < end:
            key, at = self._varint(at, end)
            number, wire = key >> 3, key & 7
            if not number:
                raise DamagedError(f"a field with number 0 at byte {at}")
            if wire == _VARINT:
                stop = self._varint(at, end)[1]
            elif wire == _LENGTH:
                size, at = self._varint(at, end)
                stop = at + size
            elif wire in _WIDTHS:
                stop = at + _WIDTHS[wire]
            else:
                raise DamagedError(f"wire type {wire} at byte {at}")
            if stop > end:
                raise DamagedError(f"{stop - end} bytes fewer than the field at byte {at} has")
            yield number, wire, at, stop
            at = stop

    def _take(
        self, found: Message, field: Field, wire: int, at: int, stop: int, depth: int
    ) -> None:
        """Add a field to a message."""
        kind = field.kind
        if kind in _WIRES and field.is_many and wire == _LENGTH:
            found[field.name] += self._packed(Kind(kind), at, stop)
            return
        if wire != _WIRES.get(str(kind), _LENGTH):
            raise DamagedError(f"wire type {wire} of {field.name}, a field of {kind}, at byte {at}")
        value = self._value(kind, at, stop, depth)
        if field.is_many:
            found[field.name].append(value)
        else:
            found[field.name] = value  # of several the last counts

    def _value(self, kind: Kind | str, at: int, stop: int, depth: int) -> Any:
        if kind == Kind.INTEGER:
            return _signed(self._varint(at, stop)[0])
        if kind in _NUMPY:
            return float(np.frombuffer(self.data[at:stop], _NUMPY[Kind(kind)])[0])
        if kind == Kind.BYTES:
            return self.data[at:stop]
        if kind == Kind.TEXT:
            try:
                return str(self.data[at:stop], "utf-8")
            except UnicodeDecodeError:
                raise DamagedError(f"a name at byte {at} that is not UTF-8") from None
        return self.message(at, stop, kind, depth + 1)

    def _packed(self, kind: Kind, at: int, stop: int) -> list[Any]:
        if kind == Kind.INTEGER:
            found = []
            while at < stop:
                value, at = self._varint(at, stop)
                found.append(_signed(value))
            return found
        dtype = _NUMPY[kind]
        if (stop - at) % dtype.itemsize:
            raise DamagedError(
                f"{stop - at} bytes of numbers of {dtype.itemsize} bytes at byte {at}"
            )
        numbers: list[float] = np.frombuffer(self.data[at:stop], dtype).tolist()
        return numbers

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """(the number, the place behind it)."""
        value, shift = 0, 0
        while at < end and shift < 70:
            byte = self.data[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value & (2**64 - 1), at
        raise DamagedError(f"a number that does not end at byte {at}")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
