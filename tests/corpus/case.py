"""One spelling of attention (or of something that is none): a function and example arguments.

Sizes are distinct, so that no index can be told by its extent, and rows and keys are long beside
everything else, so that a score tensor is larger than any other value: b samples, h heads in g
groups, t rows, s keys, d head width, e value width, m model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZES = {"b": 2, "g": 2, "h": 4, "t": 136, "s": 168, "d": 6, "e": 5, "m": 24, "i": 96}
POSITIONS = (SIZES["t"], SIZES["s"], SIZES["s"] + 1, SIZES["t"] // 2)
"""Extents of row and key indices, with a sink and within windows."""

SPREAD = 0.4  # of the arguments: softmaxes that are neither flat nor one-hot

Function = Callable[..., jax.Array]


@dataclass(frozen=True)
class Spelling:
    """`fn` of arrays with the letters of `shapes`; integer arguments are written `name:limit`."""

    name: str
    fn: Function
    shapes: tuple[str, ...]
    forward: int = 1
    backward: int = 1
    dtype: str = "float32"
    differentiable: bool = True

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Example arguments."""
        rng = np.random.default_rng(seed)
        return [_array(rng, letters, self.dtype) for letters in self.shapes]

    def loss(self, *arguments: jax.Array) -> jax.Array:
        """A scalar whose gradient depends on the result."""
        out = self.fn(*arguments)
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(out)]
        return sum(jnp.sum(leaf * leaf) for leaf in leaves)

    def gradient(self, *arguments: jax.Array) -> Any:
        """Value and gradients by every floating argument."""
        floats = tuple(i for i, s in enumerate(self.shapes) if ":" not in s)
        return jax.value_and_grad(self.loss, floats)(*arguments)


def _array(rng: np.random.Generator, letters: str, dtype: str) -> np.ndarray:
    if ":" in letters:
        shape, limit = letters.split(":")
        return np.sort(rng.integers(0, int(limit), [SIZES[c] for c in shape]).astype(np.int32))
    return (SPREAD * rng.normal(size=[SIZES[c] for c in letters])).astype(jnp.dtype(dtype))


def is_score(shape: Sequence[int]) -> bool:
    """True for a shape with two position indices, whatever dims they are merged into: no other size
    has the prime factors of positions twice.
    """
    elements = math.prod(shape)
    return any(elements % (a * b) == 0 for a, b in combinations_with_replacement(POSITIONS, 2))


CORPUS: dict[str, Spelling] = {}
NEGATIVES: dict[str, Spelling] = {}


def spelling(*shapes: str, **facts: Any) -> Callable[[Function], Function]:
    """Register an attention spelling under the name of its function."""

    def register(fn: Function) -> Function:
        return add(CORPUS, fn, shapes, facts)

    return register


def negative(*shapes: str, **facts: Any) -> Callable[[Function], Function]:
    """Register something that must not be taken for attention."""

    def register(fn: Function) -> Function:
        return add(NEGATIVES, fn, shapes, facts)

    return register


def add(
    table: dict[str, Spelling], fn: Function, shapes: tuple[str, ...], facts: dict[str, Any]
) -> Function:
    """Add one row. Raises ValueError for a name that is taken."""
    name = facts.pop("name", None) or fn.__name__
    if name in table:
        raise ValueError(f"two spellings are called {name}")
    table[name] = Spelling(name, fn, shapes, **facts)
    return fn
