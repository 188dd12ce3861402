"""L1: every node kind against plain NumPy, in-place safety, and errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, View
from shardwright.sim_cluster.values.kernels import prepare
from tests.support.l1 import run_kernel

F32, BF16, I32, PRED = DType.F32, DType.BF16, DType.I32, DType.PRED
ZERO = Affine()
BF = ml_dtypes.bfloat16


def compute(iter_dims: tuple[int, ...], *nodes: Node) -> KernelProgram:
    return KernelProgram(kind="compute", name="test", iter_dims=iter_dims, nodes=nodes)


def load(
    tensor: int,
    strides: tuple[int, ...],
    iter_dims: tuple[int, ...],
    dtype: DType = F32,
    offset: Affine = ZERO,
) -> Node:
    return Node("load", (), iter_dims, dtype, {"view": View(tensor, offset, strides)})


def store(
    value: int,
    tensor: int,
    strides: tuple[int, ...],
    iter_dims: tuple[int, ...],
    dtype: DType = F32,
) -> Node:
    return Node("store", (value,), iter_dims, dtype, {"view": View(tensor, Affine(), strides)})


def rand(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 17),
    st.permutations(range(4)),
)
def test_contract_is_einsum_for_any_iter_dim_order(
    b: int, m: int, n: int, k: int, order: list[int]
) -> None:
    sizes = [0] * 4
    for iter_dim, size in zip(order, (b, m, n, k), strict=True):
        sizes[iter_dim] = size
    at_b, at_m, at_n, at_k = order
    lhs, rhs = rand(b, k, m), rand(b, n, k)  # lhs is stored transposed
    strides_l, strides_r, strides_o = [0] * 4, [0] * 4, [0] * 4
    strides_l[at_b], strides_l[at_k], strides_l[at_m] = k * m, m, 1
    strides_r[at_b], strides_r[at_n], strides_r[at_k] = n * k, k, 1
    strides_o[at_b], strides_o[at_m], strides_o[at_n] = m * n, n, 1
    out = np.full(b * m * n, np.nan, np.float32)
    out_iter_dims = tuple(sorted((at_b, at_m, at_n)))
    program = compute(
        tuple(sizes),
        load(0, tuple(strides_l), tuple(sorted((at_b, at_k, at_m)))),
        load(1, tuple(strides_r), tuple(sorted((at_b, at_k, at_n)))),
        Node("contract", (0, 1), out_iter_dims, F32, {"over": (at_k,)}),
        store(2, 2, tuple(strides_o), out_iter_dims),
    )
    run_kernel(program, [lhs.reshape(-1), rhs.reshape(-1), out], {})
    np.testing.assert_allclose(
        out.reshape(b, m, n), np.einsum("bkm,bnk->bmn", lhs, rhs), rtol=1e-5, atol=1e-5
    )


def test_contract_sums_an_iter_dim_only_one_side_has() -> None:
    a, b, out = rand(4, 5), rand(3), np.zeros(4 * 3, np.float32)
    program = compute(
        (4, 5, 3),
        load(0, (5, 1, 0), (0, 1)),
        load(1, (0, 0, 1), (2,)),
        Node("contract", (0, 1), (0, 2), F32, {"over": (1,)}),
        store(2, 2, (3, 0, 1), (0, 2)),
    )
    run_kernel(program, [a.reshape(-1), b, out], {})
    np.testing.assert_allclose(out.reshape(4, 3), np.outer(a.sum(1), b), rtol=1e-5)


def test_rms_norm_rounds_every_bf16_node() -> None:
    x, w = rand(6, 16, dtype=BF), rand(16, dtype=BF)
    out = np.zeros(96, BF)
    program = compute(
        (6, 16),
        load(0, (16, 1), (0, 1), BF16),
        Node("convert", (0,), (0, 1), F32),
        Node("multiply", (1, 1), (0, 1), F32),
        Node("reduce", (2,), (0,), F32, {"kind": "add", "over": (1,)}),
        Node("constant", (), (), F32, {"value": 1 / 16}),
        Node("multiply", (3, 4), (0,), F32),
        Node("rsqrt", (5,), (0,), F32),
        Node("multiply", (1, 6), (0, 1), F32),
        Node("convert", (7,), (0, 1), BF16),
        load(1, (0, 1), (1,), BF16),
        Node("multiply", (8, 9), (0, 1), BF16),
        store(10, 2, (16, 1), (0, 1), BF16),
    )
    run_kernel(program, [x.reshape(-1), w, out], {})
    x32 = x.astype(np.float32)
    normed = (x32 / np.sqrt((x32 * x32).mean(1, keepdims=True))).astype(BF)
    want = (normed.astype(np.float32) * w.astype(np.float32)).astype(BF)
    assert np.mean(out.reshape(6, 16) != want) < 0.05  # rsqrt against division may flip a tie
    np.testing.assert_allclose(
        out.reshape(6, 16).astype(np.float32), want.astype(np.float32), rtol=1e-2
    )


def test_in_place_update_reads_everything_before_it_writes() -> None:
    p, g = rand(8), rand(8) + 1
    moved = np.zeros(8, np.float32)
    program = compute(
        (8,),
        load(0, (1,), (0,)),
        load(1, (1,), (0,)),
        Node("subtract", (0, 1), (0,), F32),
        store(2, 0, (1,), (0,)),
        store(0, 2, (1,), (0,)),  # the old value, although the store above already wrote
        Node("add", (0, 2), (0,), F32),
        store(5, 1, (1,), (0,)),
    )
    old, gradient = p.copy(), g.copy()
    run_kernel(program, [p, g, moved], {})
    np.testing.assert_array_equal(p, old - gradient)
    np.testing.assert_array_equal(moved, old)
    np.testing.assert_array_equal(g, old + (old - gradient))


def test_values_read_twice_are_not_overwritten_in_place() -> None:
    x, out = rand(5, 3), np.zeros(15, np.float32)
    program = compute(
        (5, 3),
        load(0, (3, 1), (0, 1)),
        Node("exponential", (0,), (0, 1), F32),
        Node("convert", (1,), (0, 1), F32),
        Node("negate", (1,), (0, 1), F32),
        Node("logistic", (3,), (0, 1), F32),
        Node("multiply", (2, 4), (0, 1), F32),
        store(5, 1, (3, 1), (0, 1)),
    )
    run_kernel(program, [x.reshape(-1), out], {})
    e = np.exp(x)
    np.testing.assert_allclose(out.reshape(5, 3), e / (1 + np.exp(e)), rtol=1e-6)


def test_offsets_follow_registers_and_prepared_kernels_run_again() -> None:
    x, out = rand(4, 6), np.zeros(6, np.float32)
    program = compute(
        (6,), load(0, (1,), (0,), offset=Affine(0, ((3, 6),))), store(0, 1, (1,), (0,))
    )
    run = prepare(program, (F32, F32))
    for row in (2, 0, 3):
        run([x.reshape(-1), out], {3: row})
        np.testing.assert_array_equal(out, x[row])


@pytest.mark.parametrize("mode", ["clamp", "fill"])
def test_load_indexed_picks_rows(mode: str) -> None:
    table, index = rand(7, 4), np.array([3, -2, 6, 9, 0], np.int32)
    out = np.zeros(20, np.float32)
    attrs = {"view": View(0, Affine(), (0, 1)), "stride": 4, "rows": 7, "mode": mode}
    program = compute(
        (5, 4),
        load(1, (1, 0), (0,), I32),
        Node("load_indexed", (0,), (0, 1), F32, attrs),
        store(1, 2, (4, 1), (0, 1)),
    )
    run_kernel(program, [table.reshape(-1), index, out], {})
    want = table[np.clip(index, 0, 6)]
    if mode == "fill":
        want = np.where(((index >= 0) & (index < 7))[:, None], want, 0)
    np.testing.assert_array_equal(out.reshape(5, 4), want)


def test_load_indexed_that_moves_along_the_index_iter_dim() -> None:
    scores, labels, out = rand(5, 7), np.array([6, 0, 2, 2, 5], np.int32), np.zeros(5, np.float32)
    attrs = {"view": View(0, Affine(), (7,)), "stride": 1, "rows": 7}
    program = compute(
        (5,),
        load(1, (1,), (0,), I32),
        Node("load_indexed", (0,), (0,), F32, attrs),
        store(1, 2, (1,), (0,)),
    )
    run_kernel(program, [scores.reshape(-1), labels, out], {})
    np.testing.assert_array_equal(out, scores[np.arange(5), labels])


def test_store_add_indexed_adds_duplicates_and_drops_strangers() -> None:
    values, index, table = rand(6, 4), np.array([1, 4, 1, 9, -1, 0], np.int32), rand(5, 4)
    attrs = {"view": View(2, Affine(), (0, 1)), "stride": 4, "rows": 5}
    attrs |= {"kind": "add", "unique": False, "order": (0,)}
    program = compute(
        (6, 4),
        load(0, (4, 1), (0, 1)),
        load(1, (1, 0), (0,), I32),
        Node("store_indexed", (0, 1), (0, 1), F32, attrs),
    )
    want = table.copy()
    np.add.at(want, index[[0, 1, 2, 5]], values[[0, 1, 2, 5]])
    flat = table.reshape(-1).copy()
    run_kernel(program, [values.reshape(-1), index, flat], {})
    np.testing.assert_allclose(flat.reshape(5, 4), want, rtol=1e-6)


def test_integers_wrap_and_divide_as_stablehlo() -> None:
    a, b = (
        np.array([7, -7, 7, -7, 2**31 - 1, 5], np.int32),
        np.array([2, 2, -2, -2, 1, 0], np.int32),
    )
    cases = {
        "divide": [3, -3, -3, 3, 2**31 - 1, -1],
        "remainder": [1, -1, 1, -1, 0, 5],
        "add": [9, -5, 5, -9, -(2**31), 5],
        "shift_left": [28, -28, 0, 0, -2, 5],
        "shift_right_logical": [1, 2**30 - 2, 0, 0, 2**30 - 1, 5],
        "shift_right_arithmetic": [1, -2, 0, -1, 2**30 - 1, 5],
    }
    for op, want in cases.items():
        out = np.zeros(6, np.int32)
        program = compute(
            (6,),
            load(0, (1,), (0,), I32),
            load(1, (1,), (0,), I32),
            Node(op, (0, 1), (0,), I32),
            store(2, 2, (1,), (0,), I32),
        )
        run_kernel(program, [a, b, out], {})
        assert out.tolist() == want, op


def test_iota_register_compare_select_build_a_causal_mask() -> None:
    out = np.zeros(16, np.float32)
    program = compute(
        (4, 4),
        Node("iota", (), (0,), I32, {"atom": 0, "start": Affine(0, ((1, 1),)), "step": 1}),
        Node("iota", (), (1,), I32, {"atom": 1, "start": Affine(), "step": 1}),
        Node("compare", (0, 1), (0, 1), PRED, {"direction": "GE"}),
        Node("constant", (), (), F32, {"value": 1.0}),
        Node("register", (), (), F32, {"value": Affine(-5, ((1, 1),))}),
        Node("select", (2, 3, 4), (0, 1), F32),
        store(5, 0, (4, 1), (0, 1)),
    )
    run_kernel(program, [out], {1: 1})
    want = np.where(np.arange(4)[:, None] + 1 >= np.arange(4), 1, -4)
    np.testing.assert_array_equal(out.reshape(4, 4), want)


def test_scalar_kernel_and_convert_truncation() -> None:
    x, out = np.array([-2.7], np.float32), np.zeros(1, np.int32)
    program = compute((), load(0, (), ()), Node("convert", (0,), (), I32), store(1, 1, (), (), I32))
    run_kernel(program, [x, out], {})
    assert out.tolist() == [-2]


def test_long_outer_sum_keeps_fp32_accuracy() -> None:
    x = (rand(20000, 3) + 3).astype(np.float32)
    out = np.zeros(3, np.float32)
    program = compute(
        (20000, 3),
        load(0, (3, 1), (0, 1)),
        Node("reduce", (0,), (1,), F32, {"kind": "add", "over": (0,)}),
        store(1, 1, (0, 1), (1,)),
    )
    run_kernel(program, [x.reshape(-1), out], {})
    np.testing.assert_allclose(out, x.astype(np.float64).sum(0), rtol=1e-6)


def test_a_view_outside_its_tensor_is_refused_with_kernel_and_node() -> None:
    program = compute((8,), load(0, (1,), (0,), offset=Affine(1)), store(0, 1, (1,), (0,)))
    with pytest.raises(SimulationError, match="kernel test, node 0"):
        run_kernel(program, [rand(8), rand(8)], {})


def test_an_unknown_op_is_refused() -> None:
    program = compute((8,), load(0, (1,), (0,)), Node("besselj", (0,), (0,), F32))
    with pytest.raises(SimulationError, match="besselj"):
        run_kernel(program, [rand(8)], {})
