"""The cost oracle that lowering asks for times of code, and what time is worth against memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.ir.types import Op
from shardwright.compiler.isa.kernel import KernelProgram, Tensor

SPARE = 64  # part of HBM that a form may take more than another to be faster (our choice)
QUICK_MARGIN = 0.4
"""How much slower than its parts a reduction fusion may be at -O1, which keeps scores on chip
without a search, and a function than one that passes much more through HBM (our choice).
"""

Clock = Callable[[KernelProgram, Sequence[Tensor]], int]
"""Picoseconds of a kernel. Raises CompileError or CapacityError when there is no code for it."""


def time_or_inf(clock: Clock, program: KernelProgram, tensors: Sequence[Tensor]) -> float:
    """What a kernel takes; where there is no code for it, for ever."""
    try:
        return clock(program, tensors)
    except DiagnosticError:
        return math.inf


class CostOracle(Protocol):
    """A `Clock` that may be content with a first tiling. `limit_bytes`: HBM of a core; what passes
    more from kernel to kernel is no code to compare with.
    """

    @property
    def limit_bytes(self) -> int:
        """Bytes."""

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """What a kernel takes, as far as that is told soon."""

    def searched(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """What the code takes that a kernel will run."""

    def collective_ps(self, op: Op) -> int:
        """How long a collective is expected to be in flight."""
