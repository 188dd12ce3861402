"""A tiny training job on the whole road: built by the orchestrator's own functions on a mesh of a
few cores, written to disk, loaded back and run in values.

Only the product check of the mesh against the cores of an instance is left out: a value run on four
cores shows the same things as one on 32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import load_target, logical
from shardwright.compiler.neff.bundle import Bundle
from shardwright.compiler.options import DEFAULTS as USUAL
from shardwright.compiler.options import CompileOptions
from shardwright.orchestrator.cache import Cache, open_cache
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import Layout
from shardwright.orchestrator.models import config_task
from shardwright.orchestrator.road.build import Built, build_task
from shardwright.orchestrator.road.job import write_and_load
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.service.batch import UnitRow
from shardwright.orchestrator.service.executor import Executor, InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.sharding.partition.mesh import DATA_AXES, make_mesh
from shardwright.sharding.settings import DEFAULTS, StrategySettings
from shardwright.sim_cluster.values.run_values import ValueRun

TARGET = "trn1n.32xlarge"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,  # bytes
    "max_position_embeddings": 16,
}

ON_ONE_CHIP = """
[model]
config = "config.json"
seq_len = 8
[mesh]
dp_shard = 2
[cluster]
target = "trn1.2xlarge"
"""
"""A job of the small llama, whose sizes are in the file it names, on a machine of two cores."""
JOB = f"""{ON_ONE_CHIP}[run]
executor = "inline"
progress = "quiet"
"""


@cache
def small_llama(dtype: str = "f32", seq_len: int = 8) -> TrainTask:
    """Two scanned layers, AdamW, clipping. One object, so that JAX traces and compiles it once."""
    return config_task.train_task(SIZES, seq_len=seq_len, dtype=dtype)


@dataclass(frozen=True)
class Road:
    """A task built on a mesh, and where its units ran."""

    built: Built
    rows: list[UnitRow]


def build_on(
    task: TrainTask,
    mesh: Mapping[str, int],
    cache: Path | None = None,
    num_microbatches: int = 2,
    micro_batch: int = 1,
    executor: Callable[[], Executor] = InlineExecutor,
    settings: StrategySettings = DEFAULTS,
    lnc: int = 1,
    options: CompileOptions = USUAL,
) -> Road:
    """Capture to linked programs on a mesh of any size; `micro_batch` samples per data rank.

    What is compiled is kept in `cache`; without one, in that of the test run.
    """
    sizes = make_mesh(mesh)
    captured = micro_batch * sizes.size(DATA_AXES)
    target = logical(load_target(TARGET), lnc, hypothetical=lnc > 1)
    layout = Layout(
        target=target,
        topology=cluster_topology(target, 1),
        mesh=sizes,
        captured_batch=captured,
        global_batch=captured * num_microbatches,
        num_microbatches=num_microbatches,
    )
    store = Cache(cache) if cache else open_cache(JobConfig().cache)
    with UnitService(executor, store) as service:
        job = JobConfig(strategy=settings, compiler=options)
        built = build_task(job, layout, task, service, Stages())
        return Road(built, service.rows)


def bundle_of(road: Road, path: Path) -> Bundle:
    """The bundle of a road, as it was read back from disk."""
    return write_and_load(road.built, path)


@dataclass(frozen=True)
class Steps:
    """What a value run gave."""

    run: ValueRun
    losses: list[float]
    after_one: Mapping[str, np.ndarray]


def run_steps(bundle: Bundle, task: TrainTask, global_batch: int, steps: int = 1) -> Steps:
    """Run the bundle's cores for some steps from the task's own state and batches (seed 0)."""
    state = initial_state(task, 0)
    batches = task_batches(task, 0, global_batch)
    run = ValueRun(bundle.programs, bundle.manifest)
    run.load(state)
    losses, after_one = [], {}
    for number in range(steps):
        losses.append(float(run.step(batch_leaves(next(batches)))["metrics/loss"]))
        after_one = run.gather(state) if number == 0 else after_one
    return Steps(run, losses, after_one)


def bundle_bytes(path: Path) -> dict[str, bytes]:
    """Every file of a directory by relative path."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def write_job(folder: Path, **tables: Mapping[str, object]) -> Path:
    """A `job.toml` of the small llama with one layer, its config beside it; returns its path.

    `tables` adds keys, for example `run={"steps": 2}`. Its units run in this process, on the cache
    of the test run (`tests/conftest.py`); a job whose units must be computed names a cache.
    """
    config = SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(config))
    job = {
        "model": {"config": "config.json"},
        "run": {"steps": 1, "tries": 0, "executor": "inline"},
    }
    lines = []
    for table in (*job, *(t for t in tables if t not in job)):
        lines.append(f"[{table}]")
        values = dict(job.get(table, {})) | dict(tables.get(table, {}))
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = folder / "job.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
