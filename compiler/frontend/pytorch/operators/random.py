"""Random numbers. The masks are not torch's, their distribution is: a key of JAX draws them, so
that ranks may draw their own part of one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place


def dropped(x: Any, rate: float, key: Any) -> Any:
    """x with elements set to zero with a chance of `rate`, the rest scaled to the same mean."""
    if rate >= 1:
        return jnp.zeros_like(x)
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


@ATEN.row("dropout", "alpha_dropout", "feature_dropout", placed=True)
def dropout(place: Place, x: Any, p: float, train: bool) -> Any:
    """x with elements dropped in training."""
    return dropped(x, p, place.key) if train and p else x


@ATEN.row("native_dropout", placed=True)
def native_dropout(place: Place, x: Any, p: float, train: bool | None = True) -> Any:
    """x with elements dropped, and which were kept."""
    if not train or not p:
        return x, jnp.ones(x.shape, bool)
    keep = jax.random.bernoulli(place.key, 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), jnp.zeros((), x.dtype)), keep


@ATEN.row("rand", "rand_like", placed=True)
def rand(place: Place, *_: Any, **__: Any) -> Any:
    """Uniform from 0 to 1."""
    return jax.random.uniform(place.key, place.shape, place.dtype)


@ATEN.row("randn", "randn_like", placed=True)
def randn(place: Place, *_: Any, **__: Any) -> Any:
    """Normal with mean 0 and variance 1."""
    return jax.random.normal(place.key, place.shape, place.dtype)


@ATEN.row("uniform", placed=True)
def uniform(place: Place, x: Any, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
    """Uniform from low to high, in the shape of x."""
    return jax.random.uniform(place.key, place.shape, place.dtype, low, high)


@ATEN.row("normal_functional", placed=True)
def normal(place: Place, x: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
    """Normal with a mean and a deviation, in the shape of x."""
    return mean + std * jax.random.normal(place.key, place.shape, place.dtype)


@ATEN.row("bernoulli", "bernoulli.p", placed=True)
def bernoulli(place: Place, x: Any, p: Any = None, **_: Any) -> Any:
    """Ones with a chance, that of x or p."""
    return jax.random.bernoulli(place.key, x if p is None else p, place.shape)


@ATEN.row("randint", "randint.low", placed=True)
def randint(place: Place, *bounds: Any, **_: Any) -> Any:
    """Whole numbers from low (0) to high - 1."""
    *low, high = [n for n in bounds if isinstance(n, int)]
    return jax.random.randint(place.key, place.shape, low[0] if low else 0, high)


@ATEN.row("randint_like", "randint_like.low_dtype", placed=True)
def randint_like(place: Place, x: Any, *bounds: Any, **_: Any) -> Any:
    """Whole numbers in the shape of x."""
    return randint(place, *bounds)


@ATEN.row("randperm", placed=True)
def randperm(place: Place, count: int, **_: Any) -> Any:
    """The numbers up to count in random order."""
    return jax.random.permutation(place.key, count)


@ATEN.row("multinomial", placed=True)
def multinomial(place: Place, weights: Any, count: int, replacement: bool = False, **_: Any) -> Any:
    """Indices drawn with chances as weights [..., n] say."""
    logits = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(place.key, logits, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    noise = jax.random.gumbel(place.key, weights.shape, logits.dtype)
    return jax.lax.top_k(logits + noise, count)[1]
