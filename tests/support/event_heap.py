"""Oracle of the evaluator: engines as processes on an event heap, every loop expanded, nothing
folded."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from compiler.max_plus import ENGINES, Body, Timed, TimedLoop


def expand(body: Body, queue: int) -> Iterator[Timed]:
    """The instruction stream of one queue."""
    for item in body:
        if isinstance(item, TimedLoop):
            for _ in range(item.trip):
                yield from expand(item.body, queue)
        elif item.queue == queue:
            yield item


def end_time(body: Body, tokens: Sequence[int]) -> int:
    """When the last instruction has finished, by discrete events."""
    streams = {q: expand(body, q) for q in range(len(ENGINES))}
    head = {q: next(s, None) for q, s in streams.items()}
    free = dict.fromkeys(streams, 0)
    done = dict.fromkeys(streams, 0)
    count = list(tokens)
    events: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    sequence = 0
    last = 0
    while events:
        now, _, signals = heapq.heappop(events)
        for semaphore in signals:
            count[semaphore] += 1
        progress = True
        while progress:
            progress = False
            for queue, instr in head.items():
                if instr is None or free[queue] > now:
                    continue
                need = {s: instr.waits.count(s) for s in instr.waits}
                if any(count[s] < n for s, n in need.items()):
                    continue
                for s, n in need.items():
                    count[s] -= n
                free[queue] = now + instr.interval_ps
                done[queue] = max(done[queue], free[queue] + instr.latency_ps)
                last = max(last, done[queue])
                sequence += 2
                heapq.heappush(events, (free[queue], sequence, ()))
                heapq.heappush(events, (done[queue], sequence + 1, instr.signals))
                head[queue] = next(streams[queue], None)
                progress = True
    stuck = [ENGINES[q] for q, instr in head.items() if instr is not None]
    assert not stuck, f"deadlock on {stuck}"
    return last
