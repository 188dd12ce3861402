"""Rows of all samples sorted sample by sample, where their order is proven not to matter.

The new order keeps every row in the block of its sample, so that looking rows up and writing them
back are done per sample too, and a core needs the rows of its own samples only. Masks of segments
compare keys instead of places. Shapes of all other values stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import lookup, moved
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from shardwright.compiler.ir.rewrite import Level as Rewrite
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.prepare.sorted_rows.level import masks_behind
from shardwright.sharding.prepare.sorted_rows.proof import Mask, Shuffle


@dataclass(slots=True)
class Blocks:
    """One level under reconstruction; `samples` are the blocks of every list of rows."""

    shuffles: Sequence[Shuffle]
    samples: int
    level: Rewrite = field(default_factory=Rewrite)
    keys: dict[Shuffle, Value] = field(default_factory=dict)

    def run(self, graph: Graph) -> Graph:
        """The level with rows sorted per sample."""
        by_sort = {op: s for s in self.shuffles for op in (s.sort, *s.inverses)}
        masks = {op: (s, mask) for s in self.shuffles for op, mask in s.masks.items()}
        for op in masks_behind(graph, {op: s.sort for op, (s, _) in masks.items()}):
            now = self.level.update(op)
            if op in by_sort:
                self._sort(now)
            elif op in masks:
                self._compare(now, *masks[op])
            elif self._is_local(op):
                self._move(now)
            else:
                self.level.ops.append(now)
        return self.level.finish(graph)

    def _emit(self, op: Op, build: Builder, results: Sequence[Value]) -> None:
        """Take over what was built in place of `op`."""
        self.level.ops += build.ops
        self.level.replace(op.results, results)

    def _sort(self, op: Op) -> None:
        """The same sort, within each sample."""
        build = Builder(loc=op.loc)
        (rows,) = op.operands[0].type.shape
        blocks = [build.reshape(v, (self.samples, rows // self.samples)) for v in op.operands]
        results = build.append(_sorted(op, blocks))
        self._emit(op, build, [build.reshape(v, (rows,)) for v in results])

    def _compare(self, op: Op, shuffle: Shuffle, mask: Mask) -> None:
        """The key of every row against the keys of the offsets."""
        build = Builder(loc=op.loc)
        number = shuffle.sort.attrs.keys[0][0]
        key = self.level.now(shuffle.sort.results[number])
        shape = op.result.type.shape
        rows = build.broadcast(key, shape, (mask.dim,))
        offsets = build.broadcast(build.constant(mask.keys, key.type.dtype), shape, mask.dims)
        sides = (rows, offsets) if mask.offsets else (offsets, rows)
        self._emit(op, build, [build.compare(*sides, op.attrs.direction)])

    def _is_local(self, op: Op) -> bool:
        """True for rows that are looked up or written by one index, within the block they are
        of.
        """
        if not _by_first_dim(op):
            return False
        target, places = op.operands[0], op.operands[1]
        found = next((s for s in self.shuffles if places in s.marks and places in s.tables), None)
        if found is None or places.type.shape[0] % self.samples:
            return False
        size = target.type.shape[0]
        if size % self.samples or op.attrs.index_vector_dim < places.type.rank - 1:
            return False
        blocks = found.tables[places].reshape(self.samples, -1) // (size // self.samples)
        return bool(
            np.array_equal(blocks.T, np.broadcast_to(np.arange(self.samples), blocks.T.shape))
        )

    def _move(self, op: Op) -> None:
        """A gather or scatter with the sample as a batching dim."""
        build = Builder(loc=op.loc)
        target, places, *update = op.operands
        blocks = [self._cut(build, v) for v in (target, *update)]
        size = target.type.shape[0] // self.samples
        local = self._within(build, places, op.attrs.index_vector_dim, size)
        found = build.op(op.name, blocks[0], local, *blocks[1:], attrs=_batched(op))
        self._emit(op, build, [build.reshape(found, op.result.type.shape)])

    def _cut(self, build: Builder, value: Value) -> Value:
        """A value with its first dim cut into samples and what a sample has."""
        first, *rest = value.type.shape
        return build.reshape(value, (self.samples, first // self.samples, *rest))

    def _within(self, build: Builder, places: Value, vector: int, size: int) -> Value:
        """Places within the block of a sample, [samples, ..., 1]."""
        if vector == places.type.rank:
            places = build.reshape(places, (*places.type.shape, 1))
        cut = self._cut(build, places)
        shape, dtype = cut.type.shape, cut.type.dtype
        start = build.multiply(build.iota(shape, 0, dtype), build.full(shape, size, dtype))
        return build.op("subtract", cut, start)


def _sorted(op: Op, blocks: Sequence[Value]) -> Op:
    results = tuple(Value(v.type) for v in blocks)
    return Op("sort", tuple(blocks), results, replace(op.attrs, dim=1), (), op.loc)


def _by_first_dim(op: Op) -> bool:
    """True when whole slices of the first dim are moved, and positions come before them."""
    rows = lookup(op)
    if rows is None or rows.operand_batching or not rows.dropped_dims == rows.index_map == (0,):
        return False
    rank, window = moved(op).type.rank, rows.moving_dims
    return window == tuple(range(rank - len(window), rank))


def _later(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d + 1 for d in dims)


def _batched(op: Op) -> GatherAttrs | ScatterAttrs:
    """The attributes of a gather or scatter whose tensors have a first dim of samples; the last dim
    of the indices is the index vector.
    """
    a: GatherAttrs | ScatterAttrs = op.attrs
    rank = op.operands[1].type.rank
    vector = rank + int(a.index_vector_dim == rank)
    if isinstance(a, GatherAttrs):
        return replace(
            a,
            offset_dims=_later(a.offset_dims),
            collapsed_slice_dims=(1,),
            operand_batching_dims=(0,),
            start_indices_batching_dims=(0,),
            start_index_map=(1,),
            index_vector_dim=vector,
            slice_sizes=(1, *a.slice_sizes),
        )
    return replace(
        a,
        update_window_dims=_later(a.update_window_dims),
        inserted_window_dims=(1,),
        input_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=vector,
    )
