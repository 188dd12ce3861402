"""Labels of all values of a graph: the transfer functions applied op by op, loops until nothing
changes.

Whatever a loop's carry may be in any iteration, its label covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.linearity.labels import FREE, MIXED, Label, join, sample
from shardwright.sharding.linearity.rules import Labels, Scope, label


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
            results = [label(op, operands, scope)] * len(op.results)
        scope.labels.update(zip(op.results, results, strict=True))
    return scope.labels


def _loop(op: Op, operands: Sequence[Label]) -> list[Label]:
    """Carries: the join over iterations, by repetition until nothing changes."""
    (body,) = op.regions
    carries = list(operands)
    while True:
        inside = _label_region(body, carries)
        after = [
            join(carry, inside[out], out) for carry, out in zip(carries, body.outputs, strict=True)
        ]
        if after == carries:
            return after
        carries = after
