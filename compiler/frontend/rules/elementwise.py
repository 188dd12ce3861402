"""Elementwise ops: same name, same operands; only comparison and conversions have attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler.dtypes import DType
from compiler.frontend.rules.registry import imports, refuse
from compiler.ir.opdef import OPS
from compiler.ir.ops import BitcastConvertAttrs, CompareAttrs, ConvertAttrs
from compiler.ir.types import Value

if TYPE_CHECKING:
    from compiler.frontend.importer import Site

_PLAIN = tuple(name for name, d in OPS.items() if d.elementwise and d.attrs is None)


@imports(*(f"stablehlo.{name}" for name in _PLAIN))
def plain(site: Site) -> Sequence[Value]:
    """An op without attributes keeps its name."""
    return site.emit(site.name.partition(".")[2], site.operands).results


@imports("stablehlo.compare")
def compare(site: Site) -> Sequence[Value]:
    """Comparison; the total order of floats (sort keys) is refused."""
    kind = site.optional("compare_type")
    if kind is not None and "TOTALORDER" in str(kind):
        refuse("NCC_EVRF001", "compare requires the partial order of floats, got TOTALORDER")
    direction = site.decode("comparison_direction", _direction)
    return site.emit("compare", site.operands, CompareAttrs(direction)).results


def _direction(attribute: object) -> str:
    from jaxlib.mlir.dialects import stablehlo

    return str(stablehlo.ComparisonDirectionAttr(attribute).value)


@imports("stablehlo.convert")
def convert(site: Site) -> Sequence[Value]:
    """Conversion to the element type of the result."""
    return site.emit("convert", site.operands, ConvertAttrs(site.result_type().dtype)).results


@imports("stablehlo.bitcast_convert")
def bitcast_convert(site: Site) -> Sequence[Value]:
    """Reinterpretation as the element type of the result."""
    attrs = BitcastConvertAttrs(site.result_type().dtype)
    return site.emit("bitcast_convert", site.operands, attrs).results


_FORMATS = {DType.F64: (11, 52), DType.F32: (8, 23), DType.BF16: (8, 7), DType.F16: (5, 10)}


@imports("stablehlo.reduce_precision")
def reduce_precision(site: Site) -> Sequence[Value]:
    """Nothing when the format holds the type (JAX marks saved values so), else a round trip through
    bf16.
    """
    (operand,) = site.operands
    exponent, mantissa = site.int("exponent_bits"), site.int("mantissa_bits")
    own_exponent, own_mantissa = _FORMATS[operand.type.dtype]
    if exponent >= own_exponent and mantissa >= own_mantissa:
        return (operand,)
    if (exponent, mantissa) != _FORMATS[DType.BF16] or operand.type.dtype is not DType.F32:
        refuse(
            "NCC_EVRF001",
            f"reduce_precision requires the format of bf16 (8, 7), got ({exponent}, {mantissa})",
        )
    rounded = site.emit("convert", (operand,), ConvertAttrs(DType.BF16))
    return site.emit("convert", rounded.results, ConvertAttrs(DType.F32)).results
