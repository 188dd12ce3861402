"""Arena plans: legal, at the liveness bound, and checked by something that does not trust them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.schedule.hbm import (
    ALIGNMENT_BYTES,
    Lifetime,
    aligned,
    check,
    liveness_bound,
    plan,
)

LIFETIMES = st.lists(
    st.builds(
        lambda size, start, length: Lifetime(size, start, start + length),
        st.integers(0, 5000),
        st.integers(0, 40),
        st.integers(0, 12),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(LIFETIMES)
def test_plans_are_legal_and_no_smaller_than_the_bound(lifetimes: list[Lifetime]) -> None:
    offsets, size = plan(lifetimes)
    assert check(lifetimes, offsets, size) == []
    assert size >= liveness_bound(lifetimes)


@settings(deadline=None)
@given(LIFETIMES)
def test_bound_is_the_busiest_step(lifetimes: list[Lifetime]) -> None:
    steps = range(60)
    busy = [sum(aligned(x.size_bytes) for x in lifetimes if x.start <= s <= x.end) for s in steps]
    assert liveness_bound(lifetimes) == max(busy)


def test_buffers_at_different_times_share_bytes() -> None:
    lifetimes = [Lifetime(1000, 0, 1), Lifetime(900, 2, 3), Lifetime(10, 1, 2)]
    offsets, size = plan(lifetimes)
    assert offsets[0] == offsets[1] == 0 and size == 1024 + ALIGNMENT_BYTES


def test_checker_catches_a_longer_life_and_a_wrong_place() -> None:
    lifetimes = [Lifetime(1000, 0, 1), Lifetime(900, 2, 3)]
    offsets, size = plan(lifetimes)
    late = [replace(lifetimes[0], end=2), lifetimes[1]]
    assert "share bytes" in check(late, offsets, size)[0]
    assert "aligned place" in check(lifetimes, [8, 0], size)[0]
    assert "aligned place" in check(lifetimes, offsets, 900)[0]
