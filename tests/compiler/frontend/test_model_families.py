"""The encoder, the GPT decoder and the families by name: what they compute, and in which types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.reference import run_reference
from shardwright.compiler.frontend.state import state_tree
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.types import Graph, Op
from shardwright.orchestrator.models import blocks, decoder, encoder, gpt, layers, vit
from shardwright.orchestrator.models.architecture import Experts
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.families import family_task
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import How, Params, Precision
from shardwright.sharding.partition.mesh import make_mesh
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, fsdp_plan, run_and_compare, worst

SIZES = Sizes(layers=2, hidden=16, heads=2, head_dim=8, ffn=32, vocab=256, positions=16)
EXACT = Precision()
SHORT = Precision(activations="bf16")
OPTIONS = TaskOptions(seq_len=8)
TOKENS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8) * 7 % 256


FAMILIES = ("encoder", "gpt", "vit", "llama")


def task_of(family: str, options: TaskOptions) -> TrainTask:
    """The task of one of `FAMILIES`, or of a mixture of experts."""
    if family != "moe":
        return family_task(family, SIZES, options)
    config = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "head_dim": 8,
    }
    feed = Experts(count=4, chosen=2, width=32, routing="products")
    return decoder.train_task(architecture_of(config).fed_by(feed), options)


def logits(module: object, tokens: jax.Array) -> np.ndarray:
    params = module.init_params(SIZES, jax.random.key(3))
    return np.asarray(logits_of(module, params, tokens, How()))


def logits_of(module: object, params: Params, tokens: jax.Array, how: How) -> jax.Array:
    if module is gpt:
        return gpt.logits(SIZES, params, tokens, how)
    states = encoder.hidden_states(SIZES, params, {"tokens": tokens}, how)
    return encoder.token_logits(params, states, how.precision)


def test_encoder_sees_later_tokens_and_the_decoder_does_not() -> None:
    changed = TOKENS.at[:, -1].set(99)
    first_positions = np.s_[:, :-1]
    assert not np.allclose(
        logits(encoder, TOKENS)[first_positions], logits(encoder, changed)[first_positions]
    )
    np.testing.assert_array_equal(
        logits(gpt, TOKENS)[first_positions], logits(gpt, changed)[first_positions]
    )


@pytest.mark.parametrize("statistics", ["f32", "bf16"])
def test_what_is_absent_is_not_seen(statistics: str) -> None:
    """Else padding of one sample would change its other positions."""
    sizes, precision = replace(SIZES, complete=True), Precision(statistics=statistics)
    params = encoder.init_params(sizes, jax.random.key(3))
    present = jnp.ones_like(TOKENS).at[:, -2:].set(0)
    batch = {"tokens": TOKENS, "segments": jnp.zeros_like(TOKENS), "present": present}
    seen = {**batch, "present": jnp.ones_like(TOKENS)}

    def first(batch: dict[str, jax.Array], last: int) -> np.ndarray:
        changed = {**batch, "tokens": TOKENS.at[:, -1].set(last)}
        states = encoder.hidden_states(sizes, params, changed, How(precision))
        return np.asarray(states[:, :-2])

    np.testing.assert_array_equal(first(batch, 99), first(batch, 5))
    assert not np.allclose(first(seen, 99), first(seen, 5))


def test_positions_are_told_apart() -> None:
    same = jnp.full((1, 8), 5, jnp.int32)
    rows = logits(encoder, same)[0]
    assert not np.allclose(rows[0], rows[1])


@pytest.mark.parametrize("causal", [True, False])
def test_ranks_of_a_tensor_parallel_layer_add_up(causal: bool) -> None:
    layers = blocks.init_layers(SIZES, jax.random.key(1))
    layer = {name: leaf[0] for name, leaf in layers.items()}
    x = jax.random.normal(jax.random.key(2), (2, 8, 16))
    whole = blocks.attention(How(), layer, x, 2, causal=causal) + blocks.mlp(
        EXACT, layer, x, exact=True
    )
    parts = 0.0
    for rank in range(2):
        share = _share(layer, rank)
        parts += blocks.attention(How(), share, x, 1, causal=causal) + blocks.mlp(
            EXACT, share, x, exact=True
        )
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-7)


def _share(layer: dict[str, jax.Array], rank: int) -> dict[str, jax.Array]:
    """One of two ranks: its head and its half of the MLP (biases of the outputs are zero)."""
    columns = ("wq", "wk", "wv", "bq", "bv", "w_up", "b_up")
    share = {n: jnp.split(layer[n], 2, axis=-1)[rank] for n in columns}
    share |= {n: jnp.split(layer[n], 2, axis=0)[rank] for n in ("wo", "w_down")}
    return layer | share


def test_layer_norm_and_softmax_are_what_they_are_called() -> None:
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (4, 64))
    normed = blocks.layer_norm(Precision(), x, jnp.full(64, 2.0), jnp.full(64, 1.0), 1e-12)
    np.testing.assert_allclose(normed.mean(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(normed.std(-1), 2.0, rtol=1e-5)
    np.testing.assert_allclose(blocks.softmax(x), jax.nn.softmax(x), rtol=1e-6)


def test_one_hot_rows_give_the_same_loss_and_gradient() -> None:
    given = jax.random.normal(jax.random.key(0), (3, 5, 7))
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 7)

    def told(one_hot: bool) -> tuple[jax.Array, jax.Array]:
        loss = partial(blocks.cross_entropy, EXACT, targets=targets, one_hot=one_hot)
        return jax.value_and_grad(lambda x: loss(logits=x))(given)

    for found, expected in zip(told(True), told(False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


def walk(graph: Graph) -> Iterator[Op]:
    for op in graph.ops:
        yield op
        for region in op.regions:
            yield from walk(region)


@pytest.mark.parametrize("family", ["encoder", "gpt"])
def test_products_of_short_activations_are_bf16_in_both_passes(family: str) -> None:
    options = TaskOptions(seq_len=8, precision=SHORT)
    graph, inputs, _ = captured_graph(family_task(family, SIZES, options), 4)
    dots = [op for op in walk(graph) if op.name == "dot_general"]
    assert len(dots) >= 3 * 8
    assert {v.type.dtype for op in dots for v in op.operands} == {DType.BF16}
    named = zip(inputs, graph.inputs, strict=True)
    floats = {v.type.dtype for slot, v in named if slot.role == "parameter"}
    assert floats == {DType.F32}


@pytest.mark.parametrize("family", ["encoder", "gpt", "llama"])
def test_stored_type_is_the_precisions(family: str) -> None:
    precision = Precision(params="bf16", activations="bf16")
    task = family_task(family, SIZES, TaskOptions(seq_len=8, precision=precision))
    params, _ = state_tree(task).arrays
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert task.full_precision is not None
    exact, _ = state_tree(task.full_precision).arrays
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(exact)} == {"float32"}


@pytest.mark.parametrize(
    ("module", "remat"), long_in_matrix([(encoder, "none"), (gpt, "full")], [(encoder, "none")])
)
def test_sharded_step_equals_the_unsharded_one(module: object, remat: str) -> None:
    task = module.train_task(SIZES, TaskOptions(seq_len=8, remat=remat))
    plan = fsdp_plan(task, make_mesh({"dp_replicate": 2}), 2, 2)
    errors, _ = run_and_compare(plan.step, task)
    assert worst(errors)[1] <= 1e-5


@pytest.mark.matrix
def test_a_complete_encoder_sharded_equals_the_unsharded_one() -> None:
    """With SGD: the gradient of a key's bias is rounding, which AdamW would make a whole step."""
    sizes = replace(SIZES, complete=True)
    task = encoder.train_task(sizes, TaskOptions(seq_len=8, optimizer="sgd"))
    plan = fsdp_plan(task, make_mesh({"dp_shard": 2}), 2, 2)
    errors, _ = run_and_compare(plan.step, task)
    (biases,) = (name for name in errors if "bk" in name)
    assert worst({n: e for n, e in errors.items() if n != biases})[1] <= 1e-5
    for told in ("segments", "w_pool", "w_next", "b_next"):
        assert any(told in name for name in errors)


