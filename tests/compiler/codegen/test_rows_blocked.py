"""Rows that are walked in column tiles: what of the longest inner iter dim is loaded comes in
parts, and sums over it are carried on; generated code in L0 equals L1.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest

from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.planning import Rates, Room
from shardwright.compiler.codegen.rows import plan_rows
from shardwright.compiler.codegen.rows.plan import RowPlan
from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.machine.target import Limits, load_target
from tests.compiler.codegen.kernel_harness import BF16, F32, TARGET, Maker, check
from tests.compiler.codegen.row_cases import backward, causal, forward
from tests.support.kernel_checks import kernel_time

BOUND = {F32: 1e-6, BF16: 1e-2}
LONG = (1, 640, 4096, 64, 32)


def small(sbuf_bytes: int) -> Limits:
    """The machine with less SBUF per partition."""
    return replace(limits_for(TARGET), sbuf_bytes=sbuf_bytes)


def plan_of(m: Maker, limits: Limits) -> RowPlan:
    """The first plan for a kernel that may fill all of SBUF."""
    domain = normalise(m.program())
    rates = Rates(load_target(TARGET).core)
    return plan_rows(domain, domain.roots, Room(limits, rates, m.tensors, limits.sbuf_bytes))[0]


def blocked_limits(m: Maker) -> Limits:
    """The largest SBUF, in steps, for which the rows are blocked: smaller ones never hold more."""
    sizes = range(120_000, 8_000, -1_500)

    def does_not_hold(sbuf_bytes: int) -> bool:
        try:
            return plan_of(m, small(sbuf_bytes)).blocked is not None
        except CapacityError:
            return True

    return small(sizes[bisect_left(sizes, True, key=does_not_hold)])


def check_blocked(m: Maker, dtype) -> Limits:
    limits = blocked_limits(m)
    check(m, BOUND[dtype], target=limits)
    return limits


@pytest.mark.parametrize("mask", ["", "causal", "padding", "window"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_forward(dtype, mask: str) -> None:
    m = forward(LONG, dtype, mask, statistics=True)
    check_blocked(m, dtype)


@pytest.mark.parametrize("mask", ["", "causal", "padding"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_backward(dtype, mask: str) -> None:
    """Sums over rows stay whole on chip while their columns come in column tiles."""
    m = backward(LONG, dtype, mask, delta=False)
    check_blocked(m, dtype)


@pytest.mark.parametrize("sizes", [(2, 67, 3500, 32, 64), (1, 300, 2100, 130, 40, 2)])
def test_odd_ends(sizes) -> None:
    """Last column tiles, row tiles and chunks of the summed iter dim that are shorter."""
    check_blocked(forward(sizes, F32, "causal", True), F32)


def query_gradient(sizes: tuple[int, ...], dtype) -> Maker:
    """dQ alone: its row sum of p * dp is one pass over the keys, the product with them another.

    Scores are of about one: an exponential makes absolute errors of its argument relative ones.
    """
    t, s, d, e = range(1, 5)
    m = Maker(sizes, "query_gradient")
    q, k, v = (m.load(a, dtype) for a in ((0, t, d), (0, s, d), (0, s, e)))
    do, top = m.load((0, t, e), dtype), m.load((0, t))
    scores = m.node("multiply", m.contract(q, k, (d,), F32), m.const(0.125))
    p = m.node("exponential", m.node("subtract", causal(m, scores, -1e30), top))
    dp = m.contract(do, v, (e,), F32)
    row = m.reduce(m.node("multiply", p, dp), (s,))
    ds = m.node("multiply", p, m.node("subtract", dp, row))
    ds = ds if dtype is F32 else m.node("convert", ds, dtype=dtype)
    m.store(m.contract(ds, k, (s,), dtype), (0, t, d))
    return m


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_two_passes_over_the_columns(dtype) -> None:
    m = query_gradient(LONG, dtype)
    plan = plan_of(m, check_blocked(m, dtype))
    assert [one.blocked for one in plan.loops].count(True) == 2


@pytest.mark.parametrize("mask", ["", "causal", "padding", "window"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_column_tiles_around_the_rows(dtype, mask: str) -> None:
    """dK and dV without dQ: every column tile of the keys has sums of its own."""
    m = backward(LONG, dtype, mask, query=False)
    blocked = plan_of(m, check_blocked(m, dtype)).blocked
    assert blocked and blocked.outside


@pytest.mark.parametrize("sizes", [(2, 300, 3500, 32, 64), (1, 300, 2100, 130, 40, 2)])
@pytest.mark.parametrize("mask", ["", "causal"])
def test_column_tiles_around_the_rows_with_odd_ends(sizes, mask: str) -> None:
    """Last column tiles, row tiles, chunks of sums that are shorter, and heads that share keys."""
    m = backward(sizes, F32, mask, query=False)
    assert plan_of(m, check_blocked(m, F32)).blocked


def column_sums(dtype) -> Maker:
    """What keys get from the queries of two heads: weighted values [keys, 96], sums [keys]."""
    t, s, d, e, g = range(1, 6)
    m = Maker((1, 640, 4096, 64, 96, 2), "column_sums")
    q, k, v = (m.load(a, dtype) for a in ((0, g, t, d), (0, s, d), (0, g, t, e)))
    scores = m.node("multiply", m.contract(q, k, (d,), F32), m.const(0.125))
    p = m.node("exponential", m.node("subtract", causal(m, scores, -1e30), m.load((0, g, t))))
    short = p if dtype is F32 else m.node("convert", p, dtype=dtype)
    m.store(m.contract(short, v, (t, g), F32), (0, s, e))
    m.store(m.node("sqrt", m.reduce(p, (t, g))), (0, s))
    return m


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums_that_lie_along_the_column_tiles(dtype) -> None:
    """A sum over rows alone lies along the row of one partition, a product on all of them."""
    m = column_sums(dtype)
    blocked = plan_of(m, check_blocked(m, dtype)).blocked
    assert blocked and blocked.outside


def test_rows_that_add_up_column_tiles_have_them_inside() -> None:
    """dQ adds up the keys, so that dK and dV beside it stay whole on chip."""
    m = backward(LONG, F32)
    blocked = plan_of(m, blocked_limits(m)).blocked
    assert blocked and not blocked.outside


def test_values_along_the_column_tiles_without_rows() -> None:
    """Row statistics of the other side, as the gradient of keys and values reads them."""
    s, t, d = 1, 2, 3
    m = Maker((1, 384, 4096, 64), "key_gradient")
    k, q, do = (m.load(a) for a in ((0, s, d), (0, t, d), (0, t, d)))
    top, row = m.load((0, t)), m.load((0, t))
    scores = m.node("multiply", m.contract(k, q, (d,)), m.const(0.125))
    p = m.node("exponential", m.node("subtract", scores, top))
    m.store(m.contract(p, do, (t,)), (0, s, d))
    m.store(m.reduce(p, (t,), "max"), (0, s))
    m.store(m.contract(m.node("multiply", p, row), q, (t,)), (0, s, d))
    check_blocked(m, F32)


def test_weights_of_blocked_rows_are_stored() -> None:
    """What lies along the blocked iter dim is made again in the pass that follows the sum."""
    m = Maker((300, 6000, 64, 48), "weights")
    x = m.contract(m.load((0, 2)), m.load((1, 2)), (2,))
    p = m.node("exponential", m.node("subtract", x, m.reduce(x, (1,), "max")))
    weights = m.node("divide", p, m.reduce(p, (1,)))
    m.store(weights, (0, 1))
    m.store(m.contract(weights, m.load((1, 3)), (1,)), (0, 3))
    check_blocked(m, F32)


def test_masked_column_tiles_are_left_out() -> None:
    """Causal rows of a square: panels do not look at what lies behind their last row."""
    sizes = (1, 8192, 8192, 64, 64)
    full, half = (forward(sizes, BF16, mask) for mask in ("", "causal"))
    limits, target = blocked_limits(half), load_target(TARGET)
    busy = [
        kernel_time(m.kernel(limits), m.tensors, target).busy_ps["tensor"] for m in (full, half)
    ]
    assert busy[1] < 0.7 * busy[0]


def test_rows_of_any_length_fit() -> None:
    """On the real machine: forward attention of width 128 at 200,000 positions."""
    m = forward((1, 256, 200_000, 128, 128), BF16)
    plan = plan_of(m, limits_for(TARGET))
    assert plan.blocked and plan.blocked.length < 200_000
    kernel = m.kernel()
    inputs = sum(np.prod(t.shape) * t.dtype.bytes for t in m.tensors if t.kind == "input")
    assert sum(t.slots * t.slot_bytes for t in kernel.tiles if t.name == "moving") < inputs / 128


def residual_norm(sizes: tuple[int, ...]) -> Maker:
    """A product over the long iter dim, then what follows the MLP of a layer: the residual stream
    is added, and rows are scaled by their sum.
    """
    t, s, d = range(3)
    m = Maker(sizes, "residual_norm")
    product = m.contract(m.load((t, s)), m.load((s, d)), (s,), F32)
    y = m.node("add", m.load((t, d)), m.node("add", product, m.load((d,))))
    m.store(m.node("multiply", y, m.reduce(y, (d,))), (t, d))
    return m


def test_what_meets_a_finished_sum_is_loaded_in_an_earlier_pass() -> None:
    """A load of the level and iter dim of the sweep that reads it, one pass before: kept."""
    check_blocked(residual_norm((640, 4096, 96)), F32)
