"""What ops say of their indices, held against their NumPy references on every row of the harness:
parts are given along each factor, and along every pair of dims that no factor has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir import facts
from shardwright.compiler.ir.combinations import REDUCTIONS
from shardwright.compiler.ir.factors import Factor, FactorKind
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import GatherAttrs
from shardwright.compiler.ir.ops.convolution import in_fewer_groups
from shardwright.compiler.ir.types import Op, Value, tensor_type
from tests.compiler.ir.test_traits import numbered, op_of, same
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase, case_inputs

Arrays = Sequence[np.ndarray]
WITHOUT = {Kind.CONTROL, Kind.COLLECTIVE, Kind.RANK}
"""Kinds that nobody asks for their indices: their regions or their ranks tell."""
INSIDE = {"unfold", "host_store", "host_load", "host_empty"}
"""Ops that the compiler makes of others, behind sharding."""
NOT_BY_PLACE = {"random_bits"}
"""An element follows from where it is counted from the first."""
ROWS = [
    pytest.param(case, id=case.id)
    for case in CASES
    if OPS[case.op].factors and case.op not in NOT_BY_PLACE
]


def run(op: Op, args: Arrays) -> list[np.ndarray]:
    return [np.asarray(out) for out in OPS[op.name].reference(op, args)]


def part(arrays: Arrays, factor: Factor, first: int, taken: slice) -> list[np.ndarray]:
    """Arrays with a part alone of the dims of `factor`; they are an op's values from `first` on."""
    found = []
    for n, array in enumerate(arrays, first):
        dims = [d for m, d in factor.places if m == n]
        found.append(array[tuple(taken if d in dims else slice(None) for d in range(array.ndim))])
    return found


def in_part(op: Op, args: Arrays, factor: Factor) -> Op:
    """`op` of those operands, with the attributes that its result has then."""
    values = [Value(tensor_type(a.shape, DType.from_numpy(a.dtype))) for a in args]
    size = next(v.type.shape[d] for v, (n, d) in ((values[p[0]], p) for p in factor.places[:1]))
    shape = list(op.results[0].type.shape)
    for m, d in factor.places:
        if m == len(op.operands):
            shape[d] = size
    attrs = facts.resized(op, tuple(shape))
    if isinstance(attrs, GatherAttrs):
        sizes = list(attrs.slice_sizes)
        for m, d in factor.places:
            if m == 0 and d not in (*attrs.operand_batching_dims, *attrs.collapsed_slice_dims):
                sizes[d] = size
        attrs = replace(attrs, slice_sizes=tuple(sizes))
    return make_op(op.name, values, attrs)


