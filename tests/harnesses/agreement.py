"""When two results of a row are the same, and the named places where they are known to differ.

NaN are equal by position, infinities and zeros exactly, signs included; numbers within the bound
of the row. A deviation is an entry here and of `docs/numerics.md`, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops.elementwise import ACTIVATIONS
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.isa.program import Program
from tests.harnesses.case import OpCase, build_graph
from tests.harnesses.special import CONTRACTIONS, accumulation, special_inputs
from tests.support.compiled import levels_of

Arrays = Sequence[np.ndarray]
SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)
ULPS_OF_SUBNORMALS = 4


@dataclass(frozen=True)
class Deviation:
    """`where` one side may differ from the other in `what`: "zero sign", or which side may be NaN.

    Sides: "reference", "XLA", "L0", "L1".
    """

    name: str
    what: str
    where: Callable[[OpCase], bool]


def _extremes(case: OpCase) -> bool:
    return case.op in ("maximum", "minimum", "clamp") or _kind(case) in ("max", "min")


def _kind(case: OpCase) -> str:
    return str(getattr(case.attrs, "kind", ""))


def _dilated(case: OpCase) -> bool:
    return case.op == "convolution" and any(d > 1 for d in case.attrs.lhs_dilation)


DEVIATIONS = (
    Deviation("Zeros of a maximum", "zero sign", _extremes),
    Deviation("Zeros of a sum", "zero sign", lambda c: accumulation(c) == "add"),
    Deviation("Holes of a convolution", "NaN in the reference", _dilated),
    Deviation(
        "Wider filters",
        "NaN in L0 and L1",
        lambda c: _dilated(c) or (c.op == "convolution" and c.attrs.feature_groups > 1),
    ),
    Deviation(
        "Groups of a batch",
        "NaN in XLA",
        lambda c: c.op == "convolution" and c.attrs.batch_groups > 1,
    ),
    Deviation(
        "Transposes on the tensor engine",
        "NaN in L0",
        lambda c: c.op in CONTRACTIONS or (c.op == "scatter" and _kind(c) == "add"),
    ),
)
"""Every way in which a row may differ; the names are those of docs/numerics.md."""
UNSURE_OF_SUBNORMALS = ("atan2", "cbrt", "power")
"""XLA:CPU flushes subnormal operands of parts of these functions and not of others: the cube root
of 1e-45 is -5.6e-16 there, and atan2(1e-45, 1e-45) is NaN."""


def assert_same_as_xla(case: OpCase, inputs: Arrays, theirs: Arrays) -> None:
    """The reference of a row against XLA:CPU, which computes with zeros instead of subnormals."""
    graph = build_graph(case)
    exact = evaluate(graph, inputs)
    flushed = evaluate(graph, [flush(a) for a in inputs])
    for kept, zeroed, other in zip(exact, flushed, theirs, strict=True):
        assert kept.dtype == other.dtype and kept.shape == other.shape, case.id
        want = flush(other)
        same = agree(flush(kept), want, case, ("reference", "XLA"))
        same |= agree(flush(zeroed), want, case, ("reference", "XLA"))
        if case.op in UNSURE_OF_SUBNORMALS:
            same |= np.logical_or.reduce([flush(a) != a for a in inputs])
        _require(same, kept, other, case.id, inputs if OPS[case.op].elementwise else ())


def assert_same(case: OpCase, level: str, inputs: Arrays, have: Arrays, want: Arrays) -> None:
    """What a `level` gives for a row against the reference."""
    for ours, reference in zip(have, want, strict=True):
        name = f"{case.id} {level}"
        assert ours.dtype == reference.dtype and ours.shape == reference.shape, name
        same = agree(ours, reference, case, (level, "reference"))
        _require(same, ours, reference, name, inputs if OPS[case.op].elementwise else ())


def assert_same_with_special_values(case: OpCase, program: Program) -> None:
    """A row's program on special values, at both levels, against the reference."""
    special = special_inputs(case)
    if special is None:
        return
    wanted = evaluate(build_graph(case), special)
    for level, found in zip(("L0", "L1"), levels_of(program, special), strict=True):
        assert_same(case, level, special, found, wanted)


def _require(
    same: np.ndarray, have: np.ndarray, want: np.ndarray, name: str, inputs: Arrays
) -> None:
    """Fail with the first elements that differ, and the operands they came from."""
    places = np.argwhere(~same.reshape(-1))[:6, 0]
    told = [
        f"{tuple(str(a.reshape(-1)[k % a.size]) for a in inputs)} -> "
        f"{have.reshape(-1)[k]}, not {want.reshape(-1)[k]}"
        for k in places
    ]
    assert not told, f"{name}: {int((~same).sum())} of {same.size} differ\n" + "\n".join(told)


def agree(have: np.ndarray, want: np.ndarray, case: OpCase, sides: tuple[str, str]) -> np.ndarray:
    """Which elements are the same. `sides` says who gave `have` and `want`."""
    if have.dtype.kind in "biu":
        return np.asarray(have == want)
    allowed = [d.what for d in DEVIATIONS if d.where(case)]
    smallest = float(ml_dtypes.finfo(want.dtype).smallest_subnormal)
    a, b = have.astype(np.float64), want.astype(np.float64)
    slack = ULPS_OF_SUBNORMALS * smallest if case.rtol else 0.0
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= case.rtol * (np.abs(b) + _scale(case, b)) + slack
    same = (a == b) | (np.isnan(a) & np.isnan(b)) | (near & np.isfinite(b))
    if "zero sign" not in allowed:
        same &= (a != 0) | (b != 0) | (np.signbit(a) == np.signbit(b))
    for side, array in zip(sides, (a, b), strict=True):
        if any(what.startswith("NaN") and side in what.split() for what in allowed):
            same |= np.isnan(array)
    return same


def _scale(case: OpCase, want: np.ndarray) -> float:
    """What an error is relative to beside the value: nothing in elementwise ops but activations,
    which differences with 1 are in (docs/numerics.md); the typical sum in others.
    """
    if OPS[case.op].elementwise:
        return float(case.op in ACTIVATIONS)
    finite = np.abs(want[np.isfinite(want)])
    return float(np.median(finite)) if finite.size else 0.0


def flush(array: np.ndarray) -> np.ndarray:
    """Zeros of the same sign in place of what fp32 holds as subnormal."""
    if not DType.from_numpy(array.dtype).is_float:
        return array
    wide = array.astype(np.float32)
    zero = np.copysign(np.float32(0), wide)
    return np.where(np.abs(wide) < SMALLEST_NORMAL, zero, wide).astype(array.dtype)
