"""Oracle of the evaluator: engines as processes on an event heap, every loop expanded, nothing
folded."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from compiler.evaluate import _Timed, _TimedLoop
from compiler.isa.program import Engine


def expand(body: Sequence[_Timed | _TimedLoop], engine: Engine) -> Iterator[_Timed]:
    """The instruction stream of one engine."""
    for item in body:
        if isinstance(item, _TimedLoop):
            for _ in range(item.trip):
                yield from expand(item.body, engine)
        elif item.engine is engine:
            yield item


def end_time(body: Sequence[_Timed | _TimedLoop], tokens: Sequence[int]) -> int:
    """When the last instruction has finished, by discrete events."""
    streams = {e: expand(body, e) for e in Engine}
    head = {e: next(s, None) for e, s in streams.items()}
    free = dict.fromkeys(Engine, 0)
    done = dict.fromkeys(Engine, 0)
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
            for engine, instr in head.items():
                if instr is None or free[engine] > now:
                    continue
                need = {s: instr.waits.count(s) for s in instr.waits}
                if any(count[s] < n for s, n in need.items()):
                    continue
                for s, n in need.items():
                    count[s] -= n
                free[engine] = now + instr.interval_ps
                done[engine] = max(done[engine], free[engine] + instr.latency_ps)
                last = max(last, done[engine])
                sequence += 2
                heapq.heappush(events, (free[engine], sequence, ()))
                heapq.heappush(events, (done[engine], sequence + 1, instr.signals))
                head[engine] = next(streams[engine], None)
                progress = True
    stuck = [e for e, instr in head.items() if instr is not None]
    assert not stuck, f"deadlock on {stuck}"
    return last
