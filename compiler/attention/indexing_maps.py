"""Indexing maps of a graph level, cut at contractions.

Every contraction makes a new index space; what only reshapes, scales, masks or reduces its result
stays in that space and in one component. A contraction over dims that every score had as batch dims
(heads that talk to each other) is not a cut. Dims touched by slices, pads and concatenations get an
iter dim that is kin to the old one: the same kind of index, another extent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiler.ir.facts import joined_dim, pairing
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.traits import IDENTITIES, REDUCTIONS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.indexing_map import (
    IndexExpr,
    IndexingMap,
    IterDim,
    all_leaves,
    behind,
    find,
    fresh,
    leaves,
    unify,
)
from shardwright.compiler.support.families import Families

Space = frozenset[IterDim]
"""Kinds of index, each by one representative iter dim."""


class IndexingMaps:
    """Indexing maps and components of the values that contractions lead to.

    Read `indexing`, `space`, `span` and `component` only after construction: iter dims still split
    and unite while the level is walked.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.indexing: dict[Value, IndexingMap] = {}
        self.seeds: list[Op] = []
        self.sinks: list[tuple[Op, int]] = []
        self._batch: dict[Value, list[IndexExpr]] = {}  # per component: batch dims of its scores
        self._components = Families[Value]()
        self._links: list[tuple[IndexExpr, IndexExpr]] = []
        for op in graph.ops:
            self._map(op)
        self._kin = self._kinds()

    def component(self, value: Value) -> Value:
        """The representative of the component of a mapped value."""
        return self._components.of(value)

    def same_component(self, a: Value, b: Value) -> bool:
        """True for mapped values of one component."""
        known = a in self.indexing and b in self.indexing
        return known and self.component(a) is self.component(b)

    def space(self, value: Value) -> Space:
        """The kinds of index a mapped value spans."""
        return frozenset(self._kind(a) for a in all_leaves(self.indexing[value]))

    def span(self, value: Value, dims: Iterable[int]) -> Space:
        """The kinds of index of some dims of a mapped value."""
        indexing = self.indexing[value]
        return frozenset(self._kind(a) for d in dims for a in leaves(indexing[d]))

    def _kind(self, iter_dim: IterDim) -> IterDim:
        return self._kin.of(find(iter_dim))

    def _kinds(self) -> Families[IterDim]:
        """Kin of every iter dim that a slice, pad or concatenation made."""
        kin = Families[IterDim]()
        for new, old in self._links:
            for iter_dim in leaves(new):
                kin.join(iter_dim, leaves(old)[-1])
        return kin

    def _set(self, value: Value, indexing: IndexingMap, sources: Iterable[Value]) -> None:
        self.indexing[value] = indexing
        for source in sources:
            self._join(self.component(source), self.component(value))

    def _join(self, root: Value, other: Value) -> None:
        """Make two components one; the longer list of batch dims takes over the shorter."""
        if root is other:
            return
        a, b = self._batch.pop(root, []), self._batch.pop(other, [])
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        longer.extend(shorter)
        self._components.join(root, other)
        self._batch[other] = longer

    def _map(self, op: Op) -> None:
        """Map the results of one op."""
        mapped = [v for v in op.operands if v in self.indexing]
        if pairing(op) is not None:
            self._contraction(op)
        elif not mapped or op.regions:
            return
        elif op.name in IDENTITIES:
            for operand, result in zip(op.operands, op.results, strict=True):
                if operand in self.indexing:
                    self._set(result, self.indexing[operand], [operand])
        elif OPS[op.name].kind in (Kind.PART, Kind.JOIN):
            self._touching(op, mapped)
        elif op.name in _SHAPED:
            if op.operands[0] in self.indexing:
                indexing = _SHAPED[op.name](op, self.indexing[op.operands[0]])
                self._set(op.result, indexing, mapped[:1])
        elif OPS[op.name].elementwise:
            self._elementwise(op, mapped)

    def _elementwise(self, op: Op, mapped: Sequence[Value]) -> None:
        """Operands of the result's shape walk the same indices."""
        shaped = [v for v in mapped if v.type.shape == op.result.type.shape]
        if not shaped:
            return
        first = self.indexing[shaped[0]]
        for other in shaped[1:]:
            for a, b in zip(first, self.indexing[other], strict=True):
                unify(a, b)
        self._set(op.result, first, shaped)

    def _touching(self, op: Op, mapped: Sequence[Value]) -> None:
        """Untouched dims keep their expression; touched ones get a new one that is kin."""
        values = [v for v in mapped if v.type.rank == op.result.type.rank]
        indexing = list(fresh(op.result.type.shape))
        for value in values:
            for d, expr in enumerate(self.indexing[value]):
                if not expr or not indexing[d]:
                    continue
                if self._is_whole(op, value, d):
                    indexing[d] = expr
                else:
                    self._links.append((indexing[d], expr))
        self._set(op.result, tuple(indexing), values)

    def _is_whole(self, op: Op, value: Value, d: int) -> bool:
        return joined_dim(op) != d and value.type.shape[d] == op.result.type.shape[d]

    def _contraction(self, op: Op) -> None:
        """A new space, unless a score is only mixed over its batch dims."""
        for side, operand in enumerate(op.operands):
            if operand in self.indexing and self._mixes(op, side):
                mixed, new = self._mixed(op, side)
                self._set(op.result, mixed, [operand])
                self._batch.setdefault(self.component(operand), []).extend(new)
                return
        self._set(op.result, fresh(op.result.type.shape), ())
        self._batch[op.result] = list(self.indexing[op.result][: len(op.attrs.lhs_batch)])
        self.seeds.append(op)
        self.sinks += [(op, side) for side in (0, 1) if op.operands[side] in self.indexing]

    def _mixes(self, op: Op, side: int) -> bool:
        """True when `side` is contracted over batch dims of scores alone, with as many coming back
        from an operand of another space.
        """
        operand, other = op.operands[side], op.operands[1 - side]
        dims, free = op.attrs.contract(side), free_dims(op, 1 - side)
        if other in self.indexing or not dims or len(free_dims(op, side)) < 2:
            return False
        root = self.component(operand)
        batch = {a for expr in self._batch.get(root, ()) for a in leaves(expr)}
        iter_dims = [a for d in dims for a in leaves(self.indexing[operand][d])]
        sizes = [operand.type.shape[d] for d in dims]
        return (
            sizes == [other.type.shape[d] for d in free]
            and bool(iter_dims)
            and batch >= set(iter_dims)
        )

    def _mixed(self, op: Op, side: int) -> tuple[IndexingMap, IndexingMap]:
        """The map of a mixed score, batch and free dims as they were, and those that came back new
        for the contracted ones.
        """
        mine, other = op.operands[side], op.operands[1 - side]
        own = self.indexing[mine]
        batch = [own[d] for d in op.attrs.batch(side)]
        kept = [own[d] for d in free_dims(op, side)]
        back = list(fresh([other.type.shape[d] for d in free_dims(op, 1 - side)]))
        return tuple(batch + (kept + back if side == 0 else back + kept)), tuple(back)


def free_dims(op: Op, side: int) -> tuple[int, ...]:
    """Free dims of one operand of a contraction."""
    dims: tuple[int, ...] = op.attrs.free_dims(*(v.type.rank for v in op.operands))[side]
    return dims


def _viewed(op: Op, indexing: IndexingMap) -> IndexingMap:
    return behind(op, indexing) or fresh(op.result.type.shape)


def _reduce(op: Op, indexing: IndexingMap) -> IndexingMap:
    return tuple(expr for d, expr in enumerate(indexing) if d not in op.attrs.dims)


_SHAPED = {**dict.fromkeys(VIEWS, _viewed), **dict.fromkeys(REDUCTIONS, _reduce)}
