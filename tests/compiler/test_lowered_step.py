"""Whole training steps as lowered kernels over ranks equal the unsharded step."""

from __future__ import annotations

import itertools
import math

import pytest

from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    reference_step,
    task_batches,
)
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.linking.placement import place
from shardwright.compiler.lower.write_out import tensor_spans
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.driver import run
from shardwright.compiler.schedule import hbm
from shardwright.orchestrator.models import config_task
from shardwright.sharding.partition.mesh import make_mesh
from tests.models import prime_model
from tests.support.kernel_reference import lower_function
from tests.support.lowered_ranks import LoweredRanks
from tests.support.road import fsdp_plan, leaf_error, split_batch, worst

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def run_lowered_step(plan: StepPlan, task: TrainTask) -> tuple[dict[str, float], LoweredRanks]:
    """Errors per leaf after one step."""
    batch = next(i for i in plan.buffers.values() if i.role == "batch")
    samples = batch.global_type.shape[0]
    state = initial_state(task, 0)
    ranks = LoweredRanks(plan, state)
    (whole,) = itertools.islice(task_batches(task, 0, samples * plan.num_microbatches), 1)
    expected = reference_step(task, state, whole)
    ranks.run_step(split_batch(batch_leaves(whole), samples))
    errors = {
        name: leaf_error(ranks.gather(name), expected[name])
        for name, info in plan.buffers.items()
        if name in expected and info.role != "batch"
    }
    assert errors
    return errors, ranks


@pytest.fixture(scope="module")
def llama_run() -> tuple[dict[str, float], LoweredRanks]:
    task = config_task.train_task(CONFIG, seq_len=16)
    plan = fsdp_plan(task, make_mesh({"dp_shard": 2}), 1, 2)
    return run_lowered_step(plan.step, task)


def test_scanned_llama_with_adamw(llama_run) -> None:
    errors, _ = llama_run
    assert worst(errors)[1] <= 1e-5, worst(errors)


def test_layers_are_one_function_each_way(llama_run) -> None:
    _, ranks = llama_run
    names = [u.name for u in ranks.outlined.functions]
    assert len(names) >= 6
    assert names.count("forward.loop") == names.count("backward.loop") == 1


def test_memory_is_at_the_liveness_bound(llama_run) -> None:
    _, ranks = llama_run
    for program in ranks.outlined.programs:
        assert place(program, {}).arena_bytes <= 1.02 * program.bound_bytes, program.name
    for bound_unit in ranks.units.values():
        lowered = bound_unit.lowered
        spans = tensor_spans(lowered.kernels)
        lifetimes = [
            hbm.Lifetime(math.prod(t.shape) * t.dtype.bytes, *spans[i])
            for i, t in enumerate(lowered.tensors)
            if t.kind == "scratch"
        ]
        assert lowered.scratch_bytes <= 1.02 * hbm.liveness_bound(lifetimes)


def test_attention_and_norms_are_loop_fusions(llama_run) -> None:
    """The forward layer has one kernel per norm and one for its softmax."""
    _, ranks = llama_run
    (layer,) = [u for u in ranks.outlined.functions if u.name == "forward.loop"]
    options = CompileOptions(attention="fused")
    kernels = lower_function(run(layer.graph, PASSES), layer.signature, options).kernels
    compute = [k.name for k in kernels if k.kind == "compute"]
    assert sum(n.op == "contract" for k in kernels for n in k.nodes) == 9
    assert compute.count("reduce_exponential") == 1
    assert compute.count("reduce") == 2
    transposed = [k for k in kernels if k.name == "transpose"]
    assert not transposed


def test_handwritten_model_of_prime_sizes() -> None:
    task = prime_model.train_task()
    plan = fsdp_plan(task, make_mesh({"dp_shard": 2}), 1, 2)
    errors, _ = run_lowered_step(plan.step, task)
    assert worst(errors)[1] <= 1e-5, worst(errors)
