"""Objects as plain data and back, held to the types that their classes declare.

The declaration of a class is its schema: numbers are finite and of a size that arithmetic with them
stays defined, sequences and maps hold what they say, objects in them are held to theirs.
"""

from __future__ import annotations

import enum
import math
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

LARGEST = 10**36
"""Our choice: beyond every count, rate and time, and squares of it are still numbers."""
_PLAIN = (bool, str, bytes, type(None))


def plain(value: Any, kind: type[Any] | None = None) -> Any:
    """`value` in what msgpack knows, as a `kind` of which its class may be a subclass; the order of
    mappings is kept, that of sets is theirs no more."""
    if is_dataclass(value):
        own: object = kind or type(value)
        return {name: plain(getattr(value, name)) for name in hints(own)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value.value if isinstance(value, enum.Enum) else value


def made(hint: Any, value: Any) -> Any:
    """What a type says of plain data: the inverse of `plain`. What is of another kind stays as it
    is, for `check_fields` to find."""
    origin, args, kind = typing.get_origin(hint), typing.get_args(hint), hint
    if is_dataclass(hint):
        known = hints(kind)
        return kind(**{name: made(known.get(name), item) for name, item in value.items()})
    if isinstance(hint, enum.EnumType):
        return kind(value)
    if origin is frozenset:
        return frozenset(value)
    if origin is tuple and args[-1] is Ellipsis and isinstance(value, list | tuple):
        return tuple(made(args[0], item) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {key: made(args[1], item) for key, item in value.items()}
    return value


def check_fields(value: Any, where: str = "") -> None:
    """Raises ValueError where a field of a dataclass, or of one in it, is of another type than the
    class declares."""
    name = type(value).__name__
    kind: object = type(value)
    for field, hint in hints(kind).items():
        _check(getattr(value, field), hint, f"{where or name}.{field}")


@cache
def hints(kind: Any) -> dict[str, Any]:
    """Field -> annotation of a dataclass."""
    found = typing.get_type_hints(kind)
    return {f.name: found[f.name] for f in fields(kind)}


def _check(value: Any, hint: Any, where: str) -> None:
    if not _holds(value, hint, where):
        raise ValueError(f"{where} requires {hint}, got {reprlib.repr(value)}")


def _holds(value: Any, hint: Any, where: str) -> bool:
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one, where) for one in typing.get_args(hint))
    if origin is not None:
        return _holds_items(value, origin, typing.get_args(hint), where)
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return type(value) in kinds and abs(value) <= LARGEST and not math.isnan(value)
    if hint in _PLAIN:
        return type(value) is hint
    if not isinstance(hint, type) or not isinstance(value, hint):
        return not isinstance(hint, type)
    if is_dataclass(value) and not isinstance(value, enum.Enum):
        check_fields(value, where)
    return True


def _fits(value: Any, hint: Any, where: str) -> bool:
    try:
        return _holds(value, hint, where)
    except ValueError:
        return False


def _holds_items(value: Any, origin: Any, args: tuple[Any, ...], where: str) -> bool:
    """Sequences and maps, item by item."""
    if issubclass(origin, Mapping):
        key, item = args
        return isinstance(value, Mapping) and all(
            _holds(k, key, where) and _holds(v, item, where) for k, v in value.items()
        )
    if issubclass(origin, tuple) and args[-1:] != (Ellipsis,):
        is_row = isinstance(value, tuple) and len(value) == len(args)
        return is_row and all(_holds(v, h, where) for v, h in zip(value, args, strict=True))
    if issubclass(origin, Sequence):
        is_row = isinstance(value, list | tuple)
        return is_row and all(_holds(v, args[0], where) for v in value)
    return isinstance(value, origin)
