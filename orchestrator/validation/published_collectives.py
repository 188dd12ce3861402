"""Published collective measurements, and what the model says of each row.

Columns: op, ranks, nodes, instance, dtype, size_bytes, time_us, and id, group, era for the report.
The machine follows from the instance, the runtime from the era: facts about the run. A row that
cannot be simulated is reported with its reason, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.timing.runtimes import Runtime, runtime_of_date
from shardwright.collectives.timing.times import CollectiveTime
from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.validation.published_columns import (
    machines_named,
    positive,
    positive_whole,
)
from shardwright.sim_cluster.network.what_if import WhatIf

# nccom-test's names beside those of StableHLO; a send and receive is a permute of pairs.
KINDS = {
    "allr": CollectiveKind.ALL_REDUCE,
    "allg": CollectiveKind.ALL_GATHER,
    "redsct": CollectiveKind.REDUCE_SCATTER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "permute": CollectiveKind.COLLECTIVE_PERMUTE,
    "sendrecv": CollectiveKind.COLLECTIVE_PERMUTE,
    "send_recv": CollectiveKind.COLLECTIVE_PERMUTE,
} | {kind.value: kind for kind in CollectiveKind}
ELEMENT_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "fp16": 2, "bf16": 2,
    "uint32": 4, "int32": 4, "fp32": 4,
}  # fmt: skip
_UNSTATED_BYTES = 4  # of an element of a row that names no dtype: fp32, as the tool's pages show
ASSUMED = "trn1.32xlarge"  # for rows that name no machine, or several


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measurement. `assumed` says that the row does not name the machine."""

    id: str
    group: str
    kind: CollectiveKind
    ranks: int
    instances: int
    target: str
    assumed: bool
    element_bytes: int
    size_bytes: int
    time_us: float
    runtime: Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePrediction:
    """The model's time of a row, or why there is none."""

    row: Mapping[str, str]
    found: CollectiveRow | None
    time: CollectiveTime | None
    reason: str = ""

    @property
    def predicted_us(self) -> float | None:
        """Predicted time."""
        return self.time.total_ps / 1e6 if self.time else None

    @property
    def error(self) -> float | None:
        """Predicted over published, less one."""
        if self.time is None or self.found is None:
            return None
        return self.time.total_ps / 1e6 / self.found.time_us - 1


def predict_row(row: Mapping[str, str], profile: str = "nominal") -> CollectivePrediction:
    """The model's time of one row."""
    try:
        found = read_row(row)
        what_if = WhatIf(
            target=logical(load_target(found.target)),
            kind=found.kind,
            ranks=found.ranks,
            instances=found.instances,
            runtime=found.runtime,
        )
        time = what_if.time(found.size_bytes, found.element_bytes, profile)
    except (DiagnosticError, KeyError, ValueError) as error:
        return CollectivePrediction(row=row, found=None, time=None, reason=reason_of(error))
    return CollectivePrediction(row=row, found=found, time=time)


def reason_of(error: Exception) -> str:
    """Why a row has no prediction."""
    if isinstance(error, DiagnosticError):
        return error.diagnostic.message
    return f"column {error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def read_row(row: Mapping[str, str]) -> CollectiveRow:
    """A row of the table. Raises KeyError or ValueError for what it lacks."""
    op, dtype = row["op"].strip().lower(), row.get("dtype", "").strip().lower()
    if op not in KINDS:
        raise ValueError(f"op requires one of {', '.join(KINDS)}, got {op!r}")
    target, assumed = machine_of(row.get("instance", ""))
    return CollectiveRow(
        id=row.get("id", ""),
        group=row.get("group", ""),
        kind=KINDS[op],
        ranks=positive_whole(row["ranks"], "ranks"),
        instances=positive_whole(row.get("nodes") or "1", "nodes"),
        target=target,
        assumed=assumed,
        element_bytes=_element_bytes(dtype),
        size_bytes=positive_whole(row["size_bytes"], "size_bytes"),
        time_us=positive(row["time_us"], "time_us"),
        runtime=runtime_of_date(row.get("era", "")),
    )


def _element_bytes(dtype: str) -> int:
    if dtype in ("", "unstated"):
        return _UNSTATED_BYTES
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype requires one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    return ELEMENT_BYTES[dtype]


def machine_of(text: str) -> tuple[str, bool]:
    """(target, whether that is assumed) of an instance column."""
    named = machines_named(text)
    return (named[0], False) if len(named) == 1 else (ASSUMED, True)
