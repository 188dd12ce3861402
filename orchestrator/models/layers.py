"""What all model families share about their stack of layers: precision, dropout, the mask of a
decoder, and the scan under recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.compiler.diagnostics import UsageError

Params = dict[str, Any]
INIT_STD = 0.02  # `initializer_range` of the published BERT, GPT and Llama configurations
MASKED = -1e30  # finite, so that a row without keys stays a number

TYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Element types: stored parameters, activations between operations and operands of matmuls,
    what norms, softmax and loss compute in, and what norms, softmax and embeddings hand on
    (`stream`; empty: activations). Sums with a longer stream are of its type, as in PyTorch's
    autocast. bf16 statistics are what a framework makes of an fp32 model that turns every fp32
    tensor into bf16; a compiler that casts matmuls of one is `CompileOptions.auto_cast`.
    Raises UsageError for an unknown type.
    """

    params: str = "f32"
    activations: str = "f32"
    statistics: str = "f32"
    stream: str = ""

    def __post_init__(self) -> None:
        named = (self.params, self.activations, self.statistics)
        for name in (*named, self.stream or self.activations):
            if name not in TYPES:
                raise UsageError("SW_DTYPE", f"dtype requires {', '.join(TYPES)}, got {name}")

    @property
    def param_dtype(self) -> Any:
        """Type of stored parameters."""
        return TYPES[self.params]

    @property
    def dtype(self) -> Any:
        """Type of activations."""
        return TYPES[self.activations]

    @property
    def stream_dtype(self) -> Any:
        """Type of what norms, softmax and embeddings hand on."""
        return TYPES[self.stream or self.activations]

    def wide(self, x: jax.Array) -> jax.Array:
        """`x` in the type of statistics."""
        return x.astype(TYPES[self.statistics])

    def einsum(self, spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
        """A product of two operands as activations, an activation."""
        return jnp.einsum(spec, left.astype(self.dtype), right.astype(self.dtype))

    def add_bias(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """`x + bias`, an activation."""
        return x + bias.astype(self.dtype)

    def linear(self, spec: str, x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        """A product with a weight, and a bias, an activation."""
        return self.add_bias(self.einsum(spec, x, weight), bias)


EXACT = Precision()


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
        """The state of the first step; words are scalars, so that what masks share is cheap."""
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


@dataclass(frozen=True, slots=True)
class How:
    """How a model is computed: its types, what is kept for its gradients, its dropout."""

    precision: Precision = EXACT
    remat: str = "none"
    drop: Dropout = NO_DROPOUT


def hide_later(scores: jax.Array) -> jax.Array:
    """Attention scores [..., T, T] without those of later positions."""
    positions = jnp.arange(scores.shape[-1])
    return jnp.where(positions[:, None] >= positions[None, :], scores, MASKED)


def hide_earlier(scores: jax.Array, window: int) -> jax.Array:
    """Attention scores [..., T, T] without those of positions `window` or more before."""
    positions = jnp.arange(scores.shape[-1])
    near = positions[:, None] - positions[None, :] < window
    return jnp.where(near, scores, MASKED)


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


Body = Callable[[jax.Array, Params, How], jax.Array]
"""A layer: what enters and its parameters -> what leaves."""


def run_layers(body: Body, x: jax.Array, layers: Params, how: How) -> jax.Array:
    """Scan `body` over the stacked layers under the checkpoint policy of `how.remat`. With dropout
    layers are counted, from 1 on.

    "selective" keeps products with weights and redoes attention scores, "full" redoes the layer;
    "offload" keeps what "selective" keeps, in the memory of the host.
    """
    return run_stack((), ((body, layers),), (), x, how)


def run_stack(
    first: Sequence[tuple[Body, Params]],
    period: Sequence[tuple[Body, Params]],
    last: Sequence[tuple[Body, Params]],
    x: jax.Array,
    how: How,
) -> jax.Array:
    """The same for layers of several kinds: some one by one, a period of stacked ones as a scan,
    and the last ones. Each is recomputed by itself.
    """
    bodies = [_step(body, how) for body, _ in period]

    def run(carry: Any, layers: tuple[Params, ...]) -> tuple[Any, None]:
        for step, layer in zip(bodies, layers, strict=True):
            carry, _ = step(carry, layer)
        return carry, None

    carry = _entered(x, how)
    for body, layer in first:
        carry, _ = _step(body, how)(carry, layer)
    carry, _ = jax.lax.scan(run, carry, tuple(layers for _, layers in period))
    for body, layer in last:
        carry, _ = _step(body, how)(carry, layer)
    result: jax.Array = carry[0] if how.drop.rate else carry
    return result


def _entered(x: jax.Array, how: How) -> Any:
    """What the layers hand on, at the first: with dropout also the layer's number."""
    return (x, jnp.uint32(how.drop.layer + 1)) if how.drop.rate else x


def _step(body: Body, how: How) -> Callable[[Any, Params], tuple[Any, None]]:
    """A layer as the body of a scan, under the checkpoint policy."""
    drop = how.drop

    def step(carry: Any, layer: Params) -> tuple[Any, None]:
        if not drop.rate:
            return body(entering(carry), layer, how), None
        x, number = carry
        dropping = replace(how, drop=replace(drop, layer=number))
        return (body(entering(x), layer, dropping), number + jnp.uint32(1)), None

    def entering(x: jax.Array) -> jax.Array:
        return checkpoint_name(x, _ENTERING) if how.remat == "offload" else x

    return recomputed(step, how)


def recomputed(body: Callable[..., Any], how: How) -> Callable[..., Any]:
    """`body` under the checkpoint policy."""
    return body if how.remat == "none" else jax.checkpoint(body, policy=_POLICIES[how.remat])
