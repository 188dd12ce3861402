"""Quadratic rematerialisation: large values that follow from small ones are made where they
are read, instead of being saved.

`recipes.py` says how a value is rematerialised and whether that pays, `groups.py` which readers are
too far away to share it, `level.py` gives those readers a copy of their own, `loops.py` does the
same between a loop that stacks a value and the loops that read the stack, `invariants.py` moves
what loops only read into their bodies. Nothing here knows what attention is.
"""

from __future__ import annotations

from shardwright.compiler.ir.rewrite import within
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.remat.invariants import remat_invariants
from shardwright.compiler.passes.remat.level import remat_at_level
from shardwright.compiler.passes.remat.loops import quadratic, remat_across_loops
from shardwright.compiler.passes.remat.recipes import SHORT_ROW


def rematerialise(graph: Graph, short_row: int = SHORT_ROW) -> Graph:
    """`graph` with quadratic values rematerialised for far readers, loop bodies included, and with
    them the maxima of rows of up to `short_row` elements, and for other loops their sums.

    What is not read any more (stacks, originals) is left to `dce`.
    """
    graph = remat_across_loops(remat_invariants(graph), quadratic, short_row)
    graph = within(graph, lambda region: rematerialise(region, short_row))
    return remat_at_level(graph, short_row)
