"""Rewrites of windowed ops into views of windows and ops that exist, before lowering.

`unfold` is a view whose elements are read by every window that holds them: a pooling is a reduction
of it, a convolution a contraction (`convolution.py`). Long running windows are folded by doubling.
What is better stored densely before a contraction is named by `stored_windows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import behind, pairing
from shardwright.compiler.ir.ops import ReduceWindowAttrs, SelectAndScatterAttrs, UnfoldAttrs
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.ops.window import SELECTIONS
from shardwright.compiler.ir.traits import VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower import convolution, views
from shardwright.compiler.lower.level import Rule, Site, rewritten
from shardwright.compiler.lower.views import Layout
from shardwright.compiler.passes.cse import cse

_Windowed = ReduceWindowAttrs | SelectAndScatterAttrs

MIN_RUN = 32
"""Elements of a row below which copying windows is bound by DMA descriptors (measured: the 7 x 7 x
3 stem of a ResNet, benchmarks/kernels.py).
"""

MIN_USES = 32
"""Products per stored element below which the copy costs more than it saves (measured there)."""

_SEEN_THROUGH = VIEWS | {"slice"}


def expand_windows(graph: Graph) -> Graph:
    """`graph` (loop-free) without convolutions and windowed ops. Raises CompileError."""
    made = rewritten(graph, lambda op: _RULES.get(op.name))
    return graph if made is graph else cse(made)


def _reduce_window(b: Site, op: Op) -> Value:
    """Long running windows by doubling, the others by a reduction of their elements."""
    a, (value,), shape = op.attrs, op.operands, op.result.type.shape
    dtype = value.type.dtype
    rounds = a.kind in ("add", "multiply") and dtype in (DType.BF16, DType.F16)
    wide = DType.F32 if rounds else dtype
    value = b.as_type(b.padded(value, identity(a.kind, dtype), a.low, a.high), wide)
    dims = _moved(a)
    running = [d for d in dims if _is_running(value.type.shape[d], shape[d], a.sizes[d])]
    for d in running:
        value = _doubled(b, value, d, a.sizes[d], a.strides[d], ELEMENTWISE_OF[a.kind])
    rest = [d for d in dims if d not in running]
    if rest:
        windows = _unfolded(b, value, rest, a, shape)
        value = b.reduce(windows, a.kind, _inner(windows, rest))
    elif value.type.shape != shape:
        value = b.slice(value, (0,) * len(shape), shape)
    return b.as_type(value, dtype)


def _unfolded(
    b: Site, value: Value, dims: Sequence[int], attrs: _Windowed, shape: Sequence[int]
) -> Value:
    """The windows of `value` along `dims`."""
    counts, strides, sizes = (
        [given[d] for d in dims] for given in (shape, attrs.strides, attrs.sizes)
    )
    return b.unfold(value, dims, counts=counts, strides=strides, sizes=sizes)


def _moved(attrs: _Windowed) -> list[int]:
    """The dims along which windows are not single elements side by side."""
    rows = zip(attrs.sizes, attrs.strides, strict=True)
    return [d for d, row in enumerate(rows) if row != (1, 1)]


def _inner(windows: Value, dims: Sequence[int]) -> list[int]:
    """The dims that hold the elements of windows."""
    return list(range(windows.type.rank - len(dims), windows.type.rank))


def _is_running(length: int, count: int, size: int) -> bool:
    """True when doubling touches fewer elements than reading every window whole."""
    return count * size > 4 * length * max(1, size.bit_length())


def _doubled(b: Site, value: Value, dim: int, size: int, stride: int, combine: str) -> Value:
    """Folds of `size` neighbours: two windows side by side make one of twice the size."""
    power, made, covered = 1, None, 0
    while True:
        if size & power:
            made = value if made is None else _joined(b, made, value, dim, covered, combine)
            covered += power
        if covered == size:
            break
        value = _joined(b, value, value, dim, power, combine)
        power *= 2
    assert made is not None
    if stride == 1:
        return made
    shape = made.type.shape
    steps = [stride if d == dim else 1 for d in range(len(shape))]
    return b.slice(made, (0,) * len(shape), shape, steps)


def _joined(b: Site, first: Value, second: Value, dim: int, distance: int, combine: str) -> Value:
    """first[i] combined with second[i + distance], as far as both reach."""
    length = min(first.type.shape[dim], second.type.shape[dim] - distance)
    parts = []
    for value, start in ((first, 0), (second, distance)):
        limit = [start + length if d == dim else n for d, n in enumerate(value.type.shape)]
        begin = [start if d == dim else 0 for d in range(len(limit))]
        parts.append(b.slice(value, begin, limit))
    return b.op(combine, *parts)


def _select_and_scatter(b: Site, op: Op) -> Value:
    """The position every window selects, then per element the sources that selected it."""
    a, (value, source) = op.attrs, op.operands
    dims = _moved(a) or [0]
    chosen = _chosen(b, value, a, dims, source.type.shape)
    dtype = source.type.dtype
    wide = b.as_type(source, DType.F32) if dtype.is_narrow else source
    picked, moved = (_spread(b, v, fill, op, dims) for v, fill in ((chosen, -1), (wide, 0)))
    inner = _inner(picked, dims)
    place = _position(b, picked.type.shape, inner, [a.sizes[d] for d in dims], reverse=True)
    hit = b.compare(picked, place, "EQ")
    kept = b.op("select", hit, moved, 0)
    total = b.reduce(kept, "add", inner)
    return b.as_type(total, dtype)


def _chosen(
    b: Site, value: Value, a: SelectAndScatterAttrs, dims: Sequence[int], shape: Sequence[int]
) -> Value:
    """Per window, the number of the selected element, row-major within the window."""
    kind = SELECTIONS[a.select]
    fill = identity(kind, value.type.dtype)
    windows = _unfolded(b, b.padded(value, fill, a.low, a.high), dims, a, shape)
    inner, whole = _inner(windows, dims), windows.type.shape
    best = b.broadcast(b.reduce(windows, kind, inner), whole, range(len(shape)))
    hit = b.compare(windows, best, "EQ")
    if any((*a.low, *a.high)):
        hit = b.op("and", hit, _inside(b, value, a, dims, whole))
    sizes = [a.sizes[d] for d in dims]
    place, first = _position(b, whole, inner, sizes), a.select.endswith("E")
    numbers = b.op("select", hit, place, math.prod(sizes) if first else -1)
    return b.reduce(numbers, "min" if first else "max", inner)


def _position(
    b: Site, shape: Sequence[int], inner: Sequence[int], sizes: Sequence[int], reverse: bool = False
) -> Value:
    """Row-major number of an element in its window; `reverse` counts every dim from its end."""
    total, step = b.full(shape, 0, DType.I32), 1
    for d, size in zip(reversed(inner), reversed(sizes), strict=True):
        count = b.iota(shape, d)
        if reverse:
            count = b.op("subtract", size - 1, count)
        total = b.add(total, b.op("multiply", count, step))
        step *= size
    return total


def _inside(
    b: Site, value: Value, a: SelectAndScatterAttrs, dims: Sequence[int], shape: Sequence[int]
) -> Value:
    """True where a window's element is not padding."""
    result = b.full(shape, True, DType.PRED)
    for d, k in zip(dims, range(value.type.rank, len(shape)), strict=True):
        at = b.add(b.op("multiply", b.iota(shape, d), a.strides[d]), b.iota(shape, k))
        result = b.op("and", result, b.compare(at, a.low[d], "GE"))
        result = b.op("and", result, b.compare(at, a.low[d] + value.type.shape[d], "LT"))
    return result


