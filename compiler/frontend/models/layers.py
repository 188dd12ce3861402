"""What all model families share about their stack of layers: dropout, and the scan under
recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


class Site(IntEnum):
    """Where a layer drops elements; outside layers there is one place, `STATES`."""

    STATES = 0
    WEIGHTS = 1
    ATTENDED = 2
    FED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Dropout at one rate. Masks follow from the state (`seed` and the number of the `step`), the
    number of the layer (0 outside layers) and the site; with rate 0 nothing is dropped.

    Bits are those of the default generator (JAX: `rbg`), which on the machine is an instruction and
    differs from one machine to the next.
    """

    rate: float = 0.0
    state: Mapping[str, jax.Array] = field(default_factory=dict)
    layer: jax.Array | int = 0

    @staticmethod
    def first_state(key: jax.Array) -> dict[str, jax.Array]:
        """The state of the first step, drawn from a key. Words are scalars, so that what masks
        share is no work of a tensor."""
        return {"seed": jax.random.bits(key), "step": jnp.uint32(0)}

    def next_state(self) -> dict[str, jax.Array]:
        """The state of the next step."""
        return {**self.state, "step": self.state["step"] + jnp.uint32(1)}

    def __call__(self, x: jax.Array, site: Site) -> jax.Array:
        """`x` with a share of its elements zero and the others scaled up."""
        if not self.rate:
            return x
        stream = jnp.uint32(self.layer) * jnp.uint32(len(Site)) + jnp.uint32(site)
        words = jnp.stack([self.state["seed"], self.state["step"], jnp.uint32(0), stream])
        _, bits = jax.lax.rng_bit_generator(words, x.shape, jnp.uint32)
        kept = bits >= jnp.uint32(self.rate * 2**32)
        return x * (kept.astype(x.dtype) * jnp.asarray(1 / (1 - self.rate), x.dtype))


NO_DROPOUT = Dropout()


def run_layers(
    body: Callable[[jax.Array, Params, Dropout], jax.Array],
    x: jax.Array,
    layers: Params,
    remat: str,
    drop: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Scan `body` over the stacked layers under the checkpoint policy of `remat`. With dropout
    layers are counted, from 1 on.

    "selective" keeps products with weights and redoes attention scores, "full" redoes the layer.
    """

    def step(carry: Any, layer: Params) -> tuple[Any, None]:
        if not drop.rate:
            return body(carry, layer, drop), None
        x, number = carry
        return (body(x, layer, replace(drop, layer=number)), number + jnp.uint32(1)), None

    if remat != "none":
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        step = jax.checkpoint(step, policy=kept if remat == "selective" else None)
    out, _ = jax.lax.scan(step, (x, jnp.uint32(1)) if drop.rate else x, layers)
    result: jax.Array = out[0] if drop.rate else out
    return result
