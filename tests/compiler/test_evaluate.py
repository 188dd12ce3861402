"""Folded program-order evaluation equals the expanded event heap, clock for clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import Border, Engine, Kernel
from shardwright.compiler.timing.core_timeline import DMA, CoreTimeline
from shardwright.compiler.timing.max_plus import ENGINES as QUEUES
from shardwright.compiler.timing.max_plus import (
    QUEUE,
    Body,
    Timed,
    TimedLoop,
    Timeline,
    _Mark,
    _period,
    _wrapped_union,
    merged,
    timed_loop,
)
from tests.support.event_heap import Heap, end_time

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


@pytest.mark.parametrize(
    ("states", "period"),
    [
        ("a", 0),
        ("aa", 1),
        ("ab", 0),
        ("aba", 2),
        ("abb", 1),
        ("abca", 0),  # three iterations are not looked for
        ("abcda", 4),
        ("abcdeabcd", 0),
        ("abab", 2),
        ("aabca", 4),
    ],
)
def test_a_loop_is_periodic_over_one_two_or_four_iterations(states: str, period: int) -> None:
    """Whatever the time, and whatever was recorded on the way."""
    history = [
        _Mark(100 * n, (ord(state), 0), ((ord(state),),), (0,), n, 7 * n)
        for n, state in enumerate(states)
    ]
    assert _period(history) == period


@pytest.mark.parametrize(("change", "same"), [(0, True), (1, False), (2, False), (3, False)])
def test_what_decides_how_a_loop_goes_on(change: int, same: bool) -> None:
    """Clocks, tokens and borders ahead, relative to the time itself."""
    mark = _Mark(0, (1, 2), ((3,), ()), (4,), 0, 0)
    other = mark._replace(**{_Mark._fields[change]: (9,) if change else 9})
    assert (mark.shape() == other.shape()) is same


def folded_end(body: Body, tokens: list[int]) -> tuple[int, int]:
    timeline = evaluated(body, tokens)
    return timeline.end_ps, len(timeline.intervals)


def pipeline(seed: int, trip: int, inner: int) -> tuple[list[Timed | TimedLoop], list[int]]:
    """A chain of engines with double-buffered hand-overs, the shape every generated kernel has."""
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


def test_tokens_of_inner_loops_move_on_with_the_outer_one() -> None:
    """Two tiles are loaded, 10 ps each, as soon as their two places are free, and used, 20 ps
    each; all is known 7 ps later. The first is used from 17 to 37 and the second to 57: places are
    free at 44 and 64, and a turn of 10 + 7 + 20 + 7 ps later again. After ten turns the second is
    free at 64 + 9 * 44 = 460, when what needs both begins.
    """
    load = loop(2, timed(Engine.DMA_IN, 10, (1,), (0,)))
    use = loop(2, timed(Engine.TENSOR, 20, (0,), (1,)))
    behind = timed(Engine.VECTOR, 5, (1, 1))
    found = evaluated([loop(10, load, use), behind], [0, 2])
    assert found.clock[QUEUE[Engine.VECTOR]] == 465 and found.end_ps == 472


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=40))
@settings(deadline=None)
def test_merged_intervals_cover_the_same_points(pairs: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in pairs]
    points = {p for start, end in intervals for p in range(start, end)}
    found = merged(intervals)
    assert {p for start, end in found for p in range(start, end)} == points
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


SEEN_PS = 11


def with_borders(
    items: Body, rng: random.Random, number: int, borders: list[Border]
) -> list[Timed | TimedLoop]:
    """Some instructions of a kernel wait for queues to finish earlier kernels."""
    out: list[Timed | TimedLoop] = []
    for item in items:
        if isinstance(item, TimedLoop):
            out.append(timed_loop(item.trip, with_borders(item.body, rng, number, borders)))
            continue
        if number and rng.random() < 0.4:
            borders.append(Border(rng.choice(QUEUES), rng.randint(1, number)))
            item = item._replace(borders=(len(borders) - 1,))
        out.append(item)
    return out


def chained(seed: int, count: int, trip: int, inner: int) -> list[tuple[Kernel, Body]]:
    """Kernels one after the other without a barrier."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        body, tokens = pipeline(rng.randrange(10**6), rng.randint(1, trip), inner)
        borders: list[Border] = []
        body = with_borders(body, rng, number, borders)
        program = KernelProgram("compute", f"r{number}")
        found.append((Kernel(program, tokens=tuple(tokens), borders=tuple(borders)), body))
    return found


