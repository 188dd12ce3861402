"""`reduce`: one operand folded over some dims with a named reduction.

There is no init operand: the start value is the identity of the reduction. Narrow floats
accumulate in fp32 and round once, integers wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.combinations import REDUCTIONS
from shardwright.compiler.ir.factors import Factor, FactorKind, along, in_pairs
from shardwright.compiler.ir.opdef import FIRST, Kind
from shardwright.compiler.ir.ops.rules import check_dims, define, mismatch, widen
from shardwright.compiler.ir.roles import DIMS
from shardwright.compiler.ir.types import Op, TensorType, tensor_type


@dataclass(frozen=True, slots=True)
class ReduceAttrs:
    """`kind` is one of add multiply max min and or xor; `dims` disappear from the result."""

    kind: str
    dims: tuple[int, ...] = field(metadata=DIMS)


def check_reduction(kind: str, dtype: DType) -> None:
    """Refuse an unknown reduction, and bitwise reductions of floats."""
    if kind not in REDUCTIONS:
        raise mismatch(f"a reduction of {' '.join(REDUCTIONS)}", kind)
    if kind in ("and", "or", "xor") and dtype.is_float:
        raise mismatch(f"integer or i1 elements for {kind}", dtype.value)


def identity(kind: str, dtype: DType) -> np.ndarray:
    """The scalar that `kind` starts from: 0, 1, the lowest or the highest value of `dtype`."""
    if kind == "and":
        value: object = np.invert(np.zeros((), dtype.numpy))
    elif kind in ("add", "or", "xor", "multiply"):
        value = 1 if kind == "multiply" else 0
    elif dtype is DType.PRED:
        value = kind == "min"
    elif dtype.is_float:
        value = -np.inf if kind == "max" else np.inf
    else:
        info = np.iinfo(dtype.numpy)
        value = info.min if kind == "max" else info.max
    return np.asarray(value).astype(dtype.numpy)


def _infer(attrs: ReduceAttrs, operand: TensorType) -> TensorType:
    check_dims("dims", attrs.dims, operand.rank)
    check_reduction(attrs.kind, operand.dtype)
    kept = tuple(s for d, s in enumerate(operand.shape) if d not in attrs.dims)
    return tensor_type(kept, operand.dtype)


def _flops(op: Op) -> int:
    return max(op.operands[0].type.num_elements - op.result.type.num_elements, 0)


def reduce_array(kind: str, x: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """`x` folded over `dims` in the type arithmetic is done in, rounded to the type of `x`."""
    wide = widen(x)
    start = identity(kind, DType.from_numpy(wide.dtype))[()]
    fold: Callable[..., Any] = REDUCTIONS[kind].reduce
    value = fold(wide, axis=dims, dtype=wide.dtype, initial=start)
    return np.asarray(value).astype(x.dtype, copy=False)


def _factors(op: Op) -> list[Factor]:
    """Kept dims go on; of a part of the others there are partial results."""
    dims = range(op.operands[0].type.rank)
    kept = [d for d in dims if d not in op.attrs.dims]
    folded = [along((0,), d, FactorKind.COMBINED) for d in op.attrs.dims]
    return in_pairs(0, kept, 1, range(len(kept))) + folded


define(
    "reduce",
    Kind.REDUCTION,
    ReduceAttrs,
    _infer,
    lambda op, x: reduce_array(op.attrs.kind, x, op.attrs.dims),
    combines=True,
    flops=_flops,
    linear=(FIRST,),
    factors=_factors,
)
