"""Whole training steps from the files of a bundle equal the unsharded JAX step.

Every case goes from a user's training step to a bundle on disk, is loaded back, and runs in values
on all cores: the loss and every leaf after one step, within the bounds of `docs/numerics.md`. The
models carry no sharding annotation; two were not written for this purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from shardwright.compiler.frontend.reference import (
    ReferenceRun,
    batch_leaves,
    initial_state,
    run_reference,
    task_batches,
)
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.models import decoder
from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.blocks import TaskOptions
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.road.numerics import BF16_BOUND, FP32_BOUND, Reference, differences
from shardwright.sharding.partition.mesh import DATA_AXES
from shardwright.sharding.settings import DEFAULTS, StrategySettings
from shardwright.sim_cluster.values.functions import L0, L1
from shardwright.sim_cluster.values.result import distance
from shardwright.sim_cluster.values.run_values import ValueRun
from tests.models import flax_decoder, prime_model
from tests.support.cells import long_in_matrix
from tests.support.small_job import build_on, bundle_of, run_steps, small_llama
from tests.support.strategy_cells import odd_llama

STEPS = 2
L0_BOUND = {"fp32": 1e-5, "bf16": 1e-2}


@cache
def flax() -> TrainTask:
    return flax_decoder.train_task(width=32, num_layers=3, seq_len=8)


@cache
def prime() -> TrainTask:
    return prime_model.train_task(seq_len=7)


def deep() -> TrainTask:
    """Unrolled blocks that become loops over stacks."""
    return prime_model.train_task(num_blocks=9, seq_len=7)


def sorted_experts(routing: str = "sorted", capacity: float = 2.0) -> TrainTask:
    """Rows sorted by expert, none dropped."""
    config = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "head_dim": 8,
    }
    feed = Experts(count=4, chosen=2, width=8, routing=routing, capacity_factor=capacity)
    model = architecture_of(config).fed_by(feed)
    return decoder.train_task(model, TaskOptions(seq_len=8, remat="full"))


def grouped_experts() -> TrainTask:
    """The rows of all samples as one sorted list."""
    return sorted_experts("grouped")


@dataclass(frozen=True)
class Case:
    make: Callable[[], TrainTask]
    mesh: dict[str, int]
    precise: str = ""  # the case that computes the same in full precision
    settings: StrategySettings = DEFAULTS
    narrow: Callable[[], TrainTask] | None = None  # in the type that the policy rounds to
    lnc: int = 1


CASES = {
    "llama fsdp": Case(small_llama, {"dp_shard": 4}),
    "llama bf16 fsdp kept": Case(
        lambda: small_llama("bf16"),
        {"dp_shard": 4},
        "llama fsdp",
        StrategySettings(reshard_after_forward=False),
    ),
    "llama hsdp precision policy": Case(
        small_llama,
        {"dp_replicate": 2, "dp_shard": 2},
        narrow=lambda: small_llama("bf16"),
        settings=StrategySettings(
            param_dtype="bfloat16", reduce_dtype="bfloat16", output_dtype="bfloat16"
        ),
    ),
    "llama hsdp": Case(small_llama, {"dp_replicate": 2, "dp_shard": 4}),
    "llama bf16 fsdp": Case(lambda: small_llama("bf16"), {"dp_shard": 4}, "llama fsdp"),
    "flax hsdp": Case(flax, {"dp_replicate": 2, "dp_shard": 2}),
    "prime fsdp": Case(prime, {"dp_shard": 4}),
    "deep prime hsdp": Case(deep, {"dp_replicate": 2, "dp_shard": 2}),
    "llama tp beyond kv heads": Case(
        small_llama, {"dp_shard": 2, "tp": 4}, settings=StrategySettings(name="llm-training")
    ),
    "odd llama tp": Case(
        odd_llama, {"dp_shard": 2, "tp": 4}, settings=StrategySettings(name="llm-training")
    ),
    "llama two physical cores": Case(small_llama, {"dp_shard": 2, "tp": 2}, lnc=2),
    "llama fsdp cp tp": Case(small_llama, {"dp_shard": 2, "cp": 2, "tp": 2}),
    "sorted experts fsdp ep": Case(sorted_experts, {"dp_shard": 2, "ep": 2}),
    "grouped experts fsdp": Case(grouped_experts, {"dp_shard": 4}),
    "grouped experts fsdp ep": Case(grouped_experts, {"dp_shard": 2, "ep": 2}),
    "llama ring": Case(
        small_llama, {"dp_shard": 2, "cp": 2}, settings=StrategySettings(context="ring")
    ),
    "llama pp tp": Case(
        small_llama, {"pp": 2, "tp": 2}, settings=StrategySettings(name="llm-training")
    ),
    "flax pp dp": Case(
        flax, {"pp": 2, "dp_shard": 2}, settings=StrategySettings(name="llm-training")
    ),
    "flax zero-1": Case(flax, {"dp_shard": 4}, settings=StrategySettings(name="generic", zero=1)),
}


@dataclass(frozen=True)
class Ready:
    task: TrainTask
    bundle: Bundle
    global_batch: int


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ready]:
    """Bundles by case, each built once."""

    @cache
    def build(name: str) -> Ready:
        case, path = CASES[name], tmp_path_factory.mktemp("road")
        task = case.make()
        road = build_on(task, case.mesh, settings=case.settings, lnc=case.lnc)
        return Ready(task, bundle_of(road, path / "bundle"), road.built.layout.global_batch)

    return build


@cache
def precise(case: str, batch: int) -> ReferenceRun:
    """The unsharded step in full precision."""
    return run_reference(CASES[case].make(), steps=STEPS, global_batch=batch, keep=(1,))


def reference(name: str, task: TrainTask, batch: int) -> Reference:
    """What to compare a case with."""
    run, bound = precise(CASES[name].precise or name, batch), FP32_BOUND
    make = CASES[name].narrow
    short = make() if make is not None else task
    if short.full_precision is not None:
        narrow = run_reference(short, steps=1, global_batch=batch, keep=(1,))
        apart = (distance(narrow.states[1][name], leaf) for name, leaf in run.states[1].items())
        bound = max(BF16_BOUND, *apart)
    return Reference(losses=run.losses, after_one=run.states[1], bound=bound)


ONLY_IN_MATRIX = (
    "llama pp tp",
    "llama fsdp cp tp",
    "llama two physical cores",
    "odd llama tp",
)
EXHAUSTIVE = (
    "sorted experts fsdp ep",
    "flax pp dp",
    "llama ring",
    "llama bf16 fsdp kept",
    "llama bf16 fsdp",
    "grouped experts fsdp",
    "deep prime hsdp",
    "llama hsdp",
    "prime fsdp",
    "flax hsdp",
    "flax zero-1",
    "grouped experts fsdp ep",
    "llama hsdp precision policy",
    "llama tp beyond kv heads",
)
"""Their model, strategy and type run in other cases too, or in quicker tests of fewer stages."""


@pytest.mark.parametrize("name", long_in_matrix(CASES, ONLY_IN_MATRIX, EXHAUSTIVE))
def test_a_step_from_files_equals_the_unsharded_step(
    name: str, ready: Callable[[str], Ready]
) -> None:
    case, one = CASES[name], ready(name)
    ranks = math.prod(size for axis, size in case.mesh.items() if axis in DATA_AXES)
    assert (one.global_batch, one.bundle.manifest.num_microbatches) == (2 * ranks, 2)
    given = run_steps(one.bundle, one.task, one.global_batch, STEPS)
    wanted = reference(name, one.task, one.global_batch)
    leaf, loss = differences(given.after_one, given.losses, wanted)
    checks = given.run.result.l0
    worst_l0 = max(check.distance for check in checks.values())
    print(f"{name}: {loss}, {leaf}, L0 {worst_l0:.1e}")
    assert loss.error <= loss.allowed == wanted.bound
    assert leaf.error <= leaf.allowed == wanted.bound, leaf.name
    assert set(given.after_one) == set(wanted.after_one)
    assert set(checks) == set(one.bundle.programs)
    assert {name.split(".")[0] for name in checks} == {"forward", "backward", "update"}
    assert all(check.instructions > 100 for check in checks.values())
    short = one.task.full_precision is not None or case.settings.rounds
    assert worst_l0 <= L0_BOUND["bf16" if short else "fp32"]


WHOLE = [
    ("llama fsdp", "fp32"),
    ("llama bf16 fsdp kept", "bf16"),
    ("llama two physical cores", "fp32"),
]


@pytest.mark.parametrize(("name", "dtype"), long_in_matrix(WHOLE, WHOLE[1:]))
def test_every_core_at_l0_equals_l1(name: str, dtype: str, ready: Callable[[str], Ready]) -> None:
    """Not one core beside the others: all four execute every instruction of a whole step."""
    one = ready(name)
    state = initial_state(one.task, 0)
    batch = batch_leaves(next(task_batches(one.task, 0, one.global_batch)))
    found: dict[str, dict[str, np.ndarray]] = {}
    for level in (L0, L1):
        run = ValueRun(one.bundle.programs, one.bundle.manifest, check_l0=False, level=level)
        run.load(state)
        found[level] = dict(run.step(batch)) | run.gather(state)
    distances = {leaf: distance(found[L0][leaf], array) for leaf, array in found[L1].items()}
    worst = max(distances, key=lambda n: distances[n])
    print(f"{dtype}: {worst} {distances[worst]:.1e}")
    assert distances[worst] <= L0_BOUND[dtype], worst
    moved = [leaf for leaf in state if distance(found[L0][leaf], state[leaf]) > 0]
    assert len(moved) == len(state)  # a step that did nothing would also be equal
