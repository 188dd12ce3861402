"""A loop over layers split into stages keeps its values, whatever the split and the direction."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.sharding.cut.pipeline.loops import split_loop
from shardwright.sharding.indices.layers import scanned_layers
from tests.support.road import captured_graph
from tests.support.strategy_cells import gqa, moe, random_inputs, tied_gpt


def split(graph: Graph, trips: tuple[int, ...]) -> Graph:
    """`graph` with every layer loop split."""
    parts = {scan.loop: split_loop(scan, trips) for scan in scanned_layers(graph)}
    ops = [new for op in graph.ops for new in parts.get(op, (op,))]
    return Graph(graph.inputs, tuple(ops), graph.outputs, graph.name)


@pytest.mark.parametrize("make", [gqa, tied_gpt, moe])
def test_forward_and_backward_loops_keep_their_values(make: object) -> None:
    graph, inputs, _ = captured_graph(make(), 2)
    parts = split(graph, (1, 1))
    verify(parts)
    assert len(scanned_layers(parts)) == 2 * len(scanned_layers(graph))
    given = random_inputs(graph, inputs)
    for one, other in zip(evaluate(parts, given), evaluate(graph, given), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("trips", [(1,), (1, 2), (3,), (2, 0)])
def test_parts_that_are_not_the_loop_are_refused(trips: tuple[int, ...]) -> None:
    graph, _, _ = captured_graph(gqa(), 2)
    with pytest.raises(ShardingError, match="add up to 2"):
        split_loop(scanned_layers(graph)[0], trips)
