"""Residuals in host memory on the whole road: bits are those of the step that keeps them in HBM,
the transfers stand in the files, and the link is what they take their time of.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import altered
from shardwright.orchestrator.models import config_task
from shardwright.orchestrator.road.timing import step_of
from shardwright.sharding.memory.footprint import host_bytes
from shardwright.sim_cluster.timing.step_time import Step, time_step
from tests.support.small_job import SIZES, Road, build_on, bundle_of, run_steps

LAYERS = 4
MESH = {"dp_shard": 2}


@cache
def task(remat: str) -> TrainTask:
    sizes = SIZES | {"num_hidden_layers": LAYERS}
    return config_task.train_task(sizes, seq_len=8, remat=remat)


@cache
def road(remat: str) -> Road:
    return build_on(task(remat), MESH)


def timed(rate: float) -> Step:
    """The step on a machine with another link to the host."""
    built = road("offload").built
    target = altered(built.layout.target, {"host_link_gb_per_s": rate})
    return replace(step_of(built, built.programs), target=target)


@pytest.mark.matrix
def test_every_bit_is_that_of_the_step_that_keeps_them(tmp_path: Path) -> None:
    ran = {}
    for remat in ("selective", "offload"):
        bundle = bundle_of(road(remat), tmp_path / remat)
        ran[remat] = run_steps(bundle, task(remat), 4, steps=2)
    kept, offloaded = ran["selective"], ran["offload"]
    assert offloaded.losses == kept.losses
    for name, array in kept.after_one.items():
        np.testing.assert_array_equal(offloaded.after_one[name], array, err_msg=name)


def moved(program: Program, kind: str) -> int:
    """Transfers in the functions of a program."""
    return sum(call.kind == kind for f in program.functions for call in f.collectives)


def test_the_files_hold_host_buffers_and_transfers(tmp_path: Path) -> None:
    bundle = bundle_of(road("offload"), tmp_path)
    buffers = bundle.manifest.buffers.values()
    on_host = [b for b in buffers if b.memory == "host"]
    step = road("offload").built.plan.step
    assert sum(b.num_bytes for b in on_host) == host_bytes(step, 0) > 0
    ends = [b.offset_bytes + b.num_bytes for b in buffers if b.memory == "device"]
    assert bundle.manifest.named_bytes >= max(ends)
    for name, kind in (("forward", "host_store"), ("backward", "host_load")):
        program = bundle.programs[name]
        assert {b.name for b in program.buffers if b.kind == "host"} == {b.name for b in on_host}
        assert moved(program, kind) > 0
    assert not moved(bundle.programs["update"], "host_store")


@pytest.mark.parametrize("profile", ["conservative", "nominal", "peak"])
def test_a_slower_link_makes_a_longer_step(profile: str) -> None:
    """A step of this size waits for the link alone; one that has enough of it waits no more."""
    fast, usual, slow = (time_step(timed(rate), profile) for rate in (1e6, 0.016, 0.008))
    assert fast.breakdown_ps.get("collective_host", 0) < usual.breakdown_ps["collective_host"]
    waits = slow.breakdown_ps["collective_host"] / usual.breakdown_ps["collective_host"]
    assert 1.9 < waits < 2.3 and fast.step_time_ps < usual.step_time_ps < slow.step_time_ps


def test_classes_of_ranks_fold() -> None:
    folded, each = (time_step(timed(0.016), folded=way) for way in (True, False))
    assert folded.rank_classes == 1 and each.rank_classes == 2
    assert folded.step_time_ps == each.step_time_ps
    assert folded.breakdown_ps == each.breakdown_ps


def test_two_cores_share_the_link_of_their_chip() -> None:
    """Both ranks are on chip 0: 8 of 16 GB/s each, behind the fixed time of a DMA transfer."""
    timing = time_step(timed(16))
    core = timing.step.target.core
    uses = [use for use in timing.collectives if use.call.is_transfer]
    assert {use.call.kind for use in uses} == {"host_store", "host_load"}
    for use in uses:
        alone = core.dma_fixed_ps + use.cost.size_bytes / 8e9 * 1e12
        assert use.cost.duration_ps == pytest.approx(alone, abs=1)
        assert use.cost.algorithm == "host link" and use.cost.why.startswith("2 cores of a chip")
        assert use.cost.demand.dma == 0 and use.cost.demand.hbm > 0
