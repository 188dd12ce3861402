"""Reduction fusions: contractions with reductions between them; generated code in L0 equals L1."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.compiler.diagnostics import CapacityError, CompileError
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import Instr, Kernel, Loop, Space
from shardwright.compiler.machine.target import PS_PER_S, Limits, load_target
from tests.compiler.codegen.kernel_harness import BF16, F32, TARGET, Maker, check
from tests.compiler.codegen.row_cases import backward, causal, forward, weighted_rows
from tests.support.cells import long_in_matrix
from tests.support.kernel_checks import kernel_time, overlaps

BOUND = {F32: 1e-6, BF16: 1e-2}
SIZES = [(2, 128, 128, 64, 64), (1, 131, 131, 16, 16), (2, 300, 700, 130, 40), (2, 67, 520, 32, 64)]
EVEN = (1, 1024, 1024, 64, 32)  # panels, skipped columns, folded packed tiles
COMPUTE = ("tensor", "vector", "scalar")
DTYPES = (F32, BF16)


@pytest.mark.parametrize("mask", ["", "causal", "padding", "window"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(dtype, mask: str) -> None:
    for sizes in SIZES:
        check(forward(sizes, dtype, mask, statistics=True), BOUND[dtype])


@pytest.mark.parametrize("mask", ["", "causal", "window"])
def test_even_sizes(mask: str) -> None:
    """Row panels with columns of their own, packed tiles with several to a partition."""
    for dtype in DTYPES:
        check(forward(EVEN, dtype, mask), BOUND[dtype])
        check(backward(EVEN, dtype, "causal"), BOUND[dtype])


def busy(m: Maker) -> int:
    time = kernel_time(m.kernel(), m.tensors, load_target(TARGET))
    return time.busy_ps["tensor"]


def test_masked_columns_are_left_out() -> None:
    """Half of the square is masked; panels keep what is above their last row."""
    assert busy(forward(EVEN, F32, "causal")) < 0.75 * busy(forward(EVEN, F32))
    assert busy(forward(EVEN, F32, "window")) < 0.5 * busy(forward(EVEN, F32))


def test_engines_overlap() -> None:
    """Causal attention keeps the busiest engine busy for 1 / 1.3 of the time, and the tensor engine
    for a fifth of it with the half of the square that counts.
    """
    heads, length, width = 8, 2048, 128
    m, target = forward((heads, length, length, width, width), BF16, "causal"), load_target(TARGET)
    time = kernel_time(m.kernel(), m.tensors, target)
    assert time.duration_ps <= 1.3 * max(time.busy_ps.values())
    useful = heads * length**2 * width * 4 / 2
    assert useful / target.core.peak_bf16_flops_per_s >= 0.20 * time.duration_ps / PS_PER_S


def test_row_tiles_add_up_in_psum() -> None:
    """At least two row tiles take turns in every block of columns, and their sums leave PSUM
    together.
    """
    row_tiles, blocks, sums = 4, 4, 2
    m = backward((1, 128 * row_tiles, 512 * blocks, 128, 128), BF16)
    kernel = m.kernel()

    def added(body: Sequence[Instr | Loop]) -> int:
        return sum(
            i.trip * added(i.body) if isinstance(i, Loop) else i.opcode == "tensor_reduce"
            for i in body
        )

    assert 0 < added(kernel.body) <= sums * blocks * row_tiles // 2
    check(m, BOUND[BF16])


def test_differences_stay_in_the_bank_of_their_product() -> None:
    """Vector multiplies p, in SBUF, by dp - row, in PSUM: the rate of one operand."""
    m = backward((1, 512, 2048, 128, 128), BF16)
    kernel = m.kernel()

    def products(body: Sequence[Instr | Loop]) -> list[Instr]:
        inner = [products(i.body) if isinstance(i, Loop) else [i] for i in body]
        return [i for part in inner for i in part if i.attrs.get("op") == "multiply"]

    found = [i for i in products(kernel.body) if i.opcode == "tensor_tensor"]
    assert found
    assert all({p.space for p in i.srcs} == {Space.PSUM, Space.SBUF} for i in found)


def test_what_gpsimd_masks_leaves_the_bank_of_its_product() -> None:
    """Scores of several heads that are masked first and then biased, each by a number of its own:
    Vector adds in SBUF what GpSimd has masked there.
    """
    m = Maker((2, 256, 512, 64, 64), "masked")
    scores = m.contract(m.load((0, 1, 3), BF16), m.load((0, 2, 3), BF16), (3,), F32)
    scores = m.node("add", causal(m, scores, -30.0), m.load((0, 1, 2)))
    weights = m.node("exponential", m.node("subtract", scores, m.reduce(scores, (2,), "max")))
    weights = m.node("convert", m.node("divide", weights, m.reduce(weights, (2,))), dtype=BF16)
    m.store(m.contract(weights, m.load((0, 2, 4), BF16), (2,), F32), (0, 1, 4))
    check(m, BOUND[BF16])


@pytest.mark.parametrize("reader", ["store", "contract"])
def test_differences_leave_the_bank_of_their_product_where_a_decided_mask_is_one(
    reader: str,
) -> None:
    """In columns that a mask leaves as they are, what it gives lies where the difference does: DMA
    and transposes read that in SBUF.
    """
    m = Maker((1, 1024, 1024, 64, 64), "decided")
    q, k, v = m.load((0, 1, 3), BF16), m.load((0, 2, 3), BF16), m.load((0, 2, 4), BF16)
    p = m.node("exponential", m.node("subtract", m.contract(q, k, (3,), F32), m.load((0, 1))))
    dp = m.node("subtract", m.contract(m.load((0, 1, 4), BF16), v, (4,), F32), m.load((0, 1)))
    ds = m.node("convert", m.node("multiply", p, dp), dtype=BF16)
    m.store(m.contract(ds, q, (1,), F32), (0, 2, 3))
    masked = causal(m, dp, 0.0)
    if reader == "store":
        m.store(masked, (0, 1, 2))
    else:
        m.store(m.contract(masked, m.load((0, 2, 3)), (2,), F32), (0, 1, 3))
    check(m, BOUND[BF16])


def test_backward_overlaps() -> None:
    """Transposes of four query heads and their sums over rows run beside each other."""
    m = backward((2, 512, 512, 64, 64, 4), BF16, "causal")
    time = kernel_time(m.kernel(), m.tensors, load_target(TARGET))
    assert time.duration_ps <= 1.4 * max(time.busy_ps.values())


@pytest.mark.parametrize(
    ("made", "engines", "bound"),
    [(forward, COMPUTE, 1.45), (backward, COMPUTE, 1.25), (backward, ("tensor",), 1.6)],
)
def test_phases_of_blocks_overlap(made, engines: tuple[str, ...], bound: float) -> None:
    """In long sweeps the tensor engine does not wait for the arithmetic of every block: more rows
    take little more time than the busiest engine needs for them. The work of the others depends on
    our code, so the products are a measure of their own: they follow from the kernel.
    """
    times = []
    for rows in (1024, 2048):
        m = made((1, rows, 8192, 128, 128), BF16, "", True)
        times.append(kernel_time(m.kernel(), m.tensors, load_target(TARGET)))
    few, many = times
    busy = max(many.busy_ps[e] - few.busy_ps[e] for e in engines)
    assert many.duration_ps - few.duration_ps <= bound * busy


def test_rows_without_a_key_keep_all_columns() -> None:
    """The first 300 rows are all masked: their weights are equal over every column, masked or
    not, so nothing may be left out for them.
    """
    check(forward(EVEN, F32, "causal", offset=-300), BOUND[F32])


def test_a_mask_that_is_not_low_enough_is_computed() -> None:
    check(forward(EVEN, F32, "causal", low=-5.0), BOUND[F32])


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward(dtype, delta: bool) -> None:
    for sizes in SIZES:
        check(backward(sizes, dtype, "causal", delta), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_queries(dtype) -> None:
    """Four query heads share a key head, whose gradient sums over them."""
    check(forward((2, 200, 200, 32, 32, 4), dtype, "causal"), BOUND[dtype])
    check(backward((2, 200, 200, 32, 32, 4), dtype, "causal"), BOUND[dtype])


def small(sbuf_bytes: int) -> Limits:
    """The machine with less SBUF per partition."""
    return replace(limits_for(TARGET), sbuf_bytes=sbuf_bytes)


def tensor_ps(m: Maker, kernel: Kernel) -> int:
    return kernel_time(kernel, m.tensors, load_target(TARGET)).busy_ps["tensor"]


@pytest.mark.parametrize("mask", ["", "causal", "window"])
@pytest.mark.parametrize(("dtype", "sbuf_bytes"), [(F32, 36_000), (BF16, 29_000)])
def test_rows_that_do_not_fit_forward(dtype, sbuf_bytes: int, mask: str) -> None:
    """Scores are made again for the exponentials instead of being kept."""
    m = forward(EVEN, dtype, mask, statistics=True)
    kernel = check(m, BOUND[dtype], target=small(sbuf_bytes))
    assert tensor_ps(m, kernel) > 1.05 * tensor_ps(m, m.kernel())


@pytest.mark.parametrize("mask", ["", "causal", "window"])
@pytest.mark.parametrize(("dtype", "sbuf_bytes"), [(F32, 84_000), (BF16, 60_000)])
def test_rows_that_do_not_fit_backward(dtype, sbuf_bytes: int, mask: str) -> None:
    """Probabilities and their gradient are made again after the sum of their products is known."""
    m, given = (backward(EVEN, dtype, mask, delta) for delta in (False, True))
    kernel = check(m, BOUND[dtype], target=small(sbuf_bytes))
    once = check(given, BOUND[dtype], target=small(sbuf_bytes))
    assert tensor_ps(m, kernel) > 1.2 * tensor_ps(given, once)


@pytest.mark.parametrize("sizes", [*SIZES, (2, 200, 200, 32, 32, 4)])
def test_small_memory_with_odd_sizes(sizes) -> None:
    """The smallest memory the kernel has code for: odd ends, grouped queries."""
    for m in (forward(sizes, F32, "causal", True), backward(sizes, F32, "causal", False)):
        for sbuf_bytes in range(8_000, 96_000, 4_000):
            with contextlib.suppress(CapacityError):
                check(m, BOUND[F32], target=small(sbuf_bytes))
                break
        else:
            pytest.fail("no memory is enough")


@pytest.mark.parametrize("made", long_in_matrix((forward, backward), (backward,)))
def test_rows_of_8192_fit(made) -> None:
    """Attention of width 128 in bf16, forward and backward, is one kernel on the real machine."""
    m = made((1, 8192, 8192, 128, 128), BF16, "causal")
    assert not overlaps(m.kernel())


def test_norm_gradients_beside_a_contraction() -> None:
    """Sums over rows that leave the kernel: a weight gradient and a bias gradient."""
    t, d, f = 300, 96, 200
    m = Maker((t, d, f), "norm")
    x, w = m.load((0, 1)), m.load((1, 2))
    total = m.reduce(m.node("multiply", x, x), (1,))
    y = m.node("multiply", x, m.node("rsqrt", total))
    z = m.contract(y, w, (1,))
    m.store(m.contract(y, z, (0,)), (1, 2))
    m.store(m.reduce(z, (0,)), (2,))
    m.store(m.node("tanh", z), (0, 2))
    check(m, 1e-6)


B, H, T, S, D = range(5)
SUMS = [((B, T, S), (H,)), ((B, S), (H, T)), ((B, T), (H, S)), ((B,), (H, T, S))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [130, 300])
def test_sums_over_rows_columns_and_samples(rows: int, dtype) -> None:
    """Gradients of a temperature per head, of scales of rows, and of biases of keys and scores."""
    m = Maker((3, 2, rows, 70, 24), "sums")
    x = m.contract(m.load((B, H, T, D), dtype), m.load((B, H, S, D), dtype), (D,), F32)
    for over, kept in SUMS:
        total = m.reduce(m.node("multiply", x, x), over)
        m.store(m.node("sqrt", total), kept)
    both = m.contract(x, m.node("tanh", x), (B, T, S), F32)
    m.store(both, (H,))
    check(m, BOUND[dtype])


def test_no_row_iter_dim_is_refused() -> None:
    """The second contraction sums what would have to be the rows, and rows need its result."""
    m = Maker((64, 64, 64), "chain")
    a = m.contract(m.load((0, 1)), m.load((1, 2)), (1,))
    scale = m.reduce(a, (0, 2))
    m.store(m.node("multiply", a, scale), (0, 2))
    with pytest.raises(CompileError) as error:
        m.kernel()
    assert error.value.code == "SW_CODEGEN_ROWS"


def test_capacity_error_names_the_tile() -> None:
    """Sums over rows lie on chip as a whole, whatever is blocked."""
    with pytest.raises(CapacityError) as error:
        backward((1, 65536, 65536, 128, 128)).kernel()
    text = str(error.value)
    assert "SBUF per partition" in text and "(sum " in text


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (1024, 1024)])
def test_both_operands_take_columns_in_one_order(rows: int, columns: int, transposed: bool) -> None:
    """A packed tile that is transposed as it arrives keeps its columns in order, one that is not
    may have neighbours on a partition: the rows it is multiplied with follow.
    """
    check(weighted_rows(rows, columns, 64, transposed), BOUND[F32])
