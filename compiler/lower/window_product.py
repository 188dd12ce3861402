"""`convolution` as one contraction of windows that may leave their operand, channels innermost.

The windows are an `unfold` view of the operand in its own order of dims, so that code generation
sees which index moves along which dim and keeps rows with their halo on chip. Padding is never
stored. Holes in lhs become output features: every distance from a multiple of the dilation is a
feature block of one dense convolution. Narrow groups are multiplied as blocks of a diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.compiler.ir.ops import ConvolutionAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.lower.level import Site
from shardwright.compiler.lower.task import PARTITIONS

_MAX_STEPS = 512
"""Products per output tile above which code would be long (our choice)."""

_NARROW = 32
"""Input features per group below which groups are multiplied together: a matmul of fewer rows
takes as long (our choice).
"""


@dataclass(frozen=True, slots=True)
class _Hole:
    """One spatial dim of a lhs with `step` - 1 holes between elements: the windows of a dense lhs
    start at `first`, have `taps` elements, and rhs, turned around, is padded by `low` and `high`.
    """

    step: int
    first: int
    taps: int
    low: int
    high: int


def is_possible(op: Op) -> bool:
    """Whether lhs has a dim of channels innermost, summed or kept, and the code stays short."""
    a: ConvolutionAttrs = op.attrs
    type = op.operands[0].type
    if not a.strides or not type.dtype.is_float:
        return False
    last, space = type.rank - 1, range(1, type.rank - 1)
    if a.lhs == (0, last, *space) and a.batch_groups == 1:  # features
        taps = math.prod(_hole(op, i).taps for i in range(len(a.strides)))
    elif a.lhs == (last, 0, *space) and a.feature_groups == 1 and max(a.lhs_dilation) == 1:
        taps = math.prod(op.result.type.shape[d] for d in a.out[2:])  # images
    else:
        return False
    return taps * math.ceil(type.shape[-1] / PARTITIONS) <= _MAX_STEPS


def expand(b: Site, op: Op) -> Value:
    """The ops that compute convolution `op`, for which `is_possible`."""
    a: ConvolutionAttrs = op.attrs
    holes = [_hole(op, i) for i in range(len(a.strides))]
    lhs, rhs = op.operands[0], b.transpose(_padded_taps(b, op, holes), a.rhs)
    groups = a.feature_groups * a.batch_groups
    outputs, inputs, *taps = rhs.type.shape
    rhs = b.reshape(rhs, (groups, outputs // groups, inputs, *taps))
    rhs = _dense_taps(b, rhs, holes)
    blocks = _blocks(op, groups, rhs)
    if blocks > 1 and a.feature_groups > 1:
        rhs = _diagonal(b, rhs, blocks)
    elif blocks > 1:
        rhs = b.reshape(rhs, (groups // blocks, blocks * outputs // groups, inputs, *taps))
    windows = _windows(b, op, holes, lhs, rhs.type.shape[0])
    result = _contracted(b, op, windows, rhs)
    if blocks > 1 and a.batch_groups > 1:
        result = _taken(b, result, blocks)
    return placed(b, op, _interleaved(b, result, holes, a))


def _hole(op: Op, i: int) -> _Hole:
    """Output q * s + r of a lhs with dilation s reads lhs element q + e at tap s * e + low - r."""
    a: ConvolutionAttrs = op.attrs
    s, low, taps = a.lhs_dilation[i], a.low[i], op.operands[1].type.shape[a.rhs[2 + i]]
    if s == 1:
        return _Hole(1, -low, taps, 0, 0)
    first, last = -(low // s), (taps - 1 + s - 1 - low) // s
    count = last - first + 1
    before = s - 1 - low - s * first
    return _Hole(s, first, count, count * s - taps - before, before)


def _padded_taps(b: Site, op: Op, holes: list[_Hole]) -> Value:
    """rhs in its own order of dims, turned around and padded where lhs has holes."""
    a, rhs = op.attrs, op.operands[1]
    dims = [d for d, h in zip(a.rhs[2:], holes, strict=True) if h.step > 1]
    if not dims:
        return rhs
    rhs = b.reverse(rhs, dims)
    low, high = [0] * rhs.type.rank, [0] * rhs.type.rank
    for d, h in zip(a.rhs[2:], holes, strict=True):
        low[d], high[d] = h.low, h.high
    return b.padded(rhs, 0, low, high)


def _dense_taps(b: Site, rhs: Value, holes: list[_Hole]) -> Value:
    """[group, output, input, taps...] with the distances from a multiple of the dilation in front
    of the outputs.
    """
    if all(h.step == 1 for h in holes):
        return rhs
    groups, outputs, inputs = rhs.type.shape[:3]
    rhs = b.reshape(rhs, (groups, outputs, inputs, *(n for h in holes for n in (h.taps, h.step))))
    steps = tuple(range(4, rhs.type.rank, 2))
    rhs = b.reverse(rhs, [d - 1 for d, h in zip(steps, holes, strict=True) if h.step > 1])
    rhs = b.transpose(rhs, (0, *steps, 1, 2, *range(3, rhs.type.rank, 2)))
    count = math.prod(h.step for h in holes)
    return b.reshape(rhs, (groups, count * outputs, inputs, *(h.taps for h in holes)))


def _blocks(op: Op, groups: int, rhs: Value) -> int:
    """Groups that are multiplied as one: as many as fill the partitions."""
    if groups == 1 or any(n > 1 for n in op.attrs.lhs_dilation):
        return 1
    channels = op.operands[0].type.shape[-1] // groups
    widest = max(channels, rhs.type.shape[1])
    if channels >= _NARROW or widest > PARTITIONS:
        return 1
    return max(n for n in range(1, PARTITIONS // widest + 1) if groups % n == 0)


def _diagonal(b: Site, rhs: Value, blocks: int) -> Value:
    """[groups, outputs, inputs, taps...] as [groups / blocks, blocks * outputs, blocks * inputs,
    taps...] with zeros off the diagonal of blocks.
    """
    groups, outputs, inputs, *taps = rhs.type.shape
    parts = b.reshape(rhs, (groups // blocks, blocks, outputs, inputs, *taps))
    rank = parts.type.rank
    # Outputs innermost, as a contraction reads them without transposing them.
    parts = b.transpose(parts, (*range(4, rank), 0, 3, 1, 2))
    count = len(taps)
    shape = (*parts.type.shape[: count + 1], blocks, *parts.type.shape[count + 1 :])
    kept = [d for d in range(len(shape)) if d != count + 1]
    wide = b.broadcast(parts, shape, kept)
    same = b.compare(b.iota(shape, count + 1), b.iota(shape, count + 3), "EQ")
    made = b.op("select", same, wide, 0)
    made = b.reshape(made, (*shape[: count + 1], blocks * inputs, blocks * outputs))
    return b.transpose(made, (count, count + 2, count + 1, *range(count)))


def _windows(b: Site, op: Op, holes: list[_Hole], lhs: Value, groups: int) -> Value:
    """[groups, batch, input feature, windows..., taps...]."""
    a: ConvolutionAttrs = op.attrs
    sizes = [op.result.type.shape[d] for d in a.out[2:]]
    windows = b.unfold(
        lhs,
        a.lhs[2:],
        starts=[h.first for h in holes],
        counts=[math.ceil(n / h.step) for n, h in zip(sizes, holes, strict=True)],
        strides=a.strides,
        sizes=[h.taps for h in holes],
        dilations=a.rhs_dilation,
        padded=True,
    )
    rank = lhs.type.rank
    windows = b.transpose(windows, (*a.lhs, *range(rank, windows.type.rank)))
    return in_groups(b, a, windows, groups)


def in_groups(b: Site, a: ConvolutionAttrs, lhs: Value, groups: int) -> Value:
    """[batch, input feature, ...] as [groups, batch, input feature, ...]."""
    batch, features, *rest = lhs.type.shape
    if a.feature_groups > 1:
        lhs = b.reshape(lhs, (batch, groups, features // groups, *rest))
        return b.transpose(lhs, (1, 0, *range(2, lhs.type.rank)))
    return b.reshape(lhs, (groups, batch // groups, features, *rest))


def _contracted(b: Site, op: Op, windows: Value, rhs: Value) -> Value:
    """[group, batch, windows..., output]."""
    num_space = len(op.attrs.strides)
    space = tuple(range(3, 3 + num_space))
    depth = (2, *range(3 + num_space, windows.type.rank))
    left = b.transpose(windows, (0, 1, *space, *depth))
    right = b.transpose(rhs, (0, *range(2, rhs.type.rank), 1))
    contract = list(range(2 + num_space, left.type.rank)), list(range(1, right.type.rank - 1))
    return b.dot(left, right, contract, ((0,), (0,)), op.attrs.dtype)


def _taken(b: Site, result: Value, blocks: int) -> Value:
    """The blocks on the diagonal of [group, (block, batch), windows..., (block, output)]:
    [group * block, batch, windows..., output].
    """
    groups, batch, *space, outputs = result.type.shape
    shape = (groups, blocks, batch // blocks, *space, blocks, outputs // blocks)
    parts, last = b.reshape(result, shape), len(shape) - 2
    same = b.compare(b.iota(shape, 1), b.iota(shape, last), "EQ")
    kept = b.op("select", same, parts, 0)
    found = b.reduce(kept, "add", (1,))  # [group, batch, windows..., block, output]
    order = (0, last - 1, *range(1, last - 1), last)
    found = b.transpose(found, order)
    return b.reshape(found, (groups * blocks, batch // blocks, *space, outputs // blocks))


def _interleaved(b: Site, value: Value, holes: list[_Hole], a: ConvolutionAttrs) -> Value:
    """[group, batch, windows..., (group's distances..., output)]: distances next to windows."""
    if all(h.step == 1 for h in holes):
        return value
    count, steps = len(holes), [h.step for h in holes]
    groups, batch, *space, outputs = value.type.shape
    value = b.reshape(value, (groups, batch, *space, *steps, outputs // math.prod(steps)))
    woven = [d for i in range(count) for d in (2 + i, 2 + count + i)]
    value = b.transpose(value, (0, 1, *woven, value.type.rank - 1))
    whole = [n * s for n, s in zip(space, steps, strict=True)]
    return b.reshape(value, (groups, batch, *whole, value.type.shape[-1]))


def placed(b: Site, op: Op, value: Value) -> Value:
    """[group, batch, windows..., output feature] in the dims of the result, which may have fewer
    windows.
    """
    a: ConvolutionAttrs = op.attrs
    wanted = [*value.type.shape]
    wanted[2:-1] = (op.result.type.shape[d] for d in a.out[2:])
    if tuple(wanted) != value.type.shape:
        value = b.slice(value, (0,) * len(wanted), wanted)
    parts = {a.out[0]: (1,), a.out[1]: (0, len(wanted) - 1)}
    parts |= {d: (2 + i,) for i, d in enumerate(a.out[2:])}
    order = [d for k in sorted(parts) for d in parts[k]]
    return b.reshape(b.transpose(value, order), op.result.type.shape)
