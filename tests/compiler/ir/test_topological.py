"""Topological order keeps places as far as dependencies allow, and leaves out rings."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.ir.topological import topological


def test_the_lowest_place_first_among_the_ready() -> None:
    before = {"a": ["c"], "b": [], "c": [], "d": ["b", "b"]}
    assert topological(before, "dcba".index) == ["c", "b", "d", "a"]


def test_a_place_may_be_a_row_of_numbers() -> None:
    before = {"a": [], "b": ["d"], "c": [], "d": []}
    places = {"a": (1, 0), "b": (0, 9), "c": (1, -1), "d": (2,)}
    assert topological(before, places.__getitem__) == ["c", "a", "d", "b"]


def test_rings_and_what_waits_for_them_are_left_out() -> None:
    before = {1: [2], 2: [1], 3: [2], 4: []}
    assert topological(before, lambda node: node) == [4]


@given(st.lists(st.sets(st.integers(0, 19)), max_size=20), st.randoms())
@settings(deadline=None, max_examples=50)
def test_everything_is_behind_what_it_depends_on(found: list[set[int]], random) -> None:
    before = {n: {one for one in earlier if one < n} for n, earlier in enumerate(found)}
    places = random.sample(range(100), len(found))
    order = topological(before, places.__getitem__)
    assert sorted(order) == list(before)
    for at, node in enumerate(order):
        assert before[node] <= set(order[:at])
        ready = [n for n in order[at:] if before[n] <= set(order[:at])]
        assert places[node] == min(places[n] for n in ready)
