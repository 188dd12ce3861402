"""Every harness row, and the declared gaps."""

from __future__ import annotations

from tests.harnesses import control, dot, elementwise, gather, reduce, shape
from tests.harnesses.case import OpCase

CASES: tuple[OpCase, ...] = (
    *elementwise.CASES,
    *dot.CASES,
    *reduce.CASES,
    *shape.CASES,
    *gather.CASES,
    *control.CASES,
)
GAPS: dict[str, str] = control.GAPS
