"""Small helpers of the op definitions: the wording of type errors and result plumbing.

Every `infer` raises ValueError in the form "X requires Y, got Z", so the wording lives here once.
Reference helpers make sure that a NumPy scalar never leaves a reference where an array is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType, cast
from shardwright.compiler.ir.opdef import Reference
from shardwright.compiler.ir.types import Graph, Op, TensorType

Types = Sequence[TensorType]
Regions = Sequence[Graph]


def mismatch(name: str, requires: str, got: object) -> ValueError:
    """The error an `infer` raises: what `name` requires, and what it got."""
    return ValueError(f"{name} requires {requires}, got {got}")


def check_arity(name: str, types: Types, count: int) -> None:
    """Refuse a wrong number of operands."""
    if len(types) != count:
        raise mismatch(name, f"{count} operand{'s' * (count != 1)}", len(types))


def check_attrs(name: str, attrs: Any, kind: type) -> None:
    """Refuse attributes of another class."""
    if type(attrs) is not kind:
        raise mismatch(name, f"attributes of class {kind.__name__}", type(attrs).__name__)


def check_dims(name: str, what: str, dims: Sequence[int], rank: int) -> None:
    """Refuse dims outside of `rank` and repeated dims."""
    if len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise mismatch(name, f"distinct {what} below rank {rank}", tuple(dims))


def check_same(name: str, types: Types) -> None:
    """Refuse operands of different types."""
    if any(t != types[0] for t in types[1:]):
        raise mismatch(name, "operands of one type", " and ".join(str(t) for t in types))


def result_elements(op: Op) -> int:
    """Useful arithmetic of an elementwise op: one per result element."""
    return sum(r.type.num_elements for r in op.results)


def no_flops(op: Op) -> int:
    """Ops that move data do no arithmetic."""
    del op
    return 0


def widen(x: np.ndarray) -> np.ndarray:
    """Narrow floats as fp32, everything else unchanged: the type arithmetic is done in."""
    return x.astype(np.float32) if DType.from_numpy(x.dtype).is_narrow else x


def reference_of(fn: Callable[..., Any]) -> Reference:
    """A reference that computes `fn` on widened operands and rounds once to the result type."""

    def reference(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        value = fn(*(widen(a) for a in args))
        return (cast(np.asarray(value), op.results[0].type.dtype),)

    return reference
