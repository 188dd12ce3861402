"""What a report says of cores that are loaded later than the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardwright.orchestrator.report.report import _late_ranks
from shardwright.sim_cluster.timing.faults import Faults


def told(late: dict[int, float]) -> list[Any]:
    built: Any = SimpleNamespace(layout=SimpleNamespace(faults=Faults(late_cores=late)))
    return list(_late_ranks(built))


def test_every_two_minutes_a_warning_names_who_is_missing() -> None:
    first, second = told({5: 300.0, 6: 200.0, 9: 20.0})
    assert {first.severity, second.severity} == {"warning"} and first.code == "SW_LATE_RANK"
    assert first.message == "after 120 s all others still wait for core 5-6 to connect"
    assert second.message == "after 240 s all others still wait for core 5 to connect"
    assert "the step begins after 300 s" in first.hint


def test_who_comes_within_two_minutes_is_not_told_of() -> None:
    assert told({}) == told({5: 119.0}) == []
