"""Exactness of the overlap and coverage arithmetic against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Border, Space, Tile, extent
from shardwright.sim_cluster.instructions.operands import is_dense
from shardwright.sim_cluster.instructions.past import Access, HbmWatch, Past
from shardwright.sim_cluster.instructions.races import ENGINES, strided_key, strides_overlap
from shardwright.sim_cluster.instructions.tiles import Slot, merge

DIMS = st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 4)), max_size=3)


def touched(address: int, dims: list[tuple[int, int]], item: int) -> set[int]:
    found = set()
    for index in itertools.product(*(range(size) for _, size in dims)):
        start = address + sum(i * stride for i, (stride, _) in zip(index, dims, strict=True))
        found |= set(range(start, start + item))
    return found


@settings(deadline=None, max_examples=300)
@given(DIMS, DIMS, st.integers(-40, 40), st.sampled_from([1, 2, 4]))
def test_strided_patterns_overlap_exactly_when_they_share_a_byte(
    a: list[tuple[int, int]], b: list[tuple[int, int]], distance: int, item: int
) -> None:
    want = bool(touched(0, a, item) & touched(distance, b, item))
    assert strides_overlap(strided_key(0, a, item), strided_key(distance, b, item)) == want
    assert strides_overlap(strided_key(distance, b, item), strided_key(0, a, item)) == want


@settings(deadline=None)
@given(DIMS)
def test_dense_means_every_element_between_the_ends(dims: list[tuple[int, int]]) -> None:
    low, high = extent(tuple(dims))
    everything = touched(0, dims, 1) == set(range(low, high + 1))
    assert (low, high) == (min(touched(0, dims, 1)), max(touched(0, dims, 1)))
    if is_dense(tuple(dims)):
        assert everything


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 7), st.integers(1, 8)),
        max_size=8,
    )
)
def test_merged_boxes_cover_what_was_added(writes: list[tuple[int, int, int, int]]) -> None:
    boxes: list[tuple[int, ...]] = []
    want = np.zeros((8, 16), bool)
    for p, parts, e, count in writes:
        boxes = merge(boxes, (p, p + parts, e, e + count))
        want[p : p + parts, e : e + count] = True
    got = np.zeros_like(want)
    for p0, p1, e0, e1 in boxes:
        got[p0:p1, e0:e1] = True
    np.testing.assert_array_equal(got, want)


def test_a_slot_written_in_pieces_of_any_shape_holds_all_of_them() -> None:
    slot = Slot(Tile("t", Space.SBUF, 4, 8, DType.F32, address=0), 0)

    def pattern(start: int, parts: int, *dims: tuple[int, int]) -> AccessPattern:
        return AccessPattern(Space.SBUF, 0, Affine(), ((1, parts), *dims), start)

    def box(start: int, parts: int, first: int, end: int) -> tuple[int, ...]:
        return (start, start + parts, first * 4, end * 4)

    whole = (box(0, 4, 0, 8), pattern(0, 4, (1, 8)), 0)
    slot.write(box(0, 4, 0, 6), True, pattern(0, 4, (1, 6)), 0, 1)
    slot.write(box(0, 2, 6, 8), True, pattern(0, 2, (1, 2)), 6, 1)
    assert not slot.holds(*whole)
    slot.write(box(2, 2, 6, 8), True, pattern(2, 2, (1, 2)), 6, 1)
    assert slot.holds(*whole)
    slot.renew()
    assert not slot.holds(*whole)


def noted(past: Access, access: Access, knows: int) -> None:
    """An access behind one of an earlier kernel, of which its queue knows up to time `knows`."""
    watch = HbmWatch()
    watch.before = [past]
    watch.note("operand", access, [knows] * len(ENGINES))


def test_what_an_earlier_kernel_may_still_touch_is_a_race_where_one_of_both_writes() -> None:
    """Bytes 0..99 of an earlier kernel at time 7."""
    for was, now in itertools.product((False, True), repeat=2):
        past, access = Access(0, was, 0, 100, 7), Access(1, now, 99, 120, 1)
        if was or now:
            told = ("read", "write")[now], ("read", "written")[was], ENGINES[0].value
            text = "{} of HBM is not ordered after it was {} by the {} queue".format(*told)
            with pytest.raises(SimulationError, match=f"SW_L0_RACE.*{text}"):
                noted(past, access, 6)
        else:
            noted(past, access, 6)
        noted(past, access, 7)
        for low, high in ((100, 120), (-20, 0)):
            noted(past, Access(1, now, low, high, 1), 6)


def test_of_an_operand_the_whole_range_is_kept_and_the_last_time() -> None:
    watch = HbmWatch()
    for low, high, time in ((40, 60, 1), (100, 120, 2), (0, 8, 3)):
        watch.note("operand", Access(1, True, low, high, time), [0] * len(ENGINES))
    assert watch.found == {"operand": Access(1, True, 0, 120, 3)}


def test_a_border_lies_at_a_kernel_that_has_run() -> None:
    """Two have: at their ends the clock of every queue stood at 3 and at 5."""
    past, watch = Past(), HbmWatch()
    for time in (3, 5):
        past.leave((), watch, [[time] * len(ENGINES) for _ in ENGINES])
    borders = [Border(ENGINES[0], back) for back in (1, 2)]
    assert past.passed(borders) == [[5] * len(ENGINES), [3] * len(ENGINES)]
    for back in (0, 3):
        with pytest.raises(SimulationError, match=f"SW_L0_OPERANDS.*{back} kernels back"):
            past.passed([Border(ENGINES[0], back)])


def test_only_a_barrier_ends_what_may_still_be_touched() -> None:
    """A kernel of no code lies behind a write of bytes 0..99; the next kernel reads them."""
    for is_barrier in (False, True):
        past, watch = Past(), HbmWatch()
        past.enter((), watch)
        watch.found["operand"] = Access(0, True, 0, 100, 7)
        past.leave((), watch, [[7] + [0] * (len(ENGINES) - 1) for _ in ENGINES])
        past.skip(is_barrier)
        past.enter((), watch)
        assert [access.high for access in watch.before] == ([] if is_barrier else [100])
