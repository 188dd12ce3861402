"""Values between functions and scratch zones in one arena: places and sizes worked out by hand.

Buffers are multiples of the 256 bytes that places are aligned to.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Call, ProgramBuffer, Repeat, calls_of
from shardwright.compiler.linking.placement import place
from shardwright.compiler.outline.buffers import OutlinedProgram
from shardwright.compiler.schedule.hbm import Lifetime

UNIT = 256


def outlined(lives: Mapping[int, tuple[int, int, int]], *steps: Call | Repeat) -> OutlinedProgram:
    """Functions f and g; buffer 0 is named, others are (units, first call, last call)."""
    buffers = [ProgramBuffer("x", (4,), DType.F32, "named")]
    buffers += [ProgramBuffer("", (n * UNIT,), DType.U8, "arena") for n, _, _ in lives.values()]
    return OutlinedProgram(
        name="p",
        functions=["f", "g"],
        buffers=buffers,
        steps=steps,
        inputs=("x",),
        outputs=(),
        lifetimes={k: Lifetime(n * UNIT, first, last) for k, (n, first, last) in lives.items()},
        positions=list(range(len(list(calls_of(steps))))),
    )


F, G = Call(0, (0,), (1,)), Call(1, (1,), (0,))


def test_a_zone_takes_bytes_that_are_free_during_its_call() -> None:
    """Call 0 has no value and a zone of 6 units, call 1 values of 5 and a zone of 1: 6 units are
    enough, where the most of each in turn would be 5 + 6."""
    program = outlined({1: (5, 1, 1)}, F, G)
    placed = place(program, {"f": 6 * UNIT, "g": UNIT})
    assert placed.arena_bytes == 6 * UNIT
    assert [call.scratch for call in calls_of(placed.steps)] == [0, 5 * UNIT]
    assert [buffer.offset_bytes for buffer in placed.buffers] == [-1, 0]


def test_a_zone_lies_beside_what_is_alive() -> None:
    """A value of 2 units lives through both calls, one of 3 in the second; zones of 4 and 1."""
    program = outlined({1: (2, 0, 1), 2: (3, 1, 1)}, F, G)
    placed = place(program, {"f": 4 * UNIT, "g": UNIT})
    zones = [call.scratch for call in calls_of(placed.steps)]
    first, second = (buffer.offset_bytes for buffer in placed.buffers[1:])
    assert placed.arena_bytes == 6 * UNIT
    assert zones[0] in (0, 2 * UNIT) and first == (4 * UNIT if zones[0] == 0 else 0)
    taken = {
        unit
        for at, size in ((first, 2), (second, 3), (zones[1], 1))
        for unit in range(at // UNIT, at // UNIT + size)
    }
    assert taken == set(range(6))


def test_calls_of_loops_have_their_zones() -> None:
    """The same function in a loop and behind it, beside values of 1 and 3 units."""
    program = outlined({1: (1, 0, 0), 2: (3, 1, 1)}, Repeat(0, 8, (F,)), F)
    placed = place(program, {"f": 2 * UNIT})
    loop, call = placed.steps
    assert isinstance(loop, Repeat) and isinstance(call, Call) and loop.trip == 8
    assert placed.arena_bytes == 5 * UNIT and call.scratch == 3 * UNIT
    assert [inner.scratch for inner in calls_of((loop,))] == [0]


def test_without_zones_only_values_are_placed() -> None:
    program = outlined({1: (5, 1, 1)}, F, G)
    assert place(program, {}).arena_bytes == 5 * UNIT == program.bound_bytes
    assert place(program, {}).steps == program.steps


@pytest.mark.parametrize(("key", "units"), [("f", 2), ("g", 5)])
def test_what_values_hold_beside_a_function(key: str, units: int) -> None:
    """f is called in the first and the third call, g in the second."""
    program = outlined({1: (2, 0, 1), 2: (3, 1, 1), 3: (1, 2, 2)}, F, G, F)
    assert program.most_beside(key) == units * UNIT
