"""Short rows that follow each other in memory move several to a partition: runs and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import BF16, F32, PRED, TARGET, Maker, arrays, check, distance

from shardwright.compiler.codegen import contraction
from shardwright.compiler.codegen.contract_plan import ContractPlan
from shardwright.compiler.codegen.contract_tiling import plan_contraction
from shardwright.compiler.codegen.domain import AccessMap
from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.planning import Rates, Room
from shardwright.compiler.codegen.row_blocks import RowBlock, row_block, spread
from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.limits import limits_for, walk
from shardwright.compiler.isa.program import Kernel, Space
from shardwright.compiler.machine.target import load_target
from tests.support import l0, l1

RATES = Rates(load_target(TARGET).core)


def runs_of(kernel: Kernel, tensor: int) -> set[int]:
    """Elements that transfers of a tensor move in a run on chip."""
    found = set()
    for i in walk(kernel.body):
        ends = [p for p in (i.dst, *i.srcs) if p is not None]
        if i.opcode == "dma" and any(p.space is Space.HBM and p.buffer == tensor for p in ends):
            (chip,) = (p for p in ends if p.space is Space.SBUF)
            assert chip.dims[-1][0] == 1
            found.add(chip.dims[-1][1])
    return found


def weighted_values(heads: int, rows: int, keys: int, width: int, dtype=BF16) -> Maker:
    """out[b, t, h, e] = sum over s of p[b, h, t, s] * v[b, s, h, e]."""
    m = Maker((2, heads, rows, width, keys), "values")
    p, v = m.load((0, 1, 2, 4), dtype), m.load((0, 4, 1, 3), dtype)
    m.store(m.contract(p, v, (4,)), (0, 2, 1, 3))
    return m


def projection(heads: int, rows: int, width: int, outputs: int, dtype=BF16) -> Maker:
    """out[b, t, n] = sum over h, e of x[b, h, t, e] * w[h, e, n]."""
    m = Maker((2, rows, outputs, heads, width), "projection")
    x, w = m.load((0, 3, 1, 4), dtype), m.load((3, 4, 2), dtype)
    m.store(m.contract(x, w, (3, 4)), (0, 1, 2))
    return m


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_of_several_batch_points_share_partitions(dtype) -> None:
    m = weighted_values(8, 128, 128, 64, dtype)
    kernel = check(m, bound=1e-2 if dtype is BF16 else 1e-6)
    assert min(runs_of(kernel, 0)) * dtype.bytes >= 2048


def test_rows_of_several_depth_tiles_share_partitions() -> None:
    kernel = check(projection(16, 128, 64, 200), bound=1e-2)
    assert min(runs_of(kernel, 0)) * 2 >= 1024


def gradient(heads: int, rows: int, keys: int, width: int, dtype=BF16) -> Maker:
    """out[b, s, h, e] = sum over t of p[b, h, t, s] * d[b, t, h, e]: k counts the rows of p."""
    m = Maker((2, heads, keys, width, rows), "gradient")
    p, d = m.load((0, 1, 4, 2), dtype), m.load((0, 4, 1, 3), dtype)
    m.store(m.contract(p, d, (4,)), (0, 2, 1, 3))
    return m


@pytest.mark.parametrize("rows", [128, 512])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_that_k_counts_share_partitions(dtype, rows: int) -> None:
    kernel = check(gradient(8, rows, 64, 64, dtype), bound=1e-2 if dtype is BF16 else 1e-6)
    assert min(runs_of(kernel, 0)) * dtype.bytes >= 1024


@pytest.mark.parametrize("maker", [weighted_values, gradient, projection])
@pytest.mark.parametrize("size", [(4, 512, 64, 64), (8, 256, 128, 32)])
def test_every_plan_with_blocks_keeps_the_values(
    maker, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is resident, held or streamed, and however many tiles of k and of rows arrive."""
    m = maker(*size)
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    domain = normalise(m.program())
    (number,) = (n for n, v in enumerate(domain.values) if v.op == "contract")
    room = Room(limits_for(TARGET), RATES, m.tensors, limits_for(TARGET).sbuf_bytes // 2)
    chosen = {}
    for plan in sorted(plan_contraction(domain, number, tuple(domain.roots), room), key=cost):
        side = plan.stationary.number, plan.resident, plan.held, plan.staged, bool(plan.group)
        chosen.setdefault((*side, plan.block > 1, plan.chunk > 1), plan)
    ran = 0
    for plan in list(chosen.values())[:24]:
        monkeypatch.setattr(contraction, "plan_contraction", lambda *_, plan=plan: [plan])
        try:
            kernel = m.kernel()
        except CapacityError:  # PSUM of this plan does not fit: the planner's estimate was low
            continue
        got = arrays(m.tensors, 0)
        l0.run_kernel(kernel, got, {})
        assert distance(got[-1], want[-1]) <= 1e-2, plan
        ran += 1
    assert ran >= 8


def cost(plan: ContractPlan) -> float:
    return plan.cost


ODD = [(3, 67, 131, 48), (5, 128, 96, 64), (8, 256, 64, 32), (7, 300, 128, 80), (4, 512, 100, 128)]


@pytest.mark.parametrize("size", ODD)
def test_odd_sizes_keep_the_values(size: tuple[int, int, int, int]) -> None:
    check(weighted_values(*size), bound=1e-2)
    check(projection(*size[:2], size[3], size[2]), bound=1e-2)
    check(gradient(*size), bound=1e-2)


def test_several_tiles_of_k_in_a_row() -> None:
    """Rows of 256 elements: two k tiles a row, several rows a partition."""
    kernel = check(weighted_values(8, 256, 256, 64), bound=1e-2)
    assert min(runs_of(kernel, 0)) >= 1024


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 300))
@settings(deadline=None, max_examples=200)
def test_spread_counts_neighbours(sizes: list[int], count: int) -> None:
    """The reached box holds exactly the first `count` points, innermost index first."""
    reach = spread(count, sizes)
    if reach is None:
        return
    points = {0}
    step = 1
    for size, extent in zip(sizes, reach, strict=True):
        assert size % extent == 0
        points = {p + i * step for p in points for i in range(extent)}
        step *= size
    assert points == set(range(count))


