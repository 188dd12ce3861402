"""A step as functions and calls: loops become repeats, repeated code is compiled once.

`live_ranges.py` sees to it that little crosses from one to the next, `cut.py` finds the functions,
`buffers.py` gives every value between them memory. What comes out is one list of distinct compile
units for the whole step, and per program the calls that `linking/link.py` turns into a `Program`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.outline.buffers import OutlinedProgram, outline_program
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.compiler.support.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlined:
    """`functions` are the distinct compile units of a step, in order of first use; programs name
    them by key.
    """

    functions: tuple[Unit, ...]
    programs: tuple[OutlinedProgram, ...]


def outline(plan: StepPlan) -> Outlined:
    """Outline every program of `plan`. Raises CompileError for loops the cut cannot express."""
    ranks = {name: _ranks(plan, info) for name, info in plan.buffers.items()}
    return outline_programs(
        plan.programs, {n: (0, count - 1) for n, count in ranks.items() if count}
    )


def _ranks(plan: StepPlan, info: BufferInfo) -> int:
    """How many positions a coordinate tells apart; 0 of another buffer."""
    if info.role != "coordinate":
        return 0
    return math.prod(plan.mesh[axis] for axes in info.axes for axis in axes)


def outline_programs(
    programs: tuple[StepProgram, ...], ranges: Mapping[str, Interval] | None = None
) -> Outlined:
    """Outline programs that share their compile units; `ranges` are what integer buffers stay
    in.
    """
    units: dict[str, Unit] = {}
    outlined = tuple(outline_program(program, units, ranges or {}) for program in programs)
    return Outlined(functions=tuple(units.values()), programs=outlined)
