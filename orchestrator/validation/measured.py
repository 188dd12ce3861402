"""Published kernels and collectives, as `validate` predicts them.

A kernel is compiled for one core from the JAX function it computes and timed by the evaluator; a
collective is priced by the network model (`published_collectives.py`). Rows that the model has no
answer for are reported with the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.validation.kernel_times import kernel_of, kernel_seconds
from shardwright.orchestrator.validation.published_collectives import predict_row, reason_of
from shardwright.orchestrator.validation.published_columns import (
    machines_named,
    positive,
    read_table,
)
from shardwright.sim_cluster.profiles import under_profile

NOMINAL = "nominal"
LARGE_BYTES, SMALL_BYTES = 1 << 20, 64 << 10

Row = Mapping[str, str]


def kernels(path: Path) -> Facts:
    """The report on the kernels of a CSV file with the columns id, group, kernel, shape, dtype,
    target, latency_us. Raises UsageError for a file that cannot be read or lacks one."""
    columns = ("id", "group", "kernel", "shape", "dtype", "target", "latency_us")
    out = [_kernel(row) for _, row in read_table(path, columns)]
    return {"rows": out, **_medians(out)}


def _kernel(row: Row) -> Facts:
    named = {k: row[k] for k in ("id", "group", "kernel", "shape", "dtype")}
    try:
        published = positive(row["latency_us"], "latency_us")
        named_targets = machines_named(row["target"])
        if not named_targets:
            raise ValueError(f"target requires a known machine, got {row['target']!r}")
        target = logical(load_target(named_targets[0]), 1)  # of several, the first
        kernel = kernel_of(row)
        predicted = kernel_seconds(kernel, under_profile(target, NOMINAL)) * 1e6
    except (ValueError, DiagnosticError) as error:
        return named | {"predicted_us": None, "error": None, "reason": reason_of(error)}
    return named | {
        "target": target.name,
        "predicted_us": predicted,
        "published_us": published,
        "error": predicted / published - 1,
    }


def collectives(path: Path) -> Facts:
    """The report on the collectives of a CSV file with the columns id, group, op, ranks, nodes,
    instance, dtype, size_bytes, time_us. Raises UsageError as `kernels`."""
    columns = ("op", "ranks", "nodes", "instance", "dtype", "size_bytes", "time_us")
    out = [_collective(row) for _, row in read_table(path, ("id", "group", *columns))]
    made = [r for r in out if r["error"] is not None]
    large = [r["error"] for r in made if r["size_bytes"] >= LARGE_BYTES]
    small = [r["error"] for r in made if r["size_bytes"] < SMALL_BYTES]
    factors = [max(1 + e, 1 / (1 + e)) for e in small]
    return {
        "rows": out,
        **_medians(out),
        "large_median_error": spread(large)["median_error"],
        "small_median_factor": statistics.median(factors) if factors else None,
    }


def _collective(row: Row) -> Facts:
    named: dict[str, Any] = {k: row[k] for k in ("id", "group", "op", "instance")}
    made = predict_row(row, NOMINAL)
    if made.found is None or made.time is None:
        return named | {"predicted_us": None, "error": None, "reason": made.reason}
    return named | {
        "target": made.found.target,
        "assumed": made.found.assumed,
        "runtime": made.found.runtime.name,
        "size_bytes": made.found.size_bytes,
        "predicted_us": made.predicted_us,
        "published_us": made.found.time_us,
        "error": made.error,
        "algorithm": made.time.algorithm,
        "why": made.time.why,
    }


def _medians(rows: Sequence[Facts]) -> Facts:
    errors = [r["error"] for r in rows if r["error"] is not None]
    return {**spread(errors), "refused": len(rows) - len(errors)}


def spread(errors: Iterable[float], of: str = "") -> Facts:
    """Median and largest of absolute errors, by names that begin with `of`; None without any."""
    sizes = list(map(abs, errors))
    median = statistics.median(sizes) if sizes else None
    return {f"{of}median_error": median, f"{of}max_error": max(sizes, default=None)}
