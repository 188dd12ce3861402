"""Special values of every row: infinities, NaN, signed zeros, the ends of the type, subnormals, and
numbers at which naive formulas overflow or cancel.

Nothing is declared by a row: its op and its types decide. Elementwise rows get them all, and every
pair of them where two operands are floats. What sums gets one of each, or every sum would be NaN.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS
from tests.harnesses.case import OpCase, case_inputs

MUST = ("inf", "-inf", "nan", "0", "-0", "largest", "lowest", "smallest normal")
"""What every operand of floats carries; the smallest subnormal too, unless `LEFT_OUT` says so."""
CONTRACTIONS = ("dot_general", "convolution")
SHARE = 8  # one element of so many, where specials stand among ordinary values

MEETING = (1, -1, 0.5, -2, 3, 100, -100)
"""Ordinary numbers that meet every special value in binary ops."""
NAIVE = (
    *(89, -89, 88.5, -88.5, 104, -104, 45, -45, 20, -20, 10, -10, 9, -9, 5, -5, 4, -4),
    *(1e-5, -1e-5, 1e-3, -1e-3, 1e-7, 1e-20, -1e-20, 2.5, -2.5, 1.5, -1.5, -0.5, 0.99, -0.99),
    *(-0.999999, 1 - 2.0**-24, 3.1415927, -1.5707964, 1e4, -1e4, 2.0**23 + 0.5, 2.0**24 + 1),
    *(2.0**31, -(2.0**31), 2.0**32, 3e9, -3e9, 1e19, 1e20, -1e20, 1e38, -1e38, 2.0**127),
)
"""Where exp, its powers and squares overflow or vanish, where differences cancel, halves, and the
ends of integers."""

LEFT_OUT: dict[str, tuple[tuple[str, ...], str]] = {
    "add": (("lowest",), "it meets the largest: what the sum is depends on the order of terms"),
    "multiply": (
        ("largest", "lowest", "smallest normal", "-smallest normal", "subnormal"),
        "partial products overflow or vanish, depending on the order of factors",
    ),
}
"""What no element of a sum or a product can be, with the reason."""
FACTOR = 2.0**120
"""Stands for the largest number in sums of products: times an ordinary number it is still finite.
Else a fused multiply-add, which does not round the product, sees no infinity where others do.
"""


def named_values(dtype: DType) -> dict[str, float]:
    """The special values of a type by name."""
    info: Any = ml_dtypes.finfo(dtype.numpy)
    return {
        "inf": np.inf,
        "-inf": -np.inf,
        "nan": np.nan,
        "0": 0.0,
        "-0": -0.0,
        "largest": float(info.max),
        "lowest": -float(info.max),
        "smallest normal": float(info.smallest_normal),
        "-smallest normal": -float(info.smallest_normal),
        "subnormal": float(info.smallest_subnormal),
    }


def special_inputs(case: OpCase) -> list[np.ndarray] | None:
    """The operands of a row with special values in them; None when no operand is a float."""
    rng = np.random.default_rng(zlib.crc32(b"special" + repr(case).encode()))
    inputs = case_inputs(case)
    floats = [k for k, t in enumerate(case.types) if t.dtype.is_float and t.num_elements]
    if not floats:
        return None
    if OPS[case.op].elementwise:
        return _crossed(case, inputs, floats, rng)
    return _scattered(case, inputs, floats, rng)


def accumulation(case: OpCase) -> str:
    """The entry of LEFT_OUT that holds for a row ("" when none does)."""
    if case.op in (*CONTRACTIONS, "select_and_scatter"):
        return "add"
    kind = getattr(case.attrs, "kind", "")
    return kind if kind in LEFT_OUT else ""


def _crossed(
    case: OpCase, inputs: list[np.ndarray], floats: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Every combination of special values, as far as the elements reach.

    An operand smaller than others (a bound of clamp) keeps its values: a NaN there is everywhere.
    """
    most = max(inputs[k].size for k in floats)
    crossed = [k for k in floats if inputs[k].size == most]
    rows = [values_of(case.types[k].dtype, alone=len(crossed) == 1) for k in crossed]
    indices = np.array(list(itertools.product(*(range(len(r)) for r in rows))))
    picked = np.resize(rng.permutation(indices), (most, len(crossed)))
    for row, k, column in zip(rows, crossed, picked.T, strict=True):
        inputs[k] = row[column].reshape(inputs[k].shape)
    return inputs


def values_of(dtype: DType, alone: bool) -> np.ndarray:
    """All special values, with the numbers that naive formulas miss where one operand is alone."""
    numbers = (*named_values(dtype).values(), *MEETING, *(NAIVE if alone else ()))
    with np.errstate(over="ignore"):
        return np.array(numbers, np.float32).astype(dtype.numpy)


def _scattered(
    case: OpCase, inputs: list[np.ndarray], floats: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Special values among ordinary ones: one of each in what sums, else one of `SHARE`."""
    left_out = LEFT_OUT.get(accumulation(case), ((), ""))[0]
    for k in floats:
        named = named_values(case.types[k].dtype)
        if case.op in CONTRACTIONS:
            named["largest"] = FACTOR if k == floats[0] else 1 / FACTOR
        if case.op == "select_and_scatter" and k == floats[0]:
            del named["nan"]  # docs/numerics.md, "Windows that hold a NaN"
        values = [v for name, v in named.items() if name not in left_out]
        inputs[k] = flat = inputs[k].copy()
        count = len(values) if accumulation(case) else max(len(values), flat.size // SHARE)
        places = rng.permutation(flat.size)[:count]
        chosen = np.resize(rng.permutation(np.array(values, np.float32)), places.size)
        flat.reshape(-1)[places] = chosen.astype(flat.dtype)
    return inputs
