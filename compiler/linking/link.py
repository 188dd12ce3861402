"""Linking: outlined programs and compiled functions become one `Program` each.

Functions carry op ordinals; here they get the locations of their first use, collected in one table
per program. The arena is placed, since only now scratch zones are known. Linking is deterministic
and copies nothing but tables, so equal steps give equal programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.isa.program import Function, Kernel, Program
from shardwright.compiler.linking.placement import place
from shardwright.compiler.neff.listing import program_lines
from shardwright.compiler.outline import Outlined
from shardwright.compiler.outline.buffers import OutlinedProgram
from shardwright.compiler.outline.unit import Unit, unpack_function
from shardwright.compiler.program import StepPlan
from shardwright.compiler.shown.memory import program_memory
from shardwright.compiler.steps import note, within

Location = tuple[str, int, str]


def link(
    plan: StepPlan, outlined: Outlined, compiled: Sequence[bytes], target: str
) -> dict[str, Program]:
    """Program name -> program. `compiled` are the packed functions, in the order of
    `outlined.functions`.
    """
    units = {unit.key: unit for unit in outlined.functions}
    functions = {
        unit.key: unpack_function(data)
        for unit, data in zip(outlined.functions, compiled, strict=True)
    }
    routed = {key: _routed(function, plan.streams) for key, function in functions.items()}
    linked = {p.name: link_program(p, units, routed, target) for p in outlined.programs}
    assert linked.keys() == {program.name for program in plan.programs}
    return linked


def link_program(
    program: OutlinedProgram,
    units: Mapping[str, Unit],
    compiled: Mapping[str, Function],
    target: str,
) -> Program:
    """One linked program."""
    table: dict[Location, int] = {}
    names = function_names([units[key] for key in program.functions])
    functions = [
        placed_function(compiled[key], name, units[key], table)
        for key, name in zip(program.functions, names, strict=True)
    ]
    placed = place(program, {key: compiled[key].scratch_bytes for key in program.functions})
    linked = Program(
        name=program.name,
        target=target,
        functions=functions,
        buffers=placed.buffers,
        inputs=program.inputs,
        outputs=program.outputs,
        steps=placed.steps,
        arena_bytes=placed.arena_bytes,
        locations=tuple(table),
    )
    with within(f"programs/{program.name}"):
        note("memory", lambda: program_memory(linked))
        note("listing", lambda: _listing(linked, program, units))
    return linked


def _listing(linked: Program, program: OutlinedProgram, units: Mapping[str, Unit]) -> str:
    """Buffers and calls of a program, and where the code of its functions is."""
    folders = dict(zip(units, function_names([*units.values()]), strict=True))
    places = [
        f"function {function.name}: functions/{folders[key]}"
        for key, function in zip(program.functions, linked.functions, strict=True)
    ]
    return "\n".join([*program_lines(linked), *places]) + "\n"


def _routed(function: Function, streams: Mapping[tuple[str, tuple[str, ...]], int]) -> Function:
    """`function` with its collectives on the streams of the step."""
    calls = [replace(c, stream=streams.get((c.kind, c.axes), 0)) for c in function.collectives]
    return replace(function, collectives=calls)


def function_names(units: Sequence[Unit]) -> list[str]:
    """Names of functions inside a program, numbered where they repeat."""
    seen: dict[str, int] = {}
    found = []
    for unit in units:
        count = seen[unit.name] = seen.get(unit.name, 0) + 1
        found.append(unit.name if count == 1 else f"{unit.name}.{count}")
    return found


def placed_function(
    function: Function, name: str, unit: Unit, table: dict[Location, int]
) -> Function:
    """`function` under its name, its kernels pointing into the location table."""
    kernels, *others = (
        [_placed_kernel(kernel, unit, table) for kernel in subgraph]
        for subgraph in function.subgraphs
    )
    return replace(function, name=name, kernels=kernels, partner=others[0] if others else None)


def _placed_kernel(kernel: Kernel, unit: Unit, table: dict[Location, int]) -> Kernel:
    ordinal = kernel.program.loc
    if not 0 <= ordinal < len(unit.graph.ops):
        return kernel
    loc = unit.graph.ops[ordinal].loc
    if loc == Loc():
        return replace(kernel, program=replace(kernel.program, loc=-1))
    number = table.setdefault((loc.file, loc.line, loc.scope), len(table))
    return replace(kernel, program=replace(kernel.program, loc=number))
