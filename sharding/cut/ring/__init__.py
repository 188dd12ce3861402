"""Attention over sequences that are split over cores, as a ring: no core gathers keys and values.

A gather over the context axis whose index ends in reductions that feed each other (a softmax, in
any spelling, forward or backward) becomes loops over blocks that go around the ring. Nothing is
recognised by name: `index.py` follows the index, `terms.py` orders the reductions, `loops.py`
builds the loops. It works on per-core graphs, before they are cut into programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.diagnostics import Diagnostic, ShardingError
from shardwright.compiler.ir.ops import AllGatherAttrs
from shardwright.compiler.ir.rewrite import with_ops, with_regions, with_results
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.ring.index import Index, Level, TwoIndicesError
from shardwright.sharding.cut.ring.loops import ring_ops
from shardwright.sharding.cut.ring.reorder import reordered
from shardwright.sharding.cut.ring.terms import FREE, Pass, passes
from shardwright.sharding.indices.dims import reached
from shardwright.sharding.localize import Localized
from shardwright.sharding.partition.mesh import CONTEXT_AXIS


@dataclass(frozen=True, slots=True)
class Context:
    """What to tell the user about attention over a split sequence; `gathered_bytes` are the most
    that one level of the graph gathers of keys and values."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Diagnostic, ...] = ()
    gathered_bytes: int = 0


def with_context(local: Localized, form: str) -> tuple[Localized, Context]:
    """`local` with attention over a split sequence in the form that is asked for: `gather` changes
    nothing; `ring` puts loops in place of gathers that feed a softmax, with a finding for every one
    that stays.
    """
    size = local.source.mesh.sizes.get(CONTEXT_AXIS, 1)
    if size == 1:
        return local, Context()
    if form == "gather":
        chosen = (
            "gather (strategy.context, default: fewer passes over scores); `ring` holds 2 of"
            f" {size} blocks of keys and values instead of all"
        )
        most = _rings(local).most_bytes(local.graph)
        return local, Context(reasons={"context": chosen}, gathered_bytes=most)
    rings = _rings(local)
    graph = rings.level(local.graph)
    reason = (
        f"ring attention (strategy.context): {rings.loops} ring passes, in each of which the"
        f" {size} blocks of keys and values go around all ranks of {CONTEXT_AXIS}; a core holds 2"
        " blocks at a time"
    )
    return replace(local, graph=graph), Context({"context": reason}, tuple(rings.findings))


def _rings(local: Localized) -> Rings:
    source, graph = local.source, local.graph
    pairs = zip(source.inputs, graph.inputs, strict=True)
    return Rings(CONTEXT_AXIS, reached(graph, [v for slot, v in pairs if slot.role == "batch"]))


class Rings:
    """Rewrites the levels of a graph and counts; `on_batch` tells activations from weights."""

    def __init__(self, axis: str, on_batch: set[Value]) -> None:
        self.axes = (axis,)
        self.on_batch = on_batch
        self.loops = 0
        self.findings: list[Diagnostic] = []

    def level(self, graph: Graph) -> Graph:
        """One level with its regions."""
        ops = [with_regions(op, tuple(map(self.level, op.regions))) for op in graph.ops]
        graph = with_ops(graph, ops)
        left = [op for op in graph.ops if self._gathers(op)]
        while left:
            try:
                index = Index.of(Level(graph, left), left[0])
            except TwoIndicesError:  # it cannot be told apart from another
                done = {left[0]}
            else:
                done = {*index.entries}
                graph = self._replaced(index) or graph
            left = [op for op in left if op not in done]
        return graph

    def most_bytes(self, graph: Graph) -> int:
        """The most that a level, or one in it, gathers over the axis, whatever is live together."""
        own = sum(op.result.type.num_bytes for op in graph.ops if self._gathers(op))
        return max(own, *(self.most_bytes(r) for op in graph.ops for r in op.regions), 0)

    def _gathers(self, op: Op) -> bool:
        """True for a gather of activations over the axis."""
        a = op.attrs
        own = isinstance(a, AllGatherAttrs) and a.axes == self.axes and a.group_size > 1
        return own and op.operands[0] in self.on_batch

    def _replaced(self, index: Index) -> Graph | None:
        """The level with the passes of `index`; None when nothing is normalised along it, or an op
        needs it whole.
        """
        index, steps = _fewest(index)
        if len(steps) < 2 and all(term == FREE for s in steps for term in s.folds.values()):
            return None
        try:
            made = [(_key(index, step), ring_ops(index, step)) for step in steps]
        except ShardingError as refused:
            self.findings.append(_stays_gathered(index, refused.diagnostic))
            return None
        self.loops += len(made)
        return _assembled(index, made)


