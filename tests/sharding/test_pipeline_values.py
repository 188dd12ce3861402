"""Steps on the stages of a pipeline equal the unsharded step: loss, new weights, optimizer state.

Models are scanned and unrolled, with clipping by the global norm, LAMB and tied embeddings; stages
follow their own schedules with micro-batches in flight. The default run takes every distribution of
up to eight cores once and every model; the whole matrix is behind its marker.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import Diagnostic, Loc, ShardingError, SimulationError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.neff.schedule import Transfer
from shardwright.compiler.program import StepPlan
from shardwright.sharding.cut.pipeline.balance import PartShare
from shardwright.sharding.cut.pipeline.divide import divide
from shardwright.sharding.cut.pipeline.unstack import Staged
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.prepare.phantom_replica import (
    PROOF_SAMPLES,
    TRACED_SAMPLES,
    MeanProof,
    check_means,
)
from tests.support.cells import diagonals, long_in_matrix
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import worst
from tests.support.staged_runs import Make, captured, plan_of, step_errors
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import (
    PIPELINE_DISTRIBUTIONS,
    PIPELINE_MODELS,
    Distribution,
    distribution,
    dropless,
    grouped,
    moe,
    random_inputs,
    tied_gpt,
)

BOUND = 1e-5
MICRO_BATCHES = 4
CELLS = [(model, name) for model in PIPELINE_MODELS for name in PIPELINE_DISTRIBUTIONS]
FEW = [
    ("gqa", "pp 4"),
    ("bert", "pp 2"),
    ("flax", "pp interleaved 2"),
    ("gqa", "pp gpipe 4"),
    ("gqa", "pp tp zero-1 8"),
    ("flax", "pp fsdp 8"),
    ("gqa", "pp fsdp cp 8"),
    ("gqa", "pp ring 4"),
]
LONG = [case for case in FEW if case not in (("gqa", "pp 4"), ("flax", "pp interleaved 2"))]


def check(model: str, name: str) -> None:
    errors = step_errors(PIPELINE_MODELS[model], PIPELINE_DISTRIBUTIONS[name], MICRO_BATCHES)
    leaf, error = worst(errors)
    assert error <= BOUND, f"{leaf}: {error:.1e}"


@pytest.mark.cells("pipelines", len(CELLS))
@pytest.mark.parametrize(("model", "name"), long_in_matrix(FEW, LONG))
def test_a_step_on_stages_equals_the_unsharded_step(model: str, name: str) -> None:
    check(model, name)


@pytest.mark.cells("pipelines", len(CELLS))
@pytest.mark.parametrize(("model", "name"), diagonals([c for c in CELLS if c not in FEW], 5))
def test_values_of_every_cell(model: str, name: str) -> None:
    check(model, name)


def test_the_few_cover_models_and_distributions() -> None:
    assert {model for model, _ in FEW} == set(PIPELINE_MODELS)
    small = {n for n in PIPELINE_DISTRIBUTIONS if not n.endswith(" 16")}
    assert {name for _, name in FEW} | {"pp 2"} == small


def plan(model: str, name: str) -> Plan:
    return plan_of(PIPELINE_MODELS[model], PIPELINE_DISTRIBUTIONS[name], MICRO_BATCHES)


def test_layers_lie_on_their_stage_only() -> None:
    """Five layers on four stages, one of which has two."""
    buffers = plan("gqa", "pp 4").step.buffers
    stages = {b.name: b.stages for b in buffers.values()}
    layers = {n: s for n, s in stages.items() if "layers/" in n and n.startswith("params/")}
    assert all(stages == (int(name[-1]),) for name, stages in layers.items())
    own = [buffers[f"params/layers/w_up@{stage}"] for stage in range(4)]
    sizes = [buffer.local_type.shape[0] for buffer in own]
    assert sorted(sizes) == [1, 1, 1, 2]
    assert sizes == [part.layers for part in plan("gqa", "pp 4").parts]
    assert {buffer.part.leaf for buffer in own if buffer.part} == {"params/layers/w_up"}
    assert stages["params/embed"] == (0,)
    assert stages["params/lm_head"] == (3,)
    assert stages["metrics/loss"] == (3,)


def moved(step: StepPlan) -> Counter:
    """Transfers by (source, target)."""
    return Counter((t.source, t.target) for t in step.transfers if not t.once)


def test_neighbours_send_one_activation_and_one_gradient_per_micro_batch() -> None:
    step = plan("gqa", "pp 4").step
    assert moved(step) == {(a, a + 1): 1 for a in range(3)} | {(a + 1, a): 1 for a in range(3)}
    assert {t.num_bytes for t in step.transfers} == {2 * 8 * 32 * 4}  # samples, positions, width


def test_a_tied_embedding_lies_on_both_ends_which_exchange_its_gradient_once() -> None:
    step = plan("bert", "pp 4").step
    assert step.buffers["params/embed"].stages == (0, 3)
    exchanged = {(t.source, t.target) for t in step.transfers if "params/embed" in t.sent}
    assert exchanged == {(0, 3), (3, 0)}
    assert all(t.once for t in step.transfers if "params/embed" in t.sent)


def test_1f1b_holds_at_most_as_many_activations_as_stages_gpipe_all() -> None:
    """Slots of what a stage keeps for its backward pass."""
    held = {}
    for name in ("pp 4", "pp gpipe 4"):
        step = plan_of(PIPELINE_MODELS["gqa"], PIPELINE_DISTRIBUTIONS[name], 8).step
        kept = [b for b in step.buffers.values() if b.role == "residual"]
        held[name] = [max(b.slots_on(s) for b in kept if b.on(s)) for s in range(4)]
    assert held == {"pp 4": [4, 3, 2, 1], "pp gpipe 4": [8, 8, 8, 8]}


def test_weights_that_stay_gathered_lie_once_on_their_stage() -> None:
    """They are alike in all micro-batches; what a layer made of a micro-batch is not."""
    how = distribution("fsdp", reshard_after_forward=False, pp=2, dp_shard=2)
    make = PIPELINE_MODELS["gqa"]
    buffers = plan_of(make, how, MICRO_BATCHES).step.buffers.values()
    slots = {
        role: {b.slots_on(s) for b in buffers if b.role == role for s in range(2) if b.on(s)}
        for role in ("gathered", "residual")
    }
    assert slots == {"gathered": {1}, "residual": {1, 2}}
    leaf, error = worst(step_errors(make, how, MICRO_BATCHES))
    assert error <= BOUND, leaf


def run(step: StepPlan) -> None:
    make, how = PIPELINE_MODELS["gqa"], PIPELINE_DISTRIBUTIONS["pp 2"]
    graph, inputs, _ = captured(make, 2)
    arrays = random_inputs(graph, inputs)
    given = {slot.name: array for slot, array in zip(inputs, arrays, strict=True)}
    assert how.mesh.num_cores == 2
    ReferenceRanks(step, given).run_step([given] * MICRO_BATCHES)


def without(step: StepPlan, lost: Transfer) -> StepPlan:
    """The step with a message that is never sent: its writer does not run on that stage."""
    kept = tuple(
        dataclasses.replace(t, writer="nobody") if t is lost else t for t in step.transfers
    )
    return dataclasses.replace(step, transfers=kept)


def test_a_lost_send_is_a_reported_deadlock() -> None:
    step = plan("gqa", "pp 2").step
    run(step)
    lost = next(t for t in step.transfers if t.reader == "backward.0")
    with pytest.raises(SimulationError, match="SW_SIM_DEADLOCK") as caught:
        run(without(step, lost))
    text = str(caught.value)
    assert f"stage 0 waits for {lost.received} from stage 1 before run 0 of backward.0" in text
    assert "stage 1 waits for" in text


def test_more_stages_than_layers_are_refused() -> None:
    none = dataclasses.replace(PIPELINE_DISTRIBUTIONS["pp interleaved 2"].settings, stage_parts=0)
    with pytest.raises(ShardingError, match="stage_parts requires at least 1"):
        plan_of(PIPELINE_MODELS["gqa"], Distribution(none, (("pp", 2),)), 2)
    with pytest.raises(ShardingError, match="at least 8 layers that repeat, found 5"):
        plan_of(PIPELINE_MODELS["gqa"], distribution("llm-training", pp=8), 1)


def layered(weights: dict, read: Callable[[dict, int], jax.Array], frozen: int = 0) -> TrainTask:
    """Four layers in a Python loop, layer `i` with the weight that `read` gives it; the first
    `frozen` ones learn nothing."""

    def loss(params: dict, batch: dict) -> jax.Array:
        x = batch["x"]
        for i in range(4):
            weight = read(params, i)
            x = x + jnp.tanh(x @ (jax.lax.stop_gradient(weight) if i < frozen else weight))
        return jnp.mean(x**2)

    def step(params: dict, opt_state: dict, batch: dict) -> tuple[dict, dict, dict]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        fixed = [f"w{i}" for i in range(frozen)]
        new = {k: w if k in fixed else w - 0.1 * grads[k] for k, w in params.items()}
        return new, opt_state, {"loss": value}

    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}
    return TrainTask(
        step=step,
        state=(state, {}),
        batch=lambda samples: {"x": jax.ShapeDtypeStruct((samples, 8), jnp.float32)},
    )


LAYERS_OF_ONE_WEIGHT = {
    "a stack, indexed": lambda: layered({"w": (4, 8, 8)}, lambda params, i: params["w"][i]),
    "one weight": lambda: layered({"w": (8, 8)}, lambda params, i: params["w"]),
}


@pytest.mark.parametrize("name", LAYERS_OF_ONE_WEIGHT)
def test_layers_without_weights_of_their_own_have_no_stages(name: str) -> None:
    with pytest.raises(ShardingError, match="SW_PIPELINE_LAYERS") as caught:
        plan_of(LAYERS_OF_ONE_WEIGHT[name], distribution("fsdp", pp=2), 1)
    found = caught.value.diagnostic
    assert "each of 2 parts, got none for part 0: layers of several parts read params/w" in str(
        caught.value
    )
    assert found.loc and found.loc.file.endswith("test_pipeline_values.py") and found.hint


def test_stages_whose_layers_learn_nothing_are_refused() -> None:
    """No gradient reaches them, so that their part has no backward pass."""

    def frozen(count: int) -> Plan:
        leaves = {f"w{i}": (8, 8) for i in range(4)}
        make = functools.partial(layered, leaves, lambda params, i: params[f"w{i}"], count)
        return plan_of(make, distribution("fsdp", pp=2), 1)

    assert len(frozen(1).step.schedules) == 2  # the first stage has a layer that learns
    with pytest.raises(ShardingError, match="SW_PIPELINE_CUT") as caught:
        frozen(2)
    assert "got none in the backward pass of part 0" in str(caught.value)
    assert caught.value.diagnostic.hint


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2}])
def test_experts_beside_stages(axes: dict[str, int]) -> None:
    """Rows are dropped across samples: one micro-batch, or the step cannot be cut."""
    errors = step_errors(moe, distribution("fsdp", pp=2, **axes), 1, 8 // math.prod(axes.values()))
    leaf, error = worst(errors)
    assert error <= BOUND, f"{leaf}: {error:.1e}"


def test_a_step_without_gradients_has_no_stages() -> None:
    step = plan("gqa", "pp 2").step
    alone = dataclasses.replace(
        step,
        programs=tuple(p for p in step.programs if p.name == "forward.0"),
        metadata={"findings": (Diagnostic("SW_STAGES_CUT", "why", Loc("train.py", 5)),)},
    )
    staged = Staged(
        graph=Graph((), (), ()),
        inputs=(),
        outputs=(),
        parts={},
        homes={},
        shares=(PartShare(1, 0.5),) * 2,
    )
    with pytest.raises(ShardingError, match="SW_PIPELINE_CUT") as caught:
        divide(alone, staged, 2, "1f1b")
    assert caught.value.diagnostic.loc == Loc("train.py", 5)
    with pytest.raises(ShardingError, match="stages need a training step"):
        divide(dataclasses.replace(alone, metadata={"findings": ()}), staged, 2, "1f1b")


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (PIPELINE_MODELS["gqa"], {"pp": 4}),
        pytest.param(PIPELINE_MODELS["flax"], {"pp": 4}, marks=pytest.mark.exhaustive),
        pytest.param(PIPELINE_MODELS["bert"], {"pp": 2, "tp": 2}, marks=pytest.mark.matrix),
        pytest.param(tied_gpt, {"tp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(dropless, {"pp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(moe, {"pp": 2, "tp": 2}, marks=pytest.mark.matrix),
    ],
)
def test_one_sample_in_all(make: Make, axes: dict[str, int]) -> None:
    """No data axis and one sample per micro-batch, the usual case of a pipeline: two samples are
    traced. Three micro-batches are one and a half pairs.
    """
    how = distribution("llm-training", **axes)
    leaf, error = worst(step_errors(make, how, 3, 1))
    assert error <= BOUND, f"{leaf}: {error:.1e}"


@pytest.mark.matrix
def test_one_sample_in_all_and_one_micro_batch() -> None:
    errors = step_errors(PIPELINE_MODELS["flax"], distribution("llm-training", pp=2), 1, 1)
    assert worst(errors)[1] <= BOUND


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (PIPELINE_MODELS["gqa"], {"tp": 2}),
        pytest.param(PIPELINE_MODELS["gqa"], {"cp": 2}, marks=pytest.mark.matrix),
        pytest.param(PIPELINE_MODELS["bert"], {"tp": 2}, marks=pytest.mark.matrix),
    ],
)
def test_one_sample_in_all_needs_no_other_collectives(make: Make, axes: dict[str, int]) -> None:
    """Without stages and micro-batches, too: traced with one sample, values that lost their sample
    dim were gathered and reduced once more, and each time was told as a surprise."""
    how = distribution("llm-training", **axes)
    leaf, error = worst(step_errors(make, how, 1, 1))
    assert error <= BOUND, f"{leaf}: {error:.1e}"
    alone, two = plan_of(make, how, 1, 1), plan_of(make, how, 1, 2)
    assert not [found.message for found in alone.findings]
    assert _traffic(alone) <= _traffic(two)


def rows_kept(has_gradients: bool) -> TrainTask:
    """A step that is one program: a metric of it has the samples of the batch, or it learns
    nothing."""

    def loss(params: dict, batch: dict) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    def step(params: dict, opt_state: dict, batch: dict) -> tuple[dict, dict, dict]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients) if has_gradients else params
        return new, opt_state, {"loss": value, "row": jnp.mean(batch["x"] @ params["w"], axis=0)}

    return TrainTask(
        step=step,
        state=({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, {}),
        roles={"params": "parameter"},
        batch=lambda samples: {"x": jax.ShapeDtypeStruct((samples, 8), jnp.float32)},
    )


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_step_of_one_program_has_its_values_from_one_sample(has_gradients: bool) -> None:
    """It has no accumulators, which make a mean of the parts that a phantom replica leaves."""
    make = functools.partial(rows_kept, has_gradients)
    errors = step_errors(make, distribution("generic", tp=2), 1, 1)
    assert "metrics/row" in errors and worst(errors)[1] <= BOUND


def test_samples_that_mix_are_not_told_apart() -> None:
    """A batch norm needs the statistics of the whole micro-batch, with a phantom replica and
    without."""
    graph, inputs, outputs = captured(mixing, TRACED_SAMPLES)
    mesh = distribution("llm-training", tp=2).mesh
    with pytest.raises(ShardingError, match="SW_ONE_SAMPLE") as caught:
        build_plan(
            graph,
            inputs,
            outputs,
            mesh,
            num_microbatches=2,
            unit=answer_request,
            proof=MeanProof(graph),  # whatever the proof says: `check_means` refuses this step
        )
    assert caught.value.loc is not None and caught.value.loc.file.endswith(Path(__file__).name)
    with pytest.raises(ShardingError, match="SW_STAGES_CUT"):
        plan_of(mixing, distribution("llm-training", tp=2), 2, 1)


def test_one_list_of_the_rows_of_two_samples_has_no_phantom_replica() -> None:
    """Its proof compares traces before lists are sorted per sample: refused, with what to do."""
    with pytest.raises(ShardingError, match=r"micro_batch = 2"):
        plan_of(grouped, distribution("llm-training", tp=2), 2, 1)


def test_a_phantom_replica_needs_the_proof_of_its_step() -> None:
    make, mesh = PIPELINE_MODELS["flax"], distribution("llm-training", tp=2).mesh
    (two, *slots), four = captured(make, TRACED_SAMPLES), captured(make, PROOF_SAMPLES)
    proof, plan = check_means(two, four[0]), functools.partial(build_plan, unit=answer_request)
    with pytest.raises(ShardingError, match=r"SW_ONE_SAMPLE.*got another, samples \[4\]"):
        plan(*four, mesh, proof=proof)
    with pytest.raises(ShardingError, match=r"SW_ONE_SAMPLE.*got it, .* and 2 data ranks"):
        plan(two, *slots, distribution("fsdp", dp_shard=2).mesh, proof=proof)


def test_a_sequence_is_not_gathered_more_often_for_one_sample() -> None:
    """Collectives of a micro-batch do not depend on how many samples it has."""
    how = distribution("llm-training", pp=2, tp=2)
    one, two = (_traffic(plan_of(PIPELINE_MODELS["gqa"], how, 2, samples)) for samples in (1, 2))
    assert one == two


def _traffic(plan: Plan) -> Counter:
    rows = (row for row in plan.traffic if row.program.startswith(("forward", "backward")))
    return Counter({(row.program, row.kind, row.axes): row.count for row in rows})


def mixing() -> TrainTask:
    """Two products with a norm over the batch between them; a shift per sample, which tracing of
    one sample adds without a sum.
    """

    def loss(params: dict, batch: dict) -> jax.Array:
        hidden = batch["x"] @ params["w"] + params["b"]
        hidden = hidden - jnp.mean(hidden, axis=0, keepdims=True)
        return jnp.mean((jnp.tanh(hidden) @ params["v"]) ** 2)

    def step(params: dict, opt_state: dict, batch: dict) -> tuple[dict, dict, dict]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), opt_state, {"loss": value}

    shapes = {"w": (8, 16), "b": (1, 16), "v": (16, 8)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return TrainTask(
        step=step,
        state=(state, {}),
        batch=lambda samples: {"x": jax.ShapeDtypeStruct((samples, 8), jnp.float32)},
    )


def test_stages_agree_on_every_number() -> None:
    """What several stages hold is equal bit by bit: `gather` refuses anything else."""
    make, how = PIPELINE_MODELS["bert"], PIPELINE_DISTRIBUTIONS["pp 4"]
    step = plan_of(make, how, MICRO_BATCHES).step
    shared = [b.name for b in step.buffers.values() if len(b.stages) > 1 and b.role == "optimizer"]
    assert {name.rsplit("/", 1)[-1] for name in shared} >= {"embed", "count"}
    assert np.all([error <= BOUND for error in step_errors(make, how, MICRO_BATCHES).values()])
