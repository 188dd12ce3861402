"""Rows of all samples that are sorted as one list (dropless routing to experts): sorted sample by
sample instead, where nothing depends on their order.

A list of all rows can only be sorted where all rows are, so that every core would gather and
compute all of them. `proof.py` follows what a sort makes, `blocks.py` rewrites. What is not proven
stays as it is: right in values, gathered, and a finding. So does any other sort over samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.ir.ops import SortAttrs
from shardwright.compiler.ir.rewrite import with_ops, with_regions
from shardwright.compiler.ir.traits import MOVES, PARTS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.ranges import integer_ranges
from shardwright.sharding.indices.dims import batch_labels, reached
from shardwright.sharding.prepare.sorted_rows.blocks import Blocks
from shardwright.sharding.prepare.sorted_rows.experts import experts_apart
from shardwright.sharding.prepare.sorted_rows.level import Level
from shardwright.sharding.prepare.sorted_rows.proof import OrderMattersError, is_row_sort, proven

SORTED = "SW_ROWS_SORTED"


def sorted_per_sample(
    graph: Graph, batch: Mapping[Value, int], *, by_expert: bool = False
) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """`graph` with lists of rows sorted per sample where that changes nothing but rounding, and
    what the user should know. `batch` names the sample dim of every batch input; with `by_expert`
    every expert gets a product of its own.
    """
    known = {value: dim for value, dim in batch.items() if value.type.rank > dim}
    counts = {value.type.shape[dim] for value, dim in known.items()}
    if not counts or not any(isinstance(op.attrs, SortAttrs) for op in graph.walk()):
        return graph, ()
    alike = len(counts) == 1 and any(map(is_row_sort, graph.walk()))
    labels = batch_labels(graph, known).dims
    rewrite = _Rewrite(counts, labels, _unfollowed(graph, labels))
    level = Level(graph, graph.producers(), integer_ranges(graph) if alike else {})
    found = rewrite.run(level)
    if alike:
        found = dce(found)
    if alike and by_expert:
        found = experts_apart(Level(found, found.producers(), {}))
    return found, tuple(rewrite.notes)


def _unfollowed(graph: Graph, labels: Mapping[Value, int]) -> set[Value]:
    """What depends on values that have samples where no label says so: behind ops that move them,
    where the label ends.
    """
    moved = [op for op in graph.walk() if op.name in MOVES and op.result not in labels]
    ends = [op.result for op in moved if any(_has_several(op, v, labels) for v in op.operands)]
    return reached(graph, ends) if ends else set()


def _has_several(op: Op, value: Value, labels: Mapping[Value, int]) -> bool:
    """True when the result of `op` has more than one of the samples of an operand."""
    if value not in labels:
        return False
    one = op.name in PARTS and op.result.type.shape[labels[value]] == 1
    return not one and value.type.shape[labels[value]] > 1


@dataclass(slots=True)
class _Rewrite:
    """All levels of a graph; `counts` are the numbers of samples of its inputs."""

    counts: set[int]
    labels: Mapping[Value, int]
    unfollowed: set[Value]
    notes: list[Diagnostic] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """The number of samples, where all inputs have as many."""
        return max(self.counts)

    def run(self, level: Level) -> Graph:
        """The graph of a level, loops inside of it first."""
        sorts = [op for op in level.graph.ops if isinstance(op.attrs, SortAttrs)]
        whole = {op: self._why_whole(op) for op in sorts if self._is_over_samples(op)}
        found, refused = proven([op for op, why in whole.items() if why is None], level)
        self.notes += [_local(shuffle.sort) for shuffle in found]
        self.notes += [_mixed(error) for error in refused]
        inverses = {op for shuffle in found for op in shuffle.inverses}
        left = ((op, why) for op, why in whole.items() if why and op not in inverses)
        self.notes += [_mixed(OrderMattersError(why, op.loc)) for op, why in left]
        graph = Blocks(found, self.samples).run(level.graph) if found else level.graph
        inner = (tuple(self.run(level.inside(op)) for _ in op.regions) for op in graph.ops)
        return with_ops(graph, list(map(with_regions, graph.ops, inner)))

    def _is_over_samples(self, op: Op) -> bool:
        """True for a sort of lists that have the rows of several samples."""
        if self.samples == 1:
            return False
        found = [self.labels[v] for v in op.operands if v in self.labels]
        if not found:
            plain = op.operands[0].type.rank == 1
            return plain and not self.unfollowed.isdisjoint(op.operands)
        return op.attrs.dim in found

    def _why_whole(self, op: Op) -> str | None:
        """Why a sort over samples is none that may be done sample by sample."""
        rows = op.operands[0].type.shape[op.attrs.dim]
        shown = op.operands[0].type
        if len(self.counts) > 1:
            return f"batch inputs have {' and '.join(map(str, sorted(self.counts)))} samples"
        if not is_row_sort(op):
            return f"sort of {shown} is not one of a list by one integer key, from the least on"
        if self.labels.keys().isdisjoint(op.operands):
            return f"where the samples of {shown} are is not followed"
        if rows == self.samples or rows % self.samples:
            return f"{rows} rows are not several of each of {self.samples} samples"
        return None


def _local(sort: Op) -> Diagnostic:
    return Diagnostic(
        SORTED,
        f"sort of {sort.operands[0].type} has the rows of all samples; they are sorted sample by"
        " sample, since the step does not depend on their order",
        sort.loc,
        severity="note",
    )


def _mixed(error: OrderMattersError) -> Diagnostic:
    return Diagnostic(
        SORTED,
        f"rows of all samples are sorted as one list and gathered on every core: {error.reason}",
        error.loc,
        hint="sort within each sample, or bring every row back by scatter-add or its place",
        severity="warning",
    )