def gives_its_part(op: Op, inputs: Arrays, factor: Factor) -> bool:
    """Whether parts of the operands give that part of the results, which have the dim."""
    whole, count = run(op, inputs), len(op.operands)
    size = next((*inputs, *whole)[n].shape[d] for n, d in factor.places)
    for taken in (slice(0, size // 2), slice(size // 2, size)):
        args = part(inputs, factor, 0, taken)
        made = run(in_part(op, args, factor), args)
        wanted = part(whole, factor, count, taken)
        pairs = zip(made, wanted, strict=True)
        if not all(a.shape == b.shape and alike(op, a, b) for a, b in pairs):
            return False
    return True


def alike(op: Op, one: np.ndarray, other: np.ndarray) -> bool:
    """Whether arrays are equal; sums of many products are as far as their order tells."""
    if OPS[op.name].kind is not Kind.CONTRACTION:
        return bool(same(one, other).all())
    a, b = one.astype(np.float64), other.astype(np.float64)
    return np.allclose(a, b, rtol=2e-2, atol=1e-2 * float(np.abs(b).max(initial=0)))


def of_kind(op: Op, kind: FactorKind) -> list[Factor]:
    """The factors of a kind along which there are parts."""
    values = (*op.operands, *op.results)
    sizes = ((f, [values[n].type.shape[d] for n, d in f.places]) for f in facts.factors_of(op))
    return [f for f, size in sizes if f.kind is kind and min(size) > 1]


def test_every_op_says_along_which_indices_it_may_be_cut() -> None:
    silent = {name for name, op in OPS.items() if op.factors is None}
    assert silent == {n for n, op in OPS.items() if op.kind in WITHOUT} | INSIDE


@pytest.mark.parametrize("case", ROWS)
def test_a_part_gives_that_part(case: OpCase) -> None:
    op, inputs = op_of(case), case_inputs(case)
    for factor in of_kind(op, FactorKind.PASSED):
        assert gives_its_part(op, inputs, factor), factor


@pytest.mark.parametrize("case", ROWS)
def test_partial_results_combine_to_the_whole(case: OpCase) -> None:
    """Sums and products over parts; updates of a scatter one part after the other."""
    op, inputs = op_of(case), case_inputs(case)
    for factor in of_kind(op, FactorKind.COMBINED):
        size = next(inputs[n].shape[d] for n, d in factor.places)
        halves = [
            part(inputs, factor, 0, taken)
            for taken in (slice(0, size // 2), slice(size // 2, size))
        ]
        if OPS[op.name].kind is Kind.INDEXED:
            found = inputs[0]
            for half in halves:
                (found,) = run(in_part(op, half, factor), [found, *half[1:]])
        else:
            first, second = (run(in_part(op, half, factor), half)[0] for half in halves)
            found = REDUCTIONS[facts.combination(op)](first, second)
        have, want = (a.astype(np.float64) for a in (found, run(op, inputs)[0]))
        most = float(np.abs(want[np.isfinite(want)]).max(initial=0))
        np.testing.assert_allclose(have, want, rtol=2e-2, atol=1e-2 * most)


@pytest.mark.parametrize("case", ROWS)
def test_whole_groups_give_those_groups(case: OpCase) -> None:
    """Each of the equal shares of the groups, where an op has several."""
    op, inputs = op_of(case), case_inputs(case)
    for factor in of_kind(op, FactorKind.GROUPED):
        groups = op.attrs.feature_groups * op.attrs.batch_groups
        (whole,), made = run(op, inputs), []
        for taken in range(groups):
            args = [_share(a, factor.of(n), groups, taken) for n, a in enumerate(inputs)]
            types = [Value(tensor_type(a.shape, DType.from_numpy(a.dtype))) for a in args]
            one = make_op(op.name, types, in_fewer_groups(op.attrs, groups))
            made += run(one, args)
        joined = np.concatenate(made, factor.of(len(inputs)))
        assert joined.shape == whole.shape and alike(op, joined, whole)


def _share(array: np.ndarray, dim: int | None, ways: int, number: int) -> np.ndarray:
    return array if dim is None else np.split(array, ways, dim)[number]


@pytest.mark.parametrize("case", ROWS)
def test_what_repeats_is_the_same_all_along(case: OpCase) -> None:
    op = op_of(case)
    for factor in of_kind(op, FactorKind.REPEATED):
        (out,) = run(op, numbered(case))
        ((_, d),) = factor.places
        assert (out == out.take([0], axis=d)).all()


@pytest.mark.parametrize("case", ROWS)
def test_no_index_is_left_out(case: OpCase) -> None:
    """Two dims of one size that no factor has: a part of one gives no part of the other."""
    op, inputs = op_of(case), shuffled(numbered(case))
    if len({x for a in inputs for x in a.ravel().tolist()}) < sum(a.size for a in inputs):
        return  # elements that are alike tell nothing
    said = {p for f in facts.factors_of(op) for p in f.places if f.kind is not FactorKind.LINKED}
    linked = {p for f in facts.factors_of(op) for p in f.places if f.kind is FactorKind.LINKED}
    for n, operand in enumerate(op.operands):
        for d, size in enumerate(operand.type.shape):
            for e, other in enumerate(op.results[0].type.shape):
                places = (n, d), (len(op.operands), e)
                if size == other > 1 and not (said | linked) & set(places):
                    assert not gives(op, inputs, Factor(places)), places


def shuffled(arrays: Arrays) -> list[np.ndarray]:
    """What is sorted already tells nothing of an op that sorts."""
    draw = np.random.default_rng(0)
    return [draw.permutation(a.ravel()).reshape(a.shape) for a in arrays]


def gives(op: Op, inputs: Arrays, factor: Factor) -> bool:
    try:
        return gives_its_part(op, inputs, factor)
    except (ValueError, IndexError):
        return False


def test_where_neighbours_are_needed() -> None:
    """Of ops whose dims correspond, dims that no part can be taken of are those of no factor."""
    for case in CASES:
        op = op_of(case)
        whole = facts.needed_whole(op)
        if whole and OPS[op.name].factors:
            passed = {f.of(0) for f in facts.factors_of(op) if f.kind is FactorKind.PASSED}
            assert passed.isdisjoint(whole)
            assert passed | set(whole) == set(range(op.operands[0].type.rank))
