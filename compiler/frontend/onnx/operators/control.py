"""Branches and loops: graphs that a node holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.graphs.errors import of_values, unfit
from shardwright.compiler.frontend.graphs.table import Call, axis_of, is_known
from shardwright.compiler.frontend.graphs.types import narrowed
from shardwright.compiler.frontend.onnx.operators.registry import ONNX


def _staged(value: Any) -> Any:
    """A value as one of JAX's."""
    return jnp.asarray(narrowed(value) if isinstance(value, np.ndarray) else value)


@ONNX.row("If", has_own_type=True, folds=True)
def _if(call: Call, condition: Any) -> Any:
    """A known condition chooses while the graph is traced."""
    names = ("else_branch", "then_branch")
    if is_known(condition):
        return tuple(call.run(call.graph(names[bool(condition.any())]), ()))
    branches = [call.graph(name) for name in names]

    def branch(which: int) -> Any:
        return lambda: tuple(map(_staged, call.run(branches[which], ())))

    shapes = [jax.eval_shape(branch(which)) for which in (0, 1)]
    if shapes[0] != shapes[1]:
        raise of_values("the condition of branches whose results differ in shape or type")
    return jax.lax.cond(condition.reshape(()), branch(1), branch(0))


@ONNX.row("Loop", static=(0,), has_own_type=True, folds=True)
def _loop(call: Call, count: Any = None, condition: Any = None, *carried: Any) -> Any:
    """So many turns: the condition has to be true, and to stay so."""
    body = call.graph("body")
    if count is None or not is_known(condition):
        raise of_values("the number of turns of a loop")
    turns = 0 if condition is not None and not condition.any() else int(count.reshape(()))
    kept = len(carried)
    start = tuple(map(_staged, carried))

    def turn(state: Any, number: Any) -> Any:
        goes_on, *found = call.run(body, (number, np.asarray(True), *state))
        if not is_known(goes_on) or not goes_on.all():
            raise of_values("the condition of a loop, in every turn")
        new = [_staged(each) for each in found]
        return tuple(new[:kept]), tuple(new[kept:])

    if len(body.inputs) != kept + 2 or len(body.outputs) < kept + 1:
        raise unfit(f"a body of {kept + 2} inputs", str(len(body.inputs)))
    end, stacked = jax.lax.scan(turn, start, jnp.arange(max(turns, 0)))
    return (*end, *stacked)


@ONNX.row("Scan", since=9, has_own_type=True)
def _scan(call: Call, *operands: Any) -> Any:
    """States, then what is walked over, each along an axis and in a direction."""
    body, count = call.graph("body"), call.integer("num_scan_inputs")
    kept = len(operands) - count
    if count < 1 or kept < 0 or len(body.inputs) != len(operands):
        raise unfit(f"a body of {len(operands)} inputs", str(len(body.inputs)))
    walked = []
    axes = call.ints("scan_input_axes") or (0,) * count
    backwards = call.ints("scan_input_directions") or (0,) * count
    for x, axis, is_back in zip(operands[kept:], axes, backwards, strict=True):
        rows = jnp.moveaxis(_staged(x), axis_of(axis, x.ndim), 0)
        walked.append(jnp.flip(rows, 0) if is_back else rows)

    def turn(state: Any, rows: Any) -> Any:
        found = [_staged(each) for each in call.run(body, (*state, *rows))]
        return tuple(found[:kept]), tuple(found[kept:])

    end, stacked = jax.lax.scan(turn, tuple(map(_staged, operands[:kept])), tuple(walked))
    axes = call.ints("scan_output_axes") or (0,) * len(stacked)
    backwards = call.ints("scan_output_directions") or (0,) * len(stacked)
    rows = zip(stacked, axes, backwards, strict=True)
    turned = ((jnp.flip(y, 0) if is_back else y, axis) for y, axis, is_back in rows)
    return (*end, *(jnp.moveaxis(y, 0, axis_of(axis, y.ndim)) for y, axis in turned))