@pytest.mark.parametrize("stream", ["", "f32"])
def test_a_longer_stream_is_what_layers_add_to(stream: str) -> None:
    """As under PyTorch's autocast: products are bf16, norms and sums are fp32."""
    precision = Precision(activations="bf16", stream=stream)
    layers = blocks.init_layers(SIZES, jax.random.key(1))
    layer = {name: leaf[0] for name, leaf in layers.items()}
    kept = jnp.float32 if stream else jnp.bfloat16
    x = jnp.ones((2, 8, SIZES.hidden), kept)
    ones = jnp.ones(SIZES.hidden)
    for body in (encoder.encoder_layer, gpt.decoder_layer, vit.encoder_layer):
        assert body(SIZES, x, layer, How(precision)).dtype == kept
    assert blocks.layer_norm(precision, x, ones, ones, 1e-5).dtype == kept
    assert (
        blocks.attention(How(precision), layer, x, SIZES.heads, causal=True).dtype == jnp.bfloat16
    )
    assert blocks.mlp(precision, layer, x, exact=True).dtype == jnp.bfloat16
    for module in (encoder, gpt):
        params = module.init_params(SIZES, jax.random.key(3))
        assert logits_of(module, params, TOKENS, How(precision)).dtype == jnp.bfloat16


@pytest.mark.parametrize("family", long_in_matrix((*FAMILIES, "moe"), ("encoder", "gpt", "vit")))
def test_dropout_is_drawn_per_step_layer_and_place(family: str) -> None:
    options = TaskOptions(seq_len=16 if family == "vit" else 8, dropout=0.25)
    task = task_of(family, options)
    assert task.state_names == ("params", "opt_state", "rng")
    state, batch = task.init(jax.random.key(1)), next(task.batches(0, 2, None))
    step = jax.jit(task.step)
    *after, first = step(*state, batch)
    *_, again = step(*state, batch)
    *_, other = step(*state[:2], after[2], batch)
    assert first["loss"] == again["loss"] != other["loss"]
    plain = task_of(family, replace(options, dropout=0.0))
    assert jax.jit(plain.step)(*state[:2], batch)[-1]["loss"] != first["loss"]


