"""Rows of all samples that are sorted as one list (dropless routing to experts): sorted sample by
sample instead, where nothing depends on their order.

A list of all rows can only be sorted where all rows are, so that every core would gather and
compute all of them. `proof.py` follows what a sort makes, `blocks.py` rewrites. What is not proven
stays as it is: right in values, gathered, and a finding.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.diagnostics import Diagnostic
from compiler.ir.types import Graph, Op, Value
from compiler.passes.dce import dce
from compiler.passes.ranges import integer_ranges
from compiler.passes.rewrite import with_ops, with_regions
from sharding.dims import batch_labels
from sharding.sorted_rows.blocks import Blocks
from sharding.sorted_rows.experts import experts_apart
from sharding.sorted_rows.level import Level
from sharding.sorted_rows.proof import OrderMattersError, is_row_sort, proven

SORTED = "SW_ROWS_SORTED"


def sorted_per_sample(
    graph: Graph, batch: Mapping[Value, int], *, by_expert: bool = False
) -> tuple[Graph, tuple[Diagnostic, ...]]:
    """`graph` with lists of rows sorted per sample where that changes nothing but rounding, and
    what the user should know. `batch` names the sample dim of every batch input; with `by_expert`
    every expert gets a product of its own.
    """
    samples = {value.type.shape[dim] for value, dim in batch.items()}
    if len(samples) != 1 or not any(is_row_sort(op) for op in graph.walk()):
        return graph, ()
    labels = batch_labels(graph, batch).dims
    (count,) = samples
    rewrite = _Rewrite(count, labels)
    level = Level(graph, graph.producers(), integer_ranges(graph))
    found = dce(rewrite.run(level))
    if by_expert:
        found = experts_apart(Level(found, found.producers(), {}))
    return found, tuple(rewrite.notes)


class _Rewrite:
    """All levels of a graph."""

    def __init__(self, samples: int, labels: Mapping[Value, int]) -> None:
        self.samples = samples
        self.labels = labels
        self.notes: list[Diagnostic] = []

    def run(self, level: Level) -> Graph:
        """The graph of a level, loops inside of it first."""
        sorts = [op for op in level.graph.ops if self._is_mixing(op)]
        found, refused = proven(sorts, level)
        self.notes += [_local(shuffle.sort) for shuffle in found]
        self.notes += [_mixed(error) for error in refused]
        graph = Blocks(found, self.samples).run(level.graph) if found else level.graph
        ops = [self._inside(op, level) for op in graph.ops]
        return with_ops(graph, ops)

    def _inside(self, op: Op, level: Level) -> Op:
        if op.name != "loop":
            return op
        return with_regions(op, (self.run(level.inside(op)),))

    def _is_mixing(self, op: Op) -> bool:
        """True for a sort of one list that has the rows of several samples."""
        if not is_row_sort(op) or not any(self.labels.get(v) == 0 for v in op.operands):
            return False
        rows = op.operands[0].type.shape[0]
        return self.samples > 1 and rows > self.samples and rows % self.samples == 0


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
