"""Adapters of the families in the table: the step in plain JAX, PEFT's, and refusals."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.model import own_settings, resolve_task
from shardwright.orchestrator.models import adapters, blocks, config_task, decoder, leaves
from shardwright.orchestrator.models.adapters import TARGETS, Lora
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import EXACT, How
from shardwright.sharding.partition.findings import collectives
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, run_and_compare, worst
from tests.support.step_plans import build_plan
from tests.support.tiny_configs import tiny

LENGTH = 8
LORA = Lora(r=4, alpha=8.0, base="float32")
RATE = 0.1


def task_of(family: str, lora: Lora | None) -> TrainTask:
    return config_task.train_task(
        tiny(family, vocab_size=256), seq_len=LENGTH, optimizer="sgd", lr=RATE, clip=0.0, lora=lora
    )


def first_state(task: TrainTask) -> tuple[Any, ...]:
    """The first state, with both halves of adapters drawn: that no gradient is zero."""
    assert task.init is not None
    own, *rest = task.init(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    drawn = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(next(keys), leaf.shape), own)
    return drawn, *rest


def a_batch(task: TrainTask) -> Any:
    assert task.batches is not None
    return next(task.batches(0, 2, None))


def merged(frozen: Any, own: Any, scale: float) -> Any:
    """The whole model that adapters come to."""
    if not isinstance(own, dict):
        return frozen
    if set(own) == {"a", "b"}:
        matrix = frozen
        if isinstance(frozen, dict):
            matrix = frozen["weight"].astype(jnp.float32) * frozen["scale"]
        return matrix + scale * own["a"] @ own["b"]
    return {name: merged(leaf, own.get(name), scale) for name, leaf in frozen.items()}


STEPS = [(family, base) for family in ("llama", "qwen3", "gemma2") for base in ("float32", "int8")]


@pytest.mark.parametrize(
    ("family", "base"), long_in_matrix(STEPS, [c for c in STEPS if c != ("llama", "int8")])
)
def test_the_step_is_that_of_the_merged_model(family: str, base: str) -> None:
    """Loss, and adapters after one step of SGD, of x (W + s A B) in plain JAX."""
    lora = Lora(r=4, alpha=8.0, base=base)
    task, model = task_of(family, lora), architecture_of(tiny(family, vocab_size=256))
    own, frozen, opt_state = first_state(task)
    batch = a_batch(task)

    def loss(own: Any) -> jax.Array:
        params = merged(frozen, own, 2.0)
        params = {
            n: p.astype(jnp.float32) if hasattr(p, "astype") else p for n, p in params.items()
        }
        given = decoder.logits(model, params, batch["tokens"], How())
        return blocks.cross_entropy(EXACT, given, batch["targets"])

    value, grads = jax.jit(jax.value_and_grad(loss))(own)
    after, kept, _, metrics = jax.jit(task.step)(own, frozen, opt_state, batch)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-6)
    expected = jax.tree.map(lambda leaf, grad: leaf - RATE * grad, own, grads)
    for (path, found), wanted in zip(
        jax.tree.leaves_with_path(after), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6, err_msg=str(path))
    jax.tree.map(np.testing.assert_array_equal, kept, frozen)


def test_the_first_step_computes_what_the_model_does() -> None:
    task, plain = task_of("llama", LORA), task_of("llama", None)
    batch = a_batch(task)
    losses = [
        float(jax.jit(one.step)(*one.init(jax.random.key(0)), batch)[-1]["loss"])
        for one in (task, plain)
    ]
    assert losses[0] == losses[1]


def test_roles_and_sizes_are_those_of_adapters() -> None:
    model = architecture_of(tiny("llama", vocab_size=256))
    captured = capture(task_of("llama", LORA), 2)
    found: dict[str, int] = {}
    for info in captured.inputs:
        found[info.role] = found.get(info.role, 0) + int(np.prod(info.shape))
    layer = leaves.layer_leaves(model, model.layers[0])
    pairs = [sum(layer[name].shape) for name in TARGETS.values()]
    assert found["parameter"] == len(model.layers) * LORA.r * sum(pairs)
    assert found["frozen"] == leaves.count_params(model)


def test_codes_are_the_nearest_of_256_steps() -> None:
    matrix = jax.random.normal(jax.random.key(0), (3, 16, 5))
    found = adapters.quantised(matrix)
    assert found["weight"].dtype == jnp.int8 and found["scale"].shape == (3, 1, 5)
    error = jnp.abs(found["weight"] * found["scale"] - matrix)
    assert float(jnp.max(error / found["scale"])) <= 0.5 + 1e-5
    assert float(jnp.max(jnp.abs(found["weight"]))) == 127
    empty = adapters.quantised(jnp.zeros((4, 2)))
    assert not np.any(np.isnan(empty["scale"])) and not np.any(empty["weight"])


MESHES = {"fsdp": {"dp_shard": 4}, "tp": {"dp_shard": 2, "tp": 2}, "pp": {"pp": 2, "dp_shard": 2}}
CELLS = [(base, mesh) for base in ("float32", "bfloat16", "int8") for mesh in MESHES]


@pytest.mark.parametrize(
    ("base", "mesh"),
    long_in_matrix(
        CELLS,
        [("bfloat16", "pp"), ("int8", "fsdp")],
        [
            cell
            for cell in CELLS
            if cell not in (("int8", "tp"), ("bfloat16", "pp"), ("int8", "fsdp"))
        ],
    ),
)
def test_cores_make_the_step_of_one(base: str, mesh: str) -> None:
    task = task_of("llama", Lora(r=4, alpha=8.0, base=base))
    graph, inputs, outputs = captured_graph(task, 4)
    plan = build_plan(
        graph, inputs, outputs, make_mesh(MESHES[mesh]), num_microbatches=2, unit=answer_request
    )
    errors, _ = run_and_compare(plan.step, task)
    assert worst(errors)[1] <= 1e-5
    unexpected = [f.message for f in plan.findings if f.code == "SW_COLLECTIVE_UNEXPECTED"]
    assert not unexpected


@pytest.mark.parametrize(("adapted", "samples"), [(True, 1), (False, 1), (True, 2)])
def test_a_step_of_one_sample_has_no_surprise_that_is_ours(adapted: bool, samples: int) -> None:
    """What the layout needs is in it: sums over `tp`, which are predicted of two samples."""
    task = task_of("llama", Lora(r=4, alpha=8.0) if adapted else None)
    graph, inputs, outputs = captured_graph(task, samples)
    plan = build_plan(graph, inputs, outputs, make_mesh({"tp": 2}), unit=answer_request)
    kinds = {op.name for p in plan.step.programs for op in collectives(p.graph)}
    assert {"all_reduce"} <= kinds
    assert not [f.message for f in plan.findings if f.code == "SW_COLLECTIVE_UNEXPECTED"]


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (("model.lora_targets=q_proj,query",), "SW_LORA_TARGET", "got query"),
        (("model.lora_targets=",), "SW_LORA_TARGET", "got "),
        (
            ("model.lora_r=0", "model.lora_base=int8"),
            "SW_MODEL_SETTING",
            "model.lora_base requires",
        ),
        (("model.preset=gpt3-125m", "model.config="), "SW_LORA_MODEL", "got gpt3-125m"),
    ],
)
def test_what_is_not_built_is_refused(settings: tuple[str, ...], code: str, said: str) -> None:
    text = f"model.config={json.dumps(tiny('llama'))}"
    job = config.load(None, [text, "model.seq_len=8", "model.lora_r=4", *settings])
    with pytest.raises(UsageError, match=said) as caught:
        capture(resolve_task(job), 2)
    assert caught.value.code == code


def test_a_step_of_ones_own_is_told_what_is_asked() -> None:
    job = config.load(None, ["model.entry=tune:make_task", "model.lora_r=16"])
    assert own_settings(job) == {"model.lora_r": 16}
    job = config.load(None, ["model.entry=tune:make_task", "model.lora_targets=q_proj, v_proj"])
    assert own_settings(job) == {"model.lora_targets": ("q_proj", "v_proj")}


def test_experts_have_no_adapters() -> None:
    with pytest.raises(UsageError, match=r"q_proj, k_proj, v_proj, o_proj, got gate_proj"):
        capture(task_of("mixtral", Lora(r=4, alpha=8.0, targets=("gate_proj",))), 2)
    assert capture(task_of("mixtral", LORA), 2)


def test_the_same_weights_give_what_peft_gives() -> None:
    """Logits, and the gradient of every A and B, of the library peft."""
    pytest.importorskip("peft", reason="nothing else needs it")
    from peft import LoraConfig, get_peft_model

    from tests.support.hugging_face import Reference

    config_ = tiny("llama", vocab_size=256)
    reference, model = Reference(config_), architecture_of(config_)
    params = reference.params(model)
    torch = reference.torch
    given = LoraConfig(r=4, lora_alpha=8, target_modules=[*TARGETS], lora_dropout=0.0)
    theirs = get_peft_model(reference.model, given)
    rng = np.random.default_rng(3)
    own: Any = {"layers": {}}
    for target, leaf in TARGETS.items():
        halves: dict[str, list[np.ndarray]] = {"a": [], "b": []}
        for number in range(len(model.layers)):
            ends = tuple(f"layers.{number}.{part}.{target}" for part in ("self_attn", "mlp"))
            (module,) = (m for name, m in theirs.named_modules() if name.endswith(ends))
            for half, side in (("a", module.lora_A), ("b", module.lora_B)):
                drawn = 0.1 * rng.standard_normal(tuple(side["default"].weight.shape))
                with torch.no_grad():
                    side["default"].weight.copy_(torch.tensor(drawn, dtype=torch.float32))
                halves[half].append(drawn.T.astype(np.float32))
        own["layers"][leaf] = {half: np.stack(rows) for half, rows in halves.items()}
    tokens, targets = rng.integers(1, 256, (2, 2, LENGTH))

    def loss(own: Any) -> tuple[jax.Array, jax.Array]:
        made = adapters.adapted(LORA, params, own)
        logits = decoder.logits(model, made, tokens, How())
        return blocks.cross_entropy(EXACT, logits, targets), logits

    (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(own)
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits
    flat = expected.reshape(-1, expected.shape[-1])
    torch.nn.functional.cross_entropy(flat, torch.tensor(targets.reshape(-1)).long()).backward()
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    compared = 0
    for name, leaf in theirs.named_parameters():
        if leaf.requires_grad:
            *_, number, _, target, half, _, _ = name.split(".")
            found = grads["layers"][TARGETS[target]][half[-1].lower()][int(number)]
            wanted = leaf.grad.numpy().T
            assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted), name
            compared += 1
    assert compared == 2 * len(TARGETS) * len(model.layers)
