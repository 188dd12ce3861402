"""Elementwise ops: same name, same operands; only comparison and conversions have attributes."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.mlir import direction
from shardwright.compiler.frontend.rules.registry import Site, Values, imports, refuse
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import CompareAttrs, ConvertAttrs
from shardwright.compiler.ir.printer_ops import MEANT, STAND_INS
from shardwright.compiler.ir.types import Value

_SHIFT = "shift_right_arithmetic"
_PLAIN = tuple(
    name
    for name, d in OPS.items()
    if d.elementwise and d.attrs is None and name not in (*STAND_INS, _SHIFT)
)


@imports(*(f"stablehlo.{name}" for name in _PLAIN))
def plain(site: Site) -> Values:
    """An op without attributes keeps its name, a stand-in gets the name it was given."""
    meant = site.optional(MEANT)
    name = site.name.partition(".")[2] if meant is None else meant.value
    return site.emit(name, site.operands).results


@imports(f"stablehlo.{_SHIFT}")
def shift_right_arithmetic(site: Site) -> Values:
    """The machine shifts signs in at 32 bits only."""
    shifted = site.operands[0].type.dtype
    if shifted.bytes != 4:
        refuse(
            "NCC_EVRF022",
            f"shift_right_arithmetic requires a first operand of 32 bits, got {shifted.value}",
            "convert to int32 before the shift",
        )
    return plain(site)


@imports("stablehlo.compare")
def compare(site: Site) -> Values:
    """Comparison; the total order of floats is the order of integers made of their bits."""
    kind = site.optional("compare_type")
    operands = site.operands
    if kind is not None and "TOTALORDER" in str(kind) and operands[0].type.dtype.is_float:
        operands = tuple(_total_order(site, v) for v in operands)
    attrs = CompareAttrs(site.decode("comparison_direction", direction))
    return site.emit("compare", operands, attrs).results


def _total_order(site: Site, value: Value) -> Value:
    """Integers in the order of the floats, -NaN first: bits below a sign that is set turn over."""
    wide = DType.F64 if value.type.dtype is DType.F64 else DType.F32
    bits, width = (DType.I64, 63) if wide is DType.F64 else (DType.I32, 31)
    make = site.make
    pattern = make.bitcast(make.convert(value, wide), bits)
    sign = make.with_number("shift_right_arithmetic", pattern, width)
    return make.op("xor", pattern, make.with_number("and", sign, 2**width - 1))


@imports("stablehlo.convert")
def convert(site: Site) -> Values:
    """Conversion to the element type of the result."""
    return site.emit("convert", site.operands, ConvertAttrs(site.result_type().dtype)).results
