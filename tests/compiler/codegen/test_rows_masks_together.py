"""Several masks on one row of scores, in any spelling: generated code has the values of NumPy, also
in rows that no column is left of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.machine.target import load_target
from tests.compiler.codegen.kernel_harness import F32, I32, PRED, TARGET, Maker, check
from tests.compiler.codegen.row_cases import D, E, S, T
from tests.compiler.codegen.test_rows_blocked import blocked_limits
from tests.compiler.codegen.test_rows_masks import busy
from tests.support.kernel_checks import kernel_time

ROWS, COLUMNS = 400, 520
LOWEST = float(np.finfo(np.float32).min)
FILLS = (-1e9, LOWEST, float("-inf"))


@dataclass(frozen=True)
class Mask:
    """What keeps a column: `column - row` at least or at most `by`, both in the first `by` or
    neither, or what a tensor says.
    """

    kind: str
    by: int = 0

    def node(self, m: Maker) -> int:
        row = m.node("iota", iter_dims=(T,), dtype=I32, atom=T, start=Affine(), step=1)
        column = m.node("iota", iter_dims=(S,), dtype=I32, atom=S, start=Affine(), step=1)
        if self.kind == "data":
            loads = (n for n, made in enumerate(m.nodes) if made.op == "load")
            same = (n for n in loads if m.nodes[n].dtype is PRED)
            return next(same, None) or m.load((S,), PRED)
        by = m.const(self.by, I32)
        if self.kind == "blocks":
            first, second = (_compare(m, x, "LT", by) for x in (row, column))
            neither = (m.node("not", x, dtype=PRED) for x in (first, second))
            both = m.node("and", first, second, dtype=PRED)
            return m.node("or", both, m.node("and", *neither, dtype=PRED), dtype=PRED)
        limit = m.node("add", row, by, dtype=I32)
        return _compare(m, column, "LE" if self.kind == "most" else "GE", limit)

    def array(self) -> np.ndarray:
        row, column = np.arange(ROWS)[:, None], np.arange(COLUMNS)
        if self.kind == "blocks":
            return (row < self.by) == (column < self.by)
        return column - row <= self.by if self.kind == "most" else column - row >= self.by


def _compare(m: Maker, a: int, direction: str, b: int) -> int:
    return m.node("compare", a, b, dtype=PRED, direction=direction)


Spelling = Callable[[Maker, int, list[Mask], float], int]


def nested(m: Maker, x: int, masks: list[Mask], low: float) -> int:
    for mask in masks:
        x = m.node("select", mask.node(m), x, m.const(low), dtype=F32)
    return x


def together(m: Maker, x: int, masks: list[Mask], low: float) -> int:
    keep, *rest = (mask.node(m) for mask in masks)
    for other in rest:
        keep = m.node("and", keep, other, dtype=PRED)
    return m.node("select", keep, x, m.const(low), dtype=F32)


def filled(m: Maker, x: int, masks: list[Mask], low: float) -> int:
    """What is masked comes first, as `masked_fill` has it."""
    for mask in masks:
        leave = m.node("not", mask.node(m), dtype=PRED)
        x = m.node("select", leave, m.const(low), x, dtype=F32)
    return x


def additive(m: Maker, x: int, masks: list[Mask], low: float) -> int:
    for mask in masks:
        term = m.node("select", mask.node(m), m.const(0.0), m.const(low), dtype=F32)
        x = m.node("add", x, term)
    return x


SPELLINGS: tuple[Spelling, ...] = (nested, together, filled, additive)


def attention(
    masks: list[Mask],
    low: float,
    scores: Spelling,
    maxima: Spelling,
    size: tuple[int, int] = (ROWS, COLUMNS),
) -> Maker:
    """Softmax of masked scores times values; the scores are masked again for the maximum."""
    m = Maker((1, *size, 32, 32), "masked")
    q, k, v = m.load((T, D)), m.load((S, D)), m.load((S, E))
    s = m.contract(q, k, (D,), F32)
    x, y = scores(m, s, masks, low), maxima(m, s, masks, low)
    p = m.node("exponential", m.node("subtract", x, m.reduce(y, (S,), "max")))
    weights = m.node("divide", p, m.reduce(p, (S,)))
    m.store(m.contract(weights, v, (S,)), (T, E))
    return m


def _is_never_empty(masks: list[Mask]) -> bool:
    """Whether no row can be infinite throughout; that is NaN, which a transpose spreads."""
    known = [mask.array() for mask in masks if mask.kind != "data"]
    return len(known) == len(masks) and bool(np.all(known, axis=0).any(axis=1).all())


_MASKS = st.one_of(
    st.builds(Mask, st.sampled_from(["most", "least"]), st.integers(-300, 300)),
    st.builds(Mask, st.just("blocks"), st.integers(1, 399)),
    st.just(Mask("data")),
)


@pytest.mark.matrix
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    masks=st.lists(_MASKS, min_size=1, max_size=3),
    low=st.sampled_from(FILLS),
    scores=st.sampled_from(SPELLINGS),
    maxima=st.sampled_from(SPELLINGS),
)
def test_any_masks(masks: list[Mask], low: float, scores: Spelling, maxima: Spelling) -> None:
    assume(low == FILLS[0] or _is_never_empty(masks))
    check(attention(masks, low, scores, maxima), 1e-5)


CAUSAL, PAST, LATER = Mask("most"), Mask("most", -300), Mask("least", 1)


@pytest.mark.parametrize("scores", SPELLINGS)
@pytest.mark.parametrize("maxima", SPELLINGS)
def test_equal_masks_spelled_apart_leave_out_the_same_columns(
    scores: Spelling, maxima: Spelling
) -> None:
    m = attention([CAUSAL], -1e9, scores, maxima)
    check(m, 1e-5)
    assert busy(m) < 0.9 * busy(attention([Mask("data")], -1e9, scores, maxima))


@pytest.mark.parametrize(("spelling", "most"), [(filled, 1.25), (additive, 1.42)])
def test_blocks_without_a_mask_cost_the_same_in_any_spelling(
    spelling: Spelling, most: float
) -> None:
    times = []
    for each in (nested, spelling):
        m = attention([CAUSAL], -1e9, each, each, (1024, 1024))
        times.append(kernel_time(m.kernel(), m.tensors, load_target(TARGET)).duration_ps)
    assert times[1] < most * times[0]


@pytest.mark.parametrize("masks", [[CAUSAL], [CAUSAL, LATER], [Mask("most", 2000), PAST]])
def test_blocked_rows(masks: list[Mask]) -> None:
    m = attention(masks, -1e9, nested, together, (ROWS, 4500))
    check(m, 1e-5, target=blocked_limits(m))


@pytest.mark.parametrize("low", FILLS[:2])
@pytest.mark.parametrize("second", [LATER, Mask("least", 100)])
def test_rows_without_a_common_column_average_over_all(second: Mask, low: float) -> None:
    """Each mask leaves every row a column near the diagonal, both together leave none."""
    check(attention([CAUSAL, second], low, nested, nested), 1e-5)


def test_a_window_of_two_masks_is_left_out_on_both_sides() -> None:
    one = attention([Mask("most", 20)], -1e9, nested, nested)
    both = attention([Mask("most", 20), Mask("least", -60)], -1e9, nested, additive)
    check(both, 1e-5)
    assert busy(both) < 0.95 * busy(one)


@pytest.mark.parametrize("kind", ["product", "sum"])
@pytest.mark.parametrize("window", [PAST, Mask("least", 250)])
def test_rows_whose_columns_are_all_zero(window: Mask, kind: str) -> None:
    """The mask leaves whole row tiles nothing, and what adds their columns up is zero."""
    m = Maker((1, 640, 512, 32, 32), "zeros")
    s = m.contract(m.load((T, D)), m.load((S, D)), (D,), F32)
    x = nested(m, s, [window], 0.0)
    if kind == "product":
        m.store(m.contract(x, m.load((S, E)), (S,)), (T, E))
    else:
        m.store(m.reduce(x, (S,)), (T,))
    check(m, 1e-5)


def _short(m: Maker, dtype: DType, factor: int, shift: int) -> int:
    """(row * factor - column * factor + shift) in a type, where it wraps, against 0."""
    row, column = (
        m.node("convert", m.node("iota", iter_dims=(a,), dtype=I32, atom=a, start=Affine(), step=1))
        for a in (T, S)
    )
    by, more = m.const(factor, dtype), m.const(shift, dtype)
    ends = []
    for count in (row, column):
        m.nodes[count] = replace(m.nodes[count], dtype=dtype)
        ends.append(m.node("multiply", count, by))
    gap = m.node("add", m.node("subtract", *ends), more)
    return _compare(m, gap, "LT" if shift < 0 else "GT", m.const(abs(shift), dtype))


@pytest.mark.parametrize(
    ("dtype", "factor", "shift"),
    [
        (DType.U32, 1, 200),
        (DType.I8, 1, 3),
        (DType.I16, 100, 7),
        (DType.I32, 5_000_000, 1),
        (DType.I32, 1, 2**31 - 200),
    ],
)
def test_positions_that_leave_their_type(dtype: DType, factor: int, shift: int) -> None:
    """What wraps is decided as it is computed, and where that is unknown it is not decided."""
    m = Maker((1, ROWS, COLUMNS, 32, 32), "wraps")
    s = m.contract(m.load((T, D)), m.load((S, D)), (D,), F32)
    x = m.node("select", _short(m, dtype, factor, shift), s, m.const(-1e30), dtype=F32)
    p = m.node("exponential", m.node("subtract", x, m.reduce(x, (S,), "max")))
    m.store(m.contract(m.node("divide", p, m.reduce(p, (S,))), m.load((S, E)), (S,)), (T, E))
    check(m, 1e-5)


@pytest.mark.parametrize(("iter_dim", "other"), [(T, S), (S, T)])
def test_a_predicate_of_rows_and_of_what_they_share(iter_dim: int, other: int) -> None:
    """A vector that is held for all rows reads it, and so do the rows themselves."""
    m = Maker((1, 384, 512, 32, 32), "held")
    s = m.contract(m.load((T, D)), m.load((S, D)), (D,), F32)
    first, second = (
        m.node("iota", iter_dims=(a,), dtype=I32, atom=a, start=Affine(), step=1)
        for a in (iter_dim, other)
    )
    late = _compare(m, first, "GT", m.const(101, I32))
    slope = m.node("multiply", m.node("convert", second, dtype=F32), m.const(0.01))
    term = m.node("select", late, m.const(0.0), m.const(-1e4), dtype=F32)
    x = m.node("add", m.node("subtract", s, slope), term)
    x = m.node("select", late, x, m.const(0.0), dtype=F32)
    m.store(m.contract(x, m.load((S, E)), (S,)), (T, E))
    check(m, 1e-5)
