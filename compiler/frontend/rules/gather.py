"""`gather` and `scatter`: dimension numbers as they are; the scatter region becomes a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.compiler.frontend.rules.registry import RefusedError, imports, refuse
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from shardwright.compiler.ir.types import Value

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site


_KINDS = {
    "stablehlo.add": "add",
    "stablehlo.multiply": "multiply",
    "stablehlo.minimum": "min",
    "stablehlo.maximum": "max",
}


@imports("stablehlo.gather")
def gather(site: Site) -> Sequence[Value]:
    """Gather with full dimension numbers."""
    numbers = site.decode("dimension_numbers", _gather_numbers)
    attrs = GatherAttrs(**numbers, slice_sizes=site.ints("slice_sizes"))
    return site.emit("gather", site.operands, attrs).results


@imports("stablehlo.scatter")
def scatter(site: Site) -> Sequence[Value]:
    """Scatter of one operand whose region adds the update or takes it."""
    if len(site.operands) != 3:
        refuse(
            "NCC_EVRF001",
            f"scatter requires one operand, got {(len(site.operands) - 1) // 2}",
            "scatter the arrays one by one",
        )
    numbers = site.decode("scatter_dimension_numbers", _scatter_numbers)
    unique = site.optional("unique_indices")
    attrs = ScatterAttrs(
        **numbers, kind=_scatter_kind(site), unique=unique is not None and bool(unique.value)
    )
    return site.emit("scatter", site.operands, attrs).results


def _scatter_kind(site: Site) -> str:
    """What the update region does to an element: replace it, or combine it with the update."""
    block = site.op.regions[0].blocks[0]
    old, new = block.arguments
    (result,) = list(block.operations)[-1].operands
    if result == new:
        return "replace"
    producer = site.block_producer(block, result)
    if producer is not None and set(producer.operands) == {old, new}:
        kind = _KINDS.get(producer.name)
        if kind is not None:
            return kind
    what = producer.name if producer is not None else "the old value"
    raise RefusedError(
        "NCC_EVRF001" if site.operands[0].type.dtype.is_float else "NCC_EVRF016",
        f"scatter requires an update that replaces, adds, multiplies or takes the minimum or"
        f" maximum, got {what}",
        "use .at[].set, .add, .multiply, .min or .max",
    )


def _gather_numbers(attribute: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.GatherDimensionNumbers(attribute)
    return {
        "offset_dims": tuple(numbers.offset_dims),
        "collapsed_slice_dims": tuple(numbers.collapsed_slice_dims),
        "operand_batching_dims": tuple(numbers.operand_batching_dims),
        "start_indices_batching_dims": tuple(numbers.start_indices_batching_dims),
        "start_index_map": tuple(numbers.start_index_map),
        "index_vector_dim": numbers.index_vector_dim,
    }


def _scatter_numbers(attribute: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.ScatterDimensionNumbers(attribute)
    return {
        "update_window_dims": tuple(numbers.update_window_dims),
        "inserted_window_dims": tuple(numbers.inserted_window_dims),
        "input_batching_dims": tuple(numbers.input_batching_dims),
        "scatter_indices_batching_dims": tuple(numbers.scatter_indices_batching_dims),
        "scatter_dims_to_operand_dims": tuple(numbers.scattered_dims_to_operand_dims),
        "index_vector_dim": numbers.index_vector_dim,
    }