def chain_ends(kernels: list[tuple[Kernel, Body]], dma_ps: Sequence[int] = ()) -> list[int]:
    """Ends of kernels with so much time of loads and stores (none)."""
    timeline = CoreTimeline(SEEN_PS)
    ends = []
    for (kernel, body), moves in itertools.zip_longest(kernels, dma_ps, fillvalue=0):
        timeline.run(kernel, body, moves)
        ends.append(timeline.end_ps)
    return ends


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=120, deadline=None)
def test_kernels_without_barriers_equal_the_event_heap(
    seed: int, count: int, trip: int, inner: int
) -> None:
    """Also after every kernel on the way: what comes later changes nothing that came before."""
    kernels = chained(seed, count, trip, inner)
    seen = [0 if engine in DMA else SEEN_PS for engine in QUEUES]
    rows = [
        (body, kernel.tokens, [(QUEUE[b.queue], b.back) for b in kernel.borders or ()])
        for kernel, body in kernels
    ]
    expected = [Heap(rows[:n], seen).run() for n in range(1, count + 1)]
    assert chain_ends(kernels) == expected


def test_a_border_costs_no_more_than_a_barrier_and_no_less_than_nothing() -> None:
    for seed in range(40):
        kernels = chained(seed, 4, 12, 2)
        free = [(replace(k, borders=()), _without_borders(body)) for k, body in kernels]
        barriers = [(replace(r, borders=None), body) for r, body in free]
        fastest, given, slowest = (chain_ends(x)[-1] for x in (free, kernels, barriers))
        assert fastest <= given <= slowest + 4 * SEEN_PS
        apart = sum(end_time(body, kernel.tokens) for kernel, body in free)
        assert slowest == apart


def _without_borders(items: Body) -> list[Timed | TimedLoop]:
    return [
        timed_loop(i.trip, _without_borders(i.body))
        if isinstance(i, TimedLoop)
        else i._replace(borders=())
        for i in items
    ]


def test_loads_and_stores_share_their_engines_across_kernels() -> None:
    """Two kernels that load for 10 and store for 10 at once need 40 of the engines, not 20 and what
    is left over; a kernel that begins to load later counts from there."""
    load, store = timed(Engine.DMA_IN, 10), timed(Engine.DMA_OUT, 10)
    kernel = Kernel(KernelProgram("compute", "r"), borders=())
    assert chain_ends([(kernel, [load, store])] * 2, [20, 20]) == [20, 40]
    late = [timed(Engine.TENSOR, 100)]
    assert chain_ends([(kernel, late)]) == [107]
    waits = Kernel(KernelProgram("compute", "w"), borders=(Border(Engine.TENSOR, 1),))
    after = [load._replace(borders=(0,)), store._replace(borders=(0,))]
    assert chain_ends([(kernel, late), (waits, after)], [0, 20])[-1] == 107 + SEEN_PS + 20


def test_a_loop_of_nothing_takes_no_time() -> None:
    found = evaluated([loop(3), timed(Engine.VECTOR, 40), loop(3, loop(2))], [])
    assert found.end_ps == evaluated([timed(Engine.VECTOR, 40)], []).end_ps


def test_a_loop_of_instructions_that_take_no_time_is_busy_for_none() -> None:
    """Its iterations are a period of 0 ps."""
    nothing = timed(Engine.VECTOR, 0)._replace(recorded=True)
    assert evaluated([loop(100, nothing)], []).recorded_ps == 0


INTERVALS = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 15)), max_size=5)


@settings(deadline=None)
@given(INTERVALS, st.integers(1, 12))
def test_a_union_of_repeated_intervals_is_counted_tick_by_tick(
    intervals: list[tuple[int, int]], period: int
) -> None:
    """Each comes back every `period` ticks."""
    spans = [(start, start + length) for start, length in intervals]
    ticks = {tick % period for start, end in spans for tick in range(start, end)}
    assert _wrapped_union(spans, period) == len(ticks)
