"""Memory of linked programs over time, recomputed from their calls and instructions alone, and the
arena plans judged by it.

The planner works on lifetimes it noted while it laid the program out; nothing here reads those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import tensor_of
from shardwright.compiler.isa.program import (
    Call,
    Function,
    Instr,
    Kernel,
    Loop,
    Program,
    ProgramBuffer,
    Repeat,
    Space,
)
from shardwright.compiler.linking.residency import Residency, scratch_peak
from shardwright.compiler.outline import outline
from shardwright.compiler.schedule import hbm
from shardwright.compiler.schedule.hbm import Lifetime
from shardwright.orchestrator.road.build import Built
from tests.models import flax_decoder, prime_model
from tests.support.cells import long_in_matrix
from tests.support.small_job import build_on, small_llama
from tests.support.strategy_cells import MODELS

SLACK = 1.02
TASKS = {
    "llama": lambda: small_llama("bf16"),
    "flax": lambda: flax_decoder.train_task(width=32, num_layers=2, seq_len=8),
    "prime": lambda: prime_model.train_task(seq_len=7),
    "bert": MODELS["bert"],
}


@pytest.fixture(scope="module")
def built() -> Callable[[str], Built]:
    return cache(lambda name: build_on(TASKS[name](), {"dp_shard": 4}).built)


def function(name: str, inputs: int, outputs: int) -> Function:
    """A function without code: only its calls matter."""
    return Function(name, [], (0,) * inputs, (0,) * outputs, (), 0, [], [])


def program(sizes: list[int], *steps: Call | Repeat) -> Program:
    """Calls over arena buffers of `sizes` times 256 bytes."""
    buffers = [ProgramBuffer("", (64 * n,), DType.F32, "arena", 0) for n in sizes]
    functions = [function("f", 0, outputs) for outputs in range(8)]
    return Program("p", "t", functions, buffers, (), (), steps, 0)


def call(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Call:
    return Call(len(outputs), inputs, outputs)


def live(made: Program) -> list[int]:
    return [m.arena_bytes // 256 for m in Residency(made).moments]


def test_a_value_is_live_from_its_maker_to_its_last_reader() -> None:
    steps = call((), (0,)), call((0,), (1,)), call((1,), (2,)), call((1, 2), ())
    assert live(program([1, 10, 100], *steps)) == [1, 11, 110, 110]


def test_carries_live_through_their_loop_and_bodies_values_do_not() -> None:
    """0 is carried, 1 is made and read within an iteration, 2 is read in every one."""
    body = Repeat(0, 8, (call((0, 2), (1,)), call((1,), (0,)), call((0,), ())))
    steps = call((), (0,)), call((), (2,)), body, call((0,), ())
    made = program([1, 10, 100], *steps)
    assert live(made) == [1, 101, 111, 111, 101, 1]
    assert [m.repeats for m in Residency(made).moments] == [1, 1, 8, 8, 8, 1]


def test_what_an_iteration_leaves_for_the_next_lives_on() -> None:
    """Two loops inside each other: 1 is read before it is made, so it stays for both."""
    inner = Repeat(1, 2, (call((1,), (0,)), call((0,), ())))
    outer = Repeat(0, 3, (inner, call((), (1,))))
    made = program([1, 10], call((), (1,)), outer)
    assert live(made) == [10, 11, 11, 10]
    assert [m.repeats for m in Residency(made).moments] == [1, 6, 6, 3]


def test_what_a_loop_fills_bit_by_bit_is_not_there_before() -> None:
    """1 is written in place by every iteration, and read behind the loop; nothing made it first."""
    body = Repeat(0, 8, (call((0, 1), (1,)),))
    made = program([1, 10], call((), (0,)), call((0,), (0,)), body, call((1,), ()))
    assert live(made) == [1, 1, 11, 10]


@pytest.mark.parametrize("name", long_in_matrix(TASKS, ("bert", "prime", "flax")))
def test_arenas_of_whole_steps_are_at_the_bound(name: str, built) -> None:
    step: Built = built(name)
    for made in step.programs.values():
        bound = Residency(made).bound_bytes
        print(f"{name} {made.name}: arena {made.arena_bytes}, bound {bound}")
        assert bound <= made.arena_bytes <= SLACK * bound


@pytest.mark.parametrize(
    ("names", "least"), [(("llama",), 1), pytest.param(TASKS, 5, marks=pytest.mark.matrix)]
)
def test_a_dropped_free_shows(names: Iterable[str], least: int, built) -> None:
    """A buffer of before the peak that is never given back lifts the plan above the bound."""
    every = (plan for name in names for plan in plans(built(name)))
    found = [dropped for plan in every if (dropped := with_one_free_less(*plan))]
    assert len(found) >= least
    for lifetimes, bound in found:
        assert hbm.plan(lifetimes)[1] > SLACK * bound


def plans(step: Built) -> Iterator[tuple[list[Lifetime], int]]:
    """The lifetimes of every arena and every scratch zone, with its bound."""
    for outlined in outline(step.plan.step).programs:
        yield [*outlined.lifetimes.values()], _without_zones(step.programs[outlined.name])
    for one in (f for made in step.programs.values() for f in made.functions):
        spans = spans_of(one)
        yield [Lifetime(size_of(one, i), *span) for i, span in spans.items()], scratch_bound(one)


def _without_zones(made: Program) -> int:
    """The bound of what lies between functions alone."""
    functions = [replace(one, scratch_bytes=0) for one in made.functions]
    return Residency(replace(made, functions=functions)).bound_bytes


def with_one_free_less(lifetimes: list[Lifetime], bound: int) -> tuple[list[Lifetime], int] | None:
    """The plan with the largest buffer that is freed before the peak kept to the end, if any."""
    ends = sorted({life.end for life in lifetimes})
    busy = {at: sum(x.size_bytes for x in lifetimes if x.start <= at <= x.end) for at in ends}
    peak = max(busy, key=lambda at: busy[at], default=0)
    freed = [x for x in lifetimes if x.end < peak and x.size_bytes > 2 * (SLACK - 1) * bound]
    if not freed:
        return None
    kept = max(freed, key=lambda x: x.size_bytes)
    return [replace(x, end=ends[-1]) if x is kept else x for x in lifetimes], bound


@pytest.mark.parametrize("name", long_in_matrix(TASKS, ("bert", "prime", "flax")))
def test_scratch_zones_are_at_the_bound_of_their_instructions(name: str, built) -> None:
    """Spans come from the addresses that instructions touch, not from the kernels' views."""
    for made in built(name).programs.values():
        for one in made.functions:
            bound = scratch_bound(one)
            assert bound <= one.scratch_bytes <= max(SLACK * bound, bound + 256), one.name
            assert scratch_peak(one).num_bytes <= one.scratch_bytes


