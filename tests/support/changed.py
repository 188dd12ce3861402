"""Objects with one thing changed, for tests that go through all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, Any] = MappingProxyType({})


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}?"
        case None:
            return 1.0
        case tuple():
            return (*value, *(value[-1:] or (1,)))
        case frozenset():
            return value | {77}
        case Mapping():
            return {**value, "another": 1}
    raise AssertionError(value)


def changes(value: Any, own: Mapping[str, Any] = NOTHING, path: str = "") -> list[tuple[str, Any]]:
    """(name, object): `value` with each of its fields changed alone, those of the dataclasses it
    holds included; `own` has the new values of fields that `other` does not know."""
    found = []
    for row in dataclasses.fields(value):
        now, name = getattr(value, row.name), f"{path}{row.name}"
        if name in own:
            inner = [(name, own[name])]
        elif dataclasses.is_dataclass(now):
            inner = changes(now, own, f"{name}.")
        else:
            inner = [(name, other(now))]
        found += [(where, replace(value, **{row.name: made})) for where, made in inner]
    return found
