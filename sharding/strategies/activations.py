"""Where activations lie and what is brought to them: gathered weights, sequences and rows.

Every value with samples is constrained to the layout it is used in, so that the partitioner has
nothing left to choose; what an op reads otherwise is gathered or sent right before it.
"""

from __future__ import annotations

from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.facts import needed_whole
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.indices.dims import reached
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.settings import WEIGHTS
from shardwright.sharding.strategies.constraints import CARRYING, gather_uses
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.expected import (
    expert_uses,
    partial_axes,
    reductions,
    sends_rows,
    sequence_uses,
)

UPDATING = of(Kind.UPDATE)


def gather_operands(step: Decisions) -> None:
    """Gather a stored weight where it meets the batch, after its conversion to the compute type;
    the sequence where an op needs the axes it is split over for another index; and rows that lie by
    expert where they are read by sample.
    """
    state = step.values(*WEIGHT_ROLES, "optimizer")
    finer = [v for v in state if step.constraints[v] != step.layout.of(v)]
    step.gathers += gather_uses(
        step.graph, step.labels.dims, reached(step.graph, finer), in_parts=True
    )
    step.gathers += sequence_uses(step.graph, step.layout)
    step.gathers += expert_uses(step.graph, step.layout)


def constrain_activations(step: Decisions) -> None:
    """Every value with samples lies where it is used; loop carries of weights like their
    weight.
    """
    weights = step.weights()
    for op in step.graph.walk():
        for value in op.results:
            if value in step.labels.dims:
                _constrain_used(step, op, value)
            elif op.name in CARRYING and (spec := _carried(step, value, weights)) is not None:
                step.constraints[value] = spec
    step.predicted += reductions(step.graph, step.layout)


def _carried(step: Decisions, value: Value, weights: set[Value]) -> ShardingSpec | None:
    """The layout of a carry of weight class: gradients are stored, weights from stage 3 on."""
    spec = step.stored(value)
    keeps = spec is not None and step.zero < WEIGHTS and value in weights
    return step.layout.of(value) if keeps else spec


def _constrain_used(step: Decisions, op: Op, value: Value) -> None:
    """Constrain a value to where it is used; partial sums are made whole before they are spread, so
    that the partitioner does not gather a table to spread what is looked up in it. What an op
    writes into at a place that is not known leaves it whole, and is cut right behind it.
    """
    spec = step.layout.of(value)
    whole = needed_whole(op) if op.name in UPDATING else ()
    if any(spec.dims[dim] for dim in whole):
        dims = [() if dim in whole else axes for dim, axes in enumerate(spec.dims)]
        step.constraints[value], step.layouts[value] = ShardingSpec(tuple(dims)), spec
    elif partial_axes(op, step.layout) and value in step.layout.spread:
        step.constraints[value] = step.layout.unspread(value)
        step.layouts[value] = spec
    elif value in step.layout.rows and sends_rows(op, step.layout):
        step.constraints[value] = step.layout.by_sample(value)
        step.layouts[value] = spec
        step.predict("all_to_all", step.moved(step.constraints[value], spec), value.type)
    else:
        step.constraints[value] = spec
