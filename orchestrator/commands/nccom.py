"""`shardwright nccom`: what a collective would take on a machine, in the terms of nccom-test.

Arguments, sizes and columns are that tool's (bandwidths in GiB/s under its heading GB/s); machine,
profile, runtime and thresholds are ours. No job, model or compiler takes part: the network model
answers alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.timing.runtimes import runtime_named
from shardwright.collectives.timing.times import CollectiveTime, bus_bytes_per_s
from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import PS_PER_S, load_target, logical
from shardwright.compiler.shown import charts
from shardwright.orchestrator.config.arguments import asked_of, known_word
from shardwright.orchestrator.config.collective_settings import parse_bytes, settings
from shardwright.orchestrator.terminal import outputs, text_plots
from shardwright.orchestrator.terminal.terminal import say, say_json
from shardwright.orchestrator.validation.published_collectives import ELEMENT_BYTES, KINDS
from shardwright.sim_cluster.network.what_if import WhatIf
from shardwright.sim_cluster.profiles import PROFILES

GIB = 2**30
TOOL_NAMES = {
    "hierarchical": "hier",
    "grouped_mesh": "mesh",
    "single_step_mesh": "mesh",
    "flat_ring": "ring",
    "pairwise": "mesh",
}
"""Our algorithms under the names of the tool; the others are called alike."""
COLUMNS = (
    "size(B)", "count(elems)", "type", "time:avg(us)", "algbw(GB/s)", "busbw(GB/s)", "algorithm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for, as given, by the names of its flags."""

    op: str
    target: str
    lnc: int
    nworkers: int
    nnodes: int
    minbytes: str
    maxbytes: str
    stepbytes: str
    stepfactor: str
    datatype: str
    profile: str
    runtime: str
    set: Sequence[str]
    custom_replica_groups: str
    custom_src_target_pairs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size: the time and, for the record, the band over profiles and the reason."""

    size_bytes: int
    dtype: str
    ranks: int
    kind: CollectiveKind
    time: CollectiveTime
    band_us: tuple[float, float]

    @property
    def time_us(self) -> float:
        """Microseconds."""
        return self.time.total_ps / 1e6

    @property
    def algbw_gib_s(self) -> float:
        """Size over time."""
        return self.size_bytes * PS_PER_S / max(1, self.time.total_ps) / GIB

    @property
    def busbw_gib_s(self) -> float:
        """Bandwidth per data line, independent of the number of ranks."""
        time = max(1, self.time.total_ps)
        return bus_bytes_per_s(self.kind, self.ranks, self.size_bytes, time) / GIB

    def cells(self) -> tuple[int, int, str, float, float, float, str]:
        """The columns of the tool."""
        count = self.size_bytes // ELEMENT_BYTES[self.dtype]
        name = TOOL_NAMES.get(self.time.algorithm, self.time.algorithm)
        figures = (round(self.time_us, 2), round(self.algbw_gib_s, 4), round(self.busbw_gib_s, 4))
        return (self.size_bytes, count, self.dtype, *figures, name)

    def record(self) -> dict[str, Any]:
        """The columns by name, and what stands behind them."""
        time = self.time
        return dict(zip(COLUMNS, self.cells(), strict=True)) | {
            "schedule": time.algorithm,
            "why": time.why,
            "bound": time.bound,
            "launch_us": time.launch_ps / 1e6,
            "latency_us": time.latency_ps / 1e6,
            "transfer_us": time.transfer_ps / 1e6,
            "band_us": list(self.band_us),
        }


def points(request: Request) -> list[Point]:
    """Every size asked for. Raises UsageError for what is not understood or does not fit."""
    kind = KINDS[known_word(request.op, KINDS, "nccom")]
    dtype = known_word(request.datatype, ELEMENT_BYTES, "--datatype")
    what_if = _what_if(request, kind)
    groups = what_if.replica_groups()
    found = []
    for size in sizes(request):
        of = {n: what_if.time(size, ELEMENT_BYTES[dtype], n) for n in PROFILES}
        times = [time.total_ps / 1e6 for time in of.values()]
        found.append(
            Point(
                size_bytes=size,
                dtype=dtype,
                ranks=groups.size,
                kind=kind,
                time=of[request.profile],
                band_us=(min(times), max(times)),
            )
        )
    return found


def _what_if(request: Request, kind: CollectiveKind) -> WhatIf:
    try:
        runtime = runtime_named(request.runtime)
    except CollectiveError as error:
        raise UsageError("SW_USAGE", f"--runtime: {error}") from error
    groups = _lists(request.custom_replica_groups, "--custom-replica-groups", "replica_groups")
    pairs = _lists(request.custom_src_target_pairs, "--custom-src-target-pairs", "src_target_pairs")
    if pairs and any(len(pair) != 2 for pair in pairs):
        raise UsageError("SW_USAGE", f"--custom-src-target-pairs requires pairs, got {pairs}")
    if request.op == "sendrecv" and not pairs:
        pairs = tuple((rank, rank + 1) for rank in range(request.nworkers - 1))
    return WhatIf(
        target=logical(load_target(request.target), request.lnc, key="--lnc"),
        kind=kind,
        ranks=request.nworkers,
        instances=request.nnodes,
        groups=groups,
        pairs=tuple((source, target) for source, target in pairs),
        runtime=runtime,
        settings=settings(request.set, "--set"),
    )


def sizes(request: Request) -> list[int]:
    """Sizes from the smallest to the largest, by factor or by step.

    Raises UsageError for a range that is empty or does not grow.
    """
    first = parse_bytes(request.minbytes, "--minbytes")
    last = parse_bytes(request.maxbytes or request.minbytes, "--maxbytes")
    if first > last:
        raise UsageError("SW_USAGE", f"--maxbytes requires at least {first}, got {last}")
    return list(_series(first, last, request))


def _series(first: int, last: int, request: Request) -> Iterator[int]:
    factor = float(request.stepfactor) if _is_number(request.stepfactor) else 0.0
    if request.stepfactor and factor <= 1:
        raise UsageError("SW_USAGE", f"--stepfactor requires above 1, got {request.stepfactor}")
    given = request.stepbytes
    step = parse_bytes(given, "--stepbytes") if given else max(1, (last - first) // 10)
    size = first
    while size <= last:
        yield size
        size = max(size + 1, int(size * factor)) if factor else size + step


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+)?", text))


def _lists(text: str, flag: str, key: str) -> tuple[tuple[int, ...], ...]:
    """Lists of ranks, as JSON or in a JSON file, bare or under the tool's key."""
    if not text:
        return ()
    path = Path(text)
    try:
        data = json.loads(text if text.lstrip()[:1] in "[{" else path.read_text())
        lists = data[key] if isinstance(data, Mapping) else data
        return tuple(tuple(int(rank) for rank in each) for each in lists)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            "SW_USAGE",
            f"{flag} requires a JSON list of lists of ranks, or a file of one, got {text!r}",
            hint=f'for example {{"{key}": [[0, 1], [2, 3]]}}',
        ) from error


