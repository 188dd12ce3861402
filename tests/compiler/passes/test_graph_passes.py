"""Passes keep values and do what they are named for; the pipeline verifies, numbers and never
edits in place.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.ir.ops import PadAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.passes.cse import cse
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.fold import fold
from shardwright.compiler.passes.pipeline import LOCAL_PASSES, PASSES
from shardwright.compiler.rewriting.driver import Rewrite, run
from tests.support.building import Builder
from tests.support.graphs import layer_stack, norm, stack_inputs


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.walk()]


def assert_same_values(before: Graph, after: Graph, inputs: list[np.ndarray]) -> None:
    verify(after)
    for a, b in zip(evaluate(before, inputs), evaluate(after, inputs), strict=True):
        np.testing.assert_array_equal(a, b)


class TestLogistic:
    """JAX spells the function out; the machine has it as one."""

    @pytest.mark.parametrize("one_first", [True, False])
    def test_the_spelled_function_is_recovered(self, one_first: bool) -> None:
        graph = spelled_logistic(1.0, one_first)
        after = dce(fold(graph))
        assert names(after) == ["logistic"]
        x = np.linspace(-90, 90, 64, dtype=np.float32)
        for a, b in zip(evaluate(graph, [x]), evaluate(after, [x]), strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-7, atol=0)

    def test_another_constant_is_left_alone(self) -> None:
        assert "logistic" not in names(fold(spelled_logistic(2.0, True)))


def spelled_logistic(one: float, one_first: bool) -> Graph:
    b = Builder()
    x = b.input((64,))
    power = b.op("exponential", b.op("negate", x))
    ones = b.full((64,), one)
    total = b.op("add", ones, power) if one_first else b.op("add", power, ones)
    return b.finish(b.op("divide", ones, total))


class TestDce:
    def test_removes_what_outputs_do_not_need(self) -> None:
        b = Builder()
        x = b.input((4,))
        b.all_gather(b.op("tanh", x), 0, ("a",))
        graph = dce(b.finish(b.op("negate", x)))
        assert names(graph) == ["negate"]

    def test_removes_dead_carries_and_what_only_they_need(self) -> None:
        graph = layer_stack()
        only_h = Graph(graph.inputs, graph.ops, graph.outputs[:1])
        clean = dce(only_h)
        (loop,) = (op for op in clean.ops if op.name == "loop")
        assert len(loop.operands) == 3 and "dynamic_update_slice" not in names(clean)
        assert_same_values(only_h, clean, stack_inputs())

    def test_keeps_carries_needed_across_iterations(self) -> None:
        b = Builder()
        x = b.input((2,))

        def shuffle(inner: Builder, i: Value, c: tuple[Value, ...]) -> tuple[Value, ...]:
            return c[1], c[2], inner.op("negate", c[2]), inner.op("tanh", c[3])

        first, *_ = b.loop(5, [x, x, x, x], shuffle)
        graph = b.finish(first)
        clean = dce(graph)
        (loop,) = clean.ops[-1:]
        assert len(loop.operands) == 4, "counter and three carries that feed each other"
        assert_same_values(graph, clean, [np.array([1.0, -2.0], np.float32)])

    def test_counter_is_renumbered(self) -> None:
        graph = layer_stack()
        loop = next(op for op in graph.ops if op.name == "loop")
        # Rotate the carries so that the counter comes last.
        order = [1, 2, 3, 0]
        body = loop.regions[0]
        region = Graph(
            tuple(body.inputs[i] for i in order), body.ops, tuple(body.outputs[i] for i in order)
        )
        attrs = type(loop.attrs)(loop.attrs.trip, 3)
        rotated = Op(
            "loop",
            tuple(loop.operands[i] for i in order),
            tuple(loop.results[i] for i in order),
            attrs,
            (region,),
        )
        ops = tuple(rotated if op is loop else op for op in graph.ops)
        before = verify(Graph(graph.inputs, ops, graph.outputs[:1]))
        after = dce(before)
        assert_same_values(before, after, stack_inputs())
        assert next(op for op in after.ops if op.name == "loop").attrs.induction == 2

    def test_narrows_barriers(self) -> None:
        b = Builder()
        x = b.input((4,))
        kept, _ = b.barrier(b.op("negate", x), b.op("tanh", x))
        clean = dce(b.finish(kept))
        assert names(clean) == ["negate", "optimization_barrier"]


class TestCse:
    def test_operands_of_sums_and_products_have_no_order(self) -> None:
        b = Builder()
        x, y = b.input((4,)), b.input((4,))
        swapped = [
            b.op(name, *pair) for name in ("multiply", "subtract") for pair in ((x, y), (y, x))
        ]
        graph = b.finish(*swapped)
        assert names(dce(cse(graph))) == ["multiply", "subtract", "subtract"]
        inputs = [np.arange(4, dtype=np.float32) + n for n in range(2)]
        assert_same_values(graph, cse(graph), inputs)

    def test_merges_equal_pure_ops(self) -> None:
        b = Builder()
        x = b.input((4, 6))
        graph = b.finish(b.add(norm(b, x), norm(b, x)))
        clean = dce(cse(graph))
        assert count_ops(clean)["reduce"] == 1 and count_ops(clean)["rsqrt"] == 1
        assert_same_values(graph, clean, stack_inputs()[:1])

    def test_distinguishes_attrs_and_signed_zeros(self) -> None:
        b = Builder()
        x = b.input((4, 4))
        values = [b.reduce(x, "add", (0,)), b.reduce(x, "add", (1,))]
        values += [b.full((4,), 0.0), b.full((4,), -0.0)]
        graph = b.finish(*values)
        assert len(cse(graph).ops) == 4

    def test_barriers_and_collectives_are_never_merged(self) -> None:
        b = Builder()
        x = b.input((4,))
        (first,), (second,) = b.barrier(x), b.barrier(x)
        graph = b.finish(
            b.op("tanh", first),
            b.op("tanh", second),
            b.all_gather(x, 0, ("a",)),
            b.all_gather(x, 0, ("a",)),
        )
        assert len(cse(graph).ops) == 6

    def test_works_inside_bodies(self) -> None:
        b = Builder()
        x = b.input((4,))

        def body(inner: Builder, i: Value, c: tuple[Value, ...]) -> tuple[Value, ...]:
            return (inner.add(inner.op("tanh", c[0]), inner.op("tanh", c[0])),)

        (y,) = b.loop(3, [x], body)
        graph = b.finish(y)
        assert count_ops(cse(graph))["tanh"] == 1
        assert_same_values(graph, cse(graph), [np.ones(4, np.float32)])

    def test_twin_invariants_become_one(self) -> None:
        b = Builder()
        x, w = b.input((4,)), b.input((4,))

        def body(inner: Builder, i: Value, c: tuple[Value, ...]) -> tuple[Value, ...]:
            h = inner.add(inner.multiply(c[0], c[1]), inner.multiply(c[0], c[2]))
            return h, c[1], c[2], c[3]

        y, _, same, start = b.loop(3, [x, w, w, x], body)
        graph = b.finish(y, same, start)
        clean = run(graph, PASSES)
        loop = next(op for op in clean.ops if op.name == "loop")
        assert len(loop.operands) == 3, "counter, h and one of the duplicates"
        assert count_ops(clean)["multiply"] == 1
        rng = np.random.default_rng(1)
        inputs = [rng.normal(size=4).astype(np.float32) for _ in range(2)]
        assert_same_values(graph, clean, inputs)
        assert_same_values(graph, cse(graph), inputs)


class TestFold:
    def test_scalar_index_arithmetic(self) -> None:
        b = Builder()
        x = b.input((8,))
        index = b.constant(-3, DType.I32)
        negative = b.compare(index, b.constant(0, DType.I32), "LT")
        wrapped = b.op("select", negative, b.add(index, b.constant(8, DType.I32)), index)
        graph = b.finish(b.dynamic_slice(x, [wrapped], (2,)))
        clean = run(graph, PASSES)
        assert names(clean) == ["constant", "dynamic_slice"]
        assert clean.ops[0].attrs.array() == 5
        assert_same_values(graph, clean, [np.arange(8, dtype=np.float32)])

    def test_splats_stay_splats(self) -> None:
        b = Builder()
        scalar = b.constant(2.0)
        big = b.broadcast(scalar, (1024, 1024))
        product = b.multiply(big, b.full((1024, 1024), 3.0))
        rows = b.slice(b.transpose(product, (1, 0)), (0, 0), (4, 1024))
        clean = run(b.finish(b.reshape(rows, (4096,))), PASSES)
        (op,) = clean.ops
        assert op.attrs.is_splat and op.attrs.array()[17] == 6.0

    def test_large_constants_are_left_alone(self) -> None:
        b = Builder()
        table = b.constant(np.arange(1000), DType.F32)
        graph = b.finish(b.op("sine", table))
        assert names(fold(graph)) == ["constant", "sine"]

    @pytest.mark.parametrize(
        "build",
        [
            lambda b, x: b.add(x, b.full((4, 6), 0.0)),
            lambda b, x: b.multiply(b.full((4, 6), 1.0), x),
            lambda b, x: b.op("divide", x, b.full((4, 6), 1.0)),
            lambda b, x: b.op("subtract", x, b.full((4, 6), 0.0)),
            lambda b, x: b.convert(x, DType.F32),
            lambda b, x: b.reshape(b.reshape(x, (24,)), (4, 6)),
            lambda b, x: b.transpose(x, (0, 1)),
            lambda b, x: b.broadcast(x, (4, 6), (0, 1)),
            lambda b, x: b.slice(x, (0, 0), (4, 6)),
            lambda b, x: b.concatenate([x], 1),
            lambda b, x: b.slice(b.concatenate([b.full((2, 6), 9.0), x], 0), (2, 0), (6, 6)),
            lambda b, x: b.reduce(x, "add", ()),
            lambda b, x: b.op("select", b.constant(True, DType.PRED), x, b.full((4, 6), 9.0)),
            lambda b, x: b.op("select", b.constant(False, DType.PRED), b.full((4, 6), 9.0), x),
            lambda b, x: b.op("pad", x, b.constant(0.0), attrs=PadAttrs((0, 0), (0, 0), (0, 0))),
            lambda b, x: b.dynamic_slice(x, [b.constant(3, DType.I32)] * 2, (4, 6)),
        ],
    )
    def test_identities_vanish(self, build: object) -> None:
        b = Builder()
        x = b.input((4, 6))
        assert callable(build)
        clean = run(b.finish(build(b, x)), PASSES)
        assert not clean.ops and clean.outputs == clean.inputs

    def test_what_is_no_identity_stays(self) -> None:
        b = Builder()
        x = b.input((4, 4))
        zero, one = b.full((4, 4), 0.0), b.full((4, 4), 1.0)
        graph = b.finish(
            b.op("subtract", zero, x),
            b.op("divide", one, x),
            b.multiply(x, zero),
            b.transpose(x, (1, 0)),
            b.broadcast(x, (4, 4), (1, 0)),
            b.convert(b.convert(x, DType.BF16), DType.F32),
        )
        clean = run(graph, PASSES)
        assert len(set(clean.outputs)) == 6 and clean.inputs[0] not in clean.outputs

    def test_a_slice_of_one_piece_forgets_the_others(self) -> None:
        b = Builder()
        x, y = b.input((4, 6)), b.input((4, 3))
        joined = b.concatenate([x, y], 1)
        inside, across = b.slice(joined, (1, 7), (3, 9)), b.slice(joined, (0, 5), (4, 7))
        clean = run(b.finish(inside, across), PASSES)
        rng = np.random.default_rng(0)
        values = [rng.normal(size=v.type.shape).astype(np.float32) for v in clean.inputs]
        whole = np.concatenate(values, 1)
        for have, want in zip(
            evaluate(clean, values), (whole[1:3, 7:], whole[:, 5:7]), strict=True
        ):
            np.testing.assert_array_equal(have, want)
        (alone,) = [op for op in clean.ops if op.result is clean.outputs[0]]
        assert alone.operands == (clean.inputs[1],)
        assert names(clean).count("concatenate") == 1

    def test_broadcasts_compose(self) -> None:
        b = Builder()
        x = b.input((6, 1))
        inner = b.broadcast(x, (5, 6, 1), (1, 2))
        graph = b.finish(b.broadcast(inner, (3, 6, 2, 5), (3, 1, 0)))
        clean = run(graph, PASSES)
        assert names(clean) == ["broadcast_in_dim"]
        assert_same_values(graph, clean, [np.arange(6, dtype=np.float32).reshape(6, 1)])

    def test_a_predicate_spelled_out(self) -> None:
        b = Builder()
        pred = b.input((4,), DType.PRED)
        yes, no = b.full((4,), True, DType.PRED), b.full((4,), False, DType.PRED)
        clean = run(b.finish(b.op("select", pred, yes, no), b.op("select", pred, no, yes)), PASSES)
        assert clean.outputs[0] is pred and names(clean).count("select") == 1

    def test_invariants_leave_their_loop(self) -> None:
        b = Builder()
        x = b.input((4,))
        scale, shift = b.full((4,), 1.0), b.full((4,), 3.0)

        def body(inner: Builder, i: Value, c: tuple[Value, ...]) -> tuple[Value, ...]:
            h = inner.add(inner.multiply(c[0], c[1]), c[2])
            return h, c[1], c[2]

        y, same, _ = b.loop(3, [x, scale, shift], body)
        graph = b.finish(y, same)
        clean = run(graph, PASSES)
        loop = next(op for op in clean.ops if op.name == "loop")
        assert len(loop.operands) == 2, "counter and h"
        assert "multiply" not in names(clean)
        assert_same_values(graph, clean, [np.arange(4, dtype=np.float32)])


class TestPipeline:
    def test_keeps_the_values_of_a_layer_stack(self) -> None:
        graph = layer_stack()
        text = to_text(graph)
        clean = run(graph, PASSES)
        assert_same_values(graph, clean, stack_inputs())
        assert to_text(graph) == text, "the input graph is not edited"
        assert to_text(run(clean, PASSES)) == to_text(clean), "a second run finds nothing"

    def test_kept_values_keep_their_identity(self) -> None:
        graph = layer_stack()
        clean = run(graph, PASSES)
        assert clean.inputs == graph.inputs and clean.outputs == graph.outputs

    def test_local_passes_drop_barriers_and_keep_recomputation(self) -> None:
        b = Builder()
        x = b.input((4, 6))
        (again,) = b.barrier(x)
        graph = b.finish(norm(b, x), norm(b, again))
        clean = run(graph, LOCAL_PASSES)
        assert "optimization_barrier" not in names(clean)
        assert count_ops(clean)["rsqrt"] == 2, "the recomputation is still there"
        assert_same_values(graph, clean, stack_inputs()[:1])
        stack = run(layer_stack(), LOCAL_PASSES)
        assert "optimization_barrier" not in names(stack)
        assert_same_values(layer_stack(), stack, stack_inputs())

    def test_a_broken_pass_is_named(self) -> None:
        def lose_ops(graph: Graph) -> Graph:
            return Graph(graph.inputs, graph.ops[1:], graph.outputs, graph.name)

        with pytest.raises(CompileError, match="SW_IR_INVALID") as caught:
            run(layer_stack(), (*PASSES, Rewrite("lose_ops", lose_ops, "")))
        assert caught.value.__notes__ == ["after step lose_ops"]

    def test_an_op_a_pass_gives_the_wrong_type_is_found(self) -> None:
        """Types of an op are inferred once per pipeline, those of an op a pass made again."""

        def mistype(graph: Graph) -> Graph:
            last = graph.ops[-1]
            kind = last.results[0].type
            wrong = (Value(tensor_type((7, *kind.shape), kind.dtype)), *last.results[1:])
            ops = (*graph.ops[:-1], Op(last.name, last.operands, wrong, last.attrs, last.regions))
            return Graph(graph.inputs, ops, wrong[:1], graph.name)

        with pytest.raises(CompileError, match="requires results") as caught:
            run(layer_stack(), (*PASSES, Rewrite("mistype", mistype, "")))
        assert caught.value.__notes__ == ["after step mistype"]


BINARY = (
    *("add", "subtract", "multiply", "divide", "remainder", "and", "or", "xor"),
    *("maximum", "shift_left", "shift_right_arithmetic", "power"),
)


@st.composite
def integer_graphs(draw: st.DrawFn) -> Graph:
    """Random integer graphs with constants, so that every fold must be exact."""
    b = Builder()
    values = [b.input((3,), DType.I32), b.input((3,), DType.I32)]
    for _ in range(draw(st.integers(1, 14))):
        pick = st.sampled_from(values)
        kind = draw(st.sampled_from(("constant", "binary", "select", "barrier", "reshape")))
        if kind == "constant":
            values.append(b.full((3,), draw(st.integers(-1, 2)), DType.I32))
        elif kind == "binary":
            name = draw(st.sampled_from(BINARY))
            values.append(b.op(name, draw(pick), draw(pick)))
        elif kind == "select":
            pred = b.compare(draw(pick), draw(pick), draw(st.sampled_from(("LT", "EQ", "GE"))))
            values.append(b.op("select", pred, draw(pick), draw(pick)))
        elif kind == "barrier":
            values.extend(b.barrier(draw(pick), draw(pick)))
        else:
            values.append(b.reshape(b.reshape(draw(pick), (1, 3)), (3,)))
    return b.finish(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=4)))


@settings(deadline=None, max_examples=150)
@given(graph=integer_graphs())
def test_passes_keep_integer_values(graph: Graph) -> None:
    rng = np.random.default_rng(5)
    inputs = [rng.integers(-5, 6, 3).astype(np.int32) for _ in range(2)]
    assert_same_values(graph, run(graph, PASSES), inputs)
