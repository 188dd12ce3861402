"""The table of MXNet's operators; a row is as `graphs/table.py` says. All names of an operator are
in it: which of them a file has depends on how its user spelled it, and on the release."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call, Operators, axes_of
from shardwright.compiler.frontend.graphs.types import computed_type

MXNET = Operators(first=0)
"""Rows of MXNet's operators; `operators/__init__.py` loads the files that fill it."""

_TYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool")


def dtype_of(call: Call, name: str, default: Any) -> np.dtype[Any]:
    """A type among the attributes, in what it is computed in."""
    said = call.node.attributes.get(name)
    if said is None:
        return computed_type(np.dtype(default))
    if said == "bfloat16":
        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    if said not in _TYPES:
        raise unfit(f"an attribute {name} of {', '.join(_TYPES)}, bfloat16", repr(said)[:60])
    return computed_type(np.dtype(str(said)))


def whole_numbers(call: Call, name: str) -> tuple[int, ...] | None:
    """One or several whole numbers among the attributes; None where they are left out."""
    said = call.node.attributes.get(name)
    if isinstance(said, int):
        return (said,)
    return call.ints(name)


def reduced_axes(call: Call, rank: int, name: str = "axis") -> tuple[int, ...]:
    """The axes that a node reduces over: all where it names none, the others where it `exclude`s
    them."""
    said = whole_numbers(call, name)
    axes = axes_of(said, rank) if said else tuple(range(rank))
    if call.flag("exclude") and said:
        return tuple(axis for axis in range(rank) if axis not in axes)
    return axes
