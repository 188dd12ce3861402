"""How far rounding may move a result, and draws of that: who computes the same values in another
order gets other roundings of the same sizes, so two correct results are as far apart as two draws.

The method is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic: exploiting randomness
in floating-point arithmetic", UCLA CSD-970002, 1997), with one term more for sums, whose roundings
depend on the order of their terms. `ir/sampled.py` draws a graph, `sim_cluster` a program.
"""

from __future__ import annotations

import numpy as np

from shardwright.compiler.dtypes import DType, cast

EXACT = frozenset(
    (
        *("bitcast_convert", "broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad"),
        *("dynamic_update_slice", "load", "load_indexed", "optimization_barrier", "reshape"),
        *("reverse", "sharding_constraint", "slice", "sort", "store", "store_indexed"),
        *("transpose", "unfold", "select", "maximum", "minimum", "clamp", "negate", "abs"),
        *("ceil", "floor", "round_nearest_afz", "round_nearest_even", "sign", "random_bits"),
        *("constant", "iota", "register"),
    )
)
"""Ops of graphs and nodes of kernels whose results are elements of their operands, or whole
numbers: nothing is rounded."""

_SIGNIFICAND_BITS = {
    DType.F64: 53,
    DType.F32: 24,
    DType.TF32: 11,
    DType.F16: 11,
    DType.BF16: 8,
    DType.F8E4M3: 4,
    DType.F8E4M3FN: 4,
    DType.F8E5M2: 3,
}
"""With the hidden bit: IEEE 754, and the formats of `dtypes.py`."""
_SPREAD = 1.5
"""How far a draw goes, in largest errors of a rounding: with 1, a number of a short type would
always be rounded back to itself; so every third one moves by one place."""


def unit_roundoff(dtype: DType) -> float:
    """The largest relative error of rounding to a float type: half of the distance from 1 to the
    next number."""
    return 2.0 ** -_SIGNIFICAND_BITS[dtype]


TIMES = 4
"""How far two correct results may be apart, in the effect of one draw: both have roundings of their
own, and a draw of few elements need not have met the larger ones."""


def allowed(bound: float, effect: float) -> float:
    """The error that a result may have: `bound`, or what rounding explains, where the effect of one
    draw of it is known."""
    return max(bound, TIMES * effect)


class Draws:
    """Draws of roundings, the same ones for the same `seed` and questions."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def moved(
        self,
        name: str,
        result: np.ndarray,
        dtype: DType,
        terms: np.ndarray | None = None,
        of_integers: bool = False,
    ) -> np.ndarray:
        """What op `name` gave as `dtype`, each element moved within its rounding.

        `of_integers`: the op converts integers, and a float type has every one of them up to 2 to
        the number of its significand's bits, so that nothing is rounded there. A class 2 that is
        1.9999999 in a draw is another class where it becomes an integer again.

        `terms` is, of an op that adds up in fp32, the sum of the magnitudes of what it added: the
        errors of a sum in any order are a part of that, however little its terms leave of each
        other.
        """
        if name in EXACT or not dtype.is_float:
            return result
        reach = np.abs(np.asarray(result, np.float64)) * unit_roundoff(dtype)
        if terms is not None:
            reach += np.asarray(terms, np.float64) * unit_roundoff(DType.F32)
        if of_integers:
            is_exact = np.abs(np.asarray(result, np.float64)) <= 1 / unit_roundoff(dtype)
            reach = np.where(is_exact, 0.0, reach)
        return self._within(result, reach)

    def rounded(self, array: np.ndarray, dtype: DType) -> np.ndarray:
        """An fp32 array through a shorter type and back; other arrays as they are."""
        if array.dtype != np.float32:
            return array
        reach = np.abs(array.astype(np.float64)) * unit_roundoff(dtype)
        return cast(cast(self._within(array, reach), dtype), DType.F32)

    def _within(self, array: np.ndarray, reach: np.ndarray) -> np.ndarray:
        """Elements moved by up to `_SPREAD` times `reach`; infinities and NaN stay."""
        by = self._random.uniform(-_SPREAD, _SPREAD, np.shape(array)) * reach
        with np.errstate(all="ignore"):
            moved = np.asarray(array, np.float64) + np.where(np.isfinite(by), by, 0.0)
            return np.asarray(moved.astype(array.dtype))
