"""Attention found by index structure, in any spelling.

A contraction makes scores over rows I and keys J; something exponential of them is summed over J;
the forward result contracts that over J with I left free. The backward pass multiplies and sums
over J, contracts once over J (query gradient) and once over the rows with J left (key and value
gradients). Naming is all this does: special forms that follow a name check their own conditions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.compiler.attention.indexing_maps import IndexingMaps, Space, free_dims
from shardwright.compiler.attention.paths import Paths
from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.facts import is_sum
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.indexing_map import extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One attention in one graph level.

    `kind` is forward or backward; `op` the contraction with the values, or the row sum of the
    softmax derivative; `scores` every value over rows and keys of its component, in program order.
    `level` is the graph (or loop body) that holds them.
    """

    kind: str
    op: Op
    scores: tuple[Value, ...]
    rows: int
    keys: int
    level: Graph

    @property
    def loc(self) -> Loc:
        """Where the user wrote it."""
        return self.op.loc


def find_attention(graph: Graph) -> list[Instance]:
    """Every instance in `graph` and its loop bodies, in program order per level."""
    found = list(_in_level(graph))
    for op in graph.ops:
        for region in op.regions:
            found += find_attention(region)
    return found


def _in_level(graph: Graph) -> Iterator[Instance]:
    maps = IndexingMaps(graph)
    paths = Paths(maps)
    parts: dict[Value, _Component] = defaultdict(lambda: _Component(maps, paths))
    for value in maps.indexing:
        parts[maps.component(value)].values.append(value)
    for op in maps.seeds:
        parts[maps.component(op.result)].seeds.append(op)
    for op, side in maps.sinks:
        parts[maps.component(op.operands[side])].sinks.append((op, side))
    for component in parts.values():
        yield from component.instances()


class _Component:
    """Values of one index space, and the contractions that lead in and out of it."""

    def __init__(self, maps: IndexingMaps, paths: Paths) -> None:
        self.maps = maps
        self.paths = paths
        self.values: list[Value] = []
        self.seeds: list[Op] = []
        self.sinks: list[tuple[Op, int]] = []

    def instances(self) -> Iterator[Instance]:
        """Forward and backward instances."""
        if not self.seeds or not self.sinks:
            return
        sums = list(self._sums())
        forward = {
            op: keys for op, side in self.sinks if (keys := self._keys_of_output(op, side, sums))
        }
        backward = {op: keys for op, keys in sums if self._is_backward(op, keys, bool(forward))}
        for kind, found in (("forward", forward), ("backward", backward)):
            for op, keys in found.items():
                yield self._instance(kind, op, keys)

    def _sums(self) -> Iterator[tuple[Op, Space]]:
        """Sums over keys: (reduce, keys) where some contraction has keys among its free dims."""
        for value in self.values:
            op = self.maps.producers.get(value)
            if op is None or not is_sum(op):
                continue
            operand = op.operands[0]
            if operand in self.maps.indexing:
                keys = self.maps.span(operand, op.attrs.dims)
                if keys and self._rows(keys):
                    yield op, keys

    def _rows(self, keys: Space) -> list[Space]:
        """Per contraction that has keys on one free side: the free indices of the other side, which
        may be none (one query).
        """
        found = []
        for op in self.seeds:
            batch = len(op.attrs.lhs_batch)
            left = len(free_dims(op, 0))
            lhs = self.maps.span(op.result, range(batch, batch + left))
            rhs = self.maps.span(op.result, range(batch + left, op.result.type.rank))
            for near, rows in ((lhs, rhs), (rhs, lhs)):
                if near >= keys and (rows or near == keys):
                    found.append(rows)
        return found

    def _keys_of_output(self, op: Op, side: int, sums: list[tuple[Op, Space]]) -> Space | None:
        """keys when `op` contracts probabilities over exactly keys and leaves the rows free."""
        operand, over = op.operands[side], self._over(op, side)
        if not self.paths.is_exponential(operand):
            return None
        for total, keys in sums:
            if over != keys or not self.paths.is_exponential(total.operands[0]):
                continue
            rows = [r for r in self._rows(keys) if r]
            free = self.maps.span(operand, free_dims(op, side))
            left = any(r <= free for r in rows) or not rows
            if left and self.paths.is_probability(operand, keys):
                return keys
        return None

    def _is_backward(self, total: Op, keys: Space, forward: bool) -> bool:
        """True for the row sum of a softmax derivative."""
        product = self.paths.product_behind(total.operands[0])
        if product is None:
            return False
        by_keys = any(self._over(op, s) == keys for op, s in self.sinks)
        by_rows = [x for op, s in self.sinks if (x := self._over_rows(op, s, keys)) is not None]
        if not by_keys or not by_rows:
            return False
        if forward or any(self.paths.is_probability(x, keys) for x in by_rows):
            return True
        if self.paths.is_exponential(total.operands[0]) or not any(self._rows(keys)):
            return False
        return self.paths.uses_stored(total, product, keys)

    def _over(self, op: Op, side: int) -> Space:
        return self.maps.span(op.operands[side], op.attrs.contract(side))

    def _over_rows(self, op: Op, side: int, keys: Space) -> Value | None:
        """The operand of a contraction that removes rows (if there are any) and keeps keys."""
        operand, over = op.operands[side], self._over(op, side)
        if not self.maps.space(operand) >= keys or over & keys:
            return None
        one_query = not any(self._rows(keys))
        return operand if over or one_query else None

    def _instance(self, kind: str, op: Op, keys: Space) -> Instance:
        return Instance(
            kind=kind,
            op=op,
            scores=tuple(v for v in self.values if self._is_score(v, keys)),
            rows=max((extent(r) for r in self._rows(keys)), default=1),
            keys=extent(keys),
            level=self.maps.graph,
        )

    def _is_score(self, value: Value, keys: Space) -> bool:
        space = self.maps.space(value)
        return bool(space & keys) and extent(space - keys) > 1
