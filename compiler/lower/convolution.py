"""`convolution` as contractions of views: windows of lhs against rhs, over taps and input features.

With channels last `window_product.py` has the rule. The others store their padding: every window is
an `unfold` view, groups are a batch dim, a dilated lhs is split into phases, each a convolution
with the taps that meet no hole; narrow groups (depthwise) are multiplied and summed on the vector
engine. `windows.py` runs these rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ConvolutionAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.lower import window_product
from shardwright.compiler.lower.level import Site
from shardwright.compiler.lower.task import PARTITIONS, unsupported
from shardwright.compiler.lower.whole import as_integers

_MIN_MOVING = 64
"""Columns a matmul takes at least, in cycles (documented: nki.isa.nc_matmul cost)."""

_G, _N, _C, _SPACE = 0, 1, 2, 3  # dims of lhs: group, batch, input feature, space; rhs: _N = output


@dataclass(frozen=True, slots=True)
class _Phase:
    """Outputs at one distance from a multiple of the dilation: which taps they see, from where."""

    first_tap: int
    taps: int
    start: int  # in the padded lhs


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial dim: padding of lhs, windows per phase, and the phases, one per lhs dilation."""

    low: int
    high: int
    count: int  # windows of a phase
    stride: int
    dilation: int  # between the taps of a window in lhs
    step: int  # between the taps of a phase in rhs
    phases: tuple[_Phase, ...]


def expand(b: Site, op: Op) -> Value:
    """The ops that compute convolution `op`. Raises CompileError for what neuronx-cc refuses."""
    attrs: ConvolutionAttrs = op.attrs
    _require(op)
    if window_product.is_possible(op):
        return window_product.expand(b, op)
    axes = [_axis(op, i) for i in range(len(attrs.strides))]
    lhs, rhs = _grouped(b, attrs, _padded_lhs(b, op, axes), op.operands[1])
    parts = [_part(b, op, axes, phases, lhs, rhs) for phases in product(*(a.phases for a in axes))]
    return window_product.placed(b, op, _interleaved(b, axes, parts))


def _require(op: Op) -> None:
    a = op.attrs
    if max(a.lhs_dilation, default=1) > 1 and max((*a.rhs_dilation, *a.strides)) > 1:
        code = "NCC_EVRF010" if max(a.rhs_dilation) > 1 else "NCC_EVRF011"
        given = f"got lhs {a.lhs_dilation}, rhs {a.rhs_dilation}, strides {a.strides}"
        what = f"requires a dilated lhs alone, without rhs dilation and strides, {given}"
        raise unsupported(op, what, "dilate or stride in an operation of its own", code)


def _padded_lhs(b: Site, op: Op, axes: list[_Axis]) -> Value:
    """lhs with its padding, in its own order of dims, so that rows stay rows in memory."""
    low, high = [0] * (2 + len(axes)), [0] * (2 + len(axes))
    for d, axis in zip(op.attrs.lhs[2:], axes, strict=True):
        low[d], high[d] = axis.low, axis.high
    return b.padded(op.operands[0], 0, low, high)


