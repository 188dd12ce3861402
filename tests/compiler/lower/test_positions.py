"""What is made of counts and a number in memory: planes by their readers, lines only for planes."""

from __future__ import annotations

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.lower.body import Body
from shardwright.compiler.lower.positions import Positions
from shardwright.compiler.lower.task import REGISTER

OWN, ALL = 128, 512


def line(b: Builder, number: Value, size: int = OWN) -> Value:
    """Positions of `size` rows from `number` on."""
    return b.add(b.iota((size,), 0), b.broadcast(number, (size,), ()))


def plane(b: Builder, rows: Value, columns: int = ALL) -> Value:
    """Which columns each row sees."""
    shape = (rows.type.shape[0], columns)
    keys = b.broadcast(b.iota((columns,), 0), shape, (1,))
    return b.compare(b.broadcast(rows, shape, (0,)), keys, "GE")


def positions(graph: Graph, *numbers: Value) -> Positions:
    return Positions(graph, dict.fromkeys(numbers, (0, 384)))


def test_a_plane_and_the_line_behind_it_are_made_by_readers() -> None:
    b = Builder()
    at, x = b.input((), DType.I32), b.input((OWN, ALL))
    rows = line(b, at)
    mask = plane(b, rows)
    out = b.op("select", mask, x, b.full((OWN, ALL), 0.0))
    found = positions(b.finish(out), at)
    assert {rows, mask} <= found.wanted and out not in found.wanted
    assert found.numbers == {at}


def test_a_line_alone_stays_in_memory() -> None:
    b = Builder()
    at, x = b.input((), DType.I32), b.input((OWN,), DType.I32)
    found = positions(b.finish(b.compare(x, line(b, at), "EQ")), at)
    assert not found.wanted and not found.numbers


@pytest.mark.parametrize(("rows", "columns"), [(OWN // 2, ALL), (OWN, OWN // 2)])
def test_short_planes_stay_in_memory(rows: int, columns: int) -> None:
    b = Builder()
    at = b.input((), DType.I32)
    found = positions(b.finish(plane(b, line(b, at, rows), columns)), at)
    assert not found.wanted


def test_a_number_of_any_size_is_data() -> None:
    """Its sums with counts could leave their type."""
    b = Builder()
    at = b.input((), DType.I32)
    graph = b.finish(plane(b, line(b, at)))
    assert not positions(graph).wanted


def test_what_takes_more_than_a_pass_is_not_made_again() -> None:
    b = Builder()
    at = b.input((), DType.I32)
    distance = b.convert(plane(b, line(b, at)), DType.F32)
    table = b.op("sine", distance)
    found = positions(b.finish(table), at)
    assert distance in found.wanted and table not in found.wanted


def test_a_line_outside_of_a_loop_is_made_for_planes_inside() -> None:
    b = Builder()
    at, x = b.input((), DType.I32), b.input((OWN, ALL))
    rows = line(b, at)

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        total, seen = carries
        masked = inner.op("select", plane(inner, seen), total, inner.full((OWN, ALL), 0.0))
        return masked, seen

    found = positions(b.finish(b.loop(3, [x, rows], body)[0]), at)
    assert rows in found.wanted and found.numbers == {at}


def test_a_body_loads_a_number_once_and_stores_no_plane() -> None:
    b = Builder()
    at, x = b.input((), DType.I32), b.input((OWN, ALL))
    zeros = b.full((OWN, ALL), 0.0)
    masks = [plane(b, line(b, at)) for _ in range(2)]
    graph = b.finish(*(b.op("select", m, x, zeros) for m in masks))
    body = Body(graph, {}, positions(graph, at))
    assert [t.op.name for t in body.tasks] == [REGISTER, "select", "select"]
    assert all(body.registers_of(m) == {0} for m in masks)
    assert (body.known[at].low, body.known[at].high) == (0, 384)