def test_dropout_keeps_the_mean_and_its_share() -> None:
    state = layers.Dropout.first_state(jax.random.key(5))
    drop = layers.Dropout(rate=0.25, state=state)
    ones = jnp.ones((64, 512))
    masks = [replace(drop, layer=n)(ones, site) for n in range(3) for site in layers.Site]
    masks.append(replace(drop, state=drop.next_state())(ones, layers.Site.STATES))
    for mask in masks:
        assert set(np.unique(mask)) == {0.0, np.float32(1 / 0.75)}
        assert abs(float(jnp.mean(mask)) - 1) < 4 * (1 / 3 / ones.size) ** 0.5
    alike = [float(jnp.mean(a == b)) for i, a in enumerate(masks) for b in masks[:i]]
    assert max(abs(share - (0.75**2 + 0.25**2)) for share in alike) < 0.02
    assert layers.NO_DROPOUT(ones, layers.Site.FED) is ones


def test_dropout_requires_a_share() -> None:
    with pytest.raises(UsageError, match="less than 1, got 1"):
        TaskOptions(seq_len=8, dropout=1.0)


@pytest.mark.matrix
def test_recomputation_changes_no_value() -> None:
    losses = [
        run_reference(
            gpt.train_task(SIZES, TaskOptions(seq_len=8, remat=remat, lr=1e-2)),
            steps=3,
            global_batch=2,
        ).losses
        for remat in ("none", "selective", "full")
    ]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_statistics_are_computed_in_their_type() -> None:
    """Roots of norms, and where GELU has no exponential (GPT) those of softmax and loss."""
    for statistics in ("f32", "bf16"):
        precision = Precision(params="bf16", activations="bf16", statistics=statistics)
        options = TaskOptions(seq_len=8, precision=precision)
        for family in ("encoder", "gpt"):
            graph, _, _ = captured_graph(family_task(family, SIZES, options), 2)
            told = ("rsqrt", "exponential") if family == "gpt" else ("rsqrt",)
            found = [op for op in walk(graph) if op.name in told]
            assert {op.result.type.dtype.value for op in found} == {statistics}


def test_a_vision_transformer_learns_from_its_class_token() -> None:
    task = family_task("vit", SIZES, TaskOptions(seq_len=SIZES.positions, lr=1e-2))
    losses = run_reference(task, steps=4, seed=0, global_batch=4).losses
    assert losses[-1] < losses[0]
    params = state_tree(task).arrays[0]
    assert params["patches"].shape == (vit.PIXELS, SIZES.hidden)
    assert task.batch(2)["images"].shape == (2, SIZES.positions - 1, vit.PIXELS)
    with pytest.raises(UsageError, match="requires the 16 positions"):
        family_task("vit", SIZES, TaskOptions(seq_len=8))


def test_bad_options_name_the_field() -> None:
    with pytest.raises(UsageError, match="positive integer heads, got 0"):
        Sizes(layers=1, hidden=8, heads=0, head_dim=4, ffn=8, vocab=8, positions=8)
    with pytest.raises(UsageError, match="1 to 16 positions, got 17"):
        encoder.train_task(SIZES, TaskOptions(seq_len=17))
    with pytest.raises(
        UsageError, match="remat requires none, selective, full or offload, got some"
    ):
        TaskOptions(seq_len=8, remat="some")
    with pytest.raises(UsageError, match="dtype requires f32, bf16, got fp8"):
        Precision(params="fp8")
    with pytest.raises(UsageError, match="encoder, gpt, vit or llama, got resnet"):
        family_task("resnet", SIZES, OPTIONS)
