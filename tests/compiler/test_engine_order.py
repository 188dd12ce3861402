"""Edges between queues: those that others imply are dropped, and no other is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compiler.engine_order import Edge, _reduce, _Waits
from compiler.isa.program import Engine

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
