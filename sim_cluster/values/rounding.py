"""How a float is written to a shorter float type: to nearest even, or stochastically.

NeuronCores from v2 on can round stochastically (the runtime's `NEURON_RT_STOCHASTIC_ROUNDING_EN`
and `_SEED`): a value between two neighbours of the short type takes the upper one with a
probability equal to its distance from the lower one, so that long sums of small terms are right on
average. The mode is a property of a run, not of the code; both value levels ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from shardwright.compiler.dtypes import DType, cast

_TF32_STEP = 1 << 13  # distance of neighbours in units of the fp32 bit pattern

_generator: ContextVar[np.random.Generator | None] = ContextVar("rounding", default=None)


@contextmanager
def stochastic(seed: int) -> Iterator[None]:
    """Round stochastically inside the block, drawing from a generator seeded with `seed`."""
    token = _generator.set(np.random.default_rng(seed))
    try:
        yield
    finally:
        _generator.reset(token)


def narrow(array: np.ndarray, dtype: DType) -> np.ndarray:
    """`array` (fp32) in the storage type of a narrow float, rounded in the current mode."""
    nearest = cast(array, dtype)
    generator = _generator.get()
    return nearest if generator is None else _dithered(array, nearest, dtype, generator)


def _dithered(
    array: np.ndarray, nearest: np.ndarray, dtype: DType, generator: np.random.Generator
) -> np.ndarray:
    """`nearest`, or its neighbour on the other side of `array`, at random."""
    given = np.asarray(array, np.float32)
    with np.errstate(all="ignore"):
        error = given - nearest.astype(np.float32)
        beyond = _neighbour(nearest, error > 0, dtype)
        chance = error / (beyond.astype(np.float32) - nearest.astype(np.float32))
        # What is exact has a chance of 0, what is not finite none that is a number.
        return np.where(generator.random(given.shape) < chance, beyond, nearest)


def _neighbour(nearest: np.ndarray, up: np.ndarray, dtype: DType) -> np.ndarray:
    """The next value of the type above (`up`) or below each element."""
    if dtype is DType.TF32:
        away = up != np.signbit(nearest)
        step = np.where(away, _TF32_STEP, -_TF32_STEP).astype(np.int32)
        return (nearest.view(np.int32) + step).view(np.float32)
    infinity = np.asarray(np.inf, np.float32)
    target = np.where(up, infinity, -infinity).astype(dtype.numpy)
    result: np.ndarray = np.nextafter(nearest, target)
    return result
