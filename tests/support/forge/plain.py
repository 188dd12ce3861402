"""Plain data with something in it changed: what msgpack, JSON and TOML hold, and the few classes
that the attributes of program files add."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from shardwright.compiler.dtypes import DType

HOSTILE: tuple[Any, ...] = (-1, 2**63, 2**40, 0, "x" * 70, "../../x", None, [], {}, [[[]]], True)
"""Values that fit nowhere, or lead out of every range."""
MORE_HOSTILE: tuple[Any, ...] = (
    *HOSTILE,
    *(float("nan"), float("inf"), -0.5, 1e308, 2**31, -(2**31), -(2**63), 2**64 - 1, 7),
    *("", "\0", "\u202e", b"", b"\xff" * 9, False, [0] * 300, {"x": {"y": [None]}}),
)
Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of everything inside of plain data, containers too."""
    yield path
    for key, item in _items(value):
        yield from leaves(item, (*path, key))


def _items(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in fields(value)]
    return ()


def at(value: Any, path: Path) -> Any:
    """What a path leads to."""
    for key in path:
        value = getattr(value, key) if is_dataclass(value) else value[key]
    return value


def changed(value: Any, path: Path, new: Any) -> Any:
    """A copy with `new` where `path` leads."""
    if not path:
        return new
    first, *rest = path
    inner = changed(at(value, (first,)), tuple(rest), new)
    if isinstance(value, dict):
        return {**value, first: inner}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{first: inner})
    copy = list(value)
    copy[first] = inner
    return type(value)(copy)


def without(value: Any, path: Path) -> Any:
    """A copy of dicts and sequences that lacks what `path` leads to."""
    *front, last = path
    holder = at(value, tuple(front))
    if isinstance(holder, dict):
        rest: Any = {k: v for k, v in holder.items() if k != last}
    elif isinstance(holder, list | tuple):
        rest = type(holder)([*holder[:last], *holder[last + 1 :]])
    else:
        return value
    return changed(value, tuple(front), rest)


def mutations(value: Any, count: int, seed: int) -> Iterator[Any]:
    """Copies of plain data with one thing in them replaced by a hostile value."""
    dice = random.Random(seed)
    places = [path for path in leaves(value) if path]
    for _ in range(count):
        yield changed(value, dice.choice(places), dice.choice(HOSTILE))


def harmed(value: Any, dice: random.Random, path: Path | None = None) -> Any:
    """A copy with one thing changed: to a hostile value, to a neighbour, to what stands elsewhere
    in the same data; or dropped, renamed, repeated."""
    places = [p for p in leaves(value) if p]
    if not places:
        return dice.choice(MORE_HOSTILE)
    place = dice.choice(places) if path is None else path
    kind = dice.random()
    if kind < 0.1:
        return without(value, place)
    if kind < 0.2:
        return _moved(value, place, dice)
    if kind < 0.35:
        return changed(value, place, at(value, dice.choice(places)))
    new = _near(at(value, place), dice) if kind < 0.75 else dice.choice(MORE_HOSTILE)
    return changed(value, place, new)


def _moved(value: Any, place: Path, dice: random.Random) -> Any:
    """A key renamed, or an item of a sequence repeated, or its neighbours swapped."""
    *front, last = place
    holder = at(value, tuple(front))
    if isinstance(holder, dict):
        name = dice.choice((f"{last}x", "", *map(str, holder)))
        rest: Any = {(name if k == last else k): v for k, v in holder.items()}
    elif isinstance(holder, list | tuple):
        item = holder[last]
        rows = [*holder[:last], item, item, *holder[last + 1 :]]
        other = dice.randrange(len(holder))
        swapped = list(holder)
        swapped[last], swapped[other] = swapped[other], item
        rest = type(holder)(rows if dice.random() < 0.5 else swapped)
    else:
        return value
    return changed(value, tuple(front), rest)


def _near(old: Any, dice: random.Random) -> Any:
    """Something of the same kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return near_integer(old, dice)
    if isinstance(old, float):
        return dice.choice((-old, 0.0, old * 2, float("nan"), float("-inf"), 1e38, 1e-45))
    if isinstance(old, str):
        return dice.choice((old + "x", old[:-1], old.upper(), old * 40, "\ufffd" + old))
    if isinstance(old, bytes):
        return dice.choice((old[:-1], old + b"\0", old * 3, dice.randbytes(len(old))))
    if isinstance(old, DType):
        return dice.choice(tuple(DType))
    if isinstance(old, list | tuple):
        return type(old)([*old, *old]) if dice.random() < 0.5 else type(old)(old[:-1])
    return dice.choice(MORE_HOSTILE)


def near_integer(old: int, dice: random.Random) -> int:
    """A number somebody might have meant, or one that leads out of a table."""
    near = (old + 1, old - 1, -old, 2 * old, old + 100, old // 2, 0, 1, -1)
    far = (2**31 - 1, 2**31, 2**40, 2**62, -(2**62), 10**6, 2**15)
    return dice.choice(near if dice.random() < 0.7 else far)
