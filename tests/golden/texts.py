"""Every graph and every region of a job as text, read back: the same bytes as before."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa import region_text
from shardwright.compiler.isa.program import Program
from shardwright.orchestrator.road.build import Built
from tests.support.region_bytes import pack_region


def check_texts(built: Built) -> tuple[int, int]:
    """How many graphs and regions were compared. Fails at the first that is another."""
    graphs, regions = 0, 0
    for graph in _graphs(built):
        again = parse(to_text(graph, with_locs=True))
        assert dump(again, with_locs=True) == dump(graph, with_locs=True), graph.name
        graphs += 1
    for program in built.programs.values():
        regions += _check_regions(program)
    return graphs, regions


def _graphs(built: Built) -> Iterator[Graph]:
    """The captured step, and its programs; those hold every op that a function holds."""
    yield built.graph
    yield from (program.graph for program in built.plan.step.programs)


def _check_regions(program: Program) -> int:
    found = [r.program for f in program.functions for subgraph in f.subgraphs for r in subgraph]
    distinct = {region_text.to_text(one): one for one in found}
    for text, region in distinct.items():
        (again,) = region_text.parse(text)
        assert pack_region(again) == pack_region(region), region.name
    return len(found)
