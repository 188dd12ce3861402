"""Dependency tokens through compiled programs: in one stream what a layer waits for goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.isa.program import Program
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.models import config_task
from shardwright.orchestrator.road.timing import step_of
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.timing.step_time import StepTiming, time_step
from tests.support.cells import long_in_matrix
from tests.support.small_job import SIZES, Steps, build_on, bundle_of, run_steps

MESH = {"dp_shard": 2, "tp": 2}
SHIFTED = {"early_all_gather_shift": 1, "late_reduce_scatter_shift": 1}
KNOBS: dict[str, dict[str, Any]] = {
    "no tokens": SHIFTED,
    "tokens": SHIFTED | {"dependency_tokens": True},
    "tokens and buckets": SHIFTED | {"dependency_tokens": True, "bucket_mb": 1},
}
L0_BOUND = 1e-5


def _task() -> TrainTask:
    return config_task.train_task({**SIZES, "num_hidden_layers": 3}, seq_len=8, dtype="f32")


@pytest.fixture(scope="module")
def ready(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Bundle, Steps, StepTiming]]:
    """Bundle, a step and its time, by knobs, each built once."""
    path = tmp_path_factory.mktemp("tokens")

    @cache
    def build(name: str) -> tuple[Bundle, Steps, StepTiming]:
        road = build_on(_task(), MESH, settings=StrategySettings(**KNOBS[name]))
        bundle = bundle_of(road, path / name)
        step = step_of(road.built, bundle.programs)
        return bundle, run_steps(bundle, _task(), road.built.layout.global_batch), time_step(step)

    return build


@pytest.mark.parametrize(
    "name", long_in_matrix(("tokens", "tokens and buckets"), ("tokens",), ("tokens and buckets",))
)
def test_tokens_change_code_and_no_sum(name: str, ready: Callable[[str], Any]) -> None:
    """Functions may be cut otherwise, so that products add up in another order: the last bits."""
    (plain, steps, _), (bundle, given, _) = ready("no tokens"), ready(name)
    assert given.losses == pytest.approx(steps.losses, rel=1e-6)
    for leaf, array in steps.after_one.items():
        apart = np.abs(given.after_one[leaf].astype(float) - array.astype(float)).max()
        assert apart <= 1e-6 * np.abs(array).max(), leaf
    assert max(check.distance for check in given.run.result.l0.values()) <= L0_BOUND
    for program in ("forward", "backward"):
        assert bundle.manifest.programs[program] != plain.manifest.programs[program]


def _started(program: Program) -> Iterator[list[str]]:
    """Per function with both kinds of collectives, the innermost axes in the order of starts."""
    for function in program.functions:
        axes = [
            function.collectives[kernel.program.attrs["collective"]].axes[-1]
            for kernel in function.kernels
            if kernel.program.kind == "collective_start"
        ]
        if {"tp", "dp_shard"} <= set(axes) and function.name.startswith(f"{program.name}.loop"):
            yield axes


def _ahead(starts: list[str]) -> int:
    """Over all collectives of the layer, how many of weights and gradients start before."""
    places = [at for at, axis in enumerate(starts) if axis == "tp"]
    return sum(starts[:at].count("dp_shard") for at in places)


@pytest.mark.parametrize("program", ["forward", "backward"])
def test_less_stands_in_front_of_what_the_layer_waits_for(
    program: str, ready: Callable[[str], Any]
) -> None:
    plain, given = (list(_started(ready(n)[0].programs[program])) for n in ("no tokens", "tokens"))
    assert plain
    for without, with_tokens in zip(plain, given, strict=True):
        assert sorted(without) == sorted(with_tokens)
        assert _ahead(with_tokens) <= _ahead(without) * 3 / 4


def test_tokens_hide_what_waited_behind_prefetches(ready: Callable[[str], Any]) -> None:
    plain, given = (ready(n)[2] for n in ("no tokens", "tokens"))
    exposed = [sum(u.exposed_ps for u in t.collectives) for t in (plain, given)]
    assert exposed[1] < exposed[0]
    assert given.step_time_ps < plain.step_time_ps
    moved = [sum(u.count * u.cost.size_bytes for u in t.collectives) for t in (plain, given)]
    assert moved[0] == moved[1]
