"""Rotary positions: the frequencies of every scaling that configs name, and the tables of them.

Source of the formulas: transformers, `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.orchestrator.models.config_file import RopeScaling

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines [T, E/2] of the rotary positions, fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Frequencies below the ramp divided by `factor`, above it kept (Peng et al. 2023, YaRN); the
    ramp is between the dims that turn `slow` and `fast` times in `positions`."""

    factor: float
    positions: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    score_factor: float = 1.0
    """Of scores besides, where a model multiplies them (DeepSeek: `mscale_all_dim`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """Every frequency divided by a factor of its own (Ding et al. 2024, LongRoPE): `short` up to
    the `positions` of pre-training, `long` beyond."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    positions: int
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions of the first `dim` elements of a head."""

    dim: int
    theta: float
    interleaved: bool = False
    """Whether neighbours are rotated, else elements of the two halves."""
    scaling: RopeScaling | Yarn | LongRope | None = None


def tables(rope: Rope, seq_len: int, position: jax.Array | None = None) -> Tables:
    """The tables of as many positions, or the row of one of them."""
    half, scaling = rope.dim // 2, rope.scaling
    rates = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if isinstance(scaling, RopeScaling):
        rates = _scaled(rates, scaling)
    elif isinstance(scaling, Yarn):
        rates = jnp.asarray(_yarn_rates(rope, scaling), jnp.float32)
    elif isinstance(scaling, LongRope):
        factors = scaling.long if seq_len > scaling.positions else scaling.short
        rates = rates / jnp.asarray(factors, jnp.float32)
    if position is None:
        angles = jnp.arange(seq_len, dtype=jnp.float32)[:, None] * rates
    else:
        angles = position.astype(jnp.float32)[None, None] * rates
    if isinstance(scaling, Yarn | LongRope) and scaling.attention_factor != 1:
        return tuple(t * scaling.attention_factor for t in (jnp.cos(angles), jnp.sin(angles)))
    return jnp.cos(angles), jnp.sin(angles)


def _scaled(rates: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Rotary frequencies, scaled: by the factor below the ramp, not at all above it."""
    if not scaling.positions:
        return rates / scaling.factor
    turns = scaling.positions * rates / (2 * math.pi)
    kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    return rates * (kept + (1.0 - kept) / scaling.factor)


def _yarn_rates(rope: Rope, yarn: Yarn) -> np.ndarray:
    half = rope.dim // 2
    kept: np.ndarray = rope.theta ** (-np.arange(half) / half)

    def dim_of(turns: float) -> float:
        """The dim that turns so often in the positions of pre-training."""
        wavelengths = math.log(yarn.positions / (turns * 2 * math.pi))
        return rope.dim * wavelengths / (2 * math.log(rope.theta))

    low, high = dim_of(yarn.fast), dim_of(yarn.slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(half) - low) / width, 0, 1)
    scaled: np.ndarray = kept * (1 - ramp) + kept / yarn.factor * ramp
    return scaled


def rotate(x: jax.Array, given: Tables, interleaved: bool = False) -> jax.Array:
    """Rotate the two halves of every head by its position; elements behind the tables' stay.
    `interleaved`: neighbours are a pair, and leave as two halves."""
    cos, sin = (t[None, :, None, :].astype(x.dtype) for t in given)
    turned = 2 * cos.shape[-1]
    head, rest = (x, None) if turned == x.shape[-1] else (x[..., :turned], x[..., turned:])
    if interleaved:
        pairs = head.reshape(*head.shape[:-1], -1, 2)
        low, high = pairs[..., 0], pairs[..., 1]
    else:
        low, high = jnp.split(head, 2, axis=-1)
    parts = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(parts if rest is None else [*parts, rest], axis=-1)
