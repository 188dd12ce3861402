"""What all model families share about their stack of layers: dropout, the mask of a decoder, and
the scan under recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.compiler.diagnostics import UsageError

Params = dict[str, Any]
INIT_STD = 0.02  # `initializer_range` of the published BERT, GPT and Llama configurations
_MASKED = -1e30  # finite, so that a row without keys stays a number


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


def causal(scores: jax.Array) -> jax.Array:
    """Attention scores [..., T, T] without those of later positions."""
    positions = jnp.arange(scores.shape[-1])
    return jnp.where(positions[:, None] >= positions[None, :], scores, _MASKED)


_ENTERING = "entering"
_PRODUCTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
_STATES = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_ENTERING],
    offload_src="device",
    offload_dst="pinned_host",
)


def _offloaded(primitive: Any, *avals: Any, **parameters: Any) -> Any:
    """Products with weights, and what enters a layer."""
    named = primitive.name == "name" and parameters["name"] == _ENTERING
    return (_STATES if named else _PRODUCTS)(primitive, *avals, **parameters)


_POLICIES: dict[str, Callable[..., Any] | None] = {
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
    "offload": _offloaded,
}
_REMATS = ("none", *_POLICIES)


def check_remat(remat: str) -> None:
    """Raises UsageError for a policy that is not offered."""
    if remat not in _REMATS:
        offered = f"{', '.join(_REMATS[:-1])} or {_REMATS[-1]}"
        raise UsageError("SW_REMAT", f"remat requires {offered}, got {remat}")


def run_layers(
    body: Callable[[jax.Array, Params, Dropout], jax.Array],
    x: jax.Array,
    layers: Params,
    remat: str,
    drop: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Scan `body` over the stacked layers under the checkpoint policy of `remat`. With dropout
    layers are counted, from 1 on.

    "selective" keeps products with weights and redoes attention scores, "full" redoes the layer;
    "offload" keeps what "selective" keeps, in the memory of the host.
    """

    def step(carry: Any, layer: Params) -> tuple[Any, None]:
        if not drop.rate:
            return body(entering(carry), layer, drop), None
        x, number = carry
        dropping = replace(drop, layer=number)
        return (body(entering(x), layer, dropping), number + jnp.uint32(1)), None

    def entering(x: jax.Array) -> jax.Array:
        return checkpoint_name(x, _ENTERING) if remat == "offload" else x

    if remat != "none":
        step = jax.checkpoint(step, policy=_POLICIES[remat])
    out, _ = jax.lax.scan(step, (x, jnp.uint32(1)) if drop.rate else x, layers)
    result: jax.Array = out[0] if drop.rate else out
    return result
