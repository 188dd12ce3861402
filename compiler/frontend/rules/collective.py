"""Collectives that a module already holds: one core is what a module is compiled for.

Groups of one rank pass their operands on, and this rank is number 0. Larger groups are refused:
here the partitioner makes the collectives, from shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler.frontend.rules.bits import constant
from compiler.frontend.rules.registry import imports, refuse
from compiler.ir.types import Value

if TYPE_CHECKING:
    from compiler.frontend.importer import Site

UNPARTITIONED = "give the unpartitioned module, and the mesh and strategy beside it"


@imports(
    "stablehlo.all_gather",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.reduce_scatter",
)
def grouped(site: Site) -> Sequence[Value]:
    """A collective of groups of one rank changes nothing."""
    size = site.op.attributes["replica_groups"].type.shape[-1]
    if size != 1:
        name = site.name.partition(".")[2]
        refuse(
            "NCC_EVRF001", f"{name} requires groups of one rank, got {size or 'all'}", UNPARTITIONED
        )
    return site.operands


@imports("stablehlo.collective_permute")
def collective_permute(site: Site) -> Sequence[Value]:
    """Rank 0 to itself changes nothing."""
    pairs = list(site.op.attributes["source_target_pairs"])
    if pairs != [0, 0]:
        refuse(
            "NCC_EVRF001",
            f"collective_permute requires the pair (0, 0), got {pairs}",
            UNPARTITIONED,
        )
    return site.operands


@imports("stablehlo.partition_id", "stablehlo.replica_id")
def rank(site: Site) -> Sequence[Value]:
    """The only rank."""
    return (constant(site, 0, site.result_type()),)
