"""Elementwise ops: same name, same operands; only comparison and conversions have attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import imports, refuse
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import (
    BitcastConvertAttrs,
    CompareAttrs,
    ConstantAttrs,
    ConvertAttrs,
)
from shardwright.compiler.ir.printer_ops import MEANT, STAND_INS
from shardwright.compiler.ir.types import Value

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site

_SHIFT = "shift_right_arithmetic"
_PLAIN = tuple(
    name
    for name, d in OPS.items()
    if d.elementwise and d.attrs is None and name not in (*STAND_INS, _SHIFT)
)


@imports(*(f"stablehlo.{name}" for name in _PLAIN))
def plain(site: Site) -> Sequence[Value]:
    """An op without attributes keeps its name, a stand-in gets the name it was given."""
    meant = site.optional(MEANT)
    name = site.name.partition(".")[2] if meant is None else meant.value
    return site.emit(name, site.operands).results


@imports(f"stablehlo.{_SHIFT}")
def shift_right_arithmetic(site: Site) -> Sequence[Value]:
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
def compare(site: Site) -> Sequence[Value]:
    """Comparison; the total order of floats is the order of integers made of their bits."""
    kind = site.optional("compare_type")
    operands = site.operands
    if kind is not None and "TOTALORDER" in str(kind) and operands[0].type.dtype.is_float:
        operands = tuple(_total_order(site, v) for v in operands)
    direction = site.decode("comparison_direction", _direction)
    return site.emit("compare", operands, CompareAttrs(direction)).results


def _total_order(site: Site, value: Value) -> Value:
    """Integers that are ordered as the floats, -NaN first: the bits below the sign are turned over
    where it is set.
    """
    wide = DType.F64 if value.type.dtype is DType.F64 else DType.F32
    bits = {DType.F32: DType.I32, DType.F64: DType.I64}[wide]
    if value.type.dtype is not wide:
        value = site.emit("convert", (value,), ConvertAttrs(wide)).result
    pattern = site.emit("bitcast_convert", (value,), BitcastConvertAttrs(bits)).result

    def number(of: int) -> Value:
        data = of.to_bytes(bits.bytes, "little")
        return site.emit("constant", (), ConstantAttrs(data, pattern.type)).result

    width = 8 * bits.bytes - 1
    sign = site.emit("shift_right_arithmetic", (pattern, number(width))).result
    below = site.emit("and", (sign, number(2**width - 1))).result
    return site.emit("xor", (pattern, below)).result


def _direction(attribute: object) -> str:
    from jaxlib.mlir.dialects import stablehlo

    return str(stablehlo.ComparisonDirectionAttr(attribute).value)


@imports("stablehlo.convert")
def convert(site: Site) -> Sequence[Value]:
    """Conversion to the element type of the result."""
    return site.emit("convert", site.operands, ConvertAttrs(site.result_type().dtype)).results
