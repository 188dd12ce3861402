"""A GPT-style decoder: pre-norm layers, learned positions, causal attention, GELU, tied output.

`targets` of a batch are the next tokens.
"""

from __future__ import annotations

from functools import partial

import jax

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.layers import How, Params, Site, run_layers

_EPS = 1e-5  # `layer_norm_epsilon` of the published GPT configurations


def init_params(sizes: Sizes, key: jax.Array) -> Params:
    """Fresh parameters: normal 0.02 matrices, zero biases, unit norms, fp32."""
    c = sizes
    matrices = {"embed": (c.vocab, c.hidden), "positions": (c.positions, c.hidden)}
    vectors = {name: (c.hidden,) for name in ("final_scale", "final_shift")}
    return blocks.init_params(c, key, matrices, vectors)


decoder_layer = partial(blocks.pre_norm_layer, eps=_EPS, causal=True, exact=False)


def logits(sizes: Sizes, params: Params, tokens: jax.Array, how: How) -> jax.Array:
    """Next-token logits [B, T, V]."""
    p = how.precision
    x = params["embed"].astype(p.stream_dtype)[tokens]
    x = x + params["positions"][: tokens.shape[1]].astype(p.stream_dtype)
    x = how.drop(x, Site.STATES)
    x = run_layers(partial(decoder_layer, sizes), x, params["layers"], how)
    x = blocks.layer_norm(p, x, params["final_scale"], params["final_shift"], _EPS)
    return p.einsum("btd,vd->btv", x, params["embed"])


def train_task(sizes: Sizes, options: TaskOptions) -> TrainTask:
    """The training step of the decoder. Raises UsageError for sizes that do not fit."""

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        given = logits(sizes, params, batch["tokens"], how)
        return blocks.cross_entropy(how.precision, given, batch["targets"], options.one_hot_loss)

    init = partial(init_params, sizes)
    return blocks.language_task(init, loss, sizes.vocab, sizes.positions, options)
