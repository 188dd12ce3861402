"""What ops say of themselves, held against their NumPy references on every row of the harness."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir import facts
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import (
    COLLECTIVES,
    AllGatherAttrs,
    AllReduceAttrs,
    BroadcastInDimAttrs,
    ConstantAttrs,
    DynamicSliceAttrs,
    IotaAttrs,
    ReduceScatterAttrs,
    ReshapeAttrs,
    SliceAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Op, Value, tensor_type
from tests.compiler.ir.test_traits import numbered, op_of, outputs
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase

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
    assert {op.name for op in ops} <= set(COLLECTIVES)
    assert [facts.sent_bytes(op) for op in ops] == [4 * 48, 4 * 24, 4 * 24]
