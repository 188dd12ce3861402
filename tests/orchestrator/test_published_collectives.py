"""Published collective rows: machine and runtime are read from the row, nothing is dropped."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from shardwright.orchestrator.validation.published_collectives import (
    machine_of,
    predict_row,
)
from tests.support.published_rows import predict_file

COLUMNS = (
    "id",
    "group",
    "op",
    "ranks",
    "nodes",
    "instance",
    "dtype",
    "size_bytes",
    "time_us",
    "era",
)
TRN1 = "trn1.32xlarge (inferred: its time equals the documentation)"
# Measured with nccom-test, from public pages (docs/network.md): one row per regime.
ROWS = [
    ("a", "2r", "all_reduce", 2, 1, TRN1, "fp32", 1024, 2.1, "2025-26"),
    ("b", "2r", "all_reduce", 2, 1, TRN1, "fp32", 32768, 2.7, "2025-26"),
    ("c", "2r", "all_reduce", 2, 1, TRN1, "fp32", 4194304, 66.0, "2025-26"),
    ("d", "8r", "all_reduce", 8, 1, TRN1, "fp32", 1024, 6.3, "2025-26"),
    ("e", "8r", "all_reduce", 8, 1, TRN1, "fp32", 1073741824, 28019.1, "2025-26"),
    ("f", "32r", "all_gather", 32, 1, "trn1 or trn2 (unstated)", "fp32", 1024, 6.16, "2025-09 on"),
    ("g", "2n", "all_reduce", 2, 2, "trn1.32xlarge x2", "uint8", 65536, 43.77, "2025"),
    ("h", "old", "all_reduce", 2, 1, "trn1 (unstated)", "fp32", 16384, 58, "2023-04 (first)"),
    ("i", "old", "all_reduce", 64, 2, "trn1.32xlarge x2", "fp32", 4194304, 1378, "2023-04"),
    ("j", "old", "all_reduce", 64, 2, "trn1.32xlarge x2", "fp32", 8, 520, "2023-04"),
]


def row(values: tuple[object, ...]) -> dict[str, str]:
    return dict(zip(COLUMNS, map(str, values), strict=True))


@pytest.mark.parametrize("values", ROWS, ids=lambda v: f"{v[1]}-{v[7]}")
def test_every_regime_is_within_its_bar(values: tuple[object, ...]) -> None:
    """15 % from 1 MiB on, a factor of 1.5 below 64 KiB."""
    found = predict_row(row(values))
    assert found.error is not None, found.reason
    if int(str(values[7])) >= 1 << 20:
        assert abs(found.error) <= 0.15
    else:
        assert 1 / 1.5 <= 1 + found.error <= 1.5


def test_a_file_keeps_every_row_and_says_what_is_wrong(tmp_path: Path) -> None:
    bad = [
        ("x", "?", "all_splat", 2, 1, TRN1, "fp32", 8, 1, ""),
        ("y", "?", "all_reduce", 999, 1, TRN1, "fp32", 8, 1, ""),
        ("z", "?", "all_reduce", 4, 2, "inf2.48xlarge x2", "fp32", 8, 1, ""),
    ]
    lines = [",".join(COLUMNS), *(",".join(map(str, r)) for r in [*ROWS, *bad])]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    found = predict_file(path)
    assert [p.row["id"] for p in found] == [r[0] for r in [*ROWS, *bad]]
    reasons = [p.reason for p in found[-3:]]
    for reason, text in zip(reasons, ("all_splat", "at most 32", "require EFA"), strict=True):
        assert text in reason
    assert statistics.median(abs(p.error or 0) for p in found[: len(ROWS)]) < 0.15
    assert predict_row({"op": "allr"}).reason == "column 'ranks' is missing"


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("trn1.32xlarge x2 (64 ranks over 2 hosts)", ("trn1.32xlarge", False)),
        ("trn1 (unstated)", ("trn1.32xlarge", False)),
        ("trn2 (algorithms are Trn2 ones)", ("trn2.48xlarge", False)),
        ("trn1 or trn2 (unstated; see trn1.2xlarge)", ("trn1.32xlarge", True)),
        ("unstated", ("trn1.32xlarge", True)),
        ("trn1n", ("trn1n.32xlarge", False)),
    ],
)
def test_the_machine_of_a_row(text: str, machine: tuple[str, bool]) -> None:
    assert machine_of(text) == machine
