"""Program-order max-plus evaluation of engine queues, with loops folded.

Queues are in order and every wait names its token, so the start of an instruction is the maximum of
its queue's clock and its tokens' times: one pass in program order is exact. A loop whose whole
state (every clock and every token it touches) moves by the same amount over one, two or four
iterations is in its periodic regime, and the rest of it is a multiplication. Comparing end times
alone would be wrong: a prefetching DMA queue drifts relative to the tensor engine. The arithmetic
knows no absolute time, so a loop that is entered twice in the same relative state is evaluated
once. `tests/support/event_heap.py` is the oracle.

A timeline goes on through kernels that no barrier separates: clocks stay, semaphores are new, and
borders are instants that earlier kernels have fixed. An instant that the clock of a queue has
passed decides nothing any more, so loops fold as before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.compiler.isa.program import Engine

ENGINES = tuple(Engine)
QUEUE = {engine: number for number, engine in enumerate(ENGINES)}
_PERIODS = (1, 2, 4)


class Timed(NamedTuple):
    """An instruction with its costs, on queue `QUEUE[engine]`, `recorded`: with its interval."""

    queue: int
    interval_ps: int
    latency_ps: int
    waits: tuple[int, ...]
    signals: tuple[int, ...]
    recorded: bool = False
    borders: tuple[int, ...] = ()


class TimedLoop(NamedTuple):
    """A body, the queues and semaphores it touches, and which queue waits for which border."""

    trip: int
    body: tuple[Timed | TimedLoop, ...]
    queues: tuple[int, ...]
    semaphores: tuple[int, ...]
    borders: tuple[tuple[int, int], ...] = ()


Body = Sequence[Timed | TimedLoop]


def timed_loop(trip: int, body: Body) -> TimedLoop:
    """A loop around `body`."""
    queues: set[int] = set()
    semaphores: set[int] = set()
    borders: set[tuple[int, int]] = set()
    for item in body:
        if isinstance(item, Timed):
            queues.add(item.queue)
            semaphores.update(item.waits, item.signals)
            borders.update((item.queue, border) for border in item.borders)
        else:
            queues.update(item.queues)
            semaphores.update(item.semaphores)
            borders.update(item.borders)
    ordered = (tuple(sorted(queues)), tuple(sorted(semaphores)), tuple(sorted(borders)))
    return TimedLoop(trip, tuple(body), *ordered)


class _Mark(NamedTuple):
    """State that a loop touches, before an iteration: clocks and tokens relative to `base_ps`."""

    base_ps: int
    clocks: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    ahead: tuple[int, ...]  # time until the borders it waits for, 0 behind them
    num_intervals: int
    folded_ps: int

    def shape(self) -> tuple[object, ...]:
        """What decides everything that follows, up to a shift in time."""
        return self.clocks, self.tokens, self.ahead


class _Outcome(NamedTuple):
    """What a loop did from some relative state: the state it left and what it recorded."""

    after: _Mark
    intervals: tuple[tuple[int, int], ...]
    folded_ps: int


class Timeline:
    """Clocks and tokens of one kernel after the other, and the busy intervals that the last one
    recorded.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.clock = [0] * len(ENGINES)
        self.done = [0] * len(ENGINES)  # completion of the last instruction of each queue
        self.enter(tokens)

    def enter(self, tokens: Sequence[int], borders: Sequence[int] = ()) -> None:
        """Come to the next kernel. `borders` are the times at which its borders are passed."""
        now = min(self.clock)  # tokens that are there from the start hold nobody up
        self.tokens = [deque([now] * n) for n in tokens]
        self.borders = borders
        self.began: dict[int, int] = {}  # start of the first instruction of each queue
        self.intervals: list[tuple[int, int]] = []
        self.folded_ps = 0  # recorded time of folded iterations
        self.known: dict[object, _Outcome] = {}  # by loop and relative state

    def hold(self, until_ps: int) -> None:
        """No queue goes on before `until_ps`."""
        self.clock = [max(t, until_ps) for t in self.clock]

    def delay(self, later_ps: int) -> None:
        """Everything so far takes that much longer."""
        self.clock = [t + later_ps for t in self.clock]
        self.done = [t + later_ps for t in self.done]

    @property
    def end_ps(self) -> int:
        """When everything has finished."""
        return max(*self.clock, *self.done)

    @property
    def recorded_ps(self) -> int:
        """Time in which a recorded instruction is busy."""
        return _union(self.intervals) + self.folded_ps

    def run(self, body: Body) -> None:
        """Issue every instruction of `body` in program order."""
        clock, done, tokens, began = self.clock, self.done, self.tokens, self.began
        for item in body:
            if isinstance(item, TimedLoop):
                self._enter(item)
                continue
            queue, interval, latency, waits, signals, recorded, borders = item
            start = clock[queue]
            for border in borders:
                start = max(start, self.borders[border])
            for semaphore in waits:
                ready = tokens[semaphore].popleft()
                if ready > start:
                    start = ready
            if queue not in began:
                began[queue] = start
            clock[queue] = end = start + interval
            finished = max(done[queue], end + latency)
            done[queue] = finished
            for semaphore in signals:
                tokens[semaphore].append(finished)
            if recorded:
                self.intervals.append((start, end))

    def _enter(self, loop: TimedLoop) -> None:
        """Evaluate a loop, or repeat what it did from the same relative state."""
        if loop.trip == 1 or not loop.queues:
            self.run(loop.body)
            return
        mark = self._mark(loop)
        key = (id(loop), *mark.shape())
        known = self.known.get(key)
        if known is not None:
            self._repeat(loop, mark.base_ps, known)
            return
        self._loop(loop, mark)
        intervals = merged(self.intervals[mark.num_intervals :])
        self.intervals[mark.num_intervals :] = intervals
        moved = tuple([(a - mark.base_ps, b - mark.base_ps) for a, b in intervals])
        after = self._mark(loop)
        after = after._replace(base_ps=after.base_ps - mark.base_ps)
        self.known[key] = _Outcome(after, moved, self.folded_ps - mark.folded_ps)

    def _repeat(self, loop: TimedLoop, base_ps: int, known: _Outcome) -> None:
        """Leave the state that `known` left, moved to start at `base_ps`."""
        at = base_ps + known.after.base_ps
        clocks = iter(known.after.clocks)
        for queue in loop.queues:
            self.clock[queue] = at + next(clocks)
            self.done[queue] = at + next(clocks)
        for semaphore, times in zip(loop.semaphores, known.after.tokens, strict=True):
            self.tokens[semaphore] = deque([at + t for t in times])
        self.intervals += [(base_ps + a, base_ps + b) for a, b in known.intervals]
        self.folded_ps += known.folded_ps

    def _loop(self, loop: TimedLoop, mark: _Mark) -> None:
        """Every iteration, until it is periodic; `mark` is the state before the first."""
        history: list[_Mark] = []
        for turn in range(loop.trip):
            history.append(self._mark(loop) if turn else mark)
            period = _period(history)
            if period and loop.trip - turn >= period:
                repeats, rest = divmod(loop.trip - turn, period)
                self._advance(loop, history[-1 - period], history[-1], repeats)
                for _ in range(rest):
                    self.run(loop.body)
                return
            self.run(loop.body)

    def _mark(self, loop: TimedLoop) -> _Mark:
        clock, done, tokens = self.clock, self.done, self.tokens
        base = clock[loop.queues[0]]
        return _Mark(
            base,
            tuple([t - base for q in loop.queues for t in (clock[q], done[q])]),
            tuple([tuple([t - base for t in tokens[s]]) for s in loop.semaphores]),
            tuple([max(0, self.borders[b] - clock[q]) for q, b in loop.borders]),
            len(self.intervals),
            self.folded_ps,
        )

    def _advance(self, loop: TimedLoop, before: _Mark, now: _Mark, repeats: int) -> None:
        """Repeat the last period `repeats` times: everything the loop touches moves by `repeats *
        shift`."""
        shift = now.base_ps - before.base_ps
        explicit = _wrapped_union(self.intervals[before.num_intervals :], shift)
        inner = self.folded_ps - before.folded_ps
        self.folded_ps += repeats * min(shift, explicit + inner)
        moved = repeats * shift
        for queue in loop.queues:
            self.clock[queue] += moved
            self.done[queue] += moved
        for semaphore in loop.semaphores:
            self.tokens[semaphore] = deque([t + moved for t in self.tokens[semaphore]])


def _period(history: Sequence[_Mark]) -> int:
    """Iterations over which the whole state moved by one amount, else 0."""
    now = history[-1].shape()
    for period in _PERIODS:
        if len(history) > period and history[-1 - period].shape() == now:
            return period
    return 0


def merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same points as intervals that do not touch, in order."""
    found: list[tuple[int, int]] = []
    first = reach = -1
    for start, end in sorted(intervals):
        if start > reach:
            if reach > first:
                found.append((first, reach))
            first, reach = start, end
        elif end > reach:
            reach = end
    if reach > first:
        found.append((first, reach))
    return found


def _union(intervals: Sequence[tuple[int, int]]) -> int:
    """Length of the union."""
    return sum([end - start for start, end in merged(intervals)])


def _wrapped_union(intervals: Sequence[tuple[int, int]], period: int) -> int:
    """Length of the union of one period of a periodic pattern: intervals wrap around."""
    if period <= 0:
        return 0
    pieces = []
    for start, end in intervals:
        if end - start >= period:
            return period
        low, high = start % period, start % period + end - start
        pieces.append((low, min(high, period)))
        if high > period:
            pieces.append((0, high - period))
    return _union(pieces)