def _grouped(b: Site, a: ConvolutionAttrs, lhs: Value, rhs: Value) -> tuple[Value, Value]:
    """[group, batch, input feature, space...] and [group, output, input feature, taps...]."""
    lhs, rhs = b.transpose(lhs, a.lhs), b.transpose(rhs, a.rhs)
    groups = a.feature_groups * a.batch_groups
    outputs, *rest = rhs.type.shape
    lhs = window_product.in_groups(b, a, lhs, groups)
    return lhs, b.reshape(rhs, (groups, outputs // groups, *rest))


def _axis(op: Op, i: int) -> _Axis:
    """The plan of spatial dim `i`.

    Output q * s + r of a lhs with dilation s reads lhs element q + t + (r + j - low) / s at tap j +
    s * t, where j is the one tap below s for which this is whole.
    """
    a: ConvolutionAttrs = op.attrs
    s, low = a.lhs_dilation[i], a.low[i]
    length = op.operands[0].type.shape[a.lhs[2 + i]]
    taps, size = op.operands[1].type.shape[a.rhs[2 + i]], op.result.type.shape[a.out[2 + i]]
    first = [(low - r) % s for r in range(s)]
    before = [(low - r - j) // s for r, j in enumerate(first)]
    counts = [max(0, -(-(taps - j) // s)) for j in first]
    pad = max(0, *before) if s > 1 else max(0, low)
    phases = tuple(
        _Phase(j, n, pad - lead) for j, n, lead in zip(first, counts, before, strict=True)
    )
    count = -(-size // s)
    windows = (count - 1) * a.strides[i] + 1
    ends = [p.start + windows + (p.taps - 1) * a.rhs_dilation[i] for p in phases]
    high = max(0, max(ends) - pad - length)
    return _Axis(pad, high, count, a.strides[i], a.rhs_dilation[i], s, phases)


def _part(
    b: Site, op: Op, axes: list[_Axis], phases: tuple[_Phase, ...], lhs: Value, rhs: Value
) -> Value:
    """The outputs of one phase: [group, batch, space..., output feature]."""
    counts = tuple(a.count for a in axes)
    if any(p.taps == 0 for p in phases):
        shape = (lhs.type.shape[_G], lhs.type.shape[_N], *counts, rhs.type.shape[_N])
        return b.full(shape, 0, op.attrs.dtype)
    windows = b.unfold(
        lhs,
        tuple(range(_SPACE, _SPACE + len(axes))),
        starts=[p.start for p in phases],
        counts=counts,
        strides=[a.stride for a in axes],
        sizes=[p.taps for p in phases],
        dilations=[a.dilation for a in axes],
    )
    limits = [p.first_tap + (p.taps - 1) * a.step + 1 for p, a in zip(phases, axes, strict=True)]
    taps = b.slice(
        rhs,
        (0, 0, 0, *(p.first_tap for p in phases)),
        (*rhs.type.shape[:_SPACE], *limits),
        (1, 1, 1, *(a.step for a in axes)),
    )
    if _is_narrow(windows, taps, len(axes)):
        return _multiplied(b, op, windows, taps)
    return _contracted(b, op, windows, taps)


def _is_narrow(windows: Value, taps: Value, num_space: int) -> bool:
    """True when Vector, groups on its lanes, needs fewer cycles than one matmul per group."""
    groups, outputs, *depth = taps.type.shape
    points = math.prod(windows.type.shape[: _SPACE + num_space]) // math.prod(
        windows.type.shape[d] for d in (_G, _C)
    )
    few, many = sorted((points, outputs))
    tiles = math.ceil(math.prod(depth) / PARTITIONS) * math.ceil(few / PARTITIONS)
    matmul = groups * tiles * max(many, _MIN_MOVING)
    vector = math.ceil(groups / PARTITIONS) * math.prod(depth) * points * outputs
    return groups > 1 and vector < matmul


def _multiplied(b: Site, op: Op, windows: Value, taps: Value) -> Value:
    """Products of windows and taps, summed over taps and input features in fp32."""
    num_space = taps.type.rank - _SPACE
    space = tuple(range(_SPACE, _SPACE + num_space))
    depth = (_C, *range(_SPACE + num_space, windows.type.rank))
    left = b.transpose(windows, (_G, _N, *space, *depth))
    keep = 2 + num_space  # dims in front of the output feature
    shape = (*left.type.shape[:keep], taps.type.shape[_N], *left.type.shape[keep:])
    left_dims = [d for d in range(len(shape)) if d != keep]
    right_dims = [_G, keep, *range(keep + 1, len(shape))]
    wide = [b.as_type(v, DType.F32) for v in (left, taps)]
    spread = [b.broadcast(v, shape, d) for v, d in zip(wide, (left_dims, right_dims), strict=True)]
    total = b.reduce(b.multiply(*spread), "add", right_dims[2:])
    dtype = op.attrs.dtype
    return (
        as_integers(b, total, dtype, op.operands) if dtype.is_integer else b.as_type(total, dtype)
    )


def _contracted(b: Site, op: Op, windows: Value, taps: Value) -> Value:
    """A batched contraction whose operand dims follow memory, in case they are stored densely.

    Summed dims go in the order of rhs; the batch goes first or last, as in lhs.
    """
    a: ConvolutionAttrs = op.attrs
    num_space = len(a.strides)
    space = list(range(_SPACE, _SPACE + num_space))
    in_rhs = sorted(range(1, len(a.rhs)), key=lambda k: a.rhs[k])  # 1: feature, 2...: taps
    depth = [_C if k == 1 else _SPACE + num_space + k - 2 for k in in_rhs]
    batch_first = a.lhs[0] < a.lhs[1]
    order = [_G, _N, *space, *depth] if batch_first else [_G, *depth, *space, _N]
    left = b.transpose(windows, order)
    right = b.transpose(taps, (_G, *(_C + k - 1 for k in in_rhs), _N))
    contract = [order.index(d) for d in depth], list(range(1, 1 + len(depth)))
    result = b.dot(left, right, contract, ((0,), (0,)), a.dtype)
    if batch_first:
        return result
    last = num_space + 1
    return b.transpose(result, (0, last, *range(1, last), last + 1))


def _interleaved(b: Site, axes: list[_Axis], parts: list[Value]) -> Value:
    """Phases woven together: output q * s + r of an axis is window q of phase r."""
    if len(parts) == 1:
        return parts[0]
    steps = [len(a.phases) for a in axes]
    shape = parts[0].type.shape
    stack = b.concatenate([b.reshape(p, (1, *shape)) for p in parts], 0)
    value = b.reshape(stack, (*steps, *shape))
    n = len(axes)
    woven = [d for i in range(n) for d in (n + 2 + i, i)]
    value = b.transpose(value, (n, n + 1, *woven, value.type.rank - 1))
    counts = [a.count * s for a, s in zip(axes, steps, strict=True)]
    return b.reshape(value, (*shape[:2], *counts, shape[-1]))
