"""Functions whose gradient is torch's where JAX has another one: at ties, bounds and zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def with_slope(function: Callable[..., Any], *slopes: Callable[..., Any]) -> Callable[..., Any]:
    """An elementwise function with its derivative by each argument, functions of all arguments; one
    that is true or false lets a tangent pass or not."""
    made = jax.custom_jvp(function)

    def moved(primals: Any, tangents: Any) -> Any:
        parts = [_times(s(*primals), t) for s, t in zip(slopes, tangents, strict=True)]
        return made(*primals), sum(parts[1:], parts[0])

    made.defjvp(moved)
    found: Callable[..., Any] = made
    return found


def _times(slope: Any, tangent: Any) -> Any:
    return jnp.where(slope, tangent, 0) if slope.dtype == bool else slope * tangent


absolute = with_slope(jnp.abs, jnp.sign)
"""The size of x; its gradient at 0 is 0, where JAX has 1."""


def between(x: Any, low: Any, high: Any, passes: Callable[[Any], Any]) -> Any:
    """x between numbers (None is no bound), whose gradient is one where it `passes` and zero
    elsewhere: JAX halves it at a bound."""
    return with_slope(lambda x: jnp.clip(x, low, high), passes)(x)
