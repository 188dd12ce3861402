"""Analyses against small graphs counted by hand."""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import (
    Interval,
    count_ops,
    flops,
    invariant_carries,
    liveness,
    structure,
)
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import build_graph
from tests.support.graphs import LAYERS, ROWS, WIDTH, layer_stack, structural_hash


def test_flops_multiply_by_the_trip_count() -> None:
    n = ROWS * WIDTH
    # counter 1; norm: square n, sum n-rows, divide + add + rsqrt per row, scale n; converts of
    # weight and activation (same type here), dot, tanh.
    per_layer = 1 + n + (n - ROWS) + 3 * ROWS + n + WIDTH * WIDTH + n + 2 * n * WIDTH + n
    assert flops(layer_stack()) == LAYERS * per_layer


def test_dot_flops() -> None:
    b = Builder()
    graph = b.finish(b.dot(b.input((3, 5)), b.input((5, 7))))
    assert flops(graph) == 2 * 3 * 5 * 7


def branches(line: int = 1, value: float = 1.0, dtype: DType = DType.F32) -> Graph:
    b = Builder(loc=Loc("m.py", line))
    x, y = b.input((4,), dtype), b.input((4,), dtype)
    left = b.op("negate", x)
    right = b.op("abs", y)
    return b.finish(b.add(left, b.full((4,), value, dtype)), right)


def test_structural_hash_sees_structure_only() -> None:
    base = structural_hash(branches())
    assert base == structural_hash(branches(line=50))
    assert base != structural_hash(branches(value=2.0))
    assert base != structural_hash(branches(dtype=DType.BF16))
    swapped = branches()
    outputs = swapped.outputs[::-1]
    assert base != structural_hash(Graph(swapped.inputs, swapped.ops, outputs))
    assert structural_hash(layer_stack()) == structural_hash(layer_stack())
    assert structural_hash(layer_stack()) != structural_hash(layer_stack(DType.BF16))


def test_liveness() -> None:
    graph = branches()
    intervals = liveness(graph)
    x, y = graph.inputs
    assert intervals[x] == Interval(-1, 0)
    assert intervals[y] == Interval(-1, 1)
    assert intervals[graph.outputs[1]] == Interval(1, 4)


def test_loop_invariants_and_counts() -> None:
    graph = layer_stack()
    loop = next(op for op in graph.ops if op.name == "loop")
    assert invariant_carries(loop) == (2,)
    counts = count_ops(graph)
    assert counts["dot_general"] == 1 and counts["constant"] >= 3


def test_graphs_share_a_structure_when_their_bytes_are_equal() -> None:
    graphs = [build_graph(case) for case in CASES]
    by_bytes: dict[bytes, list[int]] = {}
    by_structure: dict[Hashable, list[int]] = {}
    for i, graph in enumerate([*graphs, *(load(dump(g, True)) for g in graphs)]):
        by_bytes.setdefault(dump(graph, False), []).append(i)
        by_structure.setdefault(structure(graph), []).append(i)
    assert sorted(by_bytes.values()) == sorted(by_structure.values())
    assert len(by_structure) > 50
