"""Predicates over positions that need no tile: GpSimd decides them as it applies the mask.

A comparison of sums of positions and numbers is one number per point, an offset plus a step per
atom, against 0. Where all its readers choose between a float and a constant it becomes a `mask`: a
value without code, and each reader one `affine_select`. What decides masked blocks beforehand
(`rows/facts.py`) reads the same form. Next: `values.py` for everything else a value may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from compiler.dtypes import DType
from compiler.isa.region import Affine

if TYPE_CHECKING:
    from compiler.codegen.space import Space, Value, Walk

MASK = "mask"
NEGATED = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}


def fold_masks(space: Space) -> None:
    """Turn comparisons that only selects of floats read into masks."""
    users = space.users(space.slice(space.sinks))
    for n, value in enumerate(space.values):
        if value.op != "compare" or n not in users:
            continue
        walk = _difference(space, value)
        if walk is not None and all(_is_masked(space, n, u) for u in users[n]):
            attrs = {"direction": value.attrs["direction"]}
            atoms = frozenset(walk.strides)
            space.values[n] = replace(
                value, op=MASK, inputs=(), atoms=atoms, walk=walk, attrs=attrs
            )


def _is_masked(space: Space, mask: int, reader: int) -> bool:
    """Whether `reader` is a float where the mask says so, and a constant elsewhere."""
    value = space.values[reader]
    if value.op != "select" or not value.dtype.is_float or mask in value.inputs[1:]:
        return False
    return sum(space.values[i].op == "constant" for i in value.inputs[1:]) == 1


def _difference(space: Space, value: Value) -> Walk | None:
    """a - b of a comparison of positions, where some atom moves it."""
    found = _sum([_position(space, i) for i in value.inputs], -1)
    return None if found is None or isinstance(found, Affine) or not found.strides else found


def _position(space: Space, number: int) -> Walk | Affine | None:
    """A 32-bit integer as a walk, or as a number where no atom moves it; None when it is neither
    (sums of shorter or unsigned ones may wrap).
    """
    value = space.values[number]
    if value.dtype is not DType.I32:
        return None
    match value.op:
        case "iota":
            return value.walk
        case "constant":
            return Affine(int(value.attrs["value"]))
        case "register":
            start: Affine = value.attrs["value"]
            return start
        case "add" | "subtract":
            given = [_position(space, i) for i in value.inputs]
            return _sum(given, 1 if value.op == "add" else -1)
    return None


def _sum(given: Sequence[Walk | Affine | None], sign: int) -> Walk | Affine | None:
    """a + sign * b."""
    a, b = given
    if a is None or b is None:
        return None
    (start, steps), (more, others) = (_parts(x) for x in (a, b))
    offset = start + more * sign
    atoms = sorted({*steps, *others})
    strides = {n: steps.get(n, 0) + sign * others.get(n, 0) for n in atoms}
    walk = next((x for x in (a, b) if not isinstance(x, Affine)), None)
    if walk is None:
        return offset
    return replace(walk, offset=offset, strides={n: s for n, s in strides.items() if s})


def _parts(position: Walk | Affine) -> tuple[Affine, Mapping[int, int]]:
    if isinstance(position, Affine):
        return position, {}
    return position.offset, position.strides
