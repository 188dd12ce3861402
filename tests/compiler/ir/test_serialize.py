"""Graphs as bytes: identity, determinism, locations, refusals."""

from __future__ import annotations

import pickle

import msgpack
import numpy as np
import pytest

from shardwright.compiler.diagnostics import LoadError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import GatherAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.serialize import attrs_classes, dump, load
from shardwright.compiler.ir.types import Graph, tensor_type
from shardwright.compiler.ir.verify import verify
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import build_graph
from tests.support.graphs import layer_stack, stack_inputs, structural_hash


def test_round_trip_of_every_harness_row() -> None:
    for case in CASES:
        graph = build_graph(case)
        copy = verify(load(dump(graph, True)))
        assert structural_hash(copy) == structural_hash(graph), case.id
        assert dump(copy, True) == dump(graph, True)


def test_round_trip_keeps_values_and_locations() -> None:
    graph = layer_stack()
    copy = load(dump(graph, True))
    inputs = stack_inputs()
    for ours, theirs in zip(evaluate(graph, inputs), evaluate(copy, inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [op.loc for op in copy.walk()] == [op.loc for op in graph.walk()]
    assert copy.ops[0].loc == Loc("model.py", 7, "stack")


def looked_up(**later: tuple) -> Graph:
    b = Builder()
    attrs = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, 4),
        **later,
    )
    return b.finish(b.op("gather", b.input((8, 4)), b.input((3, 1), DType.I32), attrs=attrs))


def test_attributes_that_came_later_are_written_where_they_say_something() -> None:
    """So graphs of before keep their bytes, and units their keys."""
    rows = [
        msgpack.unpackb(dump(g, False), strict_map_key=False)["attrs"]
        for g in (
            looked_up(),
            looked_up(last_starts=(5,)),
            looked_up(replicated=("tp",)),
        )
    ]
    assert [len(row) - 1 for (row,) in rows] == [7, 8, 9]
    for graph in (looked_up(last_starts=(5,)), looked_up(replicated=("tp",))):
        assert load(dump(graph, True)).ops[0].attrs == graph.ops[0].attrs
    for row in ([*rows[2][0], "more"], rows[0][0][:-1]):
        document = msgpack.unpackb(dump(looked_up(), True), strict_map_key=False)
        document["attrs"] = [row]
        with pytest.raises(LoadError) as caught:
            load(msgpack.packb(document))
        assert caught.value.code == "SW_GRAPH_DAMAGED"


def one_op(line: int, value: float) -> Graph:
    b = Builder(loc=Loc("m.py", line))
    return b.finish(b.add(b.input((2,)), b.full((2,), value)))


def test_moved_lines_change_nothing_without_locations() -> None:
    assert dump(one_op(1, 2.0), False) == dump(one_op(99, 2.0), False)
    assert dump(one_op(1, 2.0), True) != dump(one_op(99, 2.0), True)
    assert dump(one_op(1, 2.0), False) != dump(one_op(1, 3.0), False)


def test_every_attrs_class_is_registered_once() -> None:
    with_attrs = [d for d in OPS.values() if d.attrs is not None]
    assert len(attrs_classes()) == len(with_attrs)


def test_newer_version_is_refused() -> None:
    document = msgpack.unpackb(dump(layer_stack(), True), strict_map_key=False)
    document["version"] = 99
    with pytest.raises(LoadError, match="requires version 1, got 99") as caught:
        load(msgpack.packb(document))
    assert caught.value.code == "SW_GRAPH_VERSION"


@pytest.mark.parametrize("cut", [0, 1, 17, 200, -1])
def test_truncated_data_is_refused(cut: int) -> None:
    with pytest.raises(LoadError):
        load(dump(layer_stack(), True)[:cut])


def test_flipped_bytes_are_refused_or_seen_by_verify() -> None:
    data = dump(layer_stack(), False)
    want = structural_hash(layer_stack())
    rng = np.random.default_rng(7)
    for position in rng.integers(0, len(data), 300):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(0, 8))
        try:
            graph = verify(load(bytes(damaged)))
        except (LoadError, ValueError):
            continue
        assert structural_hash(graph) != want or graph_names(graph) != ["main", "body"]


def graph_names(graph: Graph) -> list[str]:
    """Names of the graph and of its regions: they are data, and no part of the structure."""
    return [graph.name, *(r.name for op in graph.walk() for r in op.regions)]


def test_a_type_is_the_interned_one_wherever_it_is_read() -> None:
    given = tensor_type((2, 3), DType.BF16)
    assert pickle.loads(pickle.dumps(given)) is given
    assert (given.rank, given.num_elements, given.num_bytes) == (2, 6, 12)
