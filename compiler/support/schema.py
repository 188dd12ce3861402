"""Rules for data that came out of a file: what a value must be, in words and as a test.

A file may hold anything behind right checksums. Tables of these rules say what a section may hold
(`compiler/isa/columns.py`, `orchestrator/report/shape.py`), so that code behind the reader meets
only what it was written for.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

MOST = 2**48
"""Our choice: no size, offset, stride or count of a file is larger. It is a thousand times the
memory of any machine, and leaves room for products in 64 bits."""
MOST_DEPTH = 32
"""Our choice: how deep lists and maps of a file may lie in each other."""


class Shape(Protocol):
    """What values are held to."""

    def require(self, value: Any, where: str) -> None:
        """Raises ValueError when `value` is something else; `where` is how people find it."""


class Rule(NamedTuple):
    """What is required, as people read it, and whether a value is that."""

    what: str
    holds: Callable[[Any], bool]

    def require(self, value: Any, where: str) -> None:
        """Raises ValueError when `value` is something else."""
        if not self.holds(value):
            raise ValueError(f"{where} requires {self.what}, got {reprlib.repr(value)}")


@dataclass(frozen=True, slots=True)
class Table:
    """The entries of a map by name: those it must have, and those it may have; it has no others
    unless it is `open`, and those hold plain data."""

    required: Mapping[str, Shape] = field(default_factory=dict)
    optional: Mapping[str, Shape] = field(default_factory=dict)
    is_open: bool = False

    def require(self, values: Any, where: str) -> None:
        """Raises ValueError when `values` is no such map."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} requires a map, got {reprlib.repr(values)}")
        for name in self.required:
            if name not in values:
                raise ValueError(f"{where} requires {name}")
        for name, value in values.items():
            rule = self.required.get(name) or self.optional.get(name)
            if rule is None and not self.is_open:
                raise ValueError(f"{where} has no {reprlib.repr(name)}")
            (rule or PLAIN).require(value, f"{where}: {name}")


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence of values of one shape."""

    shape: Shape

    def require(self, value: Any, where: str) -> None:
        """Raises ValueError when `value` is no such sequence."""
        if type(value) not in (list, tuple):
            raise ValueError(f"{where} requires a list, got {reprlib.repr(value)}")
        for number, item in enumerate(value):
            self.shape.require(item, f"{where}[{number}]")


@dataclass(frozen=True, slots=True)
class Entries:
    """A map from any text to values of one shape."""

    shape: Shape

    def require(self, value: Any, where: str) -> None:
        """Raises ValueError when `value` is no such map."""
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise ValueError(f"{where} requires a map of texts, got {reprlib.repr(value)}")
        for key, item in value.items():
            self.shape.require(item, f"{where}.{key}")


def is_whole(value: Any) -> bool:
    """A whole number of at most `MOST` either way; no bool."""
    return type(value) is int and -MOST <= value <= MOST


def is_count(value: Any) -> bool:
    """A whole number from 0 to `MOST`; no bool."""
    return type(value) is int and 0 <= value <= MOST


def _is_plain(value: Any, depth: int = 0) -> bool:
    if value is None or type(value) in (bool, float, str):
        return True
    if type(value) is int:
        return bool(-(2**63) <= value < 2**64)
    if depth == MOST_DEPTH:
        return False
    if type(value) in (list, tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    if type(value) is dict:
        return all(type(k) is str and _is_plain(v, depth + 1) for k, v in value.items())
    return False


def several(rule: Rule, least: int = 0, most: int = MOST) -> Rule:
    """A sequence of values that each follow `rule`, `least` to `most` of them."""
    size = "" if (least, most) == (0, MOST) else f"{least} to {most} "

    def holds(value: Any) -> bool:
        in_order = type(value) in (tuple, list)
        return in_order and least <= len(value) <= most and all(map(rule.holds, value))

    return Rule(f"a list of {size}({rule.what})", holds)


def row(*rules: Rule) -> Rule:
    """A sequence of as many values as there are rules, one for each."""

    def holds(value: Any) -> bool:
        in_order = type(value) in (tuple, list) and len(value) == len(rules)
        return in_order and all(r.holds(v) for r, v in zip(rules, value, strict=True))

    return Rule(f"[{', '.join(rule.what for rule in rules)}]", holds)


def one_of(*values: Any) -> Rule:
    """One of some words or numbers."""
    types = {type(v) for v in values}
    return Rule(
        f"one of {', '.join(map(repr, values))}", lambda v: type(v) in types and v in values
    )


def either(*rules: Rule) -> Rule:
    """What follows any of the rules."""
    return Rule(" or ".join(r.what for r in rules), lambda v: any(r.holds(v) for r in rules))


def _is_element(value: Any) -> bool:
    """Whether a value is a whole number of some integer type."""
    return type(value) is int and -(2**63) <= value < 2**64


WHOLE = Rule("a whole number", is_whole)
COUNT = Rule("a whole number from 0", is_count)
NUMBER = Rule("a number", lambda v: type(v) in (bool, float) or _is_element(v))
FLAG = Rule("true or false", lambda v: type(v) is bool)
TEXT = Rule("a text", lambda v: type(v) is str)
NOTHING = Rule("nothing", lambda v: v is None)
PLAIN = Rule(f"plain data, {MOST_DEPTH} levels deep at most", _is_plain)
COUNTS = several(COUNT)
WHOLES = several(WHOLE)
