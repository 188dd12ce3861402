"""Frozen dataclasses as `{field=value, ...}`: what the annotations of a class say is what its text
may hold.

Fields at their default are left out and come back from the class, so that adding one changes no
text. No op has a rule of its own here.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, get_args, get_origin

from shardwright.compiler.support.fields import hints
from shardwright.compiler.text.lexer import Cursor, Token

Given = dict[str, tuple[Token, Any]]
"""Values by field, each with the token it starts at."""


def field_values(item: Any) -> dict[str, Any]:
    """The fields of `item` that are not at their default, in the order of the class."""
    values = ((f, getattr(item, f.name)) for f in fields(item))
    return {f.name: value for f, value in values if not _is_default(f, value)}


def _is_default(field: Field[Any], value: object) -> bool:
    return type(field.default) is type(value) and bool(field.default == value)


def from_fields(cursor: Cursor, start: Token, cls: type, given: Given, what: str) -> Any:
    """A `cls` of the values that stand behind `start`.

    Raises: UsageError for a field that `what` does not have, lacks, or that holds another type.
    """
    known = hints(cls)
    for name, (token, value) in given.items():
        if name not in known:
            raise cursor.error(f"one of {' '.join(known)} in {what}", token)
        if not conforms(value, known[name]):
            raise cursor.error(f"{name} of {what} as {_shown(known[name])}", token)
    lacking = [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]
    if lacking:
        raise cursor.error(f"{' '.join(lacking)} of {what}", start)
    return cls(**{name: value for name, (_, value) in given.items()})


def conforms(value: object, annotation: Any) -> bool:
    """Whether a field annotated so holds `value`: classes, tuples of them, or one of several."""
    if get_origin(annotation) is UnionType:
        return any(conforms(value, one) for one in get_args(annotation))
    if get_origin(annotation) is not tuple:
        return type(value) is annotation
    inside = get_args(annotation)
    if not isinstance(value, tuple):
        return False
    if inside[-1] is Ellipsis:
        return all(conforms(v, inside[0]) for v in value)
    return len(value) == len(inside) and all(map(conforms, value, inside))


def _shown(annotation: Any) -> str:
    """An annotation in words."""
    if get_origin(annotation) is UnionType:
        return " or ".join(map(_shown, get_args(annotation)))
    if get_origin(annotation) is not tuple:
        return "none" if annotation is type(None) else str(annotation.__name__)
    inside = get_args(annotation)
    if inside[-1] is Ellipsis:
        return f"[{_shown(inside[0])}, ...]"
    return f"[{', '.join(map(_shown, inside))}]"
