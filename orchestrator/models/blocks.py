"""Parts that the encoder, the GPT decoder and the vision transformer share: projections, norm,
attention, MLP, and the training task around a loss of any family.

Written as a JAX user writes them, without any sharding annotation. Layers are stacked on a leading
dim for `lax.scan`; every width is a free number.

Einsum letters: b batch, t and s positions, h heads, e head dim, d model width, f MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.optimizers import STEP, described
from shardwright.compiler.frontend.pytorch.update_rules import RULES
from shardwright.compiler.frontend.task import BatchFactory, TrainTask
from shardwright.orchestrator.models import adapters, config_file, text
from shardwright.orchestrator.models.adapters import Lora
from shardwright.orchestrator.models.layers import (
    EXACT,
    INIT_STD,
    NO_DROPOUT,
    Dropout,
    How,
    Params,
    Precision,
    Site,
    check_remat,
    hide_later,
)

Shapes = Mapping[str, tuple[int, ...]]
Mask: TypeAlias = "jax.Array | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model. `head_dim` times `heads` may be less than `hidden`: one rank's share.

    `complete` adds what published checkpoints hold and no loss needs: biases of keys, which softmax
    does not see (so that their gradients are rounding alone), and the segments, pooler and
    next-sentence head of BERT.
    Raises UsageError for a size that is not a positive integer.
    """

    layers: int
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    complete: bool = False
    fused: bool = False
    """Whether projections that read the same input are one matrix (Megatron-LM, NxD)."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("complete", "fused") and (type(value) is not int or value < 1):
                raise config_file.refused(f"a positive integer {name}", str(value))


def normal_leaves(key: jax.Array, shapes: Shapes) -> Params:
    """Normal 0.02 leaves of the given shapes, fp32."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: INIT_STD * jax.random.normal(leaf_key, shape, jnp.float32)
        for leaf_key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def constant_leaves(shapes: Shapes) -> Params:
    """Ones for norm scales (names ending in `scale`), zeros for biases, fp32."""
    return {
        name: jnp.full(shape, 1.0 if name.endswith("scale") else 0.0, jnp.float32)
        for name, shape in shapes.items()
    }


def init_layers(sizes: Sizes, key: jax.Array) -> Params:
    """Parameters of all layers, stacked on dim 0, fp32. Keys have a bias only where `complete`."""
    s, inner = sizes, sizes.heads * sizes.head_dim
    matrices: dict[str, tuple[int, ...]]
    matrices = {name: (s.layers, s.hidden, inner) for name in ("wq", "wk", "wv")}
    if s.fused:
        matrices = {"w_qkv": (s.layers, s.hidden, 3, inner)}
    matrices |= {
        "wo": (s.layers, inner, s.hidden),
        "w_up": (s.layers, s.hidden, s.ffn),
        "w_down": (s.layers, s.ffn, s.hidden),
    }
    wide = ("bo", "b_down", "attn_scale", "attn_shift", "mlp_scale", "mlp_shift")
    vectors = {name: (s.layers, s.hidden) for name in wide}
    biases = ("bq", "bk", "bv") if s.complete else ("bq", "bv")
    vectors |= {name: (s.layers, inner) for name in biases}
    vectors["b_up"] = (s.layers, s.ffn)
    return normal_leaves(key, matrices) | constant_leaves(vectors)


def init_params(sizes: Sizes, key: jax.Array, matrices: Shapes, vectors: Shapes) -> Params:
    """Fresh parameters, fp32: layers, and the matrices and vectors around them."""
    outer_key, layer_key = jax.random.split(key)
    outer = normal_leaves(outer_key, matrices) | constant_leaves(vectors)
    return outer | {"layers": init_layers(sizes, layer_key)}


