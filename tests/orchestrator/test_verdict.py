"""When a value run passes: against the unsharded step, and at both levels of execution."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

from orchestrator.config import JobConfig
from orchestrator.job import Values, exit_code, numerics_section
from orchestrator.numerics import Reference

LEAF = {"params/w": np.ones((2, 3), np.float32)}
REFERENCE = Reference(losses=(2.0, 1.5), after_one=LEAF, bound=1e-5)
GOOD = MappingProxyType({"forward": 3e-7, "update": 0.0})


def verdict(
    losses: tuple[float, ...] = (2.0, 1.5), wrong: float = 0.0, l0: dict[str, float] | None = None
) -> int:
    state = {"params/w": LEAF["params/w"] * np.float32(1 + wrong)}
    values = Values(losses, state, l0 or GOOD)
    return exit_code({"numerics": numerics_section(JobConfig(), values, REFERENCE)})


def test_equal_values_pass() -> None:
    assert verdict() == 0


@pytest.mark.parametrize("l0", [2e-5, 2.1, float("nan"), float("inf")])
def test_instructions_that_compute_something_else_fail_the_run(l0: float) -> None:
    assert verdict(l0={"forward": 0.0, "backward": l0, "update": 0.0}) == 72


def test_a_wrong_leaf_or_loss_fails_the_run() -> None:
    assert verdict(wrong=1e-3) == 72
    assert verdict(wrong=float("nan")) == 72
    assert verdict(losses=(2.0, 1.6)) == 72
    assert verdict(losses=(2.0, float("nan"))) == 72


@pytest.mark.parametrize(("distance", "code"), [(3e-7, 0), (2e-5, 72)])
def test_without_an_unsharded_run_instructions_are_still_judged(distance: float, code: int) -> None:
    section = numerics_section(JobConfig(), Values((2.0, 1.5), {}, {"step": distance}), None)
    assert exit_code({"numerics": section}) == code
    assert section["worst_loss_error"] is section["worst_param_error"] is None
