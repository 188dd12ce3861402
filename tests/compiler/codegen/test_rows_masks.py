"""What makes a masked column matter again: its blocks are computed then, and left out otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.compiler.codegen.rows import float_intervals
from shardwright.compiler.codegen.rows.float_intervals import DATA, WILD, FloatInterval
from shardwright.compiler.machine.target import load_target
from tests.compiler.codegen.kernel_harness import F32, TARGET, Maker, check
from tests.compiler.codegen.row_cases import D, E, S, T, causal
from tests.support.kernel_checks import kernel_time

Change = Callable[[Maker, int], int]  # of scores, before their exponential


def weighted(change: Change) -> Maker:
    """exp(change(scores)) times values, and its row sums."""
    m = Maker((1, 1024, 1024, 32, 32), "weighted")
    q, k, v = m.load((0, T, D)), m.load((0, S, D)), m.load((0, S, E))
    p = m.node("exponential", change(m, m.contract(q, k, (D,), F32)))
    m.store(m.contract(p, v, (S,)), (0, T, E))
    m.store(m.reduce(p, (S,)), (0, T))
    return m


def apart(m: Maker, s: int) -> int:
    """Twice masked, and the masks cancel: the weight is 1."""
    other = causal(m, m.node("add", s, m.load((0, T))), -1e30)
    return m.node("subtract", causal(m, s, -1e30), other)


def scaled(m: Maker, s: int) -> int:
    return m.node("multiply", causal(m, s, -1e6), m.const(1e-6))


def divided(m: Maker, s: int) -> int:
    return m.node("divide", causal(m, s, -1e6), m.const(1e6))


def lifted(m: Maker, s: int) -> int:
    x = m.node("add", causal(m, s, -2e6), m.const(2e6))
    return m.node("minimum", x, m.const(1.0))


def lifted_by_a_mask(m: Maker, s: int) -> int:
    """The second mask is high where the first is low."""
    return m.node("add", causal(m, s, -2e6), causal(m, m.load((0, T)), 2e6))


def less_the_sum(m: Maker, s: int) -> int:
    """A row's sum of masked scores is as low as they are."""
    x = causal(m, s, -2e6)
    return m.node("minimum", m.node("subtract", x, m.reduce(x, (S,))), m.const(1.0))


def plain(m: Maker, s: int) -> int:
    return s


def busy(m: Maker) -> int:
    return kernel_time(m.kernel(), m.tensors, load_target(TARGET)).busy_ps["tensor"]


@pytest.mark.parametrize("change", [apart, scaled, divided, lifted, lifted_by_a_mask, less_the_sum])
def test_masked_columns_that_count(change: Change) -> None:
    check(weighted(change), 1e-5)


def masked(m: Maker, s: int) -> int:
    return causal(m, s, -1e30)


def tempered(m: Maker, s: int) -> int:
    return m.node("divide", masked(m, s), m.const(8.0))


def shifted(m: Maker, s: int) -> int:
    x = masked(m, s)
    return m.node("subtract", x, m.reduce(x, (S,), "max"))


@pytest.mark.parametrize("change", [masked, tempered, shifted])
def test_masked_columns_that_do_not(change: Change) -> None:
    m = weighted(change)
    check(m, 1e-5)
    assert busy(m) < 0.9 * busy(weighted(plain))


LOW = FloatInterval(-1e30, -1e30)


def test_spans_are_low_only_of_what_is_low() -> None:
    # Two of these are not LOW: no mask made them so.
    assert float_intervals.interval(-5e5, -5e5).high == 0.0
    assert float_intervals.added(LOW, DATA).is_low and not float_intervals.added(LOW, WILD).is_low
    assert not float_intervals.added(LOW, float_intervals.times(LOW, -1.0)).is_low
    assert float_intervals.times(LOW, 0.1).is_low and not float_intervals.times(LOW, -1.0).is_low
    assert not float_intervals.times(LOW, 1e-30).is_low and float_intervals.times(LOW, 0.0) == DATA
    assert not float_intervals.either(LOW, DATA).is_low and float_intervals.either(LOW, LOW).is_low
    assert not float_intervals.greater(LOW, DATA).is_low
    assert not float_intervals.lesser(LOW, DATA).is_low
    assert float_intervals.other(LOW) == WILD and float_intervals.other(DATA) == DATA
    low = float_intervals.interval(-float("inf"), -float("inf"))
    assert low.is_low and float_intervals.added(low, float_intervals.times(low, -1.0)) == WILD
