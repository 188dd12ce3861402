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


@ATEN.row("dropout", placed=True)
def dropout(place: Place, x: Any, p: float, train: bool) -> Any:
    """x with elements dropped in training."""
    return dropped(x, p, place.key) if train and p else x


@ATEN.row("feature_dropout", placed=True)
def feature_dropout(place: Place, x: Any, p: float, train: bool) -> Any:
    """x [N, C, ...] with channels dropped in training."""
    return x * dropped(_channels(x), p, place.key) if train and p else x


@ATEN.row("alpha_dropout", placed=True)
def alpha_dropout(place: Place, x: Any, p: float, train: bool) -> Any:
    """x with elements at the least value of SELU, scaled to the same mean and variance."""
    return _alpha_dropped(x, jnp.ones_like(x), p, place.key) if train and p else x


@ATEN.row("feature_alpha_dropout", placed=True)
def feature_alpha_dropout(place: Place, x: Any, p: float, train: bool) -> Any:
    """x [N, C, ...] with channels at the least value of SELU."""
    return _alpha_dropped(x, _channels(x), p, place.key) if train and p else x


def _channels(x: Any) -> Any:
    """Ones in the shape [N, C, 1, ...]."""
    return jnp.ones((*x.shape[:2], *[1] * (x.ndim - 2)), x.dtype)


LEAST_SELU = -1.7580993408473766
"""Of large negative numbers (Klambauer et al. 2017)."""


def _alpha_dropped(x: Any, ones: Any, p: float, key: Any) -> Any:
    if p >= 1:
        return jnp.zeros_like(x)
    keep = jax.random.bernoulli(key, 1 - p, ones.shape)
    scale = (LEAST_SELU**2 * p + 1) ** -0.5 * (1 - p) ** -0.5
    return jnp.where(keep, x, LEAST_SELU) * scale - scale * LEAST_SELU * p


@ATEN.row("rrelu", placed=True)
def rrelu(
    place: Place, x: Any, lower: Any = 0.125, upper: Any = 1 / 3, train: bool = False, *_: Any
) -> Any:
    """x, or where x is negative x times a slope: in training one drawn for each."""
    if not train:
        return jnp.where(x > 0, x, x * (lower + upper) / 2)
    return jnp.where(x > 0, x, x * jax.random.uniform(place.key, x.shape, x.dtype, lower, upper))


@ATEN.row("exponential", placed=True)
def exponential(place: Place, x: Any, rate: float = 1.0, **_: Any) -> Any:
    """Exponentially distributed, in the shape of x."""
    return jax.random.exponential(place.key, place.shape, place.dtype) / rate


@ATEN.row("cauchy", placed=True)
def cauchy(place: Place, x: Any, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Any:
    """Of Cauchy's distribution, in the shape of x."""
    return median + sigma * jax.random.cauchy(place.key, place.shape, place.dtype)


@ATEN.row("log_normal", placed=True)
def log_normal(place: Place, x: Any, mean: float = 1.0, std: float = 2.0, **_: Any) -> Any:
    """Of normal logarithms, in the shape of x."""
    return jnp.exp(normal(place, x, mean, std))


@ATEN.row("geometric", placed=True)
def geometric(place: Place, x: Any, p: float, **_: Any) -> Any:
    """How often one tries until it goes well, each with a chance of p, in the shape of x."""
    return jax.random.geometric(place.key, p, place.shape)


@ATEN.row("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", placed=True)
def normal_about(place: Place, mean: Any, std: Any = 1.0, **_: Any) -> Any:
    """Normal with a mean and a deviation of each."""
    return mean + std * jax.random.normal(place.key, place.shape, place.dtype)


@ATEN.row("normal.float_float", placed=True)
def normal_of_numbers(place: Place, mean: float, std: float, *_: Any, **__: Any) -> Any:
    """Normal with one mean and deviation."""
    return mean + std * jax.random.normal(place.key, place.shape, place.dtype)


@ATEN.row("poisson", placed=True)
def poisson(place: Place, rate: Any, **_: Any) -> Any:
    """Poisson's numbers of a rate of each."""
    return jax.random.poisson(place.key, rate, place.shape)


@ATEN.row("native_dropout", placed=True)
def native_dropout(place: Place, x: Any, p: float, train: bool | None = True) -> Any:
    """x with elements dropped, and which were kept."""
    if not train or not p:
        return x, jnp.ones(x.shape, bool)
    if p >= 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
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
    """Ones with a chance, that of x or p, and no gradient."""
    p = x if p is None else p
    return jax.random.bernoulli(place.key, jax.lax.stop_gradient(p), place.shape)


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
