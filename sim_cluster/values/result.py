"""What a value run reports: metrics per step, and how far L0 was from L1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

L0_BOUND = 1e-5
"""How far the levels may be apart in fp32 (docs/numerics.md)."""


@dataclass(frozen=True, slots=True)
class L0Check:
    """One core of a program run instruction by instruction beside the others.

    `distance` is ||L0 - L1|| / max(||L1||, 1e-12) of what the core wrote or sent, where it is the
    largest part of what it may be (`allowed`, `compiler/support/rounding.py`); `worst` names it.
    """

    program: str
    rank: int
    instructions: int
    distance: float
    worst: str
    allowed: float = L0_BOUND

    @property
    def passed(self) -> bool:
        """Whether it is no more than it may be."""
        return self.distance <= self.allowed


@dataclass(slots=True)
class ValueResult:
    """Metrics of every step of a run, and one L0 check per program."""

    steps: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    l0: dict[str, L0Check] = field(default_factory=dict)


def distance(given: np.ndarray, wanted: np.ndarray) -> float:
    """||given - wanted||2 / max(||wanted||2, 1e-12) in fp64; NaN on one side only, or anything
    unordered, is infinite.

    Values that are not finite count as equal when they are the same on both sides.
    """
    a, b = given.astype(np.float64).reshape(-1), wanted.astype(np.float64).reshape(-1)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))
