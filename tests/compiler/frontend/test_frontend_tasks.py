"""Tasks, captures, presets, texts and the reference run: names, roles, determinism, and mistakes of
users.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.compiler.diagnostics import ImportRuleError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import ArgInfo, capture
from shardwright.compiler.frontend.entry import load_task
from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    reference_step,
    run_reference,
    task_batches,
)
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import config_task, decoder, encoder, leaves, rope, text
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import How
from shardwright.orchestrator.models.presets import (
    CONFIGS,
    PRESETS,
    UNETS,
    preset_config,
    preset_names,
    preset_task,
)
from shardwright.orchestrator.models.rope import Rope
from tests.models import prime_model

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}

SEVEN_ROWS = jax.ShapeDtypeStruct((7, 3), jnp.float32)


def tiny_task(**changes: Any) -> TrainTask:
    """A linear model with optax; `changes` replace fields."""
    chain = optax.sgd(0.1, momentum=0.9)

    def init(key: jax.Array) -> Any:
        params = {"w": jax.random.normal(key, (3, 2)), "layers": [jnp.zeros(2)]}
        return params, chain.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return jnp.mean((batch["x"] @ p["w"] + p["layers"][0]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "extra": loss * 2}

    def batches(seed: int, n: int, data: str | None) -> Any:
        rng = np.random.default_rng(seed)
        while True:
            yield {"x": rng.random((n, 3), np.float32)}

    fields: dict[str, Any] = {
        "step": step,
        "init": init,
        "batch": lambda n: {"x": jax.ShapeDtypeStruct((n, 3), jnp.float32)},
        "batches": batches,
    }
    return TrainTask(**(fields | changes))


def test_names_roles_and_aliases() -> None:
    captured = capture(tiny_task(), 5)
    assert [(i.name, i.role) for i in captured.inputs] == [
        ("params/layers/0", "parameter"),
        ("params/w", "parameter"),
        ("opt_state/0/trace/layers/0", "optimizer"),
        ("opt_state/0/trace/w", "optimizer"),
        ("batch/x", "batch"),
    ]
    assert captured.inputs[-1] == ArgInfo("batch/x", "batch", (5, 3), DType.F32, 0)
    assert [(o.name, o.role) for o in captured.outputs][-2:] == [
        ("metrics/extra", "metric"),
        ("metrics/loss", "metric"),
    ]
    assert captured.aliases == ((0, 0), (1, 1), (2, 2), (3, 3))


def test_roles_can_be_set_by_path_prefix() -> None:
    task = tiny_task(
        state_names=("a", "b"), roles={"a": "parameter", "a/layers": "rng", "b": "optimizer"}
    )
    roles = {info.name: info.role for info in capture(task, 5).inputs}
    assert [roles[name] for name in ("a/w", "a/layers/0", "b/0/trace/w")] == [
        "parameter",
        "rng",
        "optimizer",
    ]


def test_capture_is_deterministic() -> None:
    first, second = (capture(tiny_task(), 5) for _ in range(2))
    assert first.artifact == second.artifact


def test_state_without_init_is_timing_only() -> None:
    full = tiny_task()
    state = jax.eval_shape(full.init, jax.random.key(0))
    task = tiny_task(init=None, state=state)
    assert task.init is None
    assert capture(task, 5).inputs == capture(full, 5).inputs
    with pytest.raises(UsageError, match=r"requires TrainTask\.init"):
        initial_state(task, 0)


def _loses_a_leaf(params: Any, opt_state: Any, batch: Any) -> Any:
    return {"w": params["w"]}, opt_state, jnp.sum(params["w"])


def _changes_a_type(params: Any, opt_state: Any, batch: Any) -> Any:
    changed = {**params, "w": params["w"].astype(jnp.bfloat16)}
    return changed, opt_state, jnp.sum(params["w"])


def _returns_no_loss(params: Any, opt_state: Any, batch: Any) -> Any:
    return params, opt_state, {"right": jnp.int32(0)}


def _returns_a_pair(params: Any, opt_state: Any, batch: Any) -> Any:
    return params, opt_state


def _asks_for_a_value(params: Any, opt_state: Any, batch: Any) -> Any:
    return params, opt_state, {"loss": float(jnp.sum(params["w"]))}


def _multiplies_what_does_not_fit(params: Any, opt_state: Any, batch: Any) -> Any:
    return params, opt_state, {"loss": jnp.sum(batch["x"] @ batch["x"])}


def _line_of(function: Any) -> str:
    """The first line of a function's body as errors name it."""
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize("step", [_asks_for_a_value, _multiplies_what_does_not_fit])
def test_what_a_step_raises_is_shown_at_its_line(step: Any) -> None:
    with pytest.raises(UsageError, match="step of the task raised") as caught:
        capture(tiny_task(step=step), 5, str(Path(__file__).parent))
    assert caught.value.code == "SW_TASK_RAISED"
    assert str(caught.value.loc) == _line_of(step)


