"""Rewrites that a strategy or an option decides about, with plain settings in their place.

Each function has the name of its rewrite. Inputs of a step are named by number: `batch=0` says that
input 0 holds samples along dim 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.lower import made_once as once
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes import auto_cast as casting
from shardwright.compiler.passes.formats import check_formats
from shardwright.compiler.passes.integers import check_integers
from shardwright.orchestrator.config.arguments import known_word
from shardwright.sharding.cut.overlap import buckets, groups, pipelined
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.ring import Rings
from shardwright.sharding.indices.dims import reached
from shardwright.sharding.localize.coordinates import hoist_coordinates
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.prepare.precision import TYPES, rounded_graph
from shardwright.sharding.prepare.sorted_rows import sorted_per_sample
from shardwright.sharding.settings import StrategySettings


def auto_cast(graph: Graph, cast: str = "matmult", type: str = "bf16") -> Graph:
    """`--auto-cast` and `--auto-cast-type`."""
    known_word(cast, ("none", "matmult", "all"), "cast")
    known_word(type, casting.CAST_TYPES, "type")
    return casting.auto_cast(graph, CompileOptions(auto_cast=cast, auto_cast_type=type))


def formats(graph: Graph, generation: str = "v2", accept: bool = False) -> Graph:
    """`--experimental-unsafe-fp8e4m3fn-as-fp8e4m3` is `accept`."""
    options = CompileOptions(experimental_unsafe_fp8e4m3fn_as_fp8e4m3=accept)
    return check_formats(graph, options, generation)


def integers(graph: Graph, generation: str = "v2", downcast: str = "default") -> Graph:
    """`--implicit-integer-downcast` is `downcast`."""
    options = CompileOptions(implicit_integer_downcast=downcast)
    return check_integers(graph, options, generation)


def rounded(graph: Graph, batch: int = 0, param: str = "auto", output: str = "auto") -> Graph:
    """`strategy.param_dtype` and `strategy.output_dtype`; inputs but the batch are weights."""
    for key, value in (("param", param), ("output", output)):
        known_word(value, ("auto", *TYPES), key)
    _input(graph, batch)
    slots = [Slot(f"in{i}", "parameter") for i in range(len(graph.inputs))]
    slots[batch] = Slot(f"in{batch}", "batch", 0)
    return rounded_graph(graph, slots, StrategySettings(param_dtype=param, output_dtype=output))


def coordinates(graph: Graph) -> Graph:
    """The axes that the new inputs count along are in their names only, which a text does not
    have."""
    return hoist_coordinates(graph)[0]


def grouped(graph: Graph, layers: int = 2, most_bytes: int = 2**30) -> Graph:
    """`strategy.layers_per_group`, and the most that its buckets hold."""
    return groups.grouped(graph, layers, most_bytes)


def bucketed(graph: Graph, most_bytes: int = 2**30) -> Graph:
    """`strategy.bucket_mb`."""
    return buckets.bucketed(graph, most_bytes)


def shifted(graph: Graph, gather: int = 1, reduce: int = 0) -> Graph:
    """`strategy.early_all_gather_shift` and `strategy.late_reduce_scatter_shift`."""
    return pipelined.shifted(graph, Shifts(gather, reduce))


def sorted_rows(graph: Graph, batch: int = 0, by_expert: bool = False) -> Graph:
    """Samples lie along dim 0 of the batch input."""
    return sorted_per_sample(graph, {_input(graph, batch): 0}, by_expert=by_expert)[0]


def ring(graph: Graph, axis: str = "cp", batch: int = 0) -> Graph:
    """Sequences of what depends on the batch input are split over `axis`."""
    return Rings(axis, reached(graph, [_input(graph, batch)])).level(graph)


def made_once(graph: Graph, most_bytes: int = 2**30) -> Graph | None:
    """Values of at most `most_bytes`."""
    return once.made_once(graph, most_bytes)


def _input(graph: Graph, number: int) -> Value:
    if number < len(graph.inputs):
        return graph.inputs[number]
    raise UsageError(
        "SW_USAGE",
        f"batch requires an input of the graph, 0 to {len(graph.inputs) - 1}, got {number}",
    )


ON_TEXTS: Mapping[str, Callable[..., Graph | None]] = MappingProxyType(
    {
        one.__name__: one
        for one in (
            rounded,
            sorted_rows,
            ring,
            coordinates,
            grouped,
            bucketed,
            shifted,
            formats,
            integers,
            auto_cast,
            made_once,
        )
    }
)
"""What runs on a text, by the name of the rewrite."""
