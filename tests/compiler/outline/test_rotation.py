"""Carries that take turns in owning memory: every value is where its reader looks for it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.outline.rotation import Rotation, Turn, Turns, substituted, turns


def _all(found: Turns) -> list[Turn]:
    return [*found.first, *(list(found.repeated) * found.count), *found.last]


def _queues(lengths: list[int]) -> tuple[Rotation, dict[int, int], dict[int, int]]:
    """One queue per length: the first carry is made anew, each other takes over the one before."""
    moved: dict[int, int] = {}
    made: list[int] = []
    carry = 0
    for length in lengths:
        made.append(carry)
        moved.update((carry + i, carry + i - 1) for i in range(1, length))
        carry += length
    place = {i: i for i in range(carry)}
    spare = {c: carry + n for n, c in enumerate(made)}
    return Rotation(moved, tuple(made)), place, spare


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 40))
def test_queues_hold_what_was_made(lengths: list[int], trip: int) -> None:
    """Memory is simulated: buffers hold (carry made, turn), carries must find what they are."""
    rotation, place, spare = _queues(lengths)
    found = turns(rotation, place, spare, trip)
    memory: dict[int, tuple[int, int]] = {}
    expected: dict[int, tuple[int, int]] = {}
    for number, turn in enumerate(_all(found)):
        assert all(memory[turn.before[c]] == what for c, what in expected.items())
        assert set(turn.targets.values()).isdisjoint(turn.before.values())
        memory.update((turn.targets[c], (c, number)) for c in rotation.made)
        moved = {c: expected[s] for c, s in rotation.moved.items() if s in expected}
        expected |= moved | {c: (c, number) for c in rotation.made}
    assert len(_all(found)) == trip
    assert all(memory[found.after[c]] == what for c, what in expected.items())


def test_a_loop_without_queues_is_one_turn() -> None:
    found = turns(Rotation({}, ()), {0: 7}, {}, 80)
    assert (list(found.first), found.count, list(found.last)) == ([], 80, [])
    assert len(found.repeated) == 1
    assert found.repeated[0].request(0) == 7


def test_a_queue_that_is_only_emptied_repeats_its_last_entry() -> None:
    """Carry 1 takes over invariant 0: after the first turn nothing changes any more."""
    found = turns(Rotation({1: 0, 2: 1}, ()), {0: 5, 1: 6, 2: 7}, {}, 10)
    assert [t.before for t in found.first] == [{0: 5, 1: 6, 2: 7}, {0: 5, 1: 5, 2: 6}]
    assert found.count == 8
    assert found.after == {0: 5, 1: 5, 2: 5}


def test_counters_of_turns() -> None:
    value = Affine(3, ((0, 2), (4, 5)))
    assert substituted(value, {4: Affine(1, ((4, 3),))}) == Affine(8, ((0, 2), (4, 15)))