def _asks_the_vendor(params: Any, opt_state: Any, batch: Any) -> Any:
    shape = jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype)
    loss = jnp.mean(jax.ffi.ffi_call("AwsNeuronGelu", shape)(batch["x"]))
    return params, opt_state, {"loss": loss}


def test_a_step_that_this_host_cannot_run_says_how_to_run_it_sharded() -> None:
    """No code but ours and jax's is at work then, and the step is no defect of ours."""
    with pytest.raises(UsageError, match=r"unsharded on XLA's CPU, raised .*AwsNeuronGelu") as told:
        run_reference(tiny_task(step=_asks_the_vendor), steps=1, global_batch=4)
    diagnostic = told.value.diagnostic
    assert (diagnostic.code, diagnostic.loc) == ("SW_TASK_RAISED", None)
    assert "run.compare=false" in diagnostic.hint


def test_who_called_a_step_is_no_place_of_what_it_raises() -> None:
    """This file is the user's, and all that it does here is to ask for the capture."""
    with pytest.raises(UsageError, match="step of the task raised") as told:
        capture(tiny_task(step=jnp.matmul), 5, str(Path(__file__).parent))
    assert Path(__file__).name not in str(told.value.loc)


def _has_no_key(key: Any) -> Any:
    return {"w": key["w"]}, ()


