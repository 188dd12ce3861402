"""Strided layouts: how a value lies in a tensor, and what view ops do to that.

A layout keeps, per dim, (size, stride) pieces from major to minor, because a reshape of a permuted
tensor gives dims that no single stride describes. Every view op is a function of the layout; None
means that strides cannot express it and the value must be copied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.ir.facts import dim_map
from shardwright.compiler.ir.ops import ReverseAttrs, SliceAttrs, UnfoldAttrs
from shardwright.compiler.ir.types import Op
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.lower.indexing_map import IndexExpr, IterDim, find, leaves, unify
from shardwright.compiler.lower.task import Window

Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Element offset and, per dim, pieces of (size, stride in elements); stride 0 repeats."""

    offset: Affine
    dims: tuple[Pieces, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""
        return tuple(_size(pieces) for pieces in self.dims)


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A position in a dim of `size` elements, `unit` elements apart in memory, as a function of the
    indices of a value: the layout it would have if the position were an address.
    """

    where: Layout
    size: int
    unit: int


def dense(shape: Sequence[int]) -> Layout:
    """Row-major layout of a whole tensor."""
    stride, dims = 1, []
    for size in reversed(shape):
        dims.append(((size, stride),) if size != 1 else ())
        stride *= size
    return Layout(Affine(), tuple(reversed(dims)))


def transpose(layout: Layout, permutation: Sequence[int]) -> Layout:
    """Dim `i` of the result is dim `permutation[i]`."""
    return Layout(layout.offset, tuple(layout.dims[p] for p in permutation))


def _mapped(layout: Layout, walked: Sequence[int | None], shape: Sequence[int]) -> Layout:
    """Dims along which the result repeats get stride 0."""
    pairs = zip(walked, shape, strict=True)
    return Layout(
        layout.offset, tuple(_steps(n, 0) if d is None else layout.dims[d] for d, n in pairs)
    )


def reshape(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Row-major regrouping; None when a piece would have to be cut where it does not divide."""
    stack = list(_merged(tuple(piece for pieces in layout.dims for piece in pieces)))
    grouped: list[Pieces] = []
    for size in reversed(shape):
        pieces = _take(stack, size)
        if pieces is None:
            return None
        grouped.append(_merged(pieces))
    return Layout(layout.offset, tuple(reversed(grouped)))


def _take(stack: list[tuple[int, int]], size: int) -> Pieces | None:
    """Minor-most pieces with product `size`, cutting the last one if it divides."""
    taken: list[tuple[int, int]] = []
    while size > 1:
        if not stack:
            return None
        have, stride = stack.pop()
        if have > size and have % size == 0:
            stack.append((have // size, stride * size))
            have = size
        if size % have:
            return None
        taken.append((have, stride))
        size //= have
    return tuple(reversed(taken))


def _merged(pieces: Pieces) -> Pieces:
    """Neighbouring pieces joined where one stride describes both."""
    joined: list[tuple[int, int]] = []
    for size, stride in pieces:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


def window(layout: Layout, part: Window) -> Layout | None:
    """Elements start, start + step, ... of every dim; None when a cut dim has pieces that do not
    allow it.
    """
    offset, dims = layout.offset, []
    cuts = zip(layout.dims, part.starts, part.sizes, part.steps, strict=True)
    for pieces, start, size, step in cuts:
        cut = _cut(pieces, start, size, step)
        if cut is None:
            return None
        offset = offset + cut[0]
        dims.append(cut[1])
    return Layout(offset, tuple(dims))


def _cut(pieces: Pieces, start: Affine, size: int, step: int) -> tuple[Affine, Pieces] | None:
    """(offset, pieces) of a range of one dim."""
    if start == Affine() and size == _size(pieces) and step == 1:
        return Affine(), pieces
    if not pieces:
        return Affine(), ()
    if len(pieces) == 1:
        stride = pieces[0][1]
        return start * stride, ((size, stride * step),) if size != 1 else ()
    return _cut_major(pieces, start, size) if step == 1 else None


def _cut_major(pieces: Pieces, start: Affine, size: int) -> tuple[Affine, Pieces] | None:
    """A range of whole blocks of the minor pieces, or one inside a single block."""
    block = _size(pieces[1:])
    if (
        start.const % block == 0
        and size % block == 0
        and all(c % block == 0 for _, c in start.terms)
    ):
        whole = Affine(start.const // block, tuple((r, c // block) for r, c in start.terms))
        cut = _cut(pieces[:1], whole, size // block, 1)
        return (cut[0], cut[1] + pieces[1:]) if cut else None
    if start.terms or start.const // block != (start.const + size - 1) // block:
        return None
    cut = _cut(pieces[1:], Affine(start.const % block), size, 1)
    return (cut[0] + start.const // block * pieces[0][1], cut[1]) if cut else None


def _reverse(layout: Layout, attrs: ReverseAttrs) -> Layout:
    """From the last element, by negative strides."""
    offset, flipped = layout.offset, list(layout.dims)
    for d in attrs.dims:
        offset = offset + sum((size - 1) * stride for size, stride in layout.dims[d])
        flipped[d] = tuple((size, -stride) for size, stride in layout.dims[d])
    return Layout(offset, tuple(flipped))


def padded_windows(
    shape: Sequence[int], layout: Layout, attrs: UnfoldAttrs
) -> tuple[Layout, tuple[Coordinate, ...]] | None:
    """Windows that may leave a dense operand of `shape`: addresses as if memory went on, and per
    dim of `attrs` the coordinate that says where it ends. None when the operand is not dense.
    """
    if replace(layout, offset=Affine()) != dense(shape):
        return None
    dims, inner, offset = list(layout.dims), [], layout.offset
    coordinates = []
    rows = zip(attrs.starts, attrs.counts, attrs.strides, attrs.sizes, attrs.dilations, strict=True)
    for i, (d, (start, count, step, size, gap)) in enumerate(zip(attrs.dims, rows, strict=True)):
        unit = math.prod(shape[d + 1 :])
        offset = offset + start * unit
        dims[d] = _steps(count, step * unit)
        inner.append(_steps(size, gap * unit))
        still = [
            _steps(attrs.counts[attrs.dims.index(o)] if o in attrs.dims else n, 0)
            for o, n in enumerate(shape)
        ]
        taps = [_steps(n, 0) for n in attrs.sizes]
        still[d], taps[i] = _steps(count, step), _steps(size, gap)
        where = Layout(Affine(start), (*still, *taps))
        coordinates.append(Coordinate(where, shape[d], unit))
    return Layout(offset, (*dims, *inner)), tuple(coordinates)


def _steps(size: int, stride: int) -> Pieces:
    return ((size, stride),) if size != 1 else ()


def unfold(layout: Layout, attrs: UnfoldAttrs) -> Layout | None:
    """Windows and their elements as dims of their own, which move over the same memory."""
    offset, dims, inner = layout.offset, list(layout.dims), []
    rows = zip(attrs.starts, attrs.counts, attrs.strides, attrs.sizes, attrs.dilations, strict=True)
    for d, (start, count, step, size, gap) in zip(attrs.dims, rows, strict=True):
        outer = _cut(layout.dims[d], Affine(start), count, step)
        element = _cut(layout.dims[d], Affine(), size, gap)
        if outer is None or element is None or (len(layout.dims[d]) > 1 and 1 not in (count, size)):
            return None
        offset = offset + outer[0]
        dims[d] = outer[1]
        inner.append(element[1])
    return Layout(offset, (*dims, *inner))


def behind(op: Op, layout: Layout) -> Layout | None:
    """The layout behind a view of a value with `layout`; None when strides cannot say it."""
    if (walked := dim_map(op)) is not None:
        return _mapped(layout, walked, op.result.type.shape)
    rule = _BEHIND.get(op.name)
    return layout if rule is None else rule(layout, op.attrs)


def _slice(layout: Layout, attrs: SliceAttrs) -> Layout | None:
    cuts = zip(attrs.start, attrs.limit, attrs.stride, strict=True)
    sizes = tuple(len(range(*cut)) for cut in cuts)
    return window(layout, Window(tuple(map(Affine, attrs.start)), sizes, attrs.stride))


_BEHIND: Mapping[str, Callable[[Layout, Any], Layout | None]] = {
    "reshape": lambda layout, a: reshape(layout, a.shape),
    "reverse": _reverse,
    "slice": _slice,
    "unfold": unfold,
}


def _size(pieces: Pieces) -> int:
    return math.prod(n for n, _ in pieces)


def align(expr: IndexExpr, pieces: Pieces) -> bool:
    """Split iter dims of a dim until each is inside one piece; False when sizes do not divide."""
    return unify(tuple(IterDim(size) for size, _ in pieces if size > 1), expr)


def strides_of(expr: IndexExpr, pieces: Pieces) -> list[tuple[IterDim, int]]:
    """(iter dim, stride) of an aligned dim."""
    stack, found = leaves(expr), []
    for size, stride in reversed(pieces):
        while size > 1:
            iter_dim = find(stack.pop())
            found.append((iter_dim, stride))
            stride *= iter_dim.size
            size //= iter_dim.size
    assert not stack
    return found
