"""Every harness row, and the declared gaps."""

from __future__ import annotations

from tests.harnesses import (
    control,
    convolution,
    dot,
    elementwise,
    gather,
    reduce,
    shape,
    sort,
    window,
)
from tests.harnesses.case import OpCase

CASES: tuple[OpCase, ...] = (
    *elementwise.CASES,
    *dot.CASES,
    *reduce.CASES,
    *shape.CASES,
    *gather.CASES,
    *sort.CASES,
    *control.CASES,
    *convolution.CASES,
    *window.CASES,
)
GAPS: dict[str, str] = control.GAPS | window.GAPS
