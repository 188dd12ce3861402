"""A decoder trained as the ZeRO paper counts memory: bf16 weights and gradients, fp32 copies of the
weights and both moments in the optimizer state.

Written as a JAX user writes it; nothing in it knows how it will be sharded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import decoder, leaves, text
from shardwright.orchestrator.models.architecture import Architecture
from shardwright.orchestrator.models.layers import How, Precision


def train_task(config: Architecture, seq_len: int) -> TrainTask:
    """Adam on fp32 masters; the model's weights are their rounded copies."""
    adam = optax.adam(1e-3)

    def rounded(master: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), master)

    def init(key: jax.Array) -> tuple[Any, Any]:
        master = leaves.init_params(config, key)
        return rounded(master), {"master": master, "adam": adam.init(master)}

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss(weights: Any) -> jax.Array:
            return decoder.loss(config, weights, batch, How(Precision(activations="bf16"), "full"))

        value, narrow = jax.value_and_grad(loss)(params)
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
        updates, moments = adam.update(grads, opt_state["adam"], opt_state["master"])
        master = optax.apply_updates(opt_state["master"], updates)
        return rounded(master), {"master": master, "adam": moments}, {"loss": value}

    return TrainTask(
        step=step,
        init=init,
        batch=lambda n: text.token_structs(n, seq_len),
        batches=text.batch_factory(seq_len, config.vocab),
        tokens_per_sample=seq_len,
        name="mixed",
    )
