"""The interpreter: loops, lock step over ranks, freeing, refusals."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import CompareAttrs
from shardwright.compiler.ir.reference import evaluate, last_uses, steps
from shardwright.compiler.ir.types import Graph, Value
from tests.support.building import Builder
from tests.support.graphs import layer_stack, stack_by_hand, stack_inputs


def test_loop_equals_python_loop() -> None:
    inputs = stack_inputs()
    h, saved = evaluate(layer_stack(), inputs)
    want_h, want_saved = stack_by_hand(*inputs)
    np.testing.assert_allclose(h, want_h, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(saved, want_saved, rtol=1e-6, atol=1e-6)


def rank_graph() -> Graph:
    """A loop whose body sums over ranks, then gathers: x_r -> sum_r in every iteration."""
    b = Builder()
    x = b.input((2, 3))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        return (inner.all_reduce(carries[0], ("a",), 2),)

    (y,) = b.loop(3, [x], body)
    index = b.broadcast(b.convert(b.axis_index(("a",)), DType.F32), (2, 3))
    return b.finish(b.all_gather(b.add(y, index), 0, ("a",), 2))


def run_ranks(graph: Graph, inputs: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """All ranks of axis a in lock step."""
    runs = [steps(graph, i) for i in inputs]
    requests = [next(r) for r in runs]
    outputs: list[list[np.ndarray]] = []
    while not outputs:
        names = {op.name for op, _ in requests}
        assert len(names) == 1, "all ranks stop at the same op"
        operands = [args[0] if args else None for _, args in requests]
        match names.pop():
            case "all_reduce":
                answers = [sum(operands)] * len(runs)
            case "all_gather":
                answers = [np.concatenate(operands)] * len(runs)
            case "axis_index":
                answers = [np.int32(r).reshape(()) for r in range(len(runs))]
        requests = []
        for run, answer in zip(runs, answers, strict=True):
            try:
                requests.append(run.send([answer]))
            except StopIteration as stop:
                outputs.append(stop.value)
    return outputs


def test_ranks_in_lock_step_through_a_loop() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    outputs = run_ranks(rank_graph(), [[x[:2]], [x[2:]]])
    total = 4 * (x[:2] + x[2:])
    for (out,) in outputs:
        np.testing.assert_array_equal(out, np.concatenate([total, total + 1]))


def test_overrides_replace_a_reference() -> None:
    b = Builder()
    x = b.input((3,))
    graph = b.finish(b.op("tanh", x))
    (out,) = evaluate(graph, [np.ones(3, np.float32)], {"tanh": lambda op, args: (args[0] * 5,)})
    np.testing.assert_array_equal(out, np.full(3, 5, np.float32))


def test_collective_on_one_rank_is_an_internal_error() -> None:
    b = Builder()
    graph = b.finish(b.all_reduce(b.input((3,)), ("dp_shard",), 4))
    with pytest.raises(AssertionError, match=r"all_reduce over .*dp_shard.* needs all ranks"):
        evaluate(graph, [np.ones(3, np.float32)])


def test_dead_values_are_freed() -> None:
    b = Builder()
    x = b.input((8,))
    first = b.op("negate", x)
    second = b.op("tanh", first)
    graph = b.finish(b.op("tanh", second))
    seen: list[weakref.ref[np.ndarray]] = []
    alive: list[bool] = []

    def watch(op: object, args: list[np.ndarray]) -> tuple[np.ndarray]:
        gc.collect()
        alive.extend(r() is not None for r in seen)
        out = np.tanh(args[0])
        seen.append(weakref.ref(args[0]))
        return (out,)

    evaluate(graph, [np.ones(8, np.float32)], {"tanh": watch})
    assert alive == [False]
    assert first in {v for values in last_uses(graph).values() for v in values}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "requires 2 inputs, got 0"),
        ([np.ones((4, 6)), np.ones((3, 6, 6), np.float32)], "input 0 of tensor<4x6xf32>"),
    ],
)
def test_wrong_inputs(inputs: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(layer_stack(), inputs)


@pytest.mark.filterwarnings("error")
def test_references_do_not_warn_of_infinities_and_nan() -> None:
    b = Builder()
    x, y = b.input((4,), DType.BF16), b.input((4,), DType.BF16)
    clamped = b.op("clamp", x, y, y)
    less = b.op("compare", x, y, attrs=CompareAttrs("LT"))
    sums = b.add(x, y)
    given = [np.array([np.nan, np.inf, 2.0**127, 1], DType.BF16.numpy) for _ in range(2)]
    given[1][1] = -np.inf
    found = evaluate(b.finish(clamped, less, sums), given)
    wide = [array.astype(np.float32) for array in found]
    np.testing.assert_array_equal(wide[0], [np.nan, -np.inf, 2.0**127, 1])
    assert found[1].tolist() == [False] * 4
    np.testing.assert_array_equal(wide[2], [np.nan, np.nan, np.inf, 2])
