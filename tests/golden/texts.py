"""Every graph and every kernel of a job as text, read back: the same bytes as before."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa import kernel_text
from shardwright.compiler.isa.program import Program
from shardwright.orchestrator.road.build import Built
from tests.support.kernel_bytes import pack_kernel


def check_texts(built: Built) -> tuple[int, int]:
    """How many graphs and kernels were compared. Fails at the first that is another."""
    graphs, kernels = 0, 0
    for graph in _graphs(built):
        again = parse(to_text(graph, with_locs=True))
        assert dump(again, with_locs=True) == dump(graph, with_locs=True), graph.name
        graphs += 1
    for program in built.programs.values():
        kernels += _check_kernels(program)
    return graphs, kernels


def _graphs(built: Built) -> Iterator[Graph]:
    """The captured step, and its programs; those hold every op that a function holds."""
    yield built.graph
    yield from (program.graph for program in built.plan.step.programs)


def _check_kernels(program: Program) -> int:
    found = [k.program for f in program.functions for subgraph in f.subgraphs for k in subgraph]
    distinct = {kernel_text.to_text(one): one for one in found}
    for text, kernel in distinct.items():
        (again,) = kernel_text.parse(text)
        assert pack_kernel(again) == pack_kernel(kernel), kernel.name
    return len(found)
