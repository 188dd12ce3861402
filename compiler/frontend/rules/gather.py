"""`gather` and `scatter`: dimension numbers as they are; the scatter region becomes a kind."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.frontend.mlir import producer, results_of
from shardwright.compiler.frontend.rules.reduce import KINDS
from shardwright.compiler.frontend.rules.registry import RefusedError, Site, Values, imports
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from shardwright.compiler.ir.ops.gather import LAST_STARTS, SCATTER_KINDS


@imports("stablehlo.gather")
def gather(site: Site) -> Values:
    """Gather with full dimension numbers."""
    numbers = site.decode("dimension_numbers", _gather_numbers)
    attrs = GatherAttrs(
        **numbers, slice_sizes=site.ints("slice_sizes"), last_starts=_last_starts(site)
    )
    return site.emit("gather", site.operands, attrs).results


@imports("stablehlo.scatter")
def scatter(site: Site) -> Values:
    """Scatters whose region takes each update or combines it with the element, one per operand."""
    count = (len(site.operands) - 1) // 2
    numbers = site.decode("scatter_dimension_numbers", _scatter_numbers)
    unique = site.optional("unique_indices")
    is_unique = unique is not None and bool(unique.value)
    indices, made = site.operands[count], []
    for n, table in enumerate(site.operands[:count]):
        kind, updates = _scatter_kind(site, n, count), site.operands[count + 1 + n]
        if kind == _DIFFERENCE:
            kind, updates = "add", site.make.op("negate", updates)
        attrs = ScatterAttrs(**numbers, kind=kind, unique=is_unique, last_starts=_last_starts(site))
        made.append(site.emit("scatter", (table, indices, updates), attrs).result)
    return made


def _last_starts(site: Site) -> tuple[int, ...]:
    """Where a padded operand ended: only texts of ours say it."""
    return site.ints(LAST_STARTS) if site.optional(LAST_STARTS) is not None else ()


_DIFFERENCE = ".subtract"


def _scatter_kind(site: Site, number: int, count: int) -> str:
    """What the update region does to an element of an operand: replace it, or combine it with the
    update.
    """
    block = site.op.regions[0].blocks[0]
    old, new = block.arguments[number], block.arguments[count + number]
    result = results_of(block)[number]
    if result == new:
        return "replace"
    made = producer(result)
    if made is not None and list(made.operands) == [old, new] and made.name.endswith(_DIFFERENCE):
        return _DIFFERENCE
    if made is not None and set(made.operands) == {old, new}:
        kind = KINDS.get(made.name)
        if kind in SCATTER_KINDS:
            return kind
    what = made.name if made is not None else "the old value"
    raise RefusedError(
        "NCC_EVRF001" if site.operands[0].type.dtype.is_float else "NCC_EVRF016",
        f"scatter requires an update that replaces, adds, multiplies or takes the minimum or"
        f" maximum, got {what}",
        "use .at[].set, .add, .multiply, .min or .max",
    )


def _gather_numbers(attribute: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.GatherDimensionNumbers(attribute)
    return _read(
        numbers,
        "offset_dims collapsed_slice_dims operand_batching_dims start_indices_batching_dims"
        " start_index_map",
    )


def _scatter_numbers(attribute: Any) -> dict[str, Any]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.ScatterDimensionNumbers(attribute)
    found = _read(
        numbers,
        "update_window_dims inserted_window_dims input_batching_dims scatter_indices_batching_dims",
    )
    return found | {"scatter_dims_to_operand_dims": tuple(numbers.scattered_dims_to_operand_dims)}


def _read(numbers: Any, dims: str) -> dict[str, Any]:
    """Lists of dims by name, and the dim of an index."""
    found = {name: tuple(getattr(numbers, name)) for name in dims.split()}
    return {**found, "index_vector_dim": numbers.index_vector_dim}
