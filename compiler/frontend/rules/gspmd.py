"""Sharding annotations of XLA's GSPMD partitioner, which modules of older front ends hold.

An annotation changes no value. The command that compiles one file passes it on and tells the user
that it is not applied (`frontend/shardings.py`); a step that is to be partitioned names its
shardings otherwise, so that one that splits a value is refused. The two calls between whole values
and parts of them are refused where they change a shape. Grammar: XLA's printed `HloSharding`, of
which only the tile counts of `devices=[...]` matter; counts behind those of dims are replicas.
"""

from __future__ import annotations

import re

from shardwright.compiler.frontend.mlir import call_target, text_of
from shardwright.compiler.frontend.rules.ranks import UNPARTITIONED
from shardwright.compiler.frontend.rules.registry import Site, Values, refuse

_TILES = re.compile(r"devices=\[([\d,]+)\]([^}]*)")
_SUBGROUPS = re.compile(r"last_tile_dims=\{([^}]*)")
_REPLICATED = "last_tile_dim_replicate"


def annotation(site: Site) -> Values:
    """`Sharding`, `SPMDFullToShardShape` and `SPMDShardToFullShape` of values that stay whole."""
    name, text = call_target(site.op), text_of(site.op, "mhlo.sharding")
    given, results = [v.type for v in site.operands], site.result_types()
    shown = f"{', '.join(map(str, given))} -> {', '.join(map(str, results))} {text}".strip()
    if given != results and name == "Sharding":
        refuse("NCC_EVRF064", f"{name} requires results like its operands, got {shown}")
    if given != results or (splits(text) and not site.importer.is_partition):
        required = f"{name} requires a value that stays whole"
        refuse("NCC_EVRF001", f"{required}, got {shown}", UNPARTITIONED)
    return site.operands


def splits(text: str) -> bool:
    """Whether a sharding, or one of a tuple, cuts its value into pieces."""
    return any(_pieces(counts, rest) > 1 for counts, rest in _TILES.findall(text))


def _pieces(counts: str, rest: str) -> int:
    """The largest number of pieces of a dim; tile dims behind those of the value are copies."""
    tiles = [int(n) for n in counts.split(",")]
    copies = len(found[1].split(",")) if (found := _SUBGROUPS.search(rest)) else _REPLICATED in rest
    return max(tiles[: len(tiles) - copies], default=1)