def table(found: Sequence[Point]) -> str:
    """The tool's table."""
    rows = [COLUMNS, *(tuple(map(_text, point.cells())) for point in found)]
    lines = charts.table(rows, right=range(len(COLUMNS)))
    return "\n".join([*lines, f"Avg bus bandwidth: {_average(found):.4f}GB/s"])


def _average(found: Sequence[Point]) -> float:
    return statistics.fmean(point.busbw_gib_s for point in found)


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def report(request: Request, found: Sequence[Point]) -> dict[str, Any]:
    """What `--json` and `--report-to-json-file` hold; `results` has the tool's columns."""
    return {
        "is_simulation": True,
        "op": KINDS[request.op].value,
        "target": request.target,
        "ranks": request.nworkers,
        "nodes": request.nnodes,
        "profile": request.profile,
        "runtime": request.runtime,
        "results": [point.record() for point in found],
        "avg_busbw": _average(found),
    }


def write_csv(path: Path, found: Sequence[Point]) -> None:
    """The columns as CSV, with the reason and the band."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*COLUMNS, "schedule", "band_low_us", "band_high_us", "why"])
    for p in found:
        writer.writerow([*p.cells(), p.time.algorithm, *p.band_us, p.time.why])
    outputs.write(path, text.getvalue(), "--csv")


def plot(found: Sequence[Point]) -> str:
    """Time over size with the band of the profiles, as text, both axes logarithmic."""
    x = [point.size_bytes for point in found]
    series = {
        "band low": (x, [point.band_us[0] for point in found]),
        "band high": (x, [point.band_us[1] for point in found]),
        "time": (x, [point.time_us for point in found]),
    }
    return text_plots.lines(series, "bytes", "us", 100, 21, log="xy").plain


def run(args: argparse.Namespace, ignored: Sequence[str]) -> int:
    """Print the table and write what else is asked for; `ignored` flags were given in vain."""
    request = asked_of(Request, args)
    found = points(request)
    data = report(request, found)
    if args.report_to_json_file:
        file = Path(args.report_to_json_file)
        outputs.write(file, json.dumps(data, indent=1) + "\n", "--report-to-json-file")
    if args.csv:
        write_csv(Path(args.csv), found)
    if args.json:
        say_json(data)
        return 0
    say(table(found))
    if args.explain:
        for point in found:
            say(f"{point.size_bytes}: {point.time.why}")
    if args.plot:
        say(plot(found))
    if ignored:
        say(f"note: {', '.join(ignored)} change nothing in a simulation", err=True)
    return 0
