"""Concatenations that only elementwise work, folds and aligned slices follow are split.

A sink in front of the keys of a softmax, or a gradient padded back to the whole, would make every
value behind it one element longer than the tiles of what it is made from. Piece by piece the same
work needs no concatenation: elementwise ops work on pieces, a fold combines the folds of the
pieces, a slice reads one piece. A concatenation that anything else reads stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import joined_dim, permutation, repeats, resized
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs, PadAttrs, SliceAttrs
from shardwright.compiler.ir.rewrite import with_ops, within
from shardwright.compiler.ir.traits import PARTS, REDUCTIONS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.remat.recipes import constant_exprs
from shardwright.compiler.support.families import Families

MAX_PIECES = 4  # every op behind is repeated as often (our choice)


@dataclass(frozen=True, slots=True)
class Cut:
    """A value in pieces of `sizes` along `dim`."""

    dim: int
    sizes: tuple[int, ...]

    def spans(self) -> list[tuple[int, int]]:
        """(first, end) of the pieces."""
        return list(pairwise(accumulate(self.sizes, initial=0)))

    def holding(self, first: int, end: int) -> int | None:
        """The piece that holds elements `first` to `end`."""
        return next((i for i, (a, b) in enumerate(self.spans()) if a <= first and end <= b), None)


def split_concats(graph: Graph) -> Graph:
    """`graph` without the concatenations, and pads, that need not be made.

    Results of folds and slices keep their values; sums may round differently in the last place.
    """
    graph = within(graph, split_concats)
    cuts = _Cuts(graph).found()
    return _Writer(graph, cuts).run() if cuts else graph


class _Cuts:
    """Which values of a level are made in pieces. Values that meet in an op share their fate."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.cuts: dict[Value, Cut] = {}
        self.families = Families[Value]()
        self.refused: set[Value] = set()
        self.producers = graph.producers()
        self.constants = constant_exprs(graph)

    def found(self) -> dict[Value, Cut]:
        """Values to make in pieces."""
        for op in self.graph.ops:
            self._visit(op)
        self.refused.update(v for v in self.graph.outputs if v in self.cuts)
        refused = {self.families.of(v) for v in self.refused}
        return {v: cut for v, cut in self.cuts.items() if self.families.of(v) not in refused}

    def _visit(self, op: Op) -> None:
        given = [v for v in op.operands if v in self.cuts]
        if not given:
            if (cut := _joins(op)) is not None:
                self.cuts[op.result] = cut
            return
        for other in given[1:]:
            self.families.join(other, given[0])
        cut = self.cuts[given[0]]
        if any(self.cuts[v] != cut for v in given) or not self._splits(op, cut):
            self.refused.update(given)
        elif (behind := _behind(op, cut)) is not None:
            self.cuts[op.result] = behind
            self.families.join(op.result, given[0])

    def _splits(self, op: Op, cut: Cut) -> bool:
        """Whether an op can work on pieces."""
        if isinstance(op.attrs, SliceAttrs):
            return cut.holding(op.attrs.start[cut.dim], op.attrs.limit[cut.dim]) is not None
        if op.name in REDUCTIONS or permutation(op) is not None:
            return True
        if not (OPS[op.name].elementwise and OPS[op.name].pure):
            return False
        shapes = {v.type.shape for v in op.operands if v.type.rank} | {op.result.type.shape}
        return len(shapes) == 1 and all(self._divisible(v, cut) for v in op.operands)

    def _divisible(self, value: Value, cut: Cut) -> bool:
        """Whether a part of an operand costs nothing: a scalar, counts, and what repeats."""
        if value in self.cuts or value in self.constants or not value.type.rank:
            return True
        return repeats(self.producers.get(value), cut.dim)


def _joins(op: Op) -> Cut | None:
    """The pieces an op puts side by side."""
    if (dim := joined_dim(op)) is not None:
        sizes = tuple(v.type.shape[dim] for v in op.operands)
    elif isinstance(attrs := op.attrs, PadAttrs) and (dim := attrs.only_dim) is not None:
        whole = op.operands[0].type.shape[dim]
        sizes = tuple(n for n in (attrs.low[dim], whole, attrs.high[dim]) if n)
    else:
        return None
    return Cut(dim, sizes) if 1 < len(sizes) <= MAX_PIECES and all(sizes) else None


