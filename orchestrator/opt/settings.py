"""Rewrites that a strategy or an option decides about, with plain settings in their place.

Inputs of a step are named by number: `batch=0` says that input 0 holds samples along dim 0.
"""

from __future__ import annotations

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes import auto_cast as casting
from shardwright.compiler.passes.formats import check_formats
from shardwright.compiler.passes.integers import check_integers
from shardwright.sharding.cut.overlap import shifted as pipelined
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.ring import Rings
from shardwright.sharding.indices.dims import reached
from shardwright.sharding.localize.coordinates import hoist_coordinates
from shardwright.sharding.prepare.sorted_rows import sorted_per_sample


def auto_cast(graph: Graph, cast: str, type: str) -> Graph:
    """`--auto-cast` and `--auto-cast-type`."""
    _one_of("cast", cast, ("none", "matmult", "all"))
    _one_of("type", type, tuple(casting.CAST_TYPES))
    return casting.auto_cast(CompileOptions(auto_cast=cast, auto_cast_type=type))(graph)


def formats(graph: Graph, generation: str, accept: bool) -> Graph:
    """`--experimental-unsafe-fp8e4m3fn-as-fp8e4m3` is `accept`."""
    options = CompileOptions(experimental_unsafe_fp8e4m3fn_as_fp8e4m3=accept)
    return check_formats(options, generation)(graph)


def integers(graph: Graph, generation: str, downcast: str, native: bool) -> Graph:
    """`--implicit-integer-downcast` is `downcast`, `--native-int64 enabled` is `native`."""
    int64 = "enabled" if native else "default"
    options = CompileOptions(implicit_integer_downcast=downcast, native_int64=int64)
    return check_integers(options, generation)(graph)


def coordinates(graph: Graph) -> Graph:
    """The axes that the new inputs count along are in their names only, which a text does not
    have."""
    return hoist_coordinates(graph)[0]


def shifted(graph: Graph, gather: int, reduce: int) -> Graph:
    """`strategy.early_all_gather_shift` and `strategy.late_reduce_scatter_shift`."""
    return pipelined(graph, Shifts(gather, reduce))


def sorted_rows(graph: Graph, batch: int, by_expert: bool) -> Graph:
    """Samples lie along dim 0 of the batch input."""
    return sorted_per_sample(graph, {_input(graph, batch): 0}, by_expert=by_expert)[0]


def ring(graph: Graph, axis: str, batch: int) -> Graph:
    """Sequences of what depends on the batch input are split over `axis`."""
    return Rings(axis, reached(graph, [_input(graph, batch)])).level(graph)


def _input(graph: Graph, number: int) -> Value:
    if number < len(graph.inputs):
        return graph.inputs[number]
    raise UsageError(
        "SW_USAGE",
        f"batch requires an input of the graph, 0 to {len(graph.inputs) - 1}, got {number}",
    )


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            "SW_USAGE",
            f"{key} requires one of {', '.join(allowed)}, got {value!r}",
            hint=did_you_mean(value, allowed),
        )
