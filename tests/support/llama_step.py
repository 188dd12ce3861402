"""The Llama step of the HBM figures: two unrolled layers of a shard of eight (4 heads of 128, 1376
of 11008 feed-forward columns), bf16 with fp32 masters and AdamW, batch 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.types import Graph
from shardwright.orchestrator.models import attending, decoder, leaves
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import How

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 4096,
    "intermediate_size": 1376,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}


def unrolled_step(seq_len: int, **sizes: int) -> tuple[Graph, int]:
    """The imported step, and how many of its first inputs are updated state (outputs in the same
    order); `sizes` replace those of the configuration.
    """
    given = {**CONFIG, **sizes, "max_position_embeddings": seq_len}
    model = architecture_of(given)
    stacked = jax.eval_shape(lambda: leaves.init_params(model, jax.random.key(0)))
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked["layers"])
    params = {**stacked, "layers": [layer] * len(model.layers)}
    chain = optax.adamw(3e-4)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        part = model.layers[0]
        given = decoder.given_of(model.layers, params, seq_len)
        x = params["embed"].astype(jnp.bfloat16)[batch["tokens"]]
        for one in params["layers"]:
            x = decoder.run_layer(model, part, given, x, one, How())
        x = attending.normed(model.norm, params, "final_norm", x)
        logits = (x @ params["lm_head"].astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
        )
        return -jnp.mean(picked)

    def step(params: Any, state: Any, batch: dict[str, jax.Array]) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(chain.init, params)
    batch = {k: jax.ShapeDtypeStruct((1, seq_len), jnp.int32) for k in ("tokens", "targets")}
    exported = jax.export.export(jax.jit(step))(params, state, batch)
    graph = import_module(exported.mlir_module_serialized)
    return graph, len(jax.tree.leaves((params, state)))