@given(st.permutations([0, 1, 2]), st.sampled_from([16, 64, 128, 200]))
@settings(deadline=None, max_examples=50)
def test_a_block_is_dense_memory(order: Sequence[int], row: int) -> None:
    """Row number r of a block starts r * row elements behind its first, whatever counts rows."""
    sizes, strides, step = {0: 32, 1: 16, 2: 24}, {}, row
    for iter_dim in order:
        strides[iter_dim] = step
        step *= sizes[iter_dim]
    block = row_block(AccessMap(Affine(), strides, 0), row, sizes, 2, RATES, 1e9)
    assert isinstance(block, RowBlock)
    rows = block.each * block.partitions
    assert [block.place(r, strides) for r in range(rows)] == [r * row for r in range(rows)]


def scores(heads: int, rows: int, keys: int, width: int, dtype=BF16) -> tuple[Maker, int]:
    """out[b, h, t, s] = sum over e of q[b, t, h, e] * k[b, s, h, e], and the product."""
    m = Maker((2, heads, rows, keys, width), "scores")
    q, k = m.load((0, 2, 1, 4), dtype), m.load((0, 3, 1, 4), dtype)
    product = m.contract(q, k, (4,))
    m.store(product, (0, 1, 2, 3))
    return m, product


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_short_rows_of_a_result_are_stored_several_to_a_partition(dtype) -> None:
    m, _ = scores(8, 128, 128, 64, dtype)
    kernel = check(m, bound=1e-2 if dtype is BF16 else 1e-6)
    assert min(runs_of(kernel, 2)) * dtype.bytes >= 2048


def test_a_product_is_stored_both_ways() -> None:
    """Crosswise, in blocks, and along its rows, which are long enough as heads lie side by side."""
    m, product = scores(8, 128, 64, 64)
    m.store(product, (0, 2, 1, 3))
    kernel = check(m, bound=1e-2)
    assert min(runs_of(kernel, 2)) * 2 >= 1024
    assert min(runs_of(kernel, 3)) * 2 >= 1024


def test_what_is_not_a_plain_product_is_not_transposed() -> None:
    """A masked score is minus infinity, which a transpose would spread over its block."""
    m, product = scores(8, 128, 128, 64)
    mask = m.load((2, 3), PRED)
    low = m.const(float("-inf"), BF16)
    m.store(m.node("select", mask, product, low, dtype=BF16), (0, 1, 2, 3))
    want, got = arrays(m.tensors, 0), arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    l0.run_kernel(m.kernel(), got, {})
    masked = np.isneginf(want[-1].astype(np.float32))
    assert masked.any() and not masked.all()
    assert np.array_equal(np.isneginf(got[-1].astype(np.float32)), masked)
    assert not np.isnan(got[-1].astype(np.float32)).any()


def test_products_beyond_fp16_stay_infinite() -> None:
    """Sums of 64 products of 60 are 230400: no neighbour may become NaN."""
    m, _ = scores(8, 128, 128, 64, DType.F16)
    want, got = arrays(m.tensors, 0), arrays(m.tensors, 0)
    for side in (0, 1):
        for run in (want, got):
            run[side][...] = 1
            run[side].reshape(2, 128, 8, 64)[0, 5, 2] = 60
    l1.run_kernel(m.program(), want, {})
    l0.run_kernel(m.kernel(), got, {})
    assert np.isposinf(want[-1].astype(np.float32)).sum() == 1
    assert np.array_equal(got[-1].astype(np.float32), want[-1].astype(np.float32))


@pytest.mark.parametrize("size", ODD)
def test_odd_results_keep_the_values(size: tuple[int, int, int, int]) -> None:
    check(scores(*size)[0], bound=1e-2)
