"""What makes a program that was read from a file sound: calls fit functions, and buffers fit calls
and memory. Everything raises ValueError.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from shardwright.compiler.isa.program import (
    NO_PLACE,
    Call,
    Function,
    Program,
    ProgramBuffer,
    Repeat,
)
from shardwright.compiler.isa.schema import AFFINE, DTYPE
from shardwright.compiler.isa.soundness import check_indices, check_place, size_bytes
from shardwright.compiler.support.schema import (
    COUNT,
    COUNTS,
    MOST_DEPTH,
    PLAIN,
    TEXT,
    WHOLE,
    Rule,
    Table,
    one_of,
    row,
    several,
)

_STEP = Rule("a step", lambda v: isinstance(v, tuple))
_BUFFER = row(TEXT, COUNTS, DTYPE, one_of("named", "host", "arena"), WHOLE)
HEAD = Table(
    {
        "name": TEXT,
        "target": TEXT,
        "buffers": several(_BUFFER),
        "inputs": several(TEXT),
        "outputs": several(TEXT),
        "steps": several(_STEP),
        "arena_bytes": COUNT,
        "metadata": PLAIN,
        "num_functions": COUNT,
    }
)
"""What the section `program` holds."""
LOCATIONS = several(row(TEXT, COUNT, TEXT))
_CALL = row(one_of("call"), COUNT, COUNTS, COUNTS, several(AFFINE), COUNT)
_REPEAT = row(
    one_of("repeat"),
    COUNT,
    COUNT,
    several(_STEP),
)


def read_step(given: Sequence[Any], depth: int = 0) -> Call | Repeat:
    """A step from plain data."""
    if depth > MOST_DEPTH:
        raise ValueError(f"repeats at most {MOST_DEPTH} deep are required")
    if given and given[0] == "call":
        _CALL.require(given, "a step")
        return Call(*given[1:])
    _REPEAT.require(given, "a step")
    _, register, trip, steps = given
    return Repeat(register, trip, tuple(read_step(s, depth + 1) for s in steps))


def check_program(program: Program) -> None:
    """All rules. Raises ValueError for the first that is broken."""
    for number, buffer in enumerate(program.buffers):
        _check_buffer(number, buffer, program)
    named = {b.name for b in program.buffers if b.kind != "arena"}
    for name in (*program.inputs, *program.outputs):
        if name not in named:
            raise ValueError(f"no buffer is named {name!r}")
    for step in program.steps:
        _check_step(step, program, ())


def _check_buffer(number: int, buffer: ProgramBuffer, program: Program) -> None:
    if buffer.kind == "arena" and buffer.offset_bytes == NO_PLACE:
        return  # `_check_bound` refuses calls that name it
    size = size_bytes(buffer, f"buffer {number}")
    if buffer.kind == "arena":
        check_place(buffer.offset_bytes, size, program.arena_bytes, f"buffer {number}")


def _check_step(step: Call | Repeat, program: Program, registers: Collection[int]) -> None:
    if isinstance(step, Repeat):
        for inner in step.steps:
            _check_step(inner, program, (*registers, step.register))
        return
    check_indices((step.function,), len(program.functions), "called functions")
    function = program.functions[step.function]
    where = f"a call of {function.name}"
    _check_bound(step.inputs, function.inputs, function, program, f"{where}: inputs")
    _check_bound(step.outputs, function.outputs, function, program, f"{where}: outputs")
    if step.scratch + function.scratch_bytes > program.arena_bytes:
        raise ValueError(
            f"{where} requires {function.scratch_bytes} bytes of scratch from byte {step.scratch}"
            f" on, the arena has {program.arena_bytes}"
        )
    if len(step.parameters) != len(function.parameters):
        raise ValueError(f"{where} requires {len(function.parameters)} parameters")
    for register in (r for p in step.parameters for r, _ in p.terms):
        if register not in registers:
            raise ValueError(f"{where} reads register {register}, which nothing sets around it")


def _check_bound(
    buffers: Sequence[int],
    tensors: Sequence[int],
    function: Function,
    program: Program,
    where: str,
) -> None:
    """A buffer of the right size for each tensor."""
    if len(buffers) != len(tensors):
        raise ValueError(f"{where} require {len(tensors)} buffers, got {len(buffers)}")
    check_indices(buffers, len(program.buffers), where)
    for number, tensor in zip(buffers, tensors, strict=True):
        buffer, wanted = program.buffers[number], function.tensors[tensor]
        if buffer.kind == "arena" and buffer.offset_bytes == NO_PLACE:
            raise ValueError(f"{where}: buffer {number} has no place in the arena")
        given = size_bytes(buffer, where)
        needed = size_bytes(wanted, where)
        if given != needed:
            raise ValueError(f"{where} require {needed} bytes for {wanted.name}, got {given}")
