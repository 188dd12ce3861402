"""The proof of the cut: sharded steps over reference ranks equal the unsharded step, leaf by leaf.

Whole models go through capture, recipe, partitioner, rewrites, localization and cut; every rank
evaluates its own programs and collectives run their ring schedules. The error of a leaf is ||a -
b||2 / max(||b||2, 1e-12).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.verify import verify
from shardwright.orchestrator.models import config_task
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.plan import Plan
from tests.models import flax_decoder, prime_model
from tests.support.cells import long_in_matrix
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import fsdp_plan, run_and_compare, worst

BOUND = 1e-5
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
WEIGHTS_PER_LAYER, OTHER_WEIGHTS = 9, 3


@cache
def scanned(dtype: str = "f32") -> TrainTask:
    return config_task.train_task(SIZES, seq_len=8, dtype=dtype)


@cache
def tied() -> TrainTask:
    return config_task.train_task(SIZES | {"tie_word_embeddings": True}, seq_len=8, remat="none")


@cache
def flax() -> TrainTask:
    return flax_decoder.train_task(width=32, num_layers=2, seq_len=8)


@cache
def prime() -> TrainTask:
    return prime_model.train_task(seq_len=7)


CASES: dict[str, tuple[Callable[[], TrainTask], dict[str, int], int, int]] = {
    "scan, 4 ranks": (scanned, {"dp_shard": 4}, 2, 1),
    "scan, hybrid, 2 micro-batches": (scanned, {"dp_replicate": 2, "dp_shard": 2}, 1, 2),
    "scan, 8 ranks, no remat, tied": (tied, {"dp_shard": 8}, 1, 2),
    "unrolled flax, hybrid, 2 micro-batches": (flax, {"dp_replicate": 2, "dp_shard": 2}, 1, 2),
    "prime width, hybrid, 2 micro-batches": (prime, {"dp_replicate": 2, "dp_shard": 2}, 1, 2),
    "prime width, hybrid, 8 ranks": (prime, {"dp_replicate": 2, "dp_shard": 4}, 1, 1),
}


ONLY_IN_MATRIX = [name for name in CASES if name != "scan, 4 ranks"]
"""From files, `tests/system/test_whole_road.py` runs their like."""


@pytest.mark.parametrize("name", long_in_matrix(CASES, ONLY_IN_MATRIX))
def test_sharded_steps_equal_the_unsharded_step(name: str) -> None:
    make, mesh, micro_batch, count = CASES[name]
    task = make()
    plan = fsdp_plan(task, make_mesh(mesh), micro_batch, count)
    assert [p.name for p in plan.step.programs] == ["forward", "backward", "update"]
    for program in plan.step.programs:
        verify(program.graph)
    errors, _ = run_and_compare(plan.step, task)
    leaf, error = worst(errors)
    assert error <= BOUND, (leaf, error)
    parameters = [i.name for i in plan.step.buffers.values() if i.role == "parameter"]
    gradients = {i.name for i in plan.step.buffers.values() if i.role == "gradient"}
    assert gradients == {f"gradient/{p}" for p in parameters}


def test_bf16_stays_within_its_bound() -> None:
    task = scanned(dtype="bf16")
    plan = fsdp_plan(task, make_mesh({"dp_shard": 4}), 1, 2)
    dtypes = {i.local_type.dtype.value for i in plan.step.buffers.values() if i.role == "residual"}
    assert "bf16" in dtypes
    errors, _ = run_and_compare(plan.step, scanned())
    state = {k: e for k, e in errors.items() if k.startswith(("params", "metrics"))}
    assert worst(state)[1] <= 1e-2, worst(state)


@cache
def scan_plan(replicate: int, count: int) -> Plan:
    mesh = make_mesh({"dp_replicate": replicate, "dp_shard": 4 // replicate})
    return fsdp_plan(scanned(), mesh, 1, count)


def counts(plan: Plan) -> Counter[tuple[str, str, tuple[str, ...]]]:
    return Counter({(t.program, t.kind, t.axes): t.count for t in plan.traffic})


def test_traffic_is_the_textbook_of_fsdp() -> None:
    weights = SIZES["num_hidden_layers"] * WEIGHTS_PER_LAYER + OTHER_WEIGHTS
    shard = ("dp_shard",)
    found = counts(scan_plan(1, 1))
    assert found["forward", "all_gather", shard] == weights
    assert found["backward", "all_gather", shard] == weights - 1  # no gradient reads the table
    assert found["backward", "reduce_scatter", shard] == weights
    assert found["update", "all_reduce", shard] == 1  # the norm
    assert found["forward", "all_reduce", shard] == 1  # the loss
    assert sum(found.values()) == 3 * weights + 1


def test_hybrid_traffic_reduces_shards_and_micro_batches_repeat_it() -> None:
    weights = SIZES["num_hidden_layers"] * WEIGHTS_PER_LAYER + OTHER_WEIGHTS
    plan = scan_plan(2, 2)
    found = counts(plan)
    assert found["backward", "reduce_scatter", ("dp_shard",)] == 2 * weights
    assert found["backward", "all_reduce", ("dp_replicate",)] == 2 * weights
    sizes = {(t.kind, t.axes): t.total_bytes for t in plan.traffic if t.program == "backward"}
    scattered = sizes["reduce_scatter", ("dp_shard",)]
    assert sizes["all_reduce", ("dp_replicate",)] * 2 == scattered
    assert not plan.findings


@pytest.mark.matrix
def test_memory_of_unrolled_layers_does_not_pile_up() -> None:
    """Weights gathered again and derivatives wait for their reader: more layers, same arena."""
    mesh = make_mesh({"dp_shard": 3})
    deep, shallow = (
        fsdp_plan(prime_model.train_task(num_blocks=n, width=66, seq_len=7), mesh, 1).footprint
        for n in (5, 2)
    )
    assert deep.arena_bytes["backward"] <= 1.1 * shallow.arena_bytes["backward"]
    assert deep.argument_bytes["activations"] > 2 * shallow.argument_bytes["activations"]


@pytest.mark.parametrize(
    ("make", "unread"),
    [
        (scanned, "params/embed"),
        pytest.param(flax, "", marks=pytest.mark.matrix),
    ],
)
def test_kept_weights_are_gathered_once_and_held(
    make: Callable[[], TrainTask], unread: str
) -> None:
    """No gather of weights in backward; forward hands over every layer's whole weights, but a table
    that no gradient reads.
    """
    mesh = make_mesh({"dp_shard": 4})
    again, kept = (fsdp_plan(make(), mesh, 1, reshard_after_forward=r) for r in (True, False))
    shard = ("dp_shard",)
    assert counts(again)["backward", "all_gather", shard]
    assert not counts(kept)["backward", "all_gather", shard]
    forward = ("forward", "all_gather", shard)
    assert counts(kept)[forward] == counts(again)[forward]
    assert not kept.findings
    held = [plan.footprint.argument_bytes for plan in (again, kept)]
    whole = sum(
        info.global_type.num_bytes
        for name, info in kept.step.buffers.items()
        if info.role == "parameter" and name != unread
    )
    assert not held[0]["gathered"] and 0.95 * whole <= held[1]["gathered"] <= whole
    assert held[1]["activations"] <= held[0]["activations"]


def test_a_damaged_collective_shows() -> None:
    """The comparison can fail: ranks that reduce with the wrong partner are found out."""

    class Damaged(ReferenceRanks):
        def _collective(self, ops, args, mesh):
            results = super()._collective(ops, args, mesh)
            return results[::-1] if ops[0].name == "reduce_scatter" else results

    task = scanned()
    plan = scan_plan(1, 1)
    state = initial_state(task, 0)
    batch = batch_leaves(next(task_batches(task, 0, 4)))
    weights = []
    for ranks in (Damaged(plan.step, state), ReferenceRanks(plan.step, state)):
        ranks.run_step([batch])
        weights.append(ranks.gather("params/lm_head"))
    difference = np.linalg.norm(weights[0] - weights[1]) / np.linalg.norm(weights[1])
    assert difference > 100 * BOUND


def test_arguments_of_a_core_are_a_share_of_the_state() -> None:
    plan = scan_plan(1, 2)
    whole = sum(
        i.global_type.num_bytes for i in plan.step.buffers.values() if i.role == "parameter"
    )
    memory = plan.footprint
    assert memory.argument_bytes["parameters"] * 4 == whole
    assert memory.argument_bytes["gradients"] * 4 == whole  # fp32 accumulators of fp32 weights
    assert memory.peak_bytes == sum(memory.categories.values())
    assert memory.peak_bytes - sum(memory.argument_bytes.values()) == max(
        memory.arena_bytes.values()
    )
