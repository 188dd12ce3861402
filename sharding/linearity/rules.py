"""Labels of all values of a graph, by transfer functions: those of results from those of operands.

Each file of an op family registers its functions here; ops without one are functions of elements.
Loops are followed until nothing changes: a carry's label covers whatever it is in any iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.tables import entering
from shardwright.sharding.indices.dims import factors
from shardwright.sharding.linearity.labels import (
    FREE,
    MIXED,
    FactoredDim,
    Kind,
    Label,
    dims_of,
    fit,
    join,
    merge,
    merge_dim,
    sample,
)

Labels = dict[Value, Label]
Transfer = Callable[[Op, Sequence[Label], "Scope"], Label]
TRANSFERS: dict[str, Transfer] = {}
transfers = entering(TRANSFERS, "transfer function")


@dataclass(slots=True)
class Scope:
    """What a transfer function may look up: labels and producers of the region at hand."""

    labels: Labels
    producers: dict[Value, Op]


def carried(op: Op, operands: Sequence[Label]) -> list[FactoredDim]:
    """The dims of the result, from those of the operands that walk along them."""
    given = {v: dims_of(x, v.type.shape) for x, v in zip(operands, op.operands, strict=True)}
    dims: list[FactoredDim] = [((n, False),) for n in op.result.type.shape]
    for factor in factors(op):
        found = [given[v][d] for v, d in factor if v in given]
        for v, d in factor:
            if v is op.result and found:
                dims[d] = reduce(merge_dim, found)
    return dims


def elementwise(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Any function of elements: SAMPLE dims pass through, a SUM does not stay one."""
    if any(label.kind is Kind.SAMPLE for label in operands):
        return merge(operands, op.results[0].type.shape)
    return MIXED if any(label.on_batch for label in operands) else FREE


def no_sum(operands: Sequence[Label]) -> list[Label]:
    """SUM read by a function that is not linear."""
    return [MIXED if label.kind is Kind.SUM else label for label in operands]


def label_values(graph: Graph, batch: Mapping[Value, int]) -> Labels:
    """Label every top-level value of `graph`; `batch` gives the sample dim of each batch input."""
    inputs = [_input_label(v, batch.get(v)) for v in graph.inputs]
    return _label_region(graph, inputs)


def _input_label(value: Value, batch_dim: int | None) -> Label:
    """The label of a graph input; a scalar batch leaf is data of the whole batch."""
    if batch_dim is None:
        return FREE
    if not value.type.rank:
        return MIXED
    return sample([((n, d == batch_dim),) for d, n in enumerate(value.type.shape)])


def _label_region(graph: Graph, inputs: Sequence[Label]) -> Labels:
    """Labels of all values of one region."""
    scope = Scope(dict(zip(graph.inputs, inputs, strict=True)), graph.producers())
    for op in graph.ops:
        operands = [scope.labels[v] for v in op.operands]
        if op.regions:
            results: Sequence[Label] = _loop(op, operands)
        elif op.name in IDENTITIES:
            results = operands
        else:
            results = [_label(op, operands, scope)] * len(op.results)
        scope.labels.update(zip(op.results, results, strict=True))
    return scope.labels


def _loop(op: Op, operands: Sequence[Label]) -> list[Label]:
    """Carries: the join over iterations, by repetition until nothing changes."""
    (body,) = op.regions
    carries = list(operands)
    while True:
        inside = _label_region(body, carries)
        pairs = zip(carries, body.outputs, strict=True)
        after = [join(carry, inside[out], out) for carry, out in pairs]
        if after == carries:
            return after
        carries = after


def _label(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """The label of the results of an op, which are alike."""
    label = TRANSFERS.get(op.name, elementwise)(op, operands, scope)
    if label.kind is Kind.SAMPLE:
        return sample(fit(label.dims, op.results[0].type.shape))
    return label
