"""A step as functions and calls: loops become repeats, repeated code is compiled once.

`cut.py` finds the functions, `buffers.py` gives every value between them memory. What comes out is
one list of distinct compile units for the whole step, and per program the calls that `link.py`
turns into a `Program`.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.outline.buffers import OutlinedProgram, outline_program
from compiler.outline.unit import Unit
from compiler.program import StepPlan, StepProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlined:
    """`functions` are the distinct compile units of a step, in order of first use; programs name
    them by key.
    """

    functions: tuple[Unit, ...]
    programs: tuple[OutlinedProgram, ...]


def outline(plan: StepPlan) -> Outlined:
    """Outline every program of `plan`. Raises CompileError for loops the cut cannot express."""
    return outline_programs(plan.programs)


def outline_programs(programs: tuple[StepProgram, ...]) -> Outlined:
    """Outline programs that share their compile units."""
    units: dict[str, Unit] = {}
    outlined = tuple(outline_program(program, units) for program in programs)
    return Outlined(functions=tuple(units.values()), programs=outlined)
