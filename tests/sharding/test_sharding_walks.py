"""Walks of the partitioner's side over ladders: every value is visited once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Value
from shardwright.sharding.indices.layers import unrolled_layers, visited_layers
from shardwright.sharding.memory.places import buffer_places
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, all_values
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.spec import replicated
from shardwright.sharding.prepare.sorted_rows.level import Level
from tests.support.building import Builder
from tests.support.ladders import check_grows, unary
from tests.support.partitioned import as_plan, partitioned

MESH = make_mesh({"dp_shard": 4})


def test_which_layer_a_turn_visits_is_told_in_one_walk() -> None:
    def made(rungs: int) -> Callable[[], object]:
        b = Builder()

        def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
            for _ in range(rungs):
                i = inner.op("subtract", inner.add(i, i), i)
            return (inner.convert(i, DType.F32),)

        b.loop(2, (b.constant(0.0),), body)
        (region,) = b.ops[-1].regions
        (last,) = (op for op in region.ops if op.name == "convert")
        return partial(visited_layers, b.ops[-1], last.operands[0])

    check_grows(made)


def test_boundaries_between_layers_are_told_in_one_walk() -> None:
    """A residual stream, and a ladder on it that the next layer reads too."""

    def made(rungs: int) -> Callable[[], object]:
        b = Builder()
        x, weights = b.input((4, 8)), [b.input((8, 8)) for _ in range(4)]
        side, batch = x, {x: 0}
        for weight in weights:
            x = b.add(x, b.dot(side, weight))
            side = x
            for _ in range(rungs):
                side = unary(b, side)
        graph = b.finish(side)
        batch |= {v: 0 for op in graph.ops for v in op.results}
        assert rungs > 2 or unrolled_layers(graph, batch, set(weights))
        return partial(unrolled_layers, graph, batch, set(weights))

    check_grows(made, 40)


def test_partial_sums_are_marked_in_one_walk() -> None:
    def made(rungs: int) -> Callable[[], object]:
        b = Builder()
        x = b.input((8, 8))
        for _ in range(rungs):
            x = b.add(x, b.transpose(x, (1, 0)))
        graph = b.finish(b.all_reduce(x, ("dp_shard",)))
        specs = {v: replicated(v.type.rank) for v in all_values(graph)}
        part = PartitionedGraph(graph=graph, specs=specs, mesh=MESH, inputs=(), outputs=())
        return partial(rewrite, part)

    check_grows(made)


def test_the_first_reader_behind_barriers_is_found_in_one_walk() -> None:
    def made(rungs: int) -> Callable[[], object]:
        b = Builder()
        x = y = b.input((8, 8))
        for _ in range(rungs):
            x, y = b.barrier(x, y)
        return partial(buffer_places, as_plan(partitioned(b.finish(x, y), MESH)))

    check_grows(made)


def test_repetitions_are_told_without_a_stack_of_calls() -> None:
    def made(rungs: int) -> Callable[[], object]:
        b = Builder()
        x = b.broadcast(b.input((8,)), (8, 8), (0,))
        for _ in range(rungs):
            x = unary(b, x)
        graph = b.finish(x)
        level = Level(graph, graph.producers(), {})
        return lambda: level.repeats(x, 1) or 1 / 0

    check_grows(made, 400)
