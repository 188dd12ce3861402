"""Where gradients are reduced: at the ops that end the sample dim.

The gradient of a stored weight is scattered as soon as a shape shows the weight's dim, any other is
summed where it is. Ops that cut a stored dim get it whole and hand it back.
"""

from __future__ import annotations

from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.strategies.constraints import (
    REDUCING,
    Users,
    layout_boundaries,
    reduction_ops,
)
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.expected import ended_axes


def reduce_gradients(step: Decisions) -> None:
    """Where the sample dim ends, reduce; the gradient of a stored weight is scattered."""
    users = Users.of(step.graph)
    for op in reduction_ops(step.graph, step.labels.dims):
        if op.name not in REDUCING and not step.data_axes:
            continue  # one share of the samples: nothing is computed twice
        if op.name not in REDUCING:
            step.warn(
                "SW_BATCH_LOST",
                f"{op.name} ends the batch dim of its operand;"
                " its result is computed on every core",
                "keep samples along one dim that is only merged, moved or reduced; cut a batch in"
                " n micro-batches as x.reshape(-1, n, *rest).swapaxes(0, 1)",
                op.loc,
            )
            continue
        for value in op.results:
            step.constraints[value] = step.layout.of(value)
            _scatter_gradient(step, op, value, users)


def _scatter_gradient(step: Decisions, op: Op, value: Value, users: Users) -> None:
    """Lay out the gradient `value` like its weight, once a shape shows the weight's dim."""
    target, spec = value, step.stored(value)
    following = users.chain(value)
    between: list[Value] = []
    while spec is None and (after := next(following, None)) is not None:
        between.append(after)
        target, spec = after, step.stored(after)
    used = step.layout.of(value).axes
    summed = step.mesh.order([a for a in ended_axes(op, step.layout) if a not in used])
    if spec is None:
        step.predict("all_reduce", summed, value.type)
        return
    step.constraints.update({v: step.layout.of(v) for v in between})
    step.layouts[target] = spec
    scattered = tuple(a for a in step.free_axes(step.layout.of(target)) if a in summed)
    step.predict("reduce_scatter", scattered, target.type)
    rest = tuple(a for a in summed if a not in scattered)
    step.predict("all_reduce", rest, target.type)


def join_layouts(step: Decisions) -> None:
    """Gather before, and lay out after, ops that cut the stored dim of a weight or of its
    gradient.
    """
    for uses, results in layout_boundaries(step.graph, step.labels.dims, step.stored):
        step.gathers += uses
        for value in results:
            spec = step.stored(value)
            if spec is not None and value not in step.layouts:
                step.constraints[value] = step.layout.of(value)
                step.layouts[value] = spec