def spans_of(one: Function) -> dict[int, tuple[int, int]]:
    """First and last kernel that touches each tensor of the scratch zone."""
    flying: dict[int, list[int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    for at, kernel in enumerate(one.kernels):
        for tensor in touched(kernel, flying):
            if one.tensors[tensor].kind == "scratch":
                spans[tensor] = (min(spans.get(tensor, (at, at))[0], at), at)
    return spans


def size_of(one: Function, tensor: int) -> int:
    return math.prod(one.tensors[tensor].shape) * one.tensors[tensor].dtype.bytes


def scratch_bound(one: Function) -> int:
    """Most aligned bytes in use at one kernel."""
    spans = spans_of(one)
    at_kernels = (
        sum(hbm.aligned(size_of(one, i)) for i, (a, b) in spans.items() if a <= at <= b)
        for at in range(len(one.kernels))
    )
    return max(at_kernels, default=0)


def touched(kernel: Kernel, flying: dict[int, list[int]]) -> set[int]:
    """The tensors a kernel's instructions address; a collective's from its start to its wait."""
    found = {p.buffer for p in patterns(kernel.body) if p.space is Space.HBM}
    attrs = kernel.program.attrs
    if kernel.program.kind == "collective_start":
        flying[attrs["collective"]] = [tensor_of(attrs["source"]), tensor_of(attrs["target"])]
        found.update(flying[attrs["collective"]])
    elif kernel.program.kind == "collective_wait":
        found.update(flying.pop(attrs["collective"]))
    elif kernel.program.kind == "register_load":
        found.add(attrs["view"].tensor)
    return found


def patterns(body: list[Instr | Loop]):
    for item in body:
        if isinstance(item, Loop):
            yield from patterns(item.body)
        else:
            yield from (p for p in (item.dst, *item.srcs) if p is not None)


def test_residents_at_the_peak_add_up_and_have_places(built) -> None:
    step: Built = built("llama")
    residency = Residency(step.programs["backward"])
    found = residency.at_peak()
    assert sum(r.num_bytes for r in found) == residency.moments[residency.peak].live_bytes
    assert any(r.gathered for r in found)
    placed = [
        r for r in found if r.loc.file.endswith(("decoder.py", "attending.py")) and r.loc.line
    ]
    assert sum(r.num_bytes for r in placed) > 0.5 * sum(r.num_bytes for r in found)
