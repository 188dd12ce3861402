"""Where everything of a program lies in its arena: values between functions, and the scratch zone
of each call, planned together once the functions are compiled.

A zone is in use during its call alone, so it takes bytes that other calls need for values; see
docs/design/0074.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from shardwright.compiler.isa.program import NO_PLACE, Call, ProgramBuffer, Repeat, calls_of
from shardwright.compiler.outline.buffers import OutlinedProgram
from shardwright.compiler.schedule import hbm


@dataclass(frozen=True, slots=True)
class Placement:
    """Buffers and calls with their places, and the bytes of the arena that holds all of them."""

    buffers: list[ProgramBuffer]
    steps: tuple[Call | Repeat, ...]
    arena_bytes: int


def place(program: OutlinedProgram, zones: Mapping[str, int]) -> Placement:
    """Place values and zones; `zones` are scratch bytes by the key of a function, none where it is
    left out."""
    calls = zip(calls_of(program.steps), program.positions, strict=True)
    used = {
        number: hbm.Lifetime(size, at, at)
        for number, (call, at) in enumerate(calls)
        if (size := zones.get(program.functions[call.function], 0))
    }
    lifetimes = [*program.lifetimes.values(), *used.values()]
    offsets, size = hbm.plan(lifetimes)
    places = dict(zip(program.lifetimes, offsets, strict=False))
    scratch = dict(zip(used, offsets[len(places) :], strict=True))
    buffers = [
        replace(buffer, offset_bytes=places.get(number, NO_PLACE))
        for number, buffer in enumerate(program.buffers)
    ]
    return Placement(buffers, tuple(_with_zones(program.steps, scratch, count())), size)


def _with_zones(
    steps: Sequence[Call | Repeat], scratch: Mapping[int, int], numbers: Iterator[int]
) -> Iterator[Call | Repeat]:
    """`steps` with the place of every call's zone, by the number of the call in program order."""
    for step in steps:
        if isinstance(step, Repeat):
            yield replace(step, steps=tuple(_with_zones(step.steps, scratch, numbers)))
        else:
            yield replace(step, scratch=scratch.get(next(numbers), 0))