def _behind(op: Op, cut: Cut) -> Cut | None:
    """The cut of the result, None when it is whole again."""
    if op.name in PARTS or (op.name in REDUCTIONS and cut.dim in op.attrs.dims):
        return None
    if op.name in REDUCTIONS:
        return replace(cut, dim=cut.dim - sum(d < cut.dim for d in op.attrs.dims))
    order = permutation(op)
    return cut if order is None else replace(cut, dim=order.index(cut.dim))


class _Writer:
    """A level while values of `cuts` are made in pieces."""

    def __init__(self, graph: Graph, cuts: dict[Value, Cut]) -> None:
        self.graph, self.cuts = graph, cuts
        self.producers = graph.producers()
        self.ops: list[Op] = []
        self.pieces: dict[Value, list[Value]] = {}

    def run(self) -> Graph:
        """The level without the joined values."""
        for op in self.graph.ops:
            cut = next((self.cuts[v] for v in op.operands if v in self.cuts), None)
            if cut is not None:
                self._write(op, cut)
            elif any(v in self.cuts for v in op.results):
                self.pieces[op.result] = self._first(op)
            else:
                self.ops.append(op)
        return with_ops(self.graph, self.ops)

    def _make(self, like: Op, name: str, operands: Sequence[Value], attrs: Any = None) -> Value:
        self.ops.append(make_op(name, operands, attrs, loc=like.loc))
        return self.ops[-1].result

    def _first(self, op: Op) -> list[Value]:
        """The pieces of a concatenation or pad."""
        if joined_dim(op) is not None:
            return list(op.operands)
        cut, whole = self.cuts[op.result], op.result.type
        found = []
        for first, end in cut.spans():
            if first == op.attrs.low[cut.dim]:
                found.append(op.operands[0])
                continue
            attrs = BroadcastInDimAttrs((), whole.resized(cut.dim, end - first).shape)
            found.append(self._make(op, "broadcast_in_dim", op.operands[1:], attrs))
        return found

    def _write(self, op: Op, cut: Cut) -> None:
        """An op that reads pieces: in pieces, or whole again."""
        if op.name in PARTS:
            self._slice(op, cut)
            return
        parts = [[self._part(v, cut, i) for v in op.operands] for i in range(len(cut.sizes))]
        if op.name in REDUCTIONS and cut.dim in op.attrs.dims:
            self._fold(op, [part for (part,) in parts])
        else:
            self.pieces[op.result] = [self._make(op, op.name, p, op.attrs) for p in parts]

    def _part(self, value: Value, cut: Cut, number: int) -> Value:
        """Piece `number` of an operand."""
        if value in self.cuts:
            return self.pieces[value][number]
        if not value.type.rank:
            return value
        op = self.producers[value]
        first, end = cut.spans()[number]
        if repeats(op, cut.dim):
            edge = value.type.resized(cut.dim, end - first).shape
            return self._make(op, op.name, op.operands, resized(op, edge))
        window = SliceAttrs.along(value.type.shape, cut.dim, first, end)
        return self._make(op, "slice", (value,), window)

    def _slice(self, op: Op, cut: Cut) -> None:
        """A slice of the one piece that holds it."""
        attrs, dim = op.attrs, cut.dim
        number = cut.holding(attrs.start[dim], attrs.limit[dim])
        assert number is not None
        first, _ = cut.spans()[number]
        piece, window = self.pieces[op.operands[0]][number], attrs.moved(dim, -first)
        self.ops.append(Op("slice", (piece,), op.results, window, (), op.loc))

    def _fold(self, op: Op, parts: Sequence[Value]) -> None:
        """The fold of all pieces: folds of each, combined."""
        kind = op.attrs.kind
        name = ELEMENTWISE_OF[kind]
        folded = [self._make(op, "reduce", (part,), op.attrs) for part in parts]
        while len(folded) > 2:
            folded[:2] = [self._make(op, name, folded[:2])]
        self.ops.append(Op(name, tuple(folded), op.results, None, (), op.loc))
