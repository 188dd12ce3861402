"""Goodput against simulated failures, its best interval against neighbours and Young's and Daly's
estimates."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.report.goodput import Failures

CASES = [(36000.0, 60.0, 600.0), (3600.0, 300.0, 900.0), (900.0, 20.0, 60.0)]


def simulated(failures: Failures, interval_s: float, segments: int) -> float:
    """Goodput of many intervals with failures drawn one by one, restarts and checkpoints
    included."""
    draw = random.Random(7).expovariate
    wall = 0.0
    for _ in range(segments):
        need = interval_s + failures.checkpoint_s
        while (failure := draw(1 / failures.mtbf_s)) < need:
            wall += failure
            while (again := draw(1 / failures.mtbf_s)) < failures.restart_s:
                wall += again
            wall += failures.restart_s
        wall += need
    return segments * interval_s / wall


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", [0.3, 1.0, 3.0])
def test_the_formula_is_what_failures_do(case: tuple[float, float, float], part: float) -> None:
    failures = Failures(mtbf_s=case[0], checkpoint_s=case[1], restart_s=case[2])
    interval = part * failures.best_interval_s()
    found = simulated(failures, interval, 20000)
    # Daly lets a restart that fails start over from the failed interval: the same expectation to
    # second order in restart / mtbf.
    slack = 0.01 + (failures.restart_s / failures.mtbf_s) ** 2
    assert failures.goodput(interval) == pytest.approx(found, rel=slack)


@settings(deadline=None)
@given(st.floats(1e2, 1e8), st.floats(1e-5, 2.0), st.floats(0.0, 1.0))
def test_no_interval_beats_the_best(mtbf: float, checkpoint: float, restart: float) -> None:
    failures = Failures(mtbf_s=mtbf, checkpoint_s=checkpoint * mtbf, restart_s=restart * mtbf)
    best = failures.best_interval_s()
    top = failures.goodput(best)
    assert 0 < top < 1
    assert all(failures.goodput(best * part) <= top * (1 + 1e-9) for part in (0.5, 0.9, 1.1, 2.0))


@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2])
def test_young_and_daly_where_they_hold(ratio: float) -> None:
    failures = Failures(mtbf_s=1e5, checkpoint_s=ratio * 1e5, restart_s=0.0)
    best, half = failures.best_interval_s(), math.sqrt(ratio / 2)
    daly = failures.young_interval_s() * (1 + half / 3 + half**2 / 9) - failures.checkpoint_s
    assert best == pytest.approx(daly, rel=1e-3)
    assert best == pytest.approx(failures.young_interval_s(), rel=2 * half)


def test_no_checkpoint_time_and_hopeless_clusters() -> None:
    assert Failures(mtbf_s=1e5, checkpoint_s=0.0, restart_s=0.0).goodput(1e-3) == pytest.approx(1)
    assert Failures(mtbf_s=1.0, checkpoint_s=1e4, restart_s=10.0).goodput(10.0) == 0.0


def test_keys_are_numbers_in_range() -> None:
    given_ = load(None, ["goodput.instance_mtbf_hours=500", "goodput.restart_s=60"]).goodput
    assert (given_.instance_mtbf_hours, given_.restart_s) == (500.0, 60.0)
    with pytest.raises(ValueError, match="instance_mtbf_hours requires 1"):
        load(None, ["goodput.instance_mtbf_hours=0"])