def layer_norm(
    precision: Precision, x: jax.Array, scale: jax.Array, shift: jax.Array, eps: float
) -> jax.Array:
    """Mean and variance norm over the last dim, computed in the type of statistics."""
    wide = precision.wide(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    kept = precision.stream_dtype
    normed = (centred * jax.lax.rsqrt(variance + eps)).astype(kept)
    return normed * scale.astype(kept) + shift.astype(kept)


def softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last dim, operator by operator."""
    shifted = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    powers = jnp.exp(shifted)
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def _projected(p: Precision, layer: Params, x: jax.Array) -> list[jax.Array]:
    """Queries, keys and values without biases."""
    if "w_qkv" in layer:
        wide = p.einsum("btd,dck->btck", x, layer["w_qkv"])
        return [wide[:, :, i] for i in range(3)]
    return [p.einsum("btd,dk->btk", x, layer[name]) for name in ("wq", "wk", "wv")]


def attention(
    how: How, layer: Params, x: jax.Array, heads: int, *, causal: bool, mask: Mask = None
) -> jax.Array:
    """Multi-head attention with biases, every position against every other (or every earlier).

    `mask` is added to the scores: far below zero where a position is not to be seen.
    """
    p, (b, t, _) = how.precision, x.shape
    q, k, v = _projected(p, layer, x)
    q, v = p.add_bias(q, layer["bq"]), p.add_bias(v, layer["bv"])
    k = p.add_bias(k, layer["bk"]) if "bk" in layer else k
    q, k, v = (y.reshape(b, t, heads, -1) for y in (q, k, v))
    scores = p.wide(p.einsum("bthe,bshe->bhts", q, k)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask.astype(scores.dtype)
    if causal:
        scores = hide_later(scores)
    weights = how.drop(softmax(scores).astype(p.stream_dtype), Site.WEIGHTS)
    mixed = p.einsum("bhts,bshe->bthe", weights, v)
    return p.linear("btk,kd->btd", mixed.reshape(b, t, -1), layer["wo"], layer["bo"])


def mlp(precision: Precision, layer: Params, x: jax.Array, exact: bool) -> jax.Array:
    """Two projections with GELU between them, of the normal distribution or in the tanh form."""
    p = precision
    inner = p.linear("btd,df->btf", x, layer["w_up"], layer["b_up"])
    inner = jax.nn.gelu(inner, approximate=not exact)
    return p.linear("btf,fd->btd", inner, layer["w_down"], layer["b_down"])


def pre_norm_layer(
    sizes: Sizes, x: jax.Array, layer: Params, how: How, *, eps: float, causal: bool, exact: bool
) -> jax.Array:
    """Attention and MLP, each behind a norm of `eps` and added to the residual."""
    p = how.precision
    normed = layer_norm(p, x, layer["attn_scale"], layer["attn_shift"], eps)
    attended = attention(how, layer, normed, sizes.heads, causal=causal)
    x = x + how.drop(attended, Site.ATTENDED)
    normed = layer_norm(p, x, layer["mlp_scale"], layer["mlp_shift"], eps)
    return x + how.drop(mlp(p, layer, normed, exact), Site.FED)


def cross_entropy(
    precision: Precision, logits: jax.Array, targets: jax.Array, one_hot: bool = False
) -> jax.Array:
    """Mean cross entropy over all positions, in nat, in the type of statistics.

    `one_hot`: targets are found by products with one-hot rows, as PyTorch/XLA lowers `nll_loss`
    (torch_xla/csrc/nll_loss.cpp), else by their index.
    """
    log_probs = jax.nn.log_softmax(precision.wide(logits), axis=-1)
    if one_hot:
        hot = (targets[..., None] == jnp.arange(logits.shape[-1])).astype(log_probs.dtype)
        weighted = jnp.where(hot == 1, -hot * log_probs, 0) * hot
        return jnp.sum(weighted) / targets.size
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a task is besides its model.

    Raises UsageError for an unknown remat.
    """

    seq_len: int
    precision: Precision = EXACT
    optimizer: str = "adamw"
    clip: float = 1.0
    lr: float = 3e-4
    remat: str = "none"
    dropout: float = 0.0
    """Share of elements that are dropped: of embeddings, attention weights, and what attention and
    MLP add to the residual (`hidden_dropout_prob` and `attention_probs_dropout_prob` of BERT)."""
    lora: Lora | None = None
    """Adapters to train, where the model itself is frozen."""
    one_hot_loss: bool = False
    """Whether the loss finds targets by one-hot rows (`cross_entropy`)."""
    name: str = "step"

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise UsageError(
                "SW_DROPOUT", f"dropout requires at least 0 and less than 1, got {self.dropout}"
            )
        check_remat(self.remat)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a model is fed: abstract batches, batches of numbers, tokens of one sample."""

    batch: Callable[[int], Any]
    batches: BatchFactory
    tokens: int


Loss = Callable[[Params, dict[str, jax.Array], How], jax.Array]
"""Loss of parameters on a batch."""
Init = Callable[[jax.Array], Params]
"""Fresh parameters from a key, fp32."""


def language_task(
    init_params: Init,
    loss: Loss,
    vocab: int,
    positions: int,
    options: TaskOptions,
) -> TrainTask:
    """The training step of a token model on byte-level text.

    Raises UsageError for a sequence longer than `positions`.
    """
    return sample_task(init_params, loss, token_samples(vocab, positions, options), options)


def token_samples(vocab: int, positions: int, options: TaskOptions) -> Samples:
    """Byte-level text. Raises UsageError for a sequence longer than `positions`."""
    _check_length(options.seq_len, positions)
    return Samples(
        lambda n: text.token_structs(n, options.seq_len),
        text.batch_factory(options.seq_len, vocab),
        options.seq_len,
    )


def sample_task(
    init_params: Init,
    loss: Loss,
    samples: Samples,
    options: TaskOptions,
    trained: Params | None = None,
) -> TrainTask:
    """The training step of a model on `samples`, its parameters stored as the precision says; with
    dropout its state has a seed and counts steps, with adapters it has what is frozen. `trained`
    says of every parameter whether it is; the loss has no gradient of the others.
    """
    chain = make_optimizer(options.optimizer, options.lr, options.clip)
    lora = options.lora
    held = ("frozen",) if lora else ()
    chain = optax.masked(chain, trained) if trained and not lora else chain

    def task(precision: Precision) -> TrainTask:
        def init(key: jax.Array) -> tuple[Any, ...]:
            made = init_params(key)
            rng = (Dropout.first_state(key),) if options.dropout else ()
            if lora:
                own = adapters.adapters(lora, made, jax.random.fold_in(key, 1))
                return own, adapters.stored(lora, made), chain.init(own), *rng
            params = jax.tree.map(lambda leaf: leaf.astype(precision.param_dtype), made)
            return params, chain.init(params), *rng

        def step(params: Params, *rest: Any) -> Any:
            frozen, (opt_state, *rng, batch) = rest[: len(held)], rest[len(held) :]
            drop = Dropout(rate=options.dropout, state=rng[0]) if rng else NO_DROPOUT
            how = How(precision, options.remat, drop)

            def value_of(p: Params) -> jax.Array:
                return loss(adapters.adapted(lora, frozen[0], p) if lora else p, batch, how)

            value, grads = jax.value_and_grad(value_of)(params)
            updates, opt_state = chain.update(grads, opt_state, params)
            after = (drop.next_state(),) if rng else ()
            params = optax.apply_updates(params, updates)
            return params, *frozen, opt_state, *after, {"loss": value}

        return TrainTask(
            step=step,
            init=init,
            batch=samples.batch,
            batches=samples.batches,
            state_names=("params", *held, "opt_state", *(("rng",) if options.dropout else ())),
            tokens_per_sample=samples.tokens,
            full_precision=None if precision == EXACT else task(EXACT),
            name=options.name,
        )

    return task(options.precision)


def make_optimizer(name: str, lr: float, clip: float) -> optax.GradientTransformation:
    """The optax chain: clip by global norm (0: none), then adamw (betas 0.9, 0.95; decay 0.1),
    lamb (decay 0.01), sgd, or another of torch.optim with its defaults there. Raises UsageError.
    """
    makers = {
        "adamw": lambda: optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1),
        "lamb": lambda: optax.lamb(lr, weight_decay=0.01),
        "sgd": lambda: optax.sgd(lr),
    }
    others = tuple(known.lower() for known in RULES if known.lower() not in makers)
    if name not in (*makers, *others):
        known = ", ".join((*makers, *others))
        raise UsageError("SW_OPTIMIZER", f"optimizer requires {known}, got {name}")
    steps = [optax.clip_by_global_norm(clip)] if clip else []
    made = makers[name]() if name in makers else _of_torch(described({"name": name, "lr": lr}))
    return optax.chain(*steps, made)


def _of_torch(rules: optax.GradientTransformation) -> optax.GradientTransformation:
    """torch's rules, which are for a flat dict by name, on any tree of parameters; their state has
    that tree under each of torch's names."""

    def flat(tree: Any) -> dict[str, Any]:
        return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}

    def like(params: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The state in the form of the parameters; what some have not is empty."""
        shape = jax.tree.structure(params)
        order = list(flat(params))
        return {
            slot: shape.unflatten([found.get(name) for name in order])
            if isinstance(found, dict)
            else found
            for slot, found in state.items()
        }

    def init(params: Any) -> Any:
        return like(params, rules.init(flat(params)))

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        before = {n: flat(s) if n != STEP else s for n, s in state.items()}
        updates, after = rules.update(flat(gradients), before, flat(params))
        order = list(flat(params))
        made = jax.tree.structure(params).unflatten([updates[name] for name in order])
        return made, like(params, after)

    return optax.GradientTransformation(init, update)


def _check_length(seq_len: int, positions: int) -> None:
    """Raises UsageError when there are fewer positions than tokens."""
    if not 1 <= seq_len <= positions:
        raise UsageError(
            "SW_SEQ_LEN", f"seq_len requires 1 to {positions} positions, got {seq_len}"
        )
