"""Deduplication: the plan of an unrolled step partitioned in its deduplicated form is, byte for
byte, the plan of the step partitioned whole; its cost does not grow with the layers; a wrong answer
never passes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models.config_task import train_task
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, all_values
from shardwright.sharding.partition.shardy import answer_request, partition
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.plan import Plan, Prepared, complete, partitioned, prepare
from shardwright.sharding.prepare.dedup import ORIGIN, Deduped, dedup
from shardwright.sharding.prepare.expand import ExpandError, expand
from shardwright.sharding.settings import StrategySettings
from tests.models import flax_decoder, prime_model
from tests.support.road import captured_graph

Weights = dict[str, jax.Array]
FSDP = make_mesh({"dp_shard": 4})
HSDP = make_mesh({"dp_replicate": 2, "dp_shard": 2})


def flax(layers: int) -> TrainTask:
    return flax_decoder.train_task(num_layers=layers, seq_len=8)


def prime(layers: int) -> TrainTask:
    return prime_model.train_task(num_blocks=layers)


@functools.cache
def prepared(model: Callable[[int], TrainTask], layers: int, mesh: Mesh) -> Prepared:
    graph, inputs, outputs = captured_graph(model(layers), 4)
    return prepare(run(graph, step_passes()), inputs, outputs, mesh)


@functools.cache
def answer_of(model: Callable[[int], TrainTask], layers: int) -> tuple[Deduped, PartitionedGraph]:
    """A deduplicated graph and the partitioner's answer for it."""
    deduped = prepared(model, layers, FSDP).deduped
    assert deduped is not None
    short = (deduped.graph, FSDP, deduped.specs, deduped.inputs, deduped.outputs)
    return deduped, partition(*short, unit=answer_request)


def plans(ready: Prepared, num_microbatches: int) -> tuple[Plan, Plan]:
    """The plan over the deduplicated form, and the one over the whole graph."""
    calls: list[bytes] = []

    def once(request: bytes) -> bytes:
        calls.append(request)
        return answer_request(request)

    deduped = partitioned(ready, once)
    assert len(calls) == 1 and ready.deduped is not None
    verify(deduped.graph)
    whole = partitioned(dataclasses.replace(ready, deduped=None), once)
    assert len(calls[0]) < 0.7 * len(calls[1])
    both = (complete(ready, part, num_microbatches=num_microbatches) for part in (deduped, whole))
    return next(both), next(both)


@pytest.mark.parametrize(
    ("model", "layers", "mesh", "reshard", "num_microbatches"),
    [
        pytest.param(flax, 6, FSDP, True, 1, marks=pytest.mark.matrix),
        pytest.param(flax, 6, HSDP, True, 2, marks=pytest.mark.matrix),
        (prime, 9, FSDP, False, 1),
        pytest.param(prime, 9, HSDP, True, 1, marks=pytest.mark.matrix),
    ],
)
def test_plan_is_that_of_the_whole_graph(
    model: Callable[[int], TrainTask],
    layers: int,
    mesh: Mesh,
    reshard: bool,
    num_microbatches: int,
) -> None:
    settings = StrategySettings(reshard_after_forward=reshard)
    ready = dataclasses.replace(prepared(model, layers, mesh), settings=settings)
    deduped, whole = plans(ready, num_microbatches)
    assert deduped.step.buffers == whole.step.buffers
    assert deduped.step.schedules == whole.step.schedules
    for one, other in zip(deduped.step.programs, whole.step.programs, strict=True):
        assert (one.inputs, one.outputs) == (other.inputs, other.outputs)
        assert dump(one.graph, with_locs=True) == dump(other.graph, with_locs=True)
    assert deduped.traffic == whole.traffic
    assert deduped.findings == whole.findings
    assert deduped.footprint == whole.footprint


def test_deduplicated_graph_does_not_grow_with_the_layers() -> None:
    few, many = (prepared(prime, n, FSDP).deduped for n in (9, 15))
    assert few is not None and many is not None
    verify(many.graph)
    assert len(many.nodes.graph.ops) > 1.5 * len(few.nodes.graph.ops)
    assert len(many.graph.ops) <= 1.05 * len(few.graph.ops)