def _spread(b: Site, value: Value, fill: float, op: Op, dims: Sequence[int]) -> Value:
    """Per element of the operand, what `value` is at the windows that hold it; `fill` elsewhere.

    The windows of element i, counted from the last one backwards, are the window at i of `value`
    with stride - 1 holes between its elements.
    """
    a, length = op.attrs, op.result.type.shape
    rank = len(length)
    low, high = [0] * rank, [0] * rank
    for d in dims:
        low[d] = a.sizes[d] - 1 - a.low[d]
        span = (value.type.shape[d] - 1) * a.strides[d] + 1
        high[d] = length[d] + a.sizes[d] - 1 - low[d] - span
    inner = [a.strides[d] - 1 if d in dims else 0 for d in range(rank)]
    spread = b.pad(value, b.constant(fill, value.type.dtype), low, high, inner)
    sizes, counts = [a.sizes[d] for d in dims], [length[d] for d in dims]
    return b.unfold(spread, dims, counts=counts, sizes=sizes)


def stored_windows(graph: Graph) -> set[Value]:
    """Operands that are stored densely before a contraction with windows, each element of which
    meets enough of the other operand to pay for the copy, and whose rows are then long enough for
    DMA: windows whose elements occur more than once, so that taps, features and positions are long
    indices, and filters whose rows in memory are taps.
    """
    made = graph.producers()
    found: set[Value] = set()
    for op in graph.ops:
        if (dims := pairing(op)) is None:
            continue
        left, right = op.operands
        sides = ((left, right, dims.rhs_contract), (right, left, dims.lhs_contract))
        for value, other, contract in sides:
            depth = math.prod(other.type.shape[d] for d in contract)
            uses = other.type.num_elements // depth
            if value.type.shape[-1:] < (MIN_RUN,) or uses < MIN_USES:
                continue
            taps = _windows_behind(other, made) is not None and _has_short_rows(value, made)
            if taps or _repeats(value, made):
                found.add(value)
    return found


def _windows_behind(value: Value, made: Mapping[Value, Op]) -> Op | None:
    """The windows that `value` is a view of."""
    op = made.get(behind(value, made, lambda op: op.name in _SEEN_THROUGH))
    return op if op is not None and isinstance(op.attrs, UnfoldAttrs) else None


def _repeats(value: Value, made: Mapping[Value, Op]) -> bool:
    """True for windows that hold elements more than once. Windows that may leave their operand stay
    windows: their code loads every element once.
    """
    op = _windows_behind(value, made)
    if op is None or op.attrs.padded:
        return False
    return value.type.num_elements > op.operands[0].type.num_elements


def _has_short_rows(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether rows of memory are short, but steps along the last dim far apart: a copy that
    transposes them moves what lies between two steps as a row.
    """
    layout = _layout(value, made)
    if layout is None or min((s for _, s in layout.dims[-1]), default=1) < MIN_RUN:
        return False
    rows = [size for pieces in layout.dims for size, stride in pieces if stride == 1]
    return max(rows, default=1) < MIN_RUN


def _layout(value: Value, made: Mapping[Value, Op]) -> Layout | None:
    """How `value` lies in the memory that it is a view of; None when strides cannot say it."""
    op = made.get(value)
    if op is None or op.name not in _SEEN_THROUGH:
        return views.dense(value.type.shape)
    layout = _layout(op.operands[0], made)
    return None if layout is None else views.behind(op, layout)


_RULES: dict[str, Rule] = {
    "convolution": convolution.expand,
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
}
