"""Rules for what regions and instructions hold: element types, affine offsets, views, bounds."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.region import Affine, Bound, View
from shardwright.compiler.support.schema import (
    COUNT,
    WHOLE,
    WHOLES,
    Rule,
    is_count,
    is_whole,
    row,
    several,
)


def _is_affine(value: Any) -> bool:
    return isinstance(value, Affine) and is_whole(value.const) and _PAIRS.holds(value.terms)


def _is_view(value: Any) -> bool:
    return (
        isinstance(value, View)
        and is_count(value.tensor)
        and _is_affine(value.offset)
        and WHOLES.holds(value.strides)
    )


def _is_bound(value: Any) -> bool:
    numbers = (value.offset, value.size, value.unit) if isinstance(value, Bound) else (None,)
    return all(map(is_whole, numbers)) and value.size >= 0 and WHOLES.holds(value.strides)


DTYPE = Rule("an element type", lambda v: isinstance(v, DType))
_PAIRS = several(row(COUNT, WHOLE))
AFFINE = Rule("a number plus multiples of registers", _is_affine)
VIEW = Rule("a view of a tensor", _is_view)
BOUND = Rule("a bounded coordinate", _is_bound)
