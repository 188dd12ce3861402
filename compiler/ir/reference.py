"""The meaning of a graph in NumPy: one interpreter, driven by `evaluate` or, in lock step over
ranks, by `steps`.

`steps` is a generator that stops at every op one rank cannot compute (collectives, `axis_index`),
inside loops too, and is sent the result. Dead values are freed after their last use. Arguments and
results may share memory: treat every array as read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.types import Graph, Op, Value

Arrays = Sequence[np.ndarray]
Request = tuple[Op, list[np.ndarray]]
Steps = Generator[Request, Arrays, list[np.ndarray]]
Override = Callable[[Op, Arrays], Arrays]

_OF_RANKS = (Kind.COLLECTIVE, Kind.RANK)


def evaluate(
    graph: Graph, inputs: Arrays, overrides: Mapping[str, Override] | None = None
) -> list[np.ndarray]:
    """The outputs of `graph`; `overrides` computes the named ops instead of their reference.

    Shapes: inputs and outputs as the graph's types say.
    Raises: AssertionError for a collective without an override; ValueError for a wrong input.
    """
    overrides = overrides or {}
    run = steps(graph, inputs, frozenset(overrides))
    try:
        op, args = next(run)
        while True:
            fn = overrides.get(op.name) or OPS[op.name].reference
            op, args = run.send(fn(op, args))
    except StopIteration as stop:
        outputs: list[np.ndarray] = stop.value
        return outputs


def steps(graph: Graph, inputs: Arrays, requests: frozenset[str] = frozenset()) -> Steps:
    """Run `graph`, yielding (op, operands) for rank ops and those named in `requests`.

    The caller sends the op's results back; the generator returns the outputs of the graph. All
    ranks of one program yield the same ops in the same order.
    """
    _check_inputs(graph, inputs)
    return _run(graph, list(inputs), requests)


def _check_inputs(graph: Graph, inputs: Arrays) -> None:
    """Refuse inputs that are not of the graph's types."""
    if len(inputs) != len(graph.inputs):
        raise ValueError(
            f"graph {graph.name} requires {len(graph.inputs)} inputs, got {len(inputs)}"
        )
    for i, (value, array) in enumerate(zip(graph.inputs, inputs, strict=True)):
        if array.shape != value.type.shape or array.dtype != value.type.dtype.numpy:
            got = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"graph {graph.name} requires input {i} of {value.type}, got {got}")


def _run(graph: Graph, inputs: list[np.ndarray], requests: frozenset[str]) -> Steps:
    """The interpreter; `inputs` is emptied so that the caller holds nothing alive."""
    env = dict(zip(graph.inputs, inputs, strict=True))
    inputs.clear()
    dead_after = last_uses(graph)
    for op in graph.ops:
        args = [env[v] for v in op.operands]
        results: Arrays
        if op.name in requests or OPS[op.name].kind in _OF_RANKS:
            results = yield op, args
        elif op.name == "loop":
            results = yield from _run_loop(op, args, requests)
        else:
            results = OPS[op.name].reference(op, args)
        env.update(zip(op.results, results, strict=True))
        for value in dead_after.get(op, ()):
            env.pop(value, None)
    return [env[v] for v in graph.outputs]


def _run_loop(op: Op, carries: list[np.ndarray], requests: frozenset[str]) -> Steps:
    for _ in range(op.attrs.trip):
        carries = yield from _run(op.regions[0], carries, requests)
    return carries


def last_uses(graph: Graph) -> dict[Op, list[Value]]:
    """Per op, the values of this level that nothing reads after it (its own unused results too)."""
    last: dict[Value, Op] = {}
    for op in graph.ops:
        for value in (*op.results, *op.operands):
            last[value] = op
    for value in graph.outputs:
        last.pop(value, None)
    dead: dict[Op, list[Value]] = {}
    for value, op in last.items():
        dead.setdefault(op, []).append(value)
    return dead
