"""Perfetto traces (Chrome trace event JSON): one process per class of ranks; in it a track for
programs, the core, every engine and DMA queue, every collective stream, and messages.

Times are microseconds, and exact picoseconds in `args`. The core track is what the breakdown sums:
code, and waits with what they are charged to. The evaluator knows how long an engine is busy in a
kernel, not when, so that each kernel shows it as one slice at its start. ui.perfetto.dev and
chrome://tracing open the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.isa.program import Engine
from shardwright.compiler.machine.target import PS_PER_US
from shardwright.sim_cluster.timing.actors import ClassResult, CollectiveUse, Ran, Span
from shardwright.sim_cluster.timing.faults import ranges
from shardwright.sim_cluster.timing.step_time import Replayed


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval on a track."""

    name: str
    start_ps: int
    end_ps: int
    args: Mapping[str, Any]


def trace_events(timing: Replayed) -> list[dict[str, Any]]:
    """Complete events, with names and order for processes and tracks."""
    events: list[dict[str, Any]] = []
    for index, result in enumerate(timing.results):
        events.append(_metadata("process_name", index, 0, {"name": _process(timing, index)}))
        events.append(_metadata("process_sort_index", index, 0, {"sort_index": index}))
        number = 0
        for name, slices in lanes(result, timing.lnc):
            for part, track in enumerate(_tracks_of(slices)):
                shown = name if part == 0 else f"{name} ({part + 1})"
                events.append(_metadata("thread_name", index, number, {"name": shown}))
                events.append(_metadata("thread_sort_index", index, number, {"sort_index": number}))
                events += [_complete(name, piece, index, number) for piece in track]
                number += 1
    return events


def _process(timing: Replayed, index: int) -> str:
    ranks = timing.classes.ranks(index)
    text = f"rank {ranges(ranks)}" if len(ranks) <= 2 else f"{len(ranks)} ranks like {ranks[0]}"
    return text if len(timing.stages_ps) == 1 else f"stage {timing.stage_of[index]}: {text}"


def lanes(result: ClassResult, lnc: int) -> Iterator[tuple[str, list[Slice]]]:
    """The tracks of a class by name, in the order they are shown."""
    by_lane: dict[str, list[Slice]] = {}
    for span in result.spans:
        by_lane.setdefault(span.lane, []).append(
            _of_span(span, result.uses.get(span.call) if span.call else None)
        )
    yield from ((name, by_lane.pop(name)) for name in ("program", "core") if name in by_lane)
    for engine in (queue.value for queue in Engine):
        for core in range(lnc):
            slices = [s for ran in result.ran for s in _busy(ran, engine, core, lnc)]
            if slices:
                yield engine if lnc == 1 else f"{engine} of physical core {core}", slices
    yield from sorted(by_lane.items(), key=lambda lane: (lane[0] == "messages", lane[0]))


def _of_span(span: Span, use: CollectiveUse | None) -> Slice:
    args: dict[str, Any] = {"ps": span.end_ps - span.start_ps}
    if span.charged_ps:
        args["charged_ps"] = dict(span.charged_ps)
    if use is not None:
        cost = use.cost
        args |= {
            "kind": use.call.kind,
            "axes": "_".join(use.call.axes),
            "bytes": cost.size_bytes,
            "ranks": cost.group_size,
            "algorithm": cost.algorithm,
            "why": cost.why,
        }
    return Slice(span.name, span.start_ps, span.end_ps, args)


def _busy(ran: Ran, engine: str, core: int, lnc: int) -> Iterator[Slice]:
    """What an engine of a physical core does in the kernels of a stretch. Busy times are sums over
    physical cores, which do the same side by side; a kernel is as much longer as its stretch is.
    What does not fit into the time that a kernel adds began in that of the kernels before."""
    kernels = ran.stretch.segment.kernels
    whole = sum(kernel.duration_ps for kernel in kernels)
    passed, start, free = 0, ran.start_ps, ran.start_ps
    for kernel in kernels:
        passed += kernel.duration_ps
        end = ran.start_ps + (ran.end_ps - ran.start_ps) * passed // max(whole, 1)
        total = kernel.busy_ps.get(engine, 0)
        busy = total * (core + 1) // lnc - total * core // lnc
        if busy:
            begun = max(free, min(start, end - busy))
            free = min(end, begun + busy)
            yield Slice(kernel.name, begun, free, {"busy_ps": busy})
        start = end


def _tracks_of(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices on as many tracks as they need so that none overlap; viewers show no others."""
    tracks: list[list[Slice]] = []
    for piece in sorted(slices, key=lambda s: (s.start_ps, s.end_ps)):
        free = next((t for t in tracks if t[-1].end_ps <= piece.start_ps), None)
        if free is None:
            tracks.append(free := [])
        free.append(piece)
    return tracks


def _complete(lane: str, piece: Slice, process: int, track: int) -> dict[str, Any]:
    return {
        "name": piece.name,
        "cat": lane,
        "ph": "X",
        "ts": piece.start_ps / PS_PER_US,
        "dur": (piece.end_ps - piece.start_ps) / PS_PER_US,
        "pid": process,
        "tid": track,
        "args": dict(piece.args),
    }


def _metadata(kind: str, process: int, track: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": dict(args)}


def trace_json(timing: Replayed) -> bytes:
    """The trace of a step, the content of a file."""
    data = {
        "displayTimeUnit": "ns",
        "otherData": {"profile": timing.profile, "step_time_ps": timing.step_time_ps},
        "traceEvents": trace_events(timing),
    }
    return json.dumps(data, separators=(",", ":")).encode()
