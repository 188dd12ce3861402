"""Rewrites into ops that fuse, or vanish: sums over dims of size 1, sums of pieces padded apart,
and neighbouring slices put together again.

A reduction over dims of size 1 is a reshape. The gradient of a split (rotary halves, packed
projections) is a sum of zero-padded pieces; where the pieces do not meet it is a concatenation,
which moves every element once instead of three times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from shardwright.compiler.ir.facts import is_sum, stored
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    ConcatenateAttrs,
    PadAttrs,
    ReduceAttrs,
    ReshapeAttrs,
    SliceAttrs,
)
from shardwright.compiler.ir.rewrite import replaced
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.single_windows import as_slice, as_update


def simplify(graph: Graph, keep_sums: bool = False) -> Graph:
    """`graph` with those ops rewritten; what they leave unused is left to `dce`.

    With `keep_sums`, additions over dims of size 1 stay reductions: in a step that was captured
    with one sample, they say where gradients are summed over samples.
    """

    def rule(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
        kept = op.name not in _RULES or (keep_sums and is_sum(op))
        return [] if kept else _RULES[op.name](op, producers)

    return replaced(graph, rule, lambda region: simplify(region, keep_sums))


def _reduce(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """Reduce only dims with more than one element."""
    value, attrs = op.operands[0], op.attrs
    shape = value.type.shape
    if all(shape[d] != 1 for d in attrs.dims):
        return []
    made: list[Op] = []
    if long := tuple(d for d in attrs.dims if shape[d] != 1):
        made.append(make_op("reduce", (value,), ReduceAttrs(attrs.kind, long), loc=op.loc))
        value = made[0].result
    return [*made, make_op("reshape", (value,), ReshapeAttrs(op.result.type.shape), loc=op.loc)]


def _add(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """Two pieces padded with zeros along one dim, one behind the other."""
    pads = [pad for v in op.operands if (pad := producers.get(v)) is not None]
    dims = {_padded_dim(pad, producers) for pad in pads}
    dim = dims.pop() if len(pads) == 2 and len(dims) == 1 else None
    if dim is None:
        return []
    first, second = sorted(pads, key=lambda pad: pad.attrs.low[dim])
    if first.attrs.low[dim] + first.operands[0].type.shape[dim] != second.attrs.low[dim]:
        return []
    pieces = (first.operands[0], second.operands[0])
    joined = make_op("concatenate", pieces, ConcatenateAttrs(dim), loc=op.loc)
    if joined.result.type == op.result.type:
        return [joined]
    attrs = replace(first.attrs, high=second.attrs.high)
    return [joined, make_op("pad", (joined.result, first.operands[1]), attrs, loc=op.loc)]


def _padded_dim(op: Op, producers: Mapping[Value, Op]) -> int | None:
    """The one dim a pad with zeros makes longer; None when it does anything else, or is none."""
    if not isinstance(op.attrs, PadAttrs):
        return None
    zero = stored(producers.get(op.operands[1]))
    return None if zero is None or zero.array().any() else op.attrs.only_dim


def _concatenate(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """Neighbouring slices of one value are one slice, or a view of all of it."""
    made = (producers.get(v) for v in op.operands)
    cuts = [cut for cut in made if cut is not None and isinstance(cut.attrs, SliceAttrs)]
    source, dim = cuts[0].operands[0] if cuts else None, op.attrs.dim
    if source is None or len(cuts) < len(op.operands):
        return []
    if not all(_follow(first, then, dim) for first, then in pairwise(cuts)):
        return []
    if op.result.type == source.type:
        return [make_op("reshape", (source,), ReshapeAttrs(source.type.shape), loc=op.loc)]
    attrs = replace(cuts[0].attrs, limit=cuts[-1].attrs.limit)
    return [make_op("slice", (source,), attrs, loc=op.loc)]


def _follow(first: Op, then: Op, dim: int) -> bool:
    """True for slices of one value, every element of `dim`, the second where the first ends."""
    a, b = first.attrs, then.attrs
    ends = (*a.limit[:dim], b.limit[dim], *a.limit[dim + 1 :])
    starts = (*a.start[:dim], a.limit[dim], *a.start[dim + 1 :])
    same = first.operands == then.operands and a.stride == b.stride and a.stride[dim] == 1
    return same and b.start == starts and b.limit == ends


_RULES = {
    "reduce": _reduce,
    "add": _add,
    "concatenate": _concatenate,
    "gather": as_slice,
    "scatter": as_update,
}
