"""Edges between queues: uses of one memory are ordered, those edges that others imply are dropped,
and no other is."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile
from shardwright.compiler.schedule.engine_order import (
    Edge,
    Memory,
    _collect,
    _reduce,
    _Waits,
    touched,
)

QUEUES = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.DMA_IN)
RUNS = 6  # of a loop's body, more than any chain of the few edges drawn here goes back
Element = tuple[int, Engine]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[_Waits, bool]:
    """Orders asked for in a body of a few elements: forward, and around the loop if it is one."""
    count, is_loop = draw(st.integers(2, 9)), draw(st.booleans())
    waits = _Waits(count)
    for _ in range(draw(st.integers(1, 12))):
        x, y = draw(st.permutations(QUEUES))[:2]
        back = draw(st.integers(0, 2)) if is_loop else 0
        last = count - 1 if back else count - 2
        source = draw(st.integers(0, last))
        to = draw(st.integers(0 if back else source + 1, count - 1))
        waits.add(source, x, to, y, back)
    return waits, is_loop


def reaches(edges: list[Edge], edge: Edge, count: int, is_loop: bool) -> bool:
    """Whether `edge` holds in an unrolled body because of `edges` and the order of queues."""
    runs = RUNS if is_loop else 1
    goal = edge.source + (runs - 1 - edge.back) * count
    seen: set[Element] = set()
    work: list[Element] = [(edge.to + (runs - 1) * count, edge.to_engine)]
    while work:
        at, engine = work.pop()
        if (at, engine) in seen or at < 0:
            continue
        seen.add((at, engine))
        work.append((at - 1, engine))  # a queue is in order
        work += [
            (at - other.to + other.source - other.back * count, other.from_engine)
            for other in edges
            if other.to_engine is engine and at % count == other.to
        ]
    return (goal, edge.from_engine) in seen


@given(bodies())
def test_what_is_left_implies_the_rest_and_nothing_of_it_is_implied(
    body: tuple[_Waits, bool],
) -> None:
    waits, is_loop = body
    asked, left = waits.edges(), _reduce(waits, is_loop)
    assert set(left) <= set(asked)
    for edge in asked:
        others = [e for e in left if e != edge]
        assert reaches(others, edge, waits.count, is_loop) == (edge not in left)


TILES, REGISTER, OTHER = 2, 7, 8


@st.composite
def loops(draw: st.DrawFn) -> tuple[Loop, list[Tile]]:
    """A loop of instructions that each touch a part of one tile, which may move with the loop."""
    body: list[Instr | Loop] = []
    for _ in range(draw(st.integers(2, 10))):
        low, size = draw(st.integers(0, 4)), draw(st.integers(1, 2))
        terms = draw(st.sampled_from([(), (), ((REGISTER, 1),), ((REGISTER, 5),), ((OTHER, 1),)]))
        tile = draw(st.integers(0, TILES - 1))
        part = AccessPattern(Space.SBUF, tile, Affine(low, terms), ((1, 1), (1, size)))
        dst, srcs = (part, ()) if draw(st.booleans()) else (None, (part,))
        body.append(Instr("any", draw(st.sampled_from(QUEUES)), dst, srcs))
    slots = draw(st.integers(1, 3))
    tiles = [Tile("", Space.SBUF, 1, 8, DType.F32, slots, REGISTER) for _ in range(TILES)]
    return Loop(REGISTER, 4, body), tiles


def part_of(item: Instr | Loop) -> AccessPattern:
    assert isinstance(item, Instr)
    return item.dst or item.srcs[0]


def may_meet(one: AccessPattern, other: AccessPattern, moves: bool) -> bool:
    """Whether two instructions may touch an element of one tile, in whatever iterations of a loop
    that `moves` them."""
    moved = moves and any(register == REGISTER for register, _ in one.offset.terms)
    if one.buffer != other.buffer or one.offset.terms != other.offset.terms or moved:
        return one.buffer == other.buffer
    ranges = [range(p.offset.const, p.offset.const + p.dims[1][1]) for p in (one, other)]
    return bool(set(ranges[0]) & set(ranges[1]))


@given(loops(), st.booleans())
def test_every_two_uses_that_may_meet_are_ordered(
    drawn: tuple[Loop, list[Tile]], is_loop: bool
) -> None:
    """As if all pairs were compared."""
    loop, tiles = drawn
    body, around = loop.body, loop if is_loop else None
    memory = Memory(Kernel(KernelProgram("compute", "drawn"), tiles, body), ())
    uses = [touched(item, memory) for item in body if isinstance(item, Instr)]
    found, asked = _Waits(len(body)), _Waits(len(body))
    _collect(body, uses, around, memory, found)
    for (a, first), (b, second) in combinations(enumerate(body), 2):
        assert isinstance(first, Instr) and isinstance(second, Instr)
        key = "tile", part_of(first).buffer
        window = is_loop and memory.is_window(key, loop)
        writes = first.dst is not None or second.dst is not None
        meets = may_meet(part_of(first), part_of(second), is_loop and not window)
        if first.engine is not second.engine and writes and meets:
            asked.add(a, first.engine, b, second.engine, 0)
            if is_loop and not window:
                back = memory.back(key, REGISTER)
                asked.add(b, second.engine, a, first.engine, back)
    assert found.edges() == asked.edges()
