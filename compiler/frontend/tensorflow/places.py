"""Places of HLO instructions: TensorFlow writes the lines of its own code into them, here they
become the user's.

An instruction's metadata names the operator that it comes from (`op_name`), and only the graph
knows which line of the user's made that one. Metadata is rewritten in the serialised module, what
else there is stays byte for byte. Source: `hlo.proto` and `xla_data.proto` of OpenXLA, the numbers
of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Place = tuple[str, int]
_COMPUTATIONS, _INSTRUCTIONS, _METADATA = 3, 2, 7
_NAME, _FILE, _LINE, _FRAME = 2, 3, 4, 15
_ALIASES = 8
_VARINT, _LENGTH = 0, 2
_WIDTHS = {1: 8, 5: 4}


def with_places(module: bytes, places: Mapping[str, Place]) -> bytes:
    """A serialised `HloModuleProto` whose instructions have the places of their operators, and none
    where nobody knows one; what XLA says of buffers that results share with arguments is left out,
    since results become fewer."""

    def of_metadata(data: bytes) -> bytes:
        fields = [f for f in _fields(data) if f[0] not in (_FILE, _LINE, _FRAME)]
        names = (bytes(value).decode() for number, _, value in fields if number == _NAME)
        found = place_of(next(names, ""), places)
        if found:
            fields += [(_FILE, _LENGTH, found[0].encode()), (_LINE, _VARINT, found[1])]
        return b"".join(_written(*field) for field in fields)

    within: Callable[[bytes], bytes] = of_metadata
    for number in (_METADATA, _INSTRUCTIONS, _COMPUTATIONS):
        within = _inside(number, within)
    own = [field for field in _fields(module) if field[0] != _ALIASES]
    return within(b"".join(_written(*field) for field in own))


def place_of(name: str, places: Mapping[str, Place]) -> Place | None:
    """The place of an operator: names of several that became one stand behind each other, calls in
    front of what they call."""
    for one in name.split(";"):
        parts = one.split("/")
        for first in range(len(parts)):
            found = places.get("/".join(parts[first:]))
            if found:
                return found
    return None


def _inside(number: int, change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """What changes the messages of one field of a message."""

    def changed(data: bytes) -> bytes:
        made = []
        for field, wire, value in _fields(data):
            is_it = field == number and wire == _LENGTH
            made.append(_written(field, wire, change(value) if is_it else value))
        return b"".join(made)

    return changed


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of the fields of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        size = _WIDTHS.get(wire, 0)
        if wire == _LENGTH:
            size, at = _varint(data, at)
        yield number, wire, data[at : at + size]
        at += size


def _written(number: int, wire: int, value: Any) -> bytes:
    key = _encoded(number << 3 | wire)
    if wire == _VARINT:
        return key + _encoded(value)
    data: bytes = value
    return key + (_encoded(len(data)) if wire == _LENGTH else b"") + data


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _encoded(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