def _fewest(index: Index) -> tuple[Index, list[Pass]]:
    """The index and its passes, with sums in the other order when that saves a pass."""
    steps = passes(index)
    graph = reordered(index)
    if graph is index.level.graph:
        return index, steps
    other = Index.of(Level(graph, index.level.gathers), index.entries[0])
    fewer = passes(other)
    return (other, fewer) if len(fewer) < len(steps) else (index, steps)


def _stays_gathered(index: Index, why: Diagnostic) -> Diagnostic:
    """A note for a softmax that needs its index whole."""
    gather = index.entries[0]
    return Diagnostic(
        "SW_CONTEXT_GATHERED",
        f"strategy.context = ring requires ops that work block by block; {gather.result.type} is"
        f" gathered over {'+'.join(index.axes)}: {why.message}",
        why.loc or gather.loc,
        hint="keep the sequence of keys and values along one dim that is only moved or reduced",
        severity="note",
    )


def _key(index: Index, step: Pass) -> int:
    """Where a pass belongs: at the first thing it makes."""
    made = {op.result for op in step.folds} | {*step.collected}
    order = enumerate(index.level.graph.ops)
    return next(i for i, op in order if any(v in made for v in op.results))


def _assembled(index: Index, made: Iterable[tuple[int, list[Op]]]) -> Graph:
    """The level with the ops of the passes in place of what they make."""
    graph = index.level.graph
    left = ((i, _left(index, op)) for i, op in enumerate(graph.ops))
    keyed = [((i, -1), op) for i, op in left if op is not None]
    keyed += [((key, n), op) for key, ops in made for n, op in enumerate(ops)]
    return with_ops(graph, _swept(index, _ordered(keyed)))


def _left(index: Index, op: Op) -> Op | None:
    """What stays of `op`: nothing of what passes make or take apart, of an identity what does not
    walk along the index.
    """
    kept = [i for i, v in enumerate(op.results) if v not in index.derived]
    if op.name in IDENTITIES and len(kept) < len(op.results):
        return with_results(op, kept, op.attrs, ()) if kept else None
    is_inside = len(kept) < len(op.results) or index.ends(op)
    return None if is_inside and op not in index.entries else op


def _swept(index: Index, ops: Sequence[Op]) -> list[Op]:
    """The ops without gathers, masks and positions that nothing reads any more."""
    read = {*index.level.graph.outputs}
    kept = []
    for op in reversed(ops):
        spare = not op.regions and any(v in index.dims for v in op.results)
        if not spare or any(v in read for v in op.results):
            kept.append(op)
            read.update(op.operands)
    return kept[::-1]


Keyed = tuple[tuple[int, int], Op]


def _ordered(keyed: Sequence[Keyed]) -> list[Op]:
    """The ops in the order of their keys, but every value before its readers."""
    maker = {v: n for n, (_, op) in enumerate(keyed) for v in op.results}
    before = {n: {maker[v] for v in op.operands if v in maker} for n, (_, op) in enumerate(keyed)}
    places = [(*key, n) for n, (key, _) in enumerate(keyed)]  # two passes may have one key
    order = topological(before, places.__getitem__)
    assert len(order) == len(keyed), "passes follow each other"
    return [keyed[n][1] for n in order]
