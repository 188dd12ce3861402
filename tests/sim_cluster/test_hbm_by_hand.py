"""Memory of a core byte by byte; what two physical cores and collectives may touch meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import ProgramBuffer
from shardwright.compiler.timing.evaluate import Segment
from shardwright.sim_cluster.instructions.physical_cores import CoreWatch
from shardwright.sim_cluster.timing.actors import Ran
from shardwright.sim_cluster.timing.macro import Stretch
from shardwright.sim_cluster.timing.step_parts import ProgramRun, _bounded, _last_call, _longest
from shardwright.sim_cluster.timing.trace import Slice
from shardwright.sim_cluster.values.functions import _overwritten
from shardwright.sim_cluster.values.memory import POISON, CoreMemory

F32, BF16 = DType.F32, DType.BF16


def test_slots_follow_the_micro_batch() -> None:
    """x has 2 slots and y 3; z, with one, is no buffer with slots. They repeat every 6."""
    memory = CoreMemory([("x", 4), ("y", 8), ("z", 2)], {"x": 2, "y": 3, "z": 1})
    assert {name: len(slots) for name, slots in memory.slots.items()} == {"x": 2, "y": 3}
    for number in range(7):
        for name in "xyz":
            memory.slot(name, number)[:] = number
    memory.select(4)
    assert (memory.turn, memory.named["x"][0], memory.named["y"][0]) == (4, 6, 4)
    memory.select(5)
    assert (memory.turn, memory.named["x"][0], memory.named["y"][0]) == (5, 5, 5)
    memory.select(6)
    assert (memory.turn, memory.named["x"][0], memory.named["y"][0]) == (0, 6, 6)
    assert memory.named["z"].tolist() == [6, 6] and memory.named["y"].size == 8
    with pytest.raises(SimulationError, match="no buffer named 'w'"):
        memory.slot("w", 0)


def test_memory_grows_and_forgets_what_was_bound_to_it() -> None:
    memory = CoreMemory([("x", 4)])
    assert memory.named["x"].tolist() == [POISON] * 4
    memory.bindings["a"] = 1
    memory.reserve(0)
    assert memory.bindings
    memory.reserve(16)
    assert (memory.arena.size, memory.bindings) == (16, {})
    memory.bindings["a"] = 1
    arena = memory.arena
    memory.reserve(15)
    assert memory.arena is arena and memory.bindings == {"a": 1}
    assert set(memory.arena.tolist()) == {POISON}


def test_buffers_of_a_program_lie_inside_their_memory() -> None:
    """2 by 3 bf16 are 12 bytes: of a named buffer its first, of the arena those at its place."""
    memory = CoreMemory([("x", 12), ("y", 11)])
    memory.reserve(20)
    memory.arena[:] = range(20)
    named = memory.program_buffer(ProgramBuffer("x", (2, 3), BF16, "named"))
    assert named.size == 12 and named.base is memory.named["x"]
    placed = memory.program_buffer(ProgramBuffer("", (2, 3), BF16, "arena", offset_bytes=8))
    assert placed.tolist() == list(range(8, 20))
    assert memory.program_buffer(ProgramBuffer("", (0,), F32, "arena", offset_bytes=20)).size == 0
    for shape, name, kind, offset, text in (
        ((2, 3), "y", "named", -1, r"requires bytes 0\.\.12, its memory has 11"),
        ((2, 3), "", "arena", 9, r"requires bytes 9\.\.21, its memory has 20"),
        ((2, 3), "", "arena", -1, r"requires bytes -1\.\.11"),
    ):
        with pytest.raises(SimulationError, match=text):
            memory.program_buffer(ProgramBuffer(name, shape, BF16, kind, offset_bytes=offset))


def test_a_copy_has_the_named_buffers_and_nothing_else() -> None:
    memory = CoreMemory([("x", 4)])
    memory.named["x"][:] = [0, 0, 128, 63]
    memory.reserve(8)
    other = memory.copy_named()
    assert other.array("x", F32).tolist() == [1.0]
    other.named["x"][:] = 0
    assert memory.array("x", F32).tolist() == [1.0]
    assert (other.arena.size, other.slots) == (0, {})


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        (None, [True, True]),
        ([True, False, False], [True, False]),
        ([False, True, False], [False, True]),
        ([False, False, True], [False, True]),
        ([False, False, False], [False, False]),
    ],
)
def test_what_is_overwritten_of_another_tensor(
    written: list[bool] | None, lost: list[bool]
) -> None:
    """Of fp32 in bytes 0 to 15, three numbers of 2 bytes from byte 6 on meet the second element,
    which begins at byte 4, with one, and the third with two."""
    memory = np.zeros(16, np.uint8)
    mask = None if written is None else np.array(written)
    at, found = _overwritten(memory[6:12].view(np.int16), mask, memory.view(np.float32))
    assert (at, found.tolist()) == (1, lost)


# Two physical cores, and a key of four bytes in a row


def key(first: int) -> tuple[int, ...]:
    return first, 1, 4


def race(code: str) -> AbstractContextManager[Any]:
    return pytest.raises(SimulationError, match=code) if code else nullcontext()


def touch(watch: CoreWatch, verb: str, first: int, tensor: int = 5) -> None:
    watch.touch(tensor, key(first), writes=verb == "write")


@pytest.mark.parametrize(
    ("done", "then", "is_race"),
    [
        ("write", "read", True),
        ("write", "write", True),
        ("read", "write", True),
        ("read", "read", False),
    ],
)
@pytest.mark.parametrize(("first", "meets"), [(0, True), (3, True), (4, False)])
def test_the_other_core(done: str, then: str, is_race: bool, first: int, meets: bool) -> None:
    """Of bytes 0 to 3; a core that waited for that kernel may."""
    watch = CoreWatch()
    watch.enter(0, 0)
    touch(watch, done, 0)
    watch.enter(1, 0)
    with race("SW_L0_RACE" if is_race and meets else ""):
        touch(watch, then, first)
    watch.enter(1, 1)
    touch(watch, then, first)
    watch.enter(1, 0)  # what it has waited for stays done
    touch(watch, then, first)
    watch.enter(0, 4)  # its own accesses are no race
    touch(watch, then, first)


@pytest.mark.parametrize(
    ("verb", "first", "code"),
    [
        ("read", 0, ""),  # the source of the collective
        ("write", 0, "SW_L0_COLLECTIVE_RACE"),
        ("read", 8, "SW_L0_COLLECTIVE_RACE"),  # its target
        ("write", 8, "SW_L0_COLLECTIVE_RACE"),
        ("write", 16, ""),
    ],
)
def test_a_collective_between_start_and_wait(verb: str, first: int, code: str) -> None:
    watch = CoreWatch()
    watch.enter(0, 0)
    touch(watch, "write", 16)
    watch.enter(0, 0)
    touch(watch, "read", 0)
    touch(watch, "write", 8)
    watch.fly(3)
    watch.enter(0, 0)
    watch.land(4)  # another one
    with race(code):
        touch(watch, verb, first)
    watch.land(3)
    watch.enter(0, 0)
    touch(watch, verb, first)


# Charts of runs


def run(stage: int, number: int, program: str = "f") -> ProgramRun:
    start = 10 * number
    return ProgramRun(
        stage=stage, program=program, number=number, runs=2, start_ps=start, end_ps=start + 7
    )


def test_neighbouring_runs_become_one_where_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """9 runs where 4 are shown: groups of 3; stages are not mixed."""
    runs = [run(0, n) for n in range(5)] + [run(1, n, "fg"[n % 2]) for n in range(4)]
    monkeypatch.setattr("shardwright.sim_cluster.timing.step_parts.MAX_RUNS", 9)
    assert _bounded(runs) == runs
    monkeypatch.setattr("shardwright.sim_cluster.timing.step_parts.MAX_RUNS", 4)
    found = _bounded(runs)
    assert [(r.stage, r.program, r.number, r.runs) for r in found] == [
        (0, "f", 0, 6),
        (0, "f", 3, 4),
        (1, "several", 0, 6),
        (1, "g", 3, 2),
    ]
    assert [(r.start_ps, r.end_ps) for r in found] == [(0, 27), (30, 47), (0, 27), (30, 37)]
    monkeypatch.setattr("shardwright.sim_cluster.timing.step_parts.MAX_RUNS", 8)
    assert [r.runs for r in _bounded(runs)] == [4, 4, 2, 4, 4]


def test_the_shortest_slices_beyond_1200_are_left_out() -> None:
    """1250 slices of 1 to 1250 ps on two tracks: those of 51 ps and more are kept."""
    slices = [Slice(str(ps), ps, 2 * ps, {}) for ps in range(1, 1251)]
    kept, left_out = _longest([("odd", slices[::2]), ("even", slices[1::2])])
    assert left_out == 50
    assert [(name, len(own), own[0].name) for name, own in kept] == [
        ("odd", 600, "51"),
        ("even", 600, "52"),
    ]
    assert _longest([("all", slices[:1200])]) == ([("all", slices[:1200])], 0)


def stretch(label: str) -> Stretch:
    return Stretch(5, 5, 5, Segment("compute", 5), label)


def test_the_last_whole_call_of_a_function_is_the_last_run_of_all_its_code() -> None:
    """Three stretches, of which the third call has come to two only; others run in between."""
    code = [stretch(label) for label in "abc"]
    order = [*code, stretch("x"), *code, code[0], stretch("y"), code[1]]
    ran = [Ran(op, 10 * n, 10 * n + 5) for n, op in enumerate(order)]
    assert _last_call(ran, code) == ran[4:7]
    assert _last_call(ran[:6], code) == ran[:3]
    assert _last_call(ran[1:6], code) == _last_call([], code) == []
    assert _last_call(ran, code[:1]) == [ran[7]]
    assert _last_call(ran, code[:2]) == [ran[7], ran[9]]
    assert _last_call(ran, []) == []


def test_poison_is_no_number() -> None:
    assert np.isnan(CoreMemory([("x", 4)]).array("x", F32)[0])
