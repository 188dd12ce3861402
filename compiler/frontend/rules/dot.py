"""Contractions: `dot_general`, and the plain `dot` that old HLO still has."""

from __future__ import annotations

from typing import Any

from shardwright.compiler.frontend.rules.registry import Site, Values, imports, refuse
from shardwright.compiler.ir.ops import DotGeneralAttrs

_Dims = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@imports("stablehlo.dot_general")
def dot_general(site: Site) -> Values:
    """Dimension numbers and the preferred element type, which is the result's."""
    return _contract(site, site.decode("dot_dimension_numbers", _dimension_numbers))


@imports("stablehlo.dot")
def dot(site: Site) -> Values:
    """The last dim of lhs with the first of rhs."""
    lhs = site.operands[0].type
    if lhs.rank not in (1, 2):
        refuse("NCC_EVRF064", f"dot requires operands of rank 1 or 2, got {lhs}")
    return _contract(site, ((), (), (lhs.rank - 1,), (0,)))


def _contract(site: Site, dims: _Dims) -> Values:
    attrs = DotGeneralAttrs(*dims, dtype=site.result_type().dtype)
    return site.emit("dot_general", site.operands, attrs).results


def _dimension_numbers(attribute: Any) -> _Dims:
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.DotDimensionNumbers(attribute)
    return (
        tuple(dims.lhs_batching_dimensions),
        tuple(dims.rhs_batching_dimensions),
        tuple(dims.lhs_contracting_dimensions),
        tuple(dims.rhs_contracting_dimensions),
    )
