"""Sets of dims by arrays are those of joining dims one by one, on steps with loops and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest

from shardwright.compiler.ir.traits import WRITES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models.config_task import train_task
from shardwright.sharding.indices.dim_sets import DimTable
from shardwright.sharding.indices.dims import Dim, factors, propagate, repeated_dims
from tests.models import flax_decoder, prime_model
from tests.support.road import captured_graph

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "head_dim": 4,
}
TASKS = {
    "scanned": lambda: train_task(SIZES, seq_len=8),
    "flax": lambda: flax_decoder.train_task(num_layers=2, seq_len=8),
    "prime": lambda: prime_model.train_task(num_blocks=2),
}


@functools.cache
def step(name: str) -> tuple[Graph, frozenset[Value]]:
    """A training step, and the values whose first dim is the batch of the inputs."""
    graph, inputs, _ = captured_graph(TASKS[name](), 4)
    pairs = zip(inputs, graph.inputs, strict=True)
    return run(graph, step_passes()), frozenset(v for s, v in pairs if s.role == "batch")


def values_of(graph: Graph) -> list[Value]:
    regions = (r for op in graph.walk() for r in op.regions)
    made = (v for op in graph.walk() for v in op.results)
    return list(dict.fromkeys((*graph.inputs, *made, *(v for r in regions for v in r.inputs))))


def dims_of(values: Iterable[Value]) -> list[Dim]:
    return [(v, d) for v in values for d in range(v.type.rank)]


def repeats(op: Op, dim: int) -> bool:
    if op.name == "iota":
        return bool(dim != op.attrs.dim)
    return op.name == "broadcast_in_dim" or (op.name == "constant" and bool(op.attrs.is_splat))


def walked_dims(graph: Graph) -> set[Dim]:
    """The dims that are more than repeated, found op by op from the inputs on."""
    found = set(dims_of(graph.inputs))

    def visit(op: Op) -> bool:
        tied: set[Dim] = set()
        for factor in factors(op):
            tied.update(factor)
            if any(dim in found for dim in factor if dim[0] in op.operands):
                found.update(dim for dim in factor if dim[0] in op.results)
        free = set() if op.name in WRITES else tied
        found.update(
            dim for dim in dims_of(op.results) if dim not in free and not repeats(op, dim[1])
        )
        return False

    def bind(source: Value, target: Value) -> bool:
        dims = range(source.type.rank)
        new = {(target, d) for d in dims if (source, d) in found} - found
        found.update(new)
        return bool(new)

    propagate(graph, visit, bind)
    return found


def joined(graph: Graph, kept: Callable[[Dim], bool], same_size: bool) -> dict[Dim, set[Dim]]:
    """The sets, by joining the dims of each factor one after the other."""
    sets: dict[Dim, set[Dim]] = {}
    for op in graph.walk():
        for factor in factors(op):
            dims = [dim for dim in factor if kept(dim)]
            for first in dims:
                for other in dims:
                    if (
                        not same_size
                        or first[0].type.shape[first[1]] == other[0].type.shape[other[1]]
                    ):
                        one = sets.setdefault(first, {first})
                        two = sets.setdefault(other, {other})
                        if one is not two:
                            one |= two
                            sets.update(dict.fromkeys(two, one))
    return sets


@pytest.mark.parametrize("name", TASKS)
def test_repeated_dims_are_all_that_are_not_walked(name: str) -> None:
    graph, _ = step(name)
    repeated = repeated_dims(graph)
    assert len(repeated) == len(set(repeated)) > 10
    assert set(repeated) == set(dims_of(values_of(graph))) - walked_dims(graph)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("same_size", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_sets_are_those_of_joining_one_by_one(name: str, same_size: bool, whole: bool) -> None:
    graph, batch = step(name)
    table, own = DimTable(graph), walked_dims(graph)
    mask = table.own if whole else table.own & ~table.of(batch)
    sets = table.sets(mask, same_size=same_size)
    wanted = joined(graph, lambda dim: dim in own and (whole or dim[0] not in batch), same_size)
    found: dict[Dim, set[Dim]] = {}
    for dim in dims_of(values_of(graph)):
        found.setdefault(sets.find(dim), set()).add(dim)
    large = {frozenset(s) for s in found.values() if len(s) > 1}
    assert large == {frozenset(s) for s in wanted.values() if len(s) > 1}
    assert len(large) > 5
