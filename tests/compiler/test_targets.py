"""Machine files: every figure says where it is from, and code is made, run and timed for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.target import load_target, target_names
from shardwright.compiler.surface.flags import TARGETS
from shardwright.compiler.surface.resolve import find_target
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import time_programs
from shardwright.orchestrator.road.units import unit_service
from shardwright.sim_cluster.network.network import Network
from tests.support.compiled import graph_of, run_levels
from tests.support.small_job import write_job

FOLDER = Path(__file__).resolve().parents[2] / "compiler" / "machine" / "targets"
FILES = sorted(FOLDER.glob("*.json"))
assert FILES, f"no data files of machines in {FOLDER}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_figure_has_a_status_and_a_source(file: Path) -> None:
    for key, fact in json.loads(file.read_text())["facts"].items():
        assert fact["status"] in ("documented", "inferred", "unknown"), key
        assert fact["source"], key
        if fact["status"] == "unknown" and fact["value"] is not None:
            low, high = fact["range"]
            assert low <= fact["value"] <= high, key


def test_every_family_of_the_surface_is_a_machine() -> None:
    for family, machine in TARGETS.items():
        assert find_target(family.upper()) is load_target(machine)
    assert {m.partition(".")[0].partition("-")[0] for m in target_names()} == set(TARGETS)


@pytest.mark.parametrize("name", ["inf1.xlarge", "inf1.24xlarge"])
def test_inf1_is_the_machine_of_neuron_cc_which_compiles_no_jobs(name: str) -> None:
    machine = load_target(name)
    assert machine.core.name == "NeuronCore-v1" and machine.core.compiler == "neuron-cc"
    assert not machine.trains and find_target(name) is machine
    with pytest.raises(UsageError, match="requires a machine of neuronx-cc, got inf1"):
        layout_of(load(None, [f"cluster.target={name}"]))


def layer() -> tuple[Graph, list[np.ndarray], np.ndarray]:
    """A layer whose contraction, reduction and row work use every engine."""
    import jax
    import jax.numpy as jnp

    def fn(x: Any, w: Any) -> Any:
        h = jax.nn.gelu(x @ w, approximate=True)
        return jax.nn.softmax(h - h.mean(-1, keepdims=True)) @ w.T

    rng = np.random.default_rng(2)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((131, 67), (67, 257)))
    return graph_of(fn, x, w), [x, w], np.asarray(jax.jit(fn)(jnp.asarray(x), jnp.asarray(w)))


# One machine of every NeuronCore: others of a family differ in what surrounds the core.
CORES = {load_target(n).core.name: n for n in target_names()}


@pytest.mark.parametrize("name", CORES.values())
def test_a_layer_runs_on_every_core(name: str) -> None:
    graph, arguments, wanted = layer()
    for (given,) in run_levels(graph, arguments, target=name):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["trn3-gen1-ultraserver", "trn2-ultraserver", "inf2.24xlarge"])
def test_jobs_find_a_network_on_every_machine(name: str) -> None:
    layout = layout_of(load(None, [f"cluster.target={name}"]))
    axes = tuple(axis for axis, size in layout.mesh.sizes.items() if size > 1)
    network = Network(layout.target, 1, layout.mesh.sizes, "nominal")
    shape = (1, 1 << 18, 1)
    call = CollectiveCall(
        kind="all_reduce", axes=axes, dtype=DType.F32, source_shape=shape, name="gradients"
    )
    found = network.duration(call)
    assert found.group_size == layout.target.cores and found.duration_ps > 0


@pytest.mark.parametrize(
    "name", ["trn1.2xlarge", pytest.param("inf2.xlarge", marks=pytest.mark.matrix)]
)
def test_a_machine_of_one_chip_is_timed_and_not_joined(name: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, cluster={"target": name})
    job = load(path, [])
    with unit_service(job, None) as service:
        built = build(job, service, Stages())
        assert built.layout.mesh.sizes == {"dp_shard": 2}
        timings = time_programs(built, built.programs, service)
    assert timings.chosen.breakdown_ps["collective_dp_shard"] > 0
    with pytest.raises(UsageError, match="requires 1, got 2: it has no EFA"):
        layout_of(load(path, ["cluster.instances=2"]))


def test_newer_cores_hold_more_and_are_not_confused() -> None:
    machines = [load_target(TARGETS[family]) for family in ("trn1", "trn2", "trn3")]
    sizes = [machine.core.limits.sbuf_bytes for machine in machines]
    assert sizes == [192 * 1024, 224 * 1024, 256 * 1024]
    assert len({load_target(name).digest for name in target_names()}) == len(target_names())
