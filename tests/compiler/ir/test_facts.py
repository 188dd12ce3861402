"""What ops say of themselves, held against their NumPy references on every row of the harness."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir import facts
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    BroadcastInDimAttrs,
    ConstantAttrs,
    DynamicSliceAttrs,
    GatherAttrs,
    IotaAttrs,
    ReduceScatterAttrs,
    ReshapeAttrs,
    SliceAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.traits import IDENTITIES, TRAFFIC
from shardwright.compiler.ir.types import Op, Value, tensor_type
from tests.compiler.ir.test_traits import numbered, op_of, outputs
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase, case_inputs

ROWS = [pytest.param(case, id=case.id) for case in CASES]


@pytest.mark.parametrize("case", ROWS)
def test_where_elements_are(case: OpCase) -> None:
    op, inputs = op_of(case), numbered(case)
    kind = OPS[op.name].kind
    if (order := facts.permutation(op)) is not None:
        np.testing.assert_array_equal(outputs(case, inputs)[0], inputs[0].transpose(order))
    if kind is Kind.VIEW and len(np.unique(inputs[0])) == inputs[0].size:
        flat = [array.ravel().tolist() for array in (inputs[0], outputs(case, inputs)[0])]
        assert not facts.keeps_order(op) or flat[0] == flat[1]
    if (walked := facts.dim_map(op)) is not None:
        (out,), (x,) = outputs(case, inputs), inputs
        index = np.indices(out.shape)
        places = [index[walked.index(d)] if d in walked else 0 for d in range(x.ndim)]
        np.testing.assert_array_equal(out, x[tuple(places)])
    if (dim := facts.joined_dim(op)) is not None:
        np.testing.assert_array_equal(outputs(case, inputs)[0], np.concatenate(inputs, axis=dim))
    if facts.takes_at(op):
        assert kind is Kind.PART and all(v.type.dtype.is_integer for v in facts.places_of(op))


@pytest.mark.parametrize("case", ROWS)
def test_how_elements_are_combined(case: OpCase) -> None:
    op = op_of(case)
    combines = OPS[op.name].combines or OPS[op.name].kind is Kind.CONTRACTION
    assert bool(facts.combination(op)) == combines
    if facts.is_sum(op):
        assert facts.combination(op) == "add"
    if (dims := facts.pairing(op)) is not None:
        lhs, rhs = (v.type.shape for v in op.operands)
        assert [lhs[d] for d in dims.lhs_contract] == [rhs[d] for d in dims.rhs_contract]
    if facts.chooses(op):
        inputs = numbered(case)
        inputs[0] = np.zeros_like(inputs[0])
        no = np.broadcast_to(inputs[2], case.types[1].shape)
        np.testing.assert_array_equal(outputs(case, inputs)[0], no)


def test_only_choices_have_operands_before_those_they_pass() -> None:
    assert {name for name, op in OPS.items() if op.passes and op.passes.start} == {"select"}


def test_literals() -> None:
    b = Builder()
    made = [b.constant(np.arange(6.0).reshape(2, 3)), b.full((2, 3), 4.0), b.iota((2, 3), 1)]
    table, one, count = (b.ops[b.ops.index(next(o for o in b.ops if v in o.results))] for v in made)
    held = facts.stored(table)
    assert held is not None and held.array().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [facts.splat(op) is not None for op in (table, one, count, None)] == [0, 1, 0, 0]
    assert [facts.counted_dim(op) for op in (table, one, count, None)] == [None, None, 1, None]


def test_a_constant_of_one_number() -> None:
    kind = tensor_type((2, 3), DType.BF16)
    made = ConstantAttrs.full(0.1, kind)
    assert made.is_splat and made.type == kind
    assert (made.array() == np.full((2, 3), 0.1).astype(DType.BF16.numpy)).all()


def test_what_is_behind_ops_that_are_looked_through() -> None:
    b = Builder()
    x, y = b.input((2, 3)), b.input((3,))
    both = b.append(make_op("optimization_barrier", (x, b.reshape(y, (3, 1)))))
    total = b.add(b.reshape(both[1], (1, 3)), b.input((1, 3)))
    made = b.finish(total).producers()

    def through(op: Op) -> bool:
        return op.name in IDENTITIES or facts.keeps_order(op)

    assert facts.behind(made[total].operands[0], made, through) is y
    assert facts.behind(total, made, through) is total


def test_an_identity_has_one_operand_per_result() -> None:
    b = Builder()
    x, y = b.input((2,)), b.input((3,))
    barrier = make_op("optimization_barrier", (x, y))
    assert [facts.operands_of(barrier, r) for r in barrier.results] == [(x,), (y,)]
    total = make_op("add", (x, x))
    assert facts.operands_of(total, total.result) == (x, x)


def test_attributes_for_other_sizes() -> None:
    """A dim that is walked whole grows; what an op takes of another dim stays as it is."""
    b = Builder()
    x, wide, zero = b.input((4, 6)), Value(tensor_type((8, 6), DType.F32)), b.constant(0, DType.I32)
    sliced = make_op("slice", (x,), SliceAttrs((0, 1), (4, 5), (1, 2)))
    ops = [
        make_op("broadcast_in_dim", (x,), BroadcastInDimAttrs((1, 2), (3, 4, 6))),
        make_op("reshape", (x,), ReshapeAttrs((4, 2, 3))),
        make_op("transpose", (x,), TransposeAttrs((1, 0))),
        sliced,
        make_op("dynamic_slice", (x, zero, zero), DynamicSliceAttrs((4, 2))),
        next(op for op in b.ops if op.name == "constant"),
        make_op("iota", (), IotaAttrs(1, tensor_type((4, 6), DType.I32))),
    ]
    for op in ops:
        shape = tuple(8 if n == 4 else n for n in op.result.type.shape)
        operands = (wide, *op.operands[1:]) if op.operands else ()
        made = make_op(op.name, operands, facts.resized(op, shape))
        assert (made.result.type.shape, type(made.attrs)) == (shape, type(op.attrs))
    assert facts.resized(sliced, (8, 2)) == SliceAttrs((0, 1), (8, 5), (1, 2))
    rows = Value(tensor_type((3, 1), DType.I32))
    columns = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        index_vector_dim=1,
        slice_sizes=(4, 1),
    )
    looked_up = make_op("gather", (x, rows), columns)
    assert facts.resized(looked_up, (3, 8)) == replace(columns, slice_sizes=(8, 1))


def collective(name: str, attrs: object, value: Value) -> Op:
    return make_op(name, (value,), attrs)


def test_the_dim_that_a_collective_resizes() -> None:
    x = Builder().input((4, 6))
    ops = [
        collective("all_gather", AllGatherAttrs(1, ("a",), 2), x),
        collective("reduce_scatter", ReduceScatterAttrs(0, ("a",), "add", 2), x),
        collective("all_reduce", AllReduceAttrs(("a",), "add", 2), x),
    ]
    for op in ops:
        sizes = zip(x.type.shape, op.result.type.shape, strict=True)
        changed = [d for d, (before, after) in enumerate(sizes) if before != after]
        assert ([] if (dim := facts.resized_dim(op)) is None else [dim]) == changed
    assert {op.name for op in ops} <= TRAFFIC
    assert [facts.sent_bytes(op) for op in ops] == [4 * 48, 4 * 24, 4 * 24]


@pytest.mark.parametrize("kind", ELEMENTWISE_OF)
def test_an_elementwise_op_combines_two_values_as_their_reduction_does(kind: str) -> None:
    b = Builder()
    x, y = b.input((2,), DType.I32), b.input((2,), DType.I32)
    pair = b.concatenate([b.reshape(x, (1, 2)), b.reshape(y, (1, 2))], 0)
    graph = b.finish(b.op(ELEMENTWISE_OF[kind], x, y), b.reduce(pair, kind, (0,)))
    joined, reduced = evaluate(graph, [np.array([5, -3], np.int32), np.array([6, 2], np.int32)])
    assert joined.tolist() == reduced.tolist()


LINEAR = [
    pytest.param(case, id=case.id)
    for case in CASES
    if case.operands and case.types[0].dtype is DType.F32 and "to_f8" not in case.note
]


@pytest.mark.parametrize("case", LINEAR)
def test_what_ops_are_linear_in(case: OpCase) -> None:
    """f(2x + 3y) is 2 f(x) + 3 f(y) in the operands of each group, the others held, and in no first
    operand that is in no group."""
    op, held = op_of(case), case_inputs(case)
    numbers = range(len(held))
    groups = [numbers[group] for group in facts.linear_in(op)]
    floats = [n for n in numbers if held[n].dtype == np.float32]
    for group in groups:
        assert is_linear(op, held, [n for n in group if n in floats]), group
    of_floats = op.results[0].type.dtype.is_float and held[0].size > 1
    if of_floats and not OPS[op.name].combines:  # windows of one element are
        assert any(0 in group for group in groups) or not is_linear(op, held, [0])


def is_linear(op: Op, held: list[np.ndarray], group: list[int]) -> bool:
    draw = np.random.default_rng(1)

    def given(numbers: dict[int, np.ndarray]) -> np.ndarray:
        args = [numbers.get(n, x) for n, x in enumerate(held)]
        return np.asarray(OPS[op.name].reference(op, args)[0], np.float64)

    one, two = (
        {n: draw.normal(size=held[n].shape).astype(np.float32) for n in group} for _ in "xy"
    )
    both = {n: np.asarray(2 * one[n] + 3 * two[n], np.float32) for n in group}
    want = 2 * given(one) + 3 * given(two)
    rounding = 0.05 if OPS[op.name].kind is Kind.CAST else 1e-3
    most = 1e-3 * float(np.nan_to_num(np.abs(want)).max(initial=1))
    return np.allclose(given(both), want, rtol=rounding, atol=most)


@pytest.mark.parametrize("case", ROWS)
def test_what_looks_up_names_its_windows(case: OpCase) -> None:
    op = op_of(case)
    rows = facts.lookup(op)
    assert (rows is not None) == (OPS[op.name].kind is Kind.INDEXED)
    if rows is not None:
        kept = rows.window_dims(op.operands[0].type.rank)
        sizes = [facts.moved(op).type.shape[d] for d in rows.moving_dims]
        limits = [op.operands[0].type.shape[d] for d in kept]
        assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))


def test_sums_of_operands_with_signs() -> None:
    for name, known in OPS.items():
        if known.signs:
            b = Builder()
            inputs = [b.input((8,)) for _ in known.signs]
            arrays = [np.arange(8, dtype=np.float32) * (3 + i) for i in range(len(inputs))]
            (found,) = evaluate(b.finish(b.op(name, *inputs)), arrays)
            total = sum(sign * array for sign, array in zip(known.signs, arrays, strict=True))
            np.testing.assert_array_equal(found, total)
    assert facts.signs(None) == facts.product_of(None) == ()


def test_what_repeats_does_so_along_its_dim() -> None:
    x = Builder().input((1, 4))
    spread = make_op("broadcast_in_dim", (x,), BroadcastInDimAttrs((0, 2), (3, 5, 4)))
    assert [facts.repeats(spread, d) for d in range(3)] == [True, True, False]
    assert not facts.repeats(make_op("transpose", (x,), TransposeAttrs((1, 0))), 0)
    assert not facts.repeats(None, 0)
