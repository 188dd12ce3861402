"""Perfetto traces (Chrome trace event JSON): one process per class of ranks, one track per core
lane and stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim_cluster.actors import ClassResult, Span
from sim_cluster.classes import RankClasses

PS_PER_US = 10**6


def trace_events(results: Sequence[ClassResult], classes: RankClasses) -> list[dict[str, Any]]:
    """Complete events in microseconds, with names for processes and tracks."""
    events: list[dict[str, Any]] = []
    for index, result in enumerate(results):
        ranks = len(classes.ranks(index))
        name = f"rank {classes.representative(index)} (stands for {ranks} ranks)"
        events.append(_metadata("process_name", index, 0, name))
        lanes = sorted({span.lane for span in result.spans})
        for track, lane in enumerate(lanes):
            events.append(_metadata("thread_name", index, track, lane))
        events += [_complete(span, index, lanes.index(span.lane)) for span in result.spans]
    return events


def _complete(span: Span, process: int, track: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": span.lane,
        "ph": "X",
        "ts": span.start_ps / PS_PER_US,
        "dur": (span.end_ps - span.start_ps) / PS_PER_US,
        "pid": process,
        "tid": track,
    }


def _metadata(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def write_trace(path: Path, results: Sequence[ClassResult], classes: RankClasses) -> None:
    """Write a file that ui.perfetto.dev and chrome://tracing open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ns", "traceEvents": trace_events(results, classes)}
    path.write_text(json.dumps(data))
