"""What a point came to, in one flat row: what tables, files and plots of sweeps are made of.

A point that is refused is a row too, with the code and the reason; a point that does not fit has
all its figures, and by how much it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import CapacityError, DiagnosticError
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.compiler.support.fields import check_fields
from shardwright.compiler.support.schema import TEXT
from shardwright.orchestrator.report.resolved import resolved_job
from shardwright.orchestrator.report.shape import MAYBE, TIME
from shardwright.orchestrator.report.text import GIB, Facts, Report, mesh_text, rate_text
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE
from shardwright.orchestrator.service.unit_errors import stored_at

Values = Mapping[str, str]
"""What a point sets, by the names the user gave."""
TEXTS = ("target", "confidence", "mesh", "price_kind", "remat")
"""The metrics that are no figures."""
FITTED = ("remat", "micro_batch")
"""The metrics that the memory decides about where the point does not say."""


@dataclass(frozen=True, slots=True)
class Row:
    """`values` are what the point sets; `metrics` are empty when it is refused. `stored_s` is when
    a stored row was stored (Unix time), 0 for one of this sweep."""

    key: str  # of the plan: what the answer depends on
    values: Values
    status: str
    code: str = ""
    reason: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    stored_s: float = 0.0

    def flat(self) -> Facts:
        """One level: values, status, metrics."""
        said = {"status": self.status, "code": self.code, "reason": self.reason}
        return {**self.values, **said, **self.metrics}

    def as_dict(self) -> Facts:
        """Plain data."""
        return asdict(self)

    @classmethod
    def of(cls, data: Facts) -> Row:
        """Inverse of `as_dict`. Raises TypeError and ValueError for what that never gives."""
        row = cls(**data)
        check_fields(row)
        if row.status not in (FITS, TOO_LARGE, REFUSED):
            raise ValueError(f"no status: {row.status}")
        TIME.require(row.stored_s, "stored_s")
        for name, value in row.metrics.items():
            (TEXT if name in TEXTS else MAYBE).require(value, name)
        return row


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that points are compared by: its name, its heading, what it is in words, and which
    way is better."""

    name: str
    title: str
    label: str
    form: Callable[[float], str]
    higher: bool = False

    def of(self, row: Row) -> float | None:
        """The figure of a row, None where it has none."""
        value: float | None = row.metrics.get(self.name)
        return value

    def text(self, row: Row) -> str:
        """The figure as tables show it."""
        value = self.of(row)
        return "-" if value is None else self.form(value)

    def rank(self, row: Row) -> float:
        """Lower is better; what has no figure is last."""
        value = self.of(row)
        return float("inf") if value is None else -value if self.higher else value


def _rate(value: float) -> str:
    return rate_text(value).replace(" ", "")  # as narrow as the other columns


METRICS = {
    metric.name: metric
    for metric in (
        Metric("tokens_per_s", "tokens/s", "tokens per second", "{:,.0f}".format, higher=True),
        Metric("step_time_s", "step s", "seconds per step", "{:.4g}".format),
        Metric("usd_per_1e6_tokens", "$/Mtok", "USD per million tokens", "{:.3g}".format),
        Metric("mfu", "MFU", "model FLOPs utilisation", _rate, higher=True),
        Metric("mbu", "MBU", "memory bandwidth utilisation", _rate, higher=True),
        Metric("exposed", "exposed", "share of exposed collectives", "{:.1%}".format),
        Metric("peak_gib", "GiB", "GiB per core", "{:.3g}".format),
        Metric("days", "days", "days to the goal", "{:,.2f}".format),
        Metric("usd", "$", "USD to the goal", "{:,.0f}".format),
    )
}


def row_of(key: str, values: Values, report: Report) -> Row:
    """The row of a point that was planned."""
    memory = report["memory"]
    over = max(0, memory["peak_bytes"] - memory["limit_bytes"])
    broken = next((f for f in report["findings"] if f["severity"] == "error"), None)
    status = FITS if memory["fits"] else TOO_LARGE
    code, reason = (broken["code"], broken["message"]) if broken else ("", "")
    if over:
        reason = f"{over / GIB:.2f} GiB over the {memory['limit_bytes'] / GIB:.2f} GiB of a core"
    metrics, since = {**_metrics(report), "over_gib": over / GIB}, report["provenance"]
    return Row(key, values, status, code, reason, metrics, since.get("stored_s", 0.0))


def refused_row(key: str, values: Values, error: DiagnosticError) -> Row:
    """The row of a point that cannot be planned."""
    status = TOO_LARGE if isinstance(error, CapacityError) else REFUSED
    return Row(key, values, status, error.code, error.diagnostic.message, {}, stored_at(error))


def _metrics(report: Report) -> Facts:
    timing, memory = report["timing"], report["memory"]
    cluster, total = report["job"]["cluster"], report["timing"]["step_time_ps"]
    shares = {name: ps / total for name, ps in timing["breakdown_ps"].items()}
    low, high = timing["band_s"]
    return {
        "target": cluster["target"],
        "instances": cluster["instances"],
        "cores": report["cores"],
        "step_time_s": timing["step_time_s"],
        "step_time_low_s": low,
        "step_time_high_s": high,
        "tokens_per_s": timing["tokens_per_s"],
        "tokens_per_step": round(timing["tokens_per_s"] * total / PS_PER_S),
        "mfu": timing["mfu"],
        "hfu": timing["hfu"],
        "exposed": sum(v for name, v in shares.items() if name.startswith("collective")),
        "bubble": shares.get("bubble", 0.0),
        "peak_gib": memory["peak_bytes"] / GIB,
        "limit_gib": memory["limit_bytes"] / GIB,
        **_of_mode(report),
        "confidence": timing["confidence"],
        "mesh": mesh_text(report),
    }


def _of_mode(report: Report) -> Facts:
    """What training has, or what inference has."""
    if "inference" not in report:
        return {
            "goodput": report["goodput"]["goodput"],
            "remat": resolved_job(report)["strategy"]["remat"],
            "micro_batch": report["batch"]["micro_batch"],
        }
    section = report["inference"]
    shown = ("mbu", "time_to_first_token_s", "time_per_output_token_s", "tokens_per_s_per_sequence")
    sizes = {"cache_gib": section["cache_bytes"] / GIB, "sequences": section["sequences"]}
    return {**sizes, "context": section["context"], **{name: section[name] for name in shown}}


def ordered(rows: Iterable[Row], metric: Metric) -> list[Row]:
    """Best first: what fits, then what does not, then what was refused."""
    rank = {FITS: 0, TOO_LARGE: 1, REFUSED: 2}
    return sorted(rows, key=lambda row: (rank[row.status], metric.rank(row)))


def pareto(rows: Sequence[Row], x: Metric, y: Metric) -> list[Row]:
    """Rows that no other fitting row beats in both figures, along x."""
    candidates = [r for r in rows if r.status == FITS and x.of(r) is not None]
    front: list[Row] = []
    for row in sorted(candidates, key=lambda r: (x.rank(r), y.rank(r))):
        if y.of(row) is not None and (not front or y.rank(row) < y.rank(front[-1])):
            front.append(row)
    return front
