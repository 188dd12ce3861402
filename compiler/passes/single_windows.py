"""Gathers and scatters of a single window: slices and updates at starts that are data.

A gather with one index vector reads one window, clamped as `dynamic_slice` clamps it. As a view
it costs nothing: who reads the window reads the operand, at an address from a register, which is
watched as the index was. A scatter of one window that surely lies inside is an update in place.
Both stay what they are where the shape does not say which indices are wrong: a rank that holds a
part masks what it has of a window. Batched indexing of one sample's rows, and of the matrices of
one expert, are such gathers on a core that has one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import joined_dim, limits_of
from shardwright.compiler.ir.ops.gather import Windows, last_starts, windows_of
from shardwright.compiler.ir.ops.shape import DynamicSliceAttrs
from shardwright.compiler.ir.types import Op, Value

LEAST_BYTES = 64 * 1024
"""Of a window. To copy less takes about as long as to set its address (our choice: cells of the
golden net with windows of a few elements took up to 0.2 % longer as slices)."""


def as_slice(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """A gather of one window as a slice; nothing for any other."""
    operand, index = op.operands[:2]
    windows = windows_of(op.attrs)
    if not _is_single(windows, index) or op.result.type.num_bytes < LEAST_BYTES:
        return []
    if op.attrs.last_starts:
        return []
    build = Builder(loc=op.loc)
    starts = _starts(build, windows, index, operand, producers)
    made = {result: one for one in build.ops for result in one.results}
    for d, last in zip(windows.index_map, last_starts(op), strict=True):
        if last == 0 and known_elements(made, starts[d]) is None:
            return []  # nobody would load that start, and see that it is another one
    attrs = DynamicSliceAttrs(op.attrs.slice_sizes, looked_up=True, replicated=op.attrs.replicated)
    taken = build.op("dynamic_slice", operand, *starts, attrs=attrs)
    build.reshape(taken, op.result.type.shape)
    return build.ops


def as_update(op: Op, producers: Mapping[Value, Op]) -> list[Op]:
    """A scatter that replaces one window, clamped to lie inside, as an update, which clamps for
    itself; nothing for any other.
    """
    operand, index, update = op.operands[:3]
    windows, rank = windows_of(op.attrs), op.operands[0].type.rank
    if op.attrs.kind != "replace" or not _is_single(windows, index):
        return []
    if op.attrs.last_starts:
        return []
    if update.type.num_bytes < LEAST_BYTES:
        return []
    walked = windows.walked(rank)
    sizes = [update.type.shape[walked[d]] if d in walked else 1 for d in range(rank)]
    room = [operand.type.shape[d] - sizes[d] for d in windows.index_map]
    free = _clamped(index, room, producers)
    if free is None:
        return []
    build = Builder(loc=op.loc)
    starts = _starts(build, windows, free, operand, producers)
    build.dynamic_update_slice(operand, build.reshape(update, sizes), starts)
    return build.ops


def _is_single(windows: Windows, index: Value) -> bool:
    """True for one index vector."""
    return all(n == 1 for n in windows.batch_shape(index.type.shape))


def _clamped(index: Value, room: Sequence[int], producers: Mapping[Value, Op]) -> Value | None:
    """The index vector that `index` is, clamped between 0 and the last starts along its dims."""
    limits = limits_of(producers.get(index))
    if limits is None:
        return None
    low, value, high = limits
    least, last = known_elements(producers, low), known_elements(producers, high)
    if least is None or last is None or least.any() or last.size not in (1, len(room)):
        return None
    return value if np.array_equal(np.broadcast_to(last.reshape(-1), len(room)), room) else None


def _starts(
    build: Builder, windows: Windows, index: Value, operand: Value, producers: Mapping[Value, Op]
) -> list[Value]:
    """The start of the window along every dim of `operand`: an element of the index vector, or 0.
    Elements that a concatenation puts side by side are read where they come from.
    """
    dim, length = windows.vector_dim, len(windows.index_map)
    made = producers.get(index)
    parts = made.operands if made is not None and joined_dim(made) == dim else ()
    if len(parts) != length:
        vector = build.reshape(index, (length,))
        parts = tuple(build.slice(vector, (k,), (k + 1,)) for k in range(length))
    found = [build.constant(0, index.type.dtype)] * operand.type.rank
    for d, part in zip(windows.index_map, parts, strict=True):
        known = known_elements(producers, part)
        if known is None:
            found[d] = build.reshape(part, ())
        else:
            found[d] = build.constant(known.item(), part.type.dtype)
    return found
