"""Stochastic rounding, with numbers drawn by hand: a value a quarter of the way between two
neighbours goes the other way when the draw is below a quarter.

Neighbours: 1 and 1 + 2^-7 in bf16, 1 + 2^-10 in fp16 and tf32; below 1 they are half as far apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType, cast
from shardwright.sim_cluster.values.rounding import _dithered, narrow, stochastic

STEP = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.TF32: 2.0**-10}


class Drawn:
    """A generator that draws one number only."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, self.number)


def rounded(values: list[float], dtype: DType, draw: float) -> list[float]:
    given = np.array(values, np.float32)
    generator: Any = Drawn(draw)
    found = _dithered(given, cast(given, dtype), dtype, generator)
    assert found.dtype == dtype.numpy
    return [float(value) for value in found]


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_quarter_of_the_way(dtype: DType, sign: int) -> None:
    """1 + u/4 is nearest to 1, 1 + 3u/4 to 1 + u, 1 - u/8 to 1 with 1 - u/2 below it."""
    u = STEP[dtype]
    values = [sign * (1 + u / 4), sign * (1 + 3 * u / 4), sign * (1 - u / 8)]
    nearest = [sign * 1.0, sign * (1 + u), sign * 1.0]
    other = [sign * (1 + u), sign * 1.0, sign * (1 - u / 2)]
    assert rounded(values, dtype, 0.2499) == other
    assert rounded(values, dtype, 0.25) == nearest
    assert rounded(values, dtype, 0.2501) == nearest


@pytest.mark.parametrize("dtype", STEP)
def test_what_is_exact_or_not_finite_stays(dtype: DType) -> None:
    values = [0.0, 1.0, -3.0, np.inf, -np.inf]
    assert rounded(values, dtype, 0.0) == values
    assert np.isnan(rounded([np.nan], dtype, 0.0))[0]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_smallest_numbers_of_tf32(sign: int) -> None:
    """A quarter of the smallest, 2^-136, rounds to zero, and goes away from it on either side."""
    least = sign * 2.0**-136
    assert rounded([least / 4], DType.TF32, 0.2) == [least]
    assert rounded([least / 4], DType.TF32, 0.3) == [0.0]


def test_the_mode_is_that_of_the_block_and_draws_with_its_seed() -> None:
    """The draws of NumPy's generator of seed 5, one per value."""
    given = np.linspace(1, 1.01, 64, dtype=np.float32).reshape(8, 8)
    nearest = cast(given, DType.BF16)
    assert narrow(given, DType.BF16).tobytes() == nearest.tobytes()
    with stochastic(5):
        first, second = narrow(given, DType.BF16), narrow(given, DType.BF16)
    draws = np.random.default_rng(5).random((2, 8, 8))
    low = np.where(given < 1 + 2.0**-7, 1.0, 1 + 2.0**-7)  # the neighbour below each
    part = (given - low) / 2.0**-7
    for found, drawn in zip((first, second), draws, strict=True):
        up = np.where(part < 0.5, drawn < part, drawn >= 1 - part)
        assert found.astype(np.float32).tolist() == (low + up * 2.0**-7).tolist()
    assert narrow(given, DType.BF16).tobytes() == nearest.tobytes()
