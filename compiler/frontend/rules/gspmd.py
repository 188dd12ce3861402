"""Sharding annotations of XLA's GSPMD partitioner, which modules of older front ends hold.

A module is compiled for one core here: an annotation that leaves every value whole passes it on,
one that splits a value is refused with the sharding it names. Grammar: XLA's printed `HloSharding`,
of which only the tile counts of `devices=[...]` matter; counts beyond the rank are replicas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler.frontend.rules.collective import UNPARTITIONED
from compiler.frontend.rules.registry import refuse
from compiler.ir.types import Value

if TYPE_CHECKING:
    from compiler.frontend.importer import Site

_TILES = re.compile(r"devices=\[([\d,]+)\]")


def annotation(site: Site) -> Sequence[Value]:
    """`Sharding`, `SPMDFullToShardShape` and `SPMDShardToFullShape` of values that stay whole."""
    name = site.op.attributes["call_target_name"].value
    given = [v.type for v in site.operands]
    results = [site.result_type(i) for i in range(len(site.op.results))]
    attributes = site.op.attributes
    text = attributes["mhlo.sharding"].value if "mhlo.sharding" in attributes else ""
    parts = _parts(text, given[0].rank) if given else 1
    if parts > 1 or (given != results and name != "Sharding"):
        shown = f"{', '.join(map(str, given))} -> {', '.join(map(str, results))} {text}".strip()
        refuse(
            "NCC_EVRF001", f"{name} requires a value that stays whole, got {shown}", UNPARTITIONED
        )
    if given != results:
        refuse("NCC_EVRF064", f"{name} requires results like its operands")
    return site.operands


def _parts(text: str, rank: int) -> int:
    """Into how many pieces a sharding cuts a value."""
    found = _TILES.search(text)
    return math.prod([int(n) for n in found[1].split(",")][:rank]) if found else 1
