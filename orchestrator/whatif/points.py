"""The points of a sweep: a grid over keys of the job, a list from a file, or the product of both.

Every point is a whole job, read and checked as the job itself is, before anything starts.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.support.documents import parse_json, read_text
from shardwright.orchestrator.config.config import JobConfig, Keys
from shardwright.orchestrator.config.job_flags import changed_keys
from shardwright.orchestrator.road.plan_cache import NOT_IN_KEY
from shardwright.orchestrator.whatif.rows import Values


@dataclass(frozen=True, slots=True)
class Point:
    """What it sets, and the job that results."""

    values: Values
    job: JobConfig


def points(
    varied: Sequence[str], listed: Path | None, job: Callable[[Keys], JobConfig]
) -> list[Point]:
    """The points of `--vary` arguments and of a file; `job` makes a job of changed keys.

    Raises UsageError for what is not understood, and for a sweep over nothing.
    """
    axes = _axes(varied)
    rows = read_list(listed) if listed else [{}]
    if not (axes or listed):
        raise UsageError(
            "SW_USAGE",
            "sweep requires --vary or --points, got neither",
            hint="for example --vary strategy.remat=none,selective,full",
        )
    twice = sorted(axes.keys() & set(itertools.chain.from_iterable(rows)))
    if twice:
        raise UsageError("SW_USAGE", f"{twice[0]} requires one source, got --vary and {listed}")
    grid = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]
    found = [row | cell for row in rows for cell in grid]
    return [Point(values, job(_keys(values))) for values in found]


def _keys(values: Values) -> Keys:
    """The keys that a point changes. Raises UsageError for those that no answer depends on, and for
    one key under two names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        keys = changed_keys(name, value)
        # A whole mesh leaves axes open (0), and a model the other ways to name one.
        if twice := next((key for key in keys if found.get(key)), ""):
            raise UsageError(
                "SW_USAGE", f"a point requires one value of {twice}, {name}={value} is another"
            )
        found |= keys
    idle = next((key for key in found if key.partition(".")[0] in NOT_IN_KEY), "")
    if idle:
        raise UsageError(
            "SW_USAGE",
            f"a sweep requires keys that plans depend on, got {idle}",
            hint=f"give {idle} to the whole sweep, for example with --set",
        )
    return found


def _axes(varied: Sequence[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for text in varied:
        name, equals, values = text.partition("=")
        name = name.strip()
        # A value may have commas of its own: a mesh, the axes of a placement.
        found = [value.strip() for value in values.split(";" if ";" in values else ",")]
        found = [value for value in found if value or len(found) == 1]
        if not (name and equals) or name in axes:
            raise UsageError(
                "SW_USAGE",
                f"--vary requires KEY=VALUE,VALUE,... once per key, got {text!r}",
                hint="put semicolons between values with commas:"
                " --vary 'mesh=tp=8;dp_shard=4,tp=2'",
            )
        axes[name] = list(dict.fromkeys(found))
    return axes


def read_list(path: Path) -> list[dict[str, str]]:
    """The rows of a list of points: CSV with names of keys in its first line, where an empty cell
    leaves the job's own value, or JSON lines, where null does.

    Raises UsageError.
    """
    try:
        text = read_text(path, named_by_user=True)
    except (OSError, ValueError) as error:
        raise UsageError("SW_USAGE", f"--points cannot read {path}: {error}") from error
    rows = list(
        _json_rows(path, text) if path.suffix in (".jsonl", ".json") else _csv_rows(path, text)
    )
    if not any(rows):
        raise UsageError("SW_USAGE", f"--points requires rows with keys of the job, got {path}")
    return rows


def _csv_rows(path: Path, text: str) -> Iterator[dict[str, str]]:
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    for row in rows:
        if None in row:  # cells without a name
            raise UsageError(
                "SW_USAGE",
                f"{path}:{rows.line_num}: requires {len(rows.fieldnames or ())} cells, got more",
                hint='put quotes around a value with commas: "dp_shard=4,tp=8"',
            )
        yield {name.strip(): value.strip() for name, value in row.items() if name and value}


def _json_rows(path: Path, text: str) -> Iterator[dict[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UsageError("SW_USAGE", f"{path}:{number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(
                "SW_USAGE",
                f"{path}:{number}: requires an object per line, got {line[:40]}",
                hint='for example {"mesh.tp": 8, "strategy.remat": "none"}',
            )
        yield dict(_flat(row))


def _flat(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as text; tables of a job may be objects."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        elif value is not None:
            yield f"{above}{name}", json.dumps(value) if isinstance(value, bool) else str(value)
