"""Running maxima: one pass over a blocked row where what it adds up can be rescaled, in any
spelling, and two where it cannot; generated code in L0 equals L1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import Kernel
from tests.compiler.codegen.kernel_harness import BF16, F32, I32, PRED, Maker, check
from tests.compiler.codegen.row_cases import causal, forward
from tests.compiler.codegen.test_rows_blocked import BOUND, LONG, blocked_limits, plan_of
from tests.support.cells import long_in_matrix

T, S, D, E = range(4)
SIZES = (300, 4500, 48, 40)
NEVER = float("-inf")


def loops(m: Maker) -> tuple[bool, int]:
    """Whether a pass is online, and how many go over the blocked iter dim."""
    plan = plan_of(m, blocked_limits(m))
    return plan.online, sum(one.blocked for one in plan.loops)


def check_online(m: Maker, dtype=F32, inputs: dict[int, np.ndarray] | None = None) -> Kernel:
    """The values of a kernel that goes over its columns once."""
    assert loops(m) == (True, 1)
    return check(m, BOUND[dtype], inputs, target=blocked_limits(m))


@pytest.mark.parametrize("mask", ["", "causal", "padding", "window"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_forward(dtype, mask: str) -> None:
    """Output and row statistics from one product with the keys."""
    check_online(forward(LONG, dtype, mask, statistics=True), dtype)


def test_grouped_queries() -> None:
    check_online(forward((2, 200, 2500, 32, 32, 4), F32, "causal"))


Scores = Callable[[Maker, int], int]


def weighted(weigh: Callable[[Maker, int, int], int], scores: Scores = lambda m, x: x) -> Maker:
    """sum over s of weigh(x, max of x) * v, and the sum of the weights."""
    m = Maker(SIZES, "weighted")
    q, k, v = m.load((T, D)), m.load((S, D)), m.load((S, E))
    x = scores(m, m.contract(q, k, (D,)))
    p = weigh(m, x, m.reduce(x, (S,), "max"))
    m.store(m.contract(p, v, (S,)), (T, E))
    m.store(m.reduce(p, (S,)), (T,))
    return m


def power(m: Maker, x: int, top: int) -> int:
    return m.node("exponential", m.node("subtract", x, top))


def at_least_zero(m: Maker, x: int, top: int) -> int:
    """A reference that follows from the maximum in steps."""
    return power(m, x, m.node("maximum", top, m.const(0.0)))


def tempered(m: Maker, x: int, top: int) -> int:
    """exp(t (x - max)) with a number t, and a product with what only the row knows."""
    shifted = m.node("multiply", m.node("subtract", x, top), m.const(0.25))
    return m.node("multiply", m.node("exponential", shifted), m.load((T,)))


def negated(m: Maker, x: int, top: int) -> int:
    """1 / exp(max - x) by another route: exp(-(max - x))."""
    return m.node("exponential", m.node("negate", m.node("subtract", top, x)))


def masked_late(m: Maker, x: int, top: int) -> int:
    """Weights that a mask sets to 0 after the exponential (dropout, a second mask)."""
    return m.node("select", m.load((S,), PRED), power(m, x, top), m.const(0.0), dtype=F32)


def finite(m: Maker, x: int, top: int) -> int:
    """The reference of a log-sum-exp that minds rows of -inf."""
    known = m.node("is_finite", top, dtype=PRED)
    return power(m, x, m.node("select", known, top, m.const(0.0), dtype=F32))


def rising(m: Maker, x: int, top: int) -> int:
    """Weights that grow when the maximum does."""
    apart = m.node("multiply", m.node("subtract", top, x), m.const(0.05))
    return m.node("exponential", apart)


def neutral(m: Maker, x: int, top: int) -> int:
    """The maximum with what it begins with, as libraries write it, subtracted by its negative."""
    begun = m.node("maximum", m.const(NEVER), top)
    return m.node("exponential", m.node("add", x, m.node("negate", begun)))


SPELLINGS = [power, at_least_zero, tempered, negated, masked_late, finite, rising, neutral]


@pytest.mark.parametrize("weigh", SPELLINGS)
def test_spellings_go_over_the_columns_once(weigh) -> None:
    check_online(weighted(weigh))


def squashed(m: Maker, x: int, top: int) -> int:
    return m.node("tanh", m.node("subtract", x, top))


def divided(m: Maker, x: int, top: int) -> int:
    return m.node("divide", x, m.node("add", m.node("abs", top), m.const(1.0)))


def added(m: Maker, x: int, top: int) -> int:
    return m.node("add", power(m, x, top), m.const(1.0))


def doubled(m: Maker, x: int, top: int) -> int:
    """Twice the lowest number is an infinity."""
    twice = m.node("multiply", top, m.const(2.0))
    return m.node("exponential", m.node("subtract", m.node("add", x, x), twice))


@pytest.mark.parametrize(
    "weigh", long_in_matrix((squashed, divided, added, doubled), (squashed, added, doubled))
)
def test_what_cannot_be_rescaled_takes_two_passes(weigh) -> None:
    m = weighted(weigh)
    assert loops(m) == (False, 2)
    check(m, BOUND[F32], target=blocked_limits(m))


def low_at_first(m: Maker, x: int, top: int) -> int:
    """A reference that only a high maximum lifts from far below."""
    high = m.node("compare", top, m.const(-1e20), dtype=PRED, direction="GT")
    return power(m, x, m.node("select", high, top, m.const(NEVER), dtype=F32))


def left_behind(m: Maker, x: int, top: int) -> int:
    """A reference that stays at 0 until the maximum is far beyond."""
    high = m.node("compare", top, m.const(1000.0), dtype=PRED, direction="GT")
    return power(m, x, m.node("select", high, top, m.const(0.0), dtype=F32))


def clamped(m: Maker, x: int, top: int) -> int:
    """A clamp with an infinity that cuts everything off."""
    return power(m, x, m.node("maximum", top, m.const(-NEVER)))


def mild(m: Maker, x: int, top: int) -> int:
    """A number that stands for never until it is scaled."""
    apart = m.node("subtract", x, top)
    kept = m.node("select", m.load((S,), PRED), apart, m.const(-1e6), dtype=F32)
    return m.node("exponential", m.node("multiply", kept, m.const(1e-6)))


@pytest.mark.parametrize(
    "weigh", long_in_matrix((low_at_first, left_behind, clamped, mild), (left_behind, clamped))
)
def test_references_that_may_leave_their_maximum_take_two_passes(weigh) -> None:
    m = weighted(weigh)
    assert loops(m) == (False, 2)
    check(m, BOUND[F32], target=blocked_limits(m))


def against(of: Callable[[Maker, int], int], weights: Callable[[Maker, int, int], int]) -> Maker:
    """Weights of x against the maximum of something else, of(x)."""
    m = Maker((130, 3000, 32, 32), "against")
    q, k, v = m.load((T, D)), m.load((S, D)), m.load((S, E))
    x = m.contract(q, k, (D,))
    p = weights(m, x, m.reduce(of(m, x), (S,), "max"))
    m.store(m.contract(p, v, (S,)), (T, E))
    m.store(m.reduce(p, (S,)), (T,))
    return m


def test_maximum_of_fewer_elements_takes_two_passes() -> None:
    """Early columns are masked in the maximum and by a product: exp(x + 1e30) * 0 is no number."""
    keep: list[int] = []

    def kept(m: Maker, x: int) -> int:
        keep.append(m.load((S,), PRED))
        return m.node("select", keep[0], x, m.const(-1e30), dtype=F32)

    def weigh(m: Maker, x: int, top: int) -> int:
        return m.node("multiply", power(m, x, top), m.node("convert", keep[0], dtype=F32))

    m = against(kept, weigh)
    assert loops(m) == (False, 2)
    check(m, BOUND[F32], {3: np.arange(3000) >= 2500}, target=blocked_limits(m))


def test_maximum_of_another_value_takes_two_passes() -> None:
    """A bias that only the maximum has, far below 0 in early columns."""
    m = against(lambda m, x: m.node("add", x, m.load((S,))), power)
    assert loops(m) == (False, 2)
    bias = np.where(np.arange(3000) < 2500, -200, 0).astype(np.float32)
    check(m, BOUND[F32], {3: bias}, target=blocked_limits(m))


def test_elements_masked_behind_the_maximum_go_once() -> None:
    """x made lower where a mask says so is still at most the maximum of x."""

    def lowered(m: Maker, x: int, top: int) -> int:
        kept = m.node("select", m.load((S,), PRED), x, m.const(-1e30), dtype=F32)
        return power(m, kept, top)

    check_online(weighted(lowered))


def test_weights_that_are_stored_take_another_pass() -> None:
    m = Maker(SIZES, "stored")
    x = m.contract(m.load((T, D)), m.load((S, D)), (D,))
    p = power(m, x, m.reduce(x, (S,), "max"))
    m.store(m.node("divide", p, m.reduce(p, (S,))), (T, S))
    assert loops(m) == (True, 2)
    check(m, BOUND[F32], target=blocked_limits(m))


def test_loss_over_a_large_vocabulary() -> None:
    """Log of the sum of exponentials of logits, without a product behind it."""
    m = Maker(SIZES, "loss")
    x = m.contract(m.load((T, D)), m.load((S, D)), (D,))
    top = m.reduce(x, (S,), "max")
    m.store(m.node("add", top, m.node("log", m.reduce(power(m, x, top), (S,)))), (T,))
    check_online(m)


@pytest.mark.parametrize("low", [NEVER, -3.4028234663852886e38, -1e30])
def test_column_tiles_without_a_key(low: float) -> None:
    """Rows whose first column tiles are masked whole, with any number that stands for never."""

    def behind(m: Maker, x: int) -> int:
        """Columns of the last third only."""
        first = m.node("iota", iter_dims=(S,), dtype=I32, atom=S, start=Affine(-3000), step=1)
        keep = m.node("compare", first, m.load((T,), I32), dtype=PRED, direction="GE")
        return m.node("select", keep, x, m.const(low), dtype=F32)

    m = weighted(power, behind)
    bounds = np.linspace(-200, 1400, SIZES[T]).astype(np.int32)
    check_online(m, inputs={3: bounds})


def test_rows_without_any_key() -> None:
    """Finite masks give equal weights, -inf gives no number, as in one pass over all columns."""
    for low in (NEVER, -1e30):
        m = Maker((1, *SIZES[:2], 32, 32), "no_key")
        q, k, v = m.load((0, 1, 3)), m.load((0, 2, 3)), m.load((0, 2, 4))
        x = causal(m, m.contract(q, k, (3,)), low, offset=-40)
        p = power(m, x, m.reduce(x, (2,), "max"))
        m.store(m.contract(m.node("divide", p, m.reduce(p, (2,))), v, (2,)), (0, 1, 4))
        check_online(m)


def lifted(m: Maker, x: int, top: int) -> int:
    """A mask behind the maximum that a second one lifts: weights there are 1 for any maximum."""
    keep = m.load((T, S), PRED)
    first = m.node("select", keep, m.node("subtract", x, top), m.const(-2e6), dtype=F32)
    second = m.node("select", keep, m.load((T,)), m.const(2e6), dtype=F32)
    return m.node("exponential", m.node("add", first, second))


def test_masks_that_are_lifted_do_not_follow_the_maximum() -> None:
    m = weighted(lifted)
    check(m, BOUND[F32], target=blocked_limits(m))
