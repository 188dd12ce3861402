"""Where code computes: the `used` layout of every value, from the indices its dims walk along.

Samples lie over the data axes, the sequence over `cp`, and what tensor parallelism splits over
`tp`. Under sequence parallelism what holds the hidden dim, or only statistics of it, is split along
the sequence by the tensor axis too. State that is stored more finely is the business of
`strategies/state.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.ir.facts import pairing
from shardwright.compiler.ir.traits import CASTS, CONTRACTIONS, REDUCTIONS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.dim_sets import DimTable
from shardwright.sharding.indices.dims import Dim, joins, propagate
from shardwright.sharding.indices.indices import Class, IndexClasses
from shardwright.sharding.indices.tensor_parallel import contracted
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec

MOVING = VIEWS | CASTS


@dataclass(frozen=True, slots=True)
class UsedLayout:
    """Axes by index. `samples` maps a value to its sample dim, `split` a class to its axes.

    `sequence_parallel_axes` lie along the sequence of the values in `spread`, `sequence_axes` of
    all others; `queries` names the sequence dim of values that have several. `experts` maps a
    family to axes it takes in weights, and before the samples do in `rows`, the samples that a
    router has sent to experts.
    """

    mesh: Mesh
    indices: IndexClasses
    samples: Mapping[Value, int]
    sample_axes: tuple[str, ...] = ()
    split: Mapping[Class, tuple[str, ...]] = field(default_factory=dict)
    sequence: frozenset[Class] = frozenset()
    hidden: frozenset[Class] = frozenset()
    sequence_axes: tuple[str, ...] = ()
    sequence_parallel_axes: tuple[str, ...] = ()
    spread: frozenset[Value] = frozenset()
    queries: Mapping[Value, int] = field(default_factory=dict)
    experts: Mapping[Class, tuple[str, ...]] = field(default_factory=dict)
    rows: frozenset[Value] = frozenset()
    _known: dict[Value, ShardingSpec] = field(default_factory=dict, init=False, repr=False)

    def of(self, value: Value) -> ShardingSpec:
        """The used layout of a value; dims that do not divide stay whole."""
        if value not in self._known:
            self._known[value] = self._lay(value)
        return self._known[value]

    def unspread(self, value: Value) -> ShardingSpec:
        """The used layout without sequence parallelism: where partial sums of them are made."""
        return self._lay(value, spread=False)

    def by_sample(self, value: Value) -> ShardingSpec:
        """The layout of a value in front of the exchange with the experts, or behind it."""
        return self._lay(value, experts=False)

    def _lay(self, value: Value, *, spread: bool = True, experts: bool = True) -> ShardingSpec:
        """Experts first, then samples, tensor-parallel dims and the sequence, as far as axes are
        left."""
        dims: list[tuple[str, ...]] = [()] * value.type.rank
        used: set[str] = set()

        def give(dim: int, axes: tuple[str, ...]) -> None:
            free = tuple(a for a in axes if a not in used)
            if not dims[dim] and free == axes and self._fits(value, dim, axes):
                dims[dim] = axes
                used.update(axes)

        sample = self.samples.get(value)
        if experts and self.experts and (sample is None or value in self.rows):
            for dim, family in self.indices.families(value):
                give(dim, self.experts.get(family, ()))
        if sample is not None:
            give(sample, tuple(a for a in self.sample_axes if a not in used))
        for dim, member in self.indices.classes(value) if self.split else ():
            give(dim, self.split.get(member, ()))
        walked = self.sequence_dim(value)
        if walked is not None:
            shared = spread and (value not in self.samples or value in self.spread)
            give(walked, (*self.sequence_axes, *(self.sequence_parallel_axes if shared else ())))
            give(walked, self.sequence_axes)
        return ShardingSpec(tuple(dims))

    def _fits(self, value: Value, dim: int, axes: Sequence[str]) -> bool:
        """True when the axes divide the dim."""
        size = value.type.shape[dim]
        return bool(axes) and size > 0 and size % self.mesh.size(axes) == 0

    def sequence_dim(self, value: Value) -> int | None:
        """The sequence dim of a value, if it has one; of scores, the dim of the queries."""
        if value in self.queries:
            return self.queries[value]
        return next(iter(self.sequence_dims(value)), None)

    def sequence_dims(self, value: Value) -> list[int]:
        """Every sequence dim of a value with samples (scores have two), or of a table of positions:
        what has no samples but the hidden dim.
        """
        if not self.sequence:
            return []
        families = dict(self.indices.families(value))
        sample = self.samples.get(value)
        if sample is None and not self.hidden & {*families.values()}:
            return []
        return [d for d, f in families.items() if f in self.sequence and d != sample]


def sequence_parallel_values(graph: Graph, layout: UsedLayout) -> frozenset[Value]:
    """The values that sequence parallelism spreads over the tensor axis.

    These have a sequence dim and the hidden dim, or are made of nothing but such values, as the
    statistics of a norm, or are products that are summed over a split index, as what a low-rank
    matrix makes. What holds a split index uses the axis for that.
    """
    found: set[Value] = set()

    def holds(value: Value) -> bool:
        return any(f in layout.hidden for _, f in layout.indices.families(value))

    def free(value: Value) -> bool:
        split = any(c in layout.split for _, c in layout.indices.classes(value))
        return layout.sequence_dim(value) is not None and not split

    def is_partial(op: Op) -> bool:
        return op.name in CONTRACTIONS and any(
            layout.indices.of(dim) in layout.split for dim in contracted(op)
        )

    def step(op: Op) -> bool:
        tokens = [v for v in op.operands if layout.sequence_dim(v) is not None]
        from_spread = bool(tokens) and all(v in found for v in tokens)
        for value in op.results:
            if free(value) and (from_spread or holds(value) or is_partial(op)):
                found.add(value)
        return False

    propagate(graph, step, joins(found))
    return frozenset(found)


def expert_rows(graph: Graph, layout: UsedLayout) -> frozenset[Value]:
    """The samples that lie by expert: what meets the experts' weights, and what follows from it
    alone.

    Rows are sent once nothing but moving is left to be done before they meet a weight, and return
    where anything that stayed is needed, so that masks and numbers of rows are not sent.
    """
    found: set[Value] = set()
    made = {v: op for op in graph.walk() for v in op.results}

    def has_experts(value: Value) -> bool:
        families = (f for _, f in layout.indices.families(value))
        return value in layout.samples and any(f in layout.experts for f in families)

    def meet(op: Op) -> list[Value]:
        """The samples that a contraction brings to experts' weights."""
        dims = pairing(op)
        if dims is None or not all(map(has_experts, op.results)):
            return []
        batch = zip(op.operands, (dims.lhs_batch, dims.rhs_batch), strict=True)
        by_expert = all(
            any(layout.indices.family((v, d)) in layout.experts for d in dims) for v, dims in batch
        )
        rows = [v for v in op.operands if v in layout.samples]
        return rows if by_expert and len(rows) == 1 else []

    def step(op: Op) -> bool:
        read = [v for v in op.operands if v in layout.samples]
        if read and not op.regions and all(v in found for v in read):
            found.update(v for v in op.results if has_experts(v))
        return False

    for op in graph.walk():
        for value in meet(op):
            while value not in found:
                found.add(value)
                source = made.get(value)
                if source is not None and source.name in MOVING and has_experts(source.operands[0]):
                    value = source.operands[0]
    propagate(graph, step, joins(found))
    return frozenset(found)


def query_dims(graph: Graph, layout: UsedLayout) -> dict[Value, int]:
    """Of every value with two sequence dims, the one that is summed over less: the queries'.

    Queries and keys are one index of the model, but among scores alone they are two: dims are tied
    through ops between such values only. A softmax and its gradient fold the rows of one sample
    along the keys; where nothing is folded, the products with the values sum over keys (and those
    of gradients over both, so that they say less).
    """
    pairs = {
        v: dims
        for op in graph.walk()
        for v in (*op.operands, *op.results)
        if len(dims := layout.sequence_dims(v)) > 1
    }
    table = DimTable(graph)
    sides = table.sets(table.of(pairs))
    folded: Counter[Dim] = Counter()
    summed: Counter[Dim] = Counter()
    for op in graph.walk():
        size = sum(v.type.num_bytes for v in op.results)
        rows = op.name in REDUCTIONS and all(v in layout.samples for v in op.results)
        for value, dim in contracted(op):
            if value in pairs:
                (folded if rows else summed)[sides.find((value, dim))] += size

    def weight(dim: Dim) -> tuple[int, int]:
        side = sides.find(dim)
        return folded[side], summed[side]

    return {v: min(dims, key=lambda d: weight((v, d))) for v, dims in pairs.items()}
