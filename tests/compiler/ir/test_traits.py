"""What ops declare of themselves, held against what their NumPy references do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir import traits
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Op
from tests.harnesses.all_cases import CASES, GAPS
from tests.harnesses.case import OpCase, build_graph, case_inputs

ROWS = {op: [case for case in CASES if case.op == op] for op in OPS}
PROBED = [name for name in OPS if ROWS[name]]
MOVING = (Kind.VIEW, Kind.PART, Kind.JOIN, Kind.UPDATE)


def outputs(case: OpCase, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(out) for out in evaluate(build_graph(case), inputs)]


def numbered(case: OpCase) -> list[np.ndarray]:
    """Operands whose elements all differ, as far as their types have so many numbers; scalars are
    as they were, since they say where."""
    inputs, at = case_inputs(case), 1
    for k, array in enumerate(inputs):
        if array.ndim:
            counts = np.arange(at, at + array.size).reshape(array.shape)
            inputs[k] = (counts % 120 if array.dtype.itemsize < 4 else counts).astype(array.dtype)
            at += array.size
    return inputs


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | ((a != a) & (b != b))


def elements(arrays: Sequence[np.ndarray]) -> set[object]:
    return {x for array in arrays for x in array.astype(np.float64).ravel().tolist()}


def attrs_of(name: str) -> Sequence[str]:
    attrs = OPS[name].attrs
    return () if attrs is None else tuple(attrs.__dataclass_fields__)


def test_every_op_has_rows_that_are_probed_or_a_reason() -> None:
    assert {name for name in OPS if name not in PROBED} == set(GAPS), "rows are in tests/harnesses"


@pytest.mark.parametrize("name", PROBED)
def test_an_op_does_what_its_kind_says(name: str) -> None:
    checks = {
        Kind.ELEMENTWISE: check_elementwise,
        Kind.CAST: check_cast,
        Kind.IDENTITY: check_identity,
        Kind.LITERAL: check_literal,
        Kind.CONTRACTION: check_contraction,
        Kind.REDUCTION: check_reduces,
        Kind.SORT: check_sorts,
        **dict.fromkeys(MOVING, check_moves),
    }
    check = checks.get(OPS[name].kind)
    assert check is not None or OPS[name].kind in (Kind.WINDOW, Kind.INDEXED)
    for case in ROWS[name]:
        if check is not None:
            check(case)


def check_elementwise(case: OpCase) -> None:
    """An element of an operand that changes moves the result there, if anywhere."""
    inputs = case_inputs(case)
    (before,) = outputs(case, inputs)
    for k, array in enumerate(inputs):
        if array.size > 1 and array.shape == before.shape:
            at = tuple(n // 2 for n in array.shape)
            changed = array.copy()
            changed[at] = array[(0,) * array.ndim]
            (after,) = outputs(case, [*inputs[:k], changed, *inputs[k + 1 :]])
            moved = ~same(before, after)
            moved[at] = False
            assert not moved.any(), (case.id, k)


def check_cast(case: OpCase) -> None:
    """Numbers that every type holds stay what they are."""
    check_elementwise(case)
    inputs = [np.arange(x.size).reshape(x.shape) % 2 for x in case_inputs(case)]
    given = [x.astype(t.dtype.numpy) for x, t in zip(inputs, case.types, strict=True)]
    for have, want in zip(outputs(case, given), inputs, strict=True):
        assert (have.astype(np.int64) == want).all(), case.id


def check_identity(case: OpCase) -> None:
    inputs = case_inputs(case)
    for have, want in zip(outputs(case, inputs), inputs, strict=True):
        assert same(have, want).all()


def check_literal(case: OpCase) -> None:
    assert not case.operands


def check_moves(case: OpCase) -> None:
    """Elements of results are elements of operands; a view has all of them, and so has a join of
    what no padding crops."""
    inputs = numbered(case)
    given, found = elements(inputs), elements(outputs(case, inputs))
    assert found <= given, case.id
    kind = OPS[case.op].kind
    if kind is Kind.VIEW or case.op == "concatenate":
        assert found == given, case.id
    if kind is Kind.UPDATE:
        assert found >= elements(inputs[1:2]), case.id
    assert OPS[case.op].flops(op_of(case)) == 0


def check_contraction(case: OpCase) -> None:
    """Twice an operand is twice the result, and nothing times something is nothing."""
    inputs = case_inputs(case)
    (once,) = outputs(case, inputs)
    for k in (0, 1):
        more = [*inputs[:k], (inputs[k] * 2).astype(inputs[k].dtype), *inputs[k + 1 :]]
        none = [*inputs[:k], np.zeros_like(inputs[k]), *inputs[k + 1 :]]
        assert not outputs(case, none)[0].any(), case.id
        (twice,) = outputs(case, more)
        np.testing.assert_array_equal(twice, (once * 2).astype(once.dtype), case.id)


def check_reduces(case: OpCase) -> None:
    """One element for those along some dims, those of nothing included."""
    dims = [n for at, n in enumerate(case.types[0].shape) if at not in case.attrs.dims]
    assert [list(out.shape) for out in outputs(case, case_inputs(case))] == [dims]


def check_sorts(case: OpCase) -> None:
    inputs = numbered(case)
    for have, want in zip(outputs(case, inputs), inputs, strict=True):
        assert sorted(have.ravel().tolist()) == sorted(want.ravel().tolist())


@pytest.mark.parametrize("name", [name for name in PROBED if OPS[name].passes is not None])
def test_results_consist_of_the_operands_that_an_op_passes(name: str) -> None:
    for case in ROWS[name]:
        inputs = numbered(case)
        assert elements(outputs(case, inputs)) <= elements(inputs[OPS[name].passes]), case.id


def op_of(case: OpCase) -> Op:
    return build_graph(case).ops[0]


def test_what_combines_says_how() -> None:
    """Its attributes name a kind of reduction, those of others do not; a choice among the elements
    of a window (`select_and_scatter`) is by a comparison."""
    names = {name for name in OPS if {"kind", "reduction"} & set(attrs_of(name))}
    assert names == {name for name, op in OPS.items() if op.combines}


def test_what_needs_ranks() -> None:
    """Its attributes name axes of a mesh."""
    names = {name for name in OPS if "axes" in attrs_of(name)}
    assert names == traits.of(Kind.COLLECTIVE, Kind.RANK)
    assert {"all_slice", "axis_index"} == traits.of(Kind.RANK)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.commutes])
def test_what_commutes_does_so_bit_by_bit(name: str) -> None:
    rng = np.random.default_rng(0)
    kinds = (np.int32, np.float32) if name in ("add", "multiply") else (np.int32,)
    for kind in kinds:
        x, y = (rng.normal(0, 1e6, 64).astype(kind) for _ in range(2))
        b = Builder()
        pair = [b.input((64,), DType.from_numpy(np.dtype(kind))) for _ in range(2)]
        graph = b.finish(b.op(name, *pair))
        assert evaluate(graph, [x, y])[0].tobytes() == evaluate(graph, [y, x])[0].tobytes()


def test_elementwise_ops_are_of_their_kind_or_an_identity() -> None:
    for op in OPS.values():
        if op.elementwise != (op.kind in (Kind.ELEMENTWISE, Kind.CAST)):
            assert op.kind is Kind.IDENTITY and op.elementwise
