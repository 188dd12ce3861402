"""Folded program-order evaluation equals the expanded event heap, clock for clock."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.isa.program import Engine
from compiler.max_plus import QUEUE, Body, Timed, TimedLoop, Timeline, merged, timed_loop
from tests.support.event_heap import end_time

ENGINES = [Engine.DMA_IN, Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.DMA_OUT]


def timed(
    engine: Engine, ps: int, waits: tuple[int, ...] = (), signals: tuple[int, ...] = ()
) -> Timed:
    return Timed(QUEUE[engine], ps, 7, waits, signals, recorded=ps > 0)


def loop(trip: int, *body: Timed | TimedLoop) -> TimedLoop:
    return timed_loop(trip, body)


def evaluated(body: Body, tokens: list[int]) -> Timeline:
    timeline = Timeline(tokens)
    timeline.run(body)
    return timeline


def folded_end(body: Body, tokens: list[int]) -> tuple[int, int]:
    timeline = evaluated(body, tokens)
    return timeline.end_ps, len(timeline.intervals)


def pipeline(seed: int, trip: int, inner: int) -> tuple[list[Timed | TimedLoop], list[int]]:
    """A chain of engines with double-buffered hand-overs, the shape every generated region has."""
    rng = random.Random(seed)
    stages = rng.sample(ENGINES, rng.randint(2, len(ENGINES)))
    body: list[Timed | TimedLoop] = []
    tokens: list[int] = []
    for k, engine in enumerate(stages):
        waits: list[int] = []
        signals: list[int] = []
        if k > 0:  # data from the stage before, and the slot handed back to it
            waits.append(2 * (k - 1))
            signals.append(2 * (k - 1) + 1)
        if k + 1 < len(stages):
            tokens += [0, rng.randint(1, 3)]
            waits.append(2 * k + 1)
            signals.append(2 * k)
        if inner > 1 and rng.random() < 0.5:
            body.append(timed(engine, 0, tuple(waits)))
            body.append(loop(inner, timed(engine, rng.randint(1, 40))))
            body.append(timed(engine, 0, (), tuple(signals)))
        else:
            body.append(timed(engine, rng.randint(1, 90), tuple(waits), tuple(signals)))
    return [loop(trip, *body)], tokens


@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_folded_equals_the_event_heap(seed: int, trip: int, inner: int) -> None:
    body, tokens = pipeline(seed, trip, inner)
    assert folded_end(body, tokens)[0] == end_time(body, tokens)


def test_folding_skips_iterations_and_a_drifting_queue_is_not_folded_too_early() -> None:
    """A fast producer with many slots runs ahead for 40 iterations before the state is periodic."""
    body = [
        loop(
            5000,
            timed(Engine.DMA_IN, 10, (1,), (0,)),
            timed(Engine.TENSOR, 11, (0,), (1,)),
        )
    ]
    tokens = [0, 40]
    end, evaluated = folded_end(body, tokens)
    assert end == end_time(body, tokens)
    assert evaluated < 1000


@pytest.mark.parametrize("factor", [2, 3])
def test_time_never_falls_when_an_instruction_gets_slower(factor: int) -> None:
    for seed in range(30):
        body, tokens = pipeline(seed, 20, 1)
        (nest,) = body
        assert isinstance(nest, TimedLoop)
        base = folded_end(body, tokens)[0]
        for k, item in enumerate(nest.body):
            assert isinstance(item, Timed)
            slower = item._replace(interval_ps=item.interval_ps * factor)
            changed = loop(nest.trip, *nest.body[:k], slower, *nest.body[k + 1 :])
            assert folded_end([changed], tokens)[0] >= base


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_nests_entered_again_equal_the_event_heap(
    seed: int, outer: int, trip: int, inner: int
) -> None:
    """Between runs of a nest another queue drifts, so that some entries repeat and some do not."""
    body, tokens = pipeline(seed, trip, inner)
    drift = timed(Engine.SCALAR, seed % 50 + 1)
    nest: Body = [loop(outer, drift, *body, drift)]
    assert folded_end(nest, tokens)[0] == end_time(nest, tokens)


def test_a_nest_entered_in_the_same_state_is_evaluated_once_and_records_the_same() -> None:
    def nest() -> TimedLoop:
        return loop(3, timed(Engine.VECTOR, 5, (1,), (0,)), timed(Engine.SCALAR, 3, (0,), (1,)))

    once = nest()
    again = evaluated([once] * 6, [0, 1])
    apart = evaluated([nest() for _ in range(6)], [0, 1])
    assert again.clock == apart.clock and again.recorded_ps == apart.recorded_ps
    assert len(again.known) < len(apart.known) == 6


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=40))
@settings(deadline=None)
def test_merged_intervals_cover_the_same_points(pairs: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in pairs]
    points = {p for start, end in intervals for p in range(start, end)}
    found = merged(intervals)
    assert {p for start, end in found for p in range(start, end)} == points
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