def test_what_other_functions_of_a_task_raise_is_shown_too() -> None:
    with pytest.raises(UsageError, match="init of the task raised") as caught:
        capture(tiny_task(init=_has_no_key), 5, str(Path(__file__).parent))
    assert str(caught.value.loc) == _line_of(_has_no_key)
    with pytest.raises(UsageError, match="batch of the task raised ZeroDivisionError"):
        capture(tiny_task(batch=lambda n: n // 0), 5)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"init": None}, "SW_TASK_STATE", "requires `init` or `state`"),
        ({"init": lambda key: {"w": key}}, "SW_TASK_STATE", r"tuple of 2 \(params, opt_state\)"),
        ({"step": _loses_a_leaf}, "SW_TASK_RESULT", "params/layers/0 back"),
        ({"step": _changes_a_type}, "SW_TASK_RESULT", r"params/w back as f32\[3, 2\], got .*bf16"),
        ({"step": _returns_no_loss}, "SW_TASK_RESULT", r"`loss` .* none among right i32\[\]"),
        ({"step": _returns_a_pair}, "SW_TASK_RESULT", "none among a result of type tuple"),
        ({"batch": lambda n: {"x": SEVEN_ROWS}}, "SW_TASK_BATCH", "dim 0 of 5"),
        ({"roles": {"params": "weights"}}, "SW_TASK_ROLE", "weights"),
    ],
)  # fmt: skip
def test_mistakes_in_a_task(changes: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        capture(tiny_task(**changes), 5)
    assert caught.value.code == code


def test_element_types_the_ir_lacks_are_refused() -> None:
    batch = {"x": jax.ShapeDtypeStruct((5, 3), jnp.float4_e2m1fn)}
    with pytest.raises(ImportRuleError, match="batch/x requires an element type") as caught:
        capture(tiny_task(batch=lambda n: batch), 5)
    assert caught.value.code == "NCC_ESPP004"


def test_load_task(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, width in ((first, 67), (second, 71)):
        folder.mkdir()
        (folder / "sizes.py").write_text(f"WIDTH = {width}\n")
        (folder / "model.py").write_text(
            "from tests.models import prime_model\n"
            "def make(**options):\n"
            "    from pathlib import Path\n"
            "    width = int((Path(__file__).parent / 'sizes.py').read_text().split()[-1])\n"
            "    return prime_model.train_task(width=width, **options)\n"
            "def nothing():\n"
            "    return 3\n"
        )
    for folder, width in ((first, 67), (second, 71)):  # the same module name twice in one process
        task = load_task("model:make", folder, {"num_blocks": 1})
        shapes = {i.name: i.shape for i in capture(task, 2).inputs}
        assert shapes["params/lookup"] == (257, width)
    for entry, words in (
        ("model", "module:function"),
        ("absent:make", "module absent"),
        ("model:absent", "function absent"),
        ("model:nothing", "returning a TrainTask or a torch.nn.Module, got int"),
    ):
        with pytest.raises(UsageError, match=words):
            load_task(entry, first)


def test_an_import_error_inside_the_users_module_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import a_package_nobody_has\n")
    with pytest.raises(UsageError, match="a_package_nobody_has") as caught:
        load_task("needs:make", tmp_path)
    assert (caught.value.code, str(caught.value.loc)) == ("SW_NEEDS_PACKAGE", "needs.py:1")


def test_reference_run_equals_single_steps() -> None:
    task = prime_model.train_task(num_blocks=1)
    run = run_reference(task, steps=3, global_batch=2, seed=1, keep=(0, 3))
    state = initial_state(task, 1)
    assert all(np.array_equal(state[name], run.states[0][name]) for name in state)
    losses = []
    for batch in itertools.islice(task_batches(task, 1, 2), 3):
        leaves = reference_step(task, state, batch)
        losses.append(float(leaves["metrics/loss"]))
        state = {name: leaves[name] for name in state}
    assert losses == pytest.approx(list(run.losses), rel=1e-6)
    for name, leaf in run.states[3].items():
        np.testing.assert_allclose(state[name], leaf, rtol=1e-5, atol=1e-6)
    assert set(run.states) == {0, 3}


def test_reference_names_are_those_of_the_capture() -> None:
    task = config_task.train_task(CONFIG, seq_len=8)
    captured = capture(task, 2)
    state, batch = initial_state(task, 0), next(task_batches(task, 0, 2))
    given = state | batch_leaves(batch)
    assert [(i.name, i.shape) for i in captured.inputs] == [(n, a.shape) for n, a in given.items()]
    assert [o.name for o in captured.outputs] == list(reference_step(task, state, batch))
    with pytest.raises(UsageError, match="requires leaf params/embed"):
        reference_step(task, {}, batch)


def test_a_loss_falls() -> None:
    task = config_task.train_task(CONFIG | {"hidden_size": 32}, seq_len=16, lr=1e-2)
    losses = run_reference(task, steps=12, global_batch=8).losses
    assert losses[0] == pytest.approx(np.log(256), abs=0.2)
    assert losses[-1] < losses[0] - 1.0


def test_text_batches_repeat_by_seed(tmp_path: Path) -> None:
    data = text.load_text(None)
    assert data == text.load_text("pydoc")
    assert len(data) > 200_000
    first, again, other = (next(text.byte_batches(data, 16, 4, seed)) for seed in (5, 5, 6))
    assert all(np.array_equal(first[k], again[k]) for k in ("tokens", "targets"))
    assert not np.array_equal(first["tokens"], other["tokens"])
    assert first["tokens"].shape == (4, 16)
    assert first["tokens"].dtype == np.int32
    assert np.array_equal(first["tokens"][:, 1:], first["targets"][:, :-1])
    row = bytes(first["tokens"][0].astype(np.uint8))
    assert row in data
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(UsageError, match="at least 17 bytes, got 2"):
        next(text.byte_batches(text.load_text(str(tmp_path / "short.txt")), 16, 4, 0))
    with pytest.raises(UsageError, match="requires a text file"):
        text.load_text(str(tmp_path / "absent.txt"))


def test_vocabulary_below_a_byte_is_refused() -> None:
    task = config_task.train_task(CONFIG | {"vocab_size": 100}, seq_len=8)
    with pytest.raises(UsageError, match="vocab_size >= 256, got 100"):
        next(task_batches(task, 0, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "f64"}, "dtype requires"),
        ({"remat": "some"}, "remat requires"),
        ({"optimizer": "lion"}, "optimizer requires"),
        ({"seq_len": 5000}, "seq_len requires 1 to 2048"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config_task.train_task(CONFIG, **({"seq_len": 8} | options))


def test_published_parameter_counts() -> None:
    """Source: the papers named in presets.py (counts of the released checkpoints)."""
    published = {
        "llama2-7b": 6_738_415_616,
        "llama2-13b": 13_015_864_320,
        "llama2-70b": 68_976_648_192,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3.1-8b": 8_030_261_248,
        "llama3.1-70b": 70_553_706_496,
        "llama3.1-405b": 405_853_388_800,
        "llama3.2-1b": 1_235_814_400,
        "llama3.2-3b": 3_212_749_824,
        "llama3.3-70b": 70_553_706_496,
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200,
        "qwen3-32b": 32_762_123_264,
        "qwen3-30b-a3b": 30_532_122_624,
        "mixtral-8x7b": 46_702_792_704,
    }
    assert {*PRESETS, *CONFIGS} == set(published)
    for name, count in published.items():
        assert leaves.count_params(architecture_of(preset_config(name))) == count, name


def test_published_parameter_counts_of_other_families() -> None:
    """Source: BertForPreTraining and ViTForImageClassification of the checkpoints presets.py names;
    GPT-3 after table 2.1, whose names are these counts rounded (175.0B with the two norms, biases
    and embeddings of its architecture).
    """
    published = {
        "bert-base": 110_106_428,
        "bert-large": 336_226_108,
        "gpt3-125m": 125_226_240,
        "gpt3-350m": 355_871_744,
        "gpt3-760m": 760_300_032,
        "gpt3-1.3b": 1_315_723_264,
        "gpt3-2.7b": 2_651_553_280,
        "gpt3-6.7b": 6_658_404_352,
        "gpt3-13b": 12_853_386_240,
        "gpt3-175b": 174_604_259_328,
        "vit-base": 86_567_656,
        "vit-large": 304_326_632,
    }
    assert set(preset_names()) == {*PRESETS, *CONFIGS, *UNETS, *published}
    for name, count in published.items():
        params, _ = jax.eval_shape(preset_task(name).init, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count, name


def test_the_task_of_bert_has_two_segments() -> None:
    sizes = Sizes(
        layers=1, hidden=8, heads=2, head_dim=4, ffn=16, vocab=256, positions=8, complete=True
    )
    task = encoder.train_task(sizes, TaskOptions(seq_len=8))
    batch = next(iter(task.batches(0, 16, None)))
    assert {name: leaf.shape for name, leaf in batch.items()} == {
        name: leaf.shape for name, leaf in task.batch(16).items()
    }
    follows = batch["is_next"] == 1
    assert 0 < follows.sum() < 16
    assert (batch["segments"] == [[0] * 4 + [1] * 4] * 16).all()
    params, state = task.init(jax.random.key(0))
    step = jax.jit(task.step)
    before = step(params, state, batch)[2]["loss"]
    other = batch | {"is_next": 1 - batch["is_next"]}
    assert before != step(params, state, other)[2]["loss"]


def test_preset_task() -> None:
    task = preset_task("llama3-8b", dtype="bf16", remat="selective")
    assert task.tokens_per_sample == 8192
    assert preset_task("llama3.1-8b").tokens_per_sample == 8192  # of 131,072 that it may reach
    assert preset_task("qwen3-8b", seq_len=65536).tokens_per_sample == 65536
    assert task.full_precision is not None
    for name, hint in (("Llama2_7B", "mean llama2-7b"), ("step.py", "module:function")):
        with pytest.raises(UsageError) as caught:
            preset_config(name)
        assert hint in caught.value.diagnostic.hint
    with pytest.raises(
        UsageError, match=r"preset requires one of llama2-7b, -13b, -70b, .*, llama3.1-8b"
    ):
        preset_task("llama9")


def test_rotary_positions_are_relative() -> None:
    """Scores of rotated heads depend only on the distance of the positions."""
    part = Rope(dim=16, theta=10000.0)
    tables = rope.tables(part, 12)
    head = jnp.broadcast_to(jnp.arange(16, dtype=jnp.float32), (1, 12, 1, 16))
    turned = np.asarray(rope.rotate(head, tables))[0, :, 0]
    scores = turned @ turned.T
    for distance in range(1, 6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-5)


def test_attention_is_causal() -> None:
    config = architecture_of(CONFIG)
    params = leaves.init_params(config, jax.random.key(0))
    tokens = np.arange(10, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 6] = 77
    logits = jax.jit(lambda t: decoder.logits(config, params, t, How()))
    before, after = np.asarray(logits(tokens)), np.asarray(logits(changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 1e-4
