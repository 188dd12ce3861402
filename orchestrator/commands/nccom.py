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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.timing.times import CollectiveTime, bus_bytes_per_s
from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.compiler.shown import charts
from shardwright.orchestrator.commands.nccom_asked import CHECKS, Request, hosts_of, sizes, what_if
from shardwright.orchestrator.commands.nccom_values import Checked, check
from shardwright.orchestrator.config.arguments import asked_of, known_word
from shardwright.orchestrator.terminal import outputs, text_plots
from shardwright.orchestrator.terminal.terminal import say, say_json
from shardwright.orchestrator.validation.published_collectives import ELEMENT_BYTES
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
SIZES = ("total_input_size(B)", "total_output_size(B)")
"""Columns of `--show-input-output-size`, behind the count."""
_STATISTIC = re.compile(r"avg|min|max|p(\d{1,2}|100)")


def _as_record(checked: Checked) -> dict[str, Any]:
    """A check with its outcome."""
    return asdict(checked) | {"passed": checked.passed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size: the time and, for the record, the band over profiles and the reason."""

    size_bytes: int
    dtype: str
    ranks: int
    kind: CollectiveKind
    time: CollectiveTime
    band_us: tuple[float, float]
    iterations: tuple[int, int] = (20, 5)
    checked: Checked | None = None

    def statistic(self, name: str) -> float:
        """Microseconds: `avg`, `min`, `max` or a percentile of the measured iterations, which a
        simulation takes to be alike."""
        times = [self.time_us] * self.iterations[0]
        if name == "avg":
            return statistics.fmean(times)
        rank = {"min": 0, "max": 100}[name] if name in ("min", "max") else int(name[1:])
        return float(np.percentile(times, rank))

    @property
    def in_out_bytes(self) -> tuple[int, int]:
        """Source and target of one rank."""
        part = -(-self.size_bytes // self.ranks)
        gathers = self.kind is CollectiveKind.ALL_GATHER
        scatters = self.kind is CollectiveKind.REDUCE_SCATTER
        return part if gathers else self.size_bytes, part if scatters else self.size_bytes

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
            "time:min(us)": self.statistic("min"),
            "time:max(us)": self.statistic("max"),
            **dict(zip(SIZES, self.in_out_bytes, strict=True)),
            **({"check": _as_record(self.checked)} if self.checked else {}),
        }


def points(request: Request) -> list[Point]:
    """Every size asked for. Raises UsageError for what is not understood or does not fit."""
    kind, element_bytes = request.kind, request.element_bytes
    iterations = request.iterations
    asked = what_if(request)
    ranks = asked.replica_groups().size
    found = []
    for size in sizes(request, ranks):
        of = {n: asked.time(size, element_bytes, n) for n in PROFILES}
        times = [time.total_ps / 1e6 for time in of.values()]
        found.append(
            Point(
                size_bytes=size,
                dtype=request.datatype,
                ranks=ranks,
                kind=kind,
                time=of[request.profile],
                band_us=(min(times), max(times)),
                iterations=iterations,
                checked=_checked(request, asked, size),
            )
        )
    return found


def _checked(request: Request, asked: WhatIf, size: int) -> Checked | None:
    """What `--check` finds for a size."""
    if not request.check:
        return None
    mode = known_word(request.check, CHECKS, "--check")
    return check(asked, size, request.datatype, mode, request.seed, Path.cwd())


def table(found: Sequence[Point], stats: Sequence[str] = ("avg",), sized: bool = False) -> str:
    """The tool's table, with a column of time for every statistic, and those of sizes."""
    rows = [_columns(COLUMNS, [f"time:{name}(us)" for name in stats], SIZES if sized else ())]
    for p in found:
        times = [round(p.statistic(name), 2) for name in stats]
        cells = _columns(p.cells(), times, p.in_out_bytes if sized else ())
        rows.append([_text(cell) for cell in cells])
    lines = charts.table(rows, right=range(len(rows[0])))
    return "\n".join([*lines, f"Avg bus bandwidth: {_average(found):.4f}GB/s"])


def _columns(cells: Sequence[Any], times: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
    """The columns with others for the time, and with sizes behind the count."""
    return [*cells[:2], *sizes, cells[2], *times, *cells[4:]]


def statistics_of(request: Request) -> tuple[str, ...]:
    """The statistics asked for. Raises UsageError for one that is none."""
    names = tuple(request.stats) or ("avg",)
    for name in names:
        if not _STATISTIC.fullmatch(name):
            raise UsageError(
                "SW_USAGE", f"--stats requires avg, min, max or p0 to p100, got {name}"
            )
    return names


def _average(found: Sequence[Point]) -> float:
    return statistics.fmean(point.busbw_gib_s for point in found)


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def report(request: Request, found: Sequence[Point]) -> dict[str, Any]:
    """What `--json` and `--report-to-json-file` hold; `results` has the tool's columns."""
    return {
        "is_simulation": True,
        "op": request.kind.value,
        "target": request.target,
        "ranks": request.nworkers,
        "nodes": request.nnodes,
        "hosts": hosts_of(request),
        "iterations": found[0].iterations[0],
        "warmup_iterations": found[0].iterations[1],
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


def run(args: argparse.Namespace) -> int:
    """Print the table and write what else is asked for; 1 where values are not those of NumPy."""
    request = asked_of(Request, args)
    stats, found = statistics_of(request), points(request)
    data = report(request, found)
    if args.report_to_json_file:
        file = Path(args.report_to_json_file)
        outputs.write(file, json.dumps(data, indent=1) + "\n", "--report-to-json-file")
    if args.csv:
        write_csv(Path(args.csv), found)
    code = _tell_checks(found, to_stderr=args.json)
    if args.json:
        say_json(data)
        return code
    say(table(found, stats, args.show_input_output_size))
    if args.explain:
        for point in found:
            say(f"{point.size_bytes}: {point.time.why}")
    if args.plot:
        say(plot(found))
    _tell_far(request)
    return code


def _tell_far(request: Request) -> None:
    """Name the pairs of a permute that are no neighbours."""
    far = what_if(request).far_pairs()
    if far:
        pair, links = max(far.items(), key=lambda one: one[1])
        say(
            f"warning: pairs that no link joins: {len(far)}, {list(pair)} crosses {links}; the"
            " vendor's page requires a ring over physical links; they are timed over their routes",
            err=True,
        )


def _tell_checks(found: Sequence[Point], to_stderr: bool) -> int:
    """Say what became of `--check`; 1 if a check failed."""
    checks = [point.checked for point in found if point.checked]
    failed = [c for c in checks if not c.passed]
    for one in failed:
        say(
            f"check {one.mode} (seed {one.seed}) of {one.size_bytes} B failed: off by"
            f" {one.error:.2e}, bound {one.bound:.2e}; input, output and golden: {one.saved}",
            err=True,
        )
    if checks and not failed:
        one = checks[0]
        sizes = ", ".join(str(size) for size in dict.fromkeys(c.size_bytes for c in checks))
        say(
            f"check {one.mode} (seed {one.seed}) passed: values of {one.ranks} ranks at {sizes} B",
            err=to_stderr,
        )
    return 1 if failed else 0