def test_scanned_model_is_not_deduplicated() -> None:
    config = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "head_dim": 8,
    }
    graph, inputs, outputs = captured_graph(train_task(config, seq_len=8), 4)
    assert prepare(graph, inputs, outputs, FSDP).deduped is None


def loops_task(count: int) -> TrainTask:
    """Unrolled blocks, each with a loop of its own: ops with regions repeat too."""

    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        steps, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c) * 0.5 + c, None), x, length=3)
        return x + jnp.tanh(steps @ w)

    def loss(params: Weights, batch: Weights) -> jax.Array:
        x = batch["x"]
        for w in params.values():
            x = block(x, w)
        return jnp.mean(x * x)

    def step(params: Weights, state: Any, batch: Weights) -> tuple[Weights, Any, Weights]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, {"loss": value}

    def init(key: jax.Array) -> tuple[Weights, tuple[()]]:
        keys = jax.random.split(key, count)
        return {f"w{i:02d}": jax.random.normal(k, (8, 8)) for i, k in enumerate(keys)}, ()

    def batch(samples: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"x": jax.ShapeDtypeStruct((samples, 8), np.float32)}

    return TrainTask(step=step, init=init, batch=batch, tokens_per_sample=1)


def test_blocks_with_loops_stay_whole_or_agree() -> None:
    ready = prepared(loops_task, 12, FSDP)
    answer = partitioned(ready, answer_request)
    whole = partitioned(dataclasses.replace(ready, deduped=None), answer_request)
    one, other = complete(ready, answer), complete(ready, whole)
    assert one.traffic == other.traffic
    for a, b in zip(one.step.programs, other.step.programs, strict=True):
        assert dump(a.graph, with_locs=False) == dump(b.graph, with_locs=False)


@pytest.mark.matrix
def test_every_changed_spec_of_the_answer_is_refused_or_changes_nothing_else() -> None:
    """A copy that would read another layout than the answer's is never made."""
    deduped, answer = answer_of(flax, 6)
    ready = prepared(flax, 6, FSDP)
    middle = deduped.standing[deduped.nodes.classes[len(deduped.nodes.classes) // 2]]
    others = [op for op in answer.graph.ops if op.loc.line != middle and op.operands]
    refused = 0
    for op in others[:: max(1, len(others) // 40)]:
        value = op.operands[0]
        spec = answer.specs[value]
        if not spec.axes:
            continue
        wrong = {**answer.specs, value: ShardingSpec(((),) * len(spec.dims), ())}
        changed = dataclasses.replace(answer, specs=wrong)
        try:
            made = expand(deduped, changed, ready.inputs, ready.outputs)
        except ExpandError:
            refused += 1
            continue
        with pytest.raises(ShardingError):
            complete(ready, made)
        refused += 1
    assert refused >= 10


def test_a_missing_op_of_the_answer_is_refused() -> None:
    deduped, answer = answer_of(flax, 6)
    ready = prepared(flax, 6, FSDP)
    gather = next(op for op in answer.graph.ops if op.name == "all_gather")
    other = next(op for op in answer.graph.ops if op.name == "dot_general")
    gather.loc, kept = other.loc, gather.loc
    try:
        with pytest.raises(ExpandError):
            expand(deduped, answer, ready.inputs, ready.outputs)
    finally:
        gather.loc = kept


def test_a_refused_deduplicated_graph_falls_back_to_the_whole_graph() -> None:
    ready = prepared(flax, 6, FSDP)
    calls: list[int] = []

    def refuses_short(request: bytes) -> bytes:
        calls.append(len(request))
        if len(calls) == 1:
            raise ShardingError("SW_PARTITIONER_RULE", "refused")
        return answer_request(request)

    answer = partitioned(ready, refuses_short)
    assert len(calls) == 2 and calls[1] > 1.4 * calls[0]
    assert all(value in answer.specs for value in all_values(answer.graph))
    assert not [op for op in answer.graph.ops if op.loc.file == ORIGIN]


def test_graphs_with_few_repeats_are_left_alone() -> None:
    graph, inputs, outputs = captured_graph(flax(2), 4)
    recipe = prepare(graph, inputs, outputs, FSDP).recipe
    assert dedup(recipe.graph, recipe.specs, inputs, outputs) is None
