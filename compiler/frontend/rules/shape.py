"""Shape ops, and the barrier: attributes one to one.

Constants become bytes, a splat only one element.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import Site, Values, imports, refuse
from shardwright.compiler.frontend.rules.trip_count import known_scalar
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    ConcatenateAttrs,
    ConstantAttrs,
    DynamicSliceAttrs,
    IotaAttrs,
    PadAttrs,
    ReshapeAttrs,
    ReverseAttrs,
    SliceAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.types import TensorType


@imports("stablehlo.constant")
def constant(site: Site) -> Values:
    """A constant of the result's type."""
    type = site.result_type()  # refused before jaxlib is asked for elements that it cannot give
    attrs = site.decode("value", lambda a: ConstantAttrs(_data(a, type), type))
    return site.emit("constant", (), attrs).results


def _data(attribute: Any, type: TensorType) -> bytes:
    """Little-endian bytes of a dense attribute."""
    if not hasattr(attribute, "is_splat"):
        refuse("NCC_EVRF001", f"constant requires dense elements, got {str(attribute)[:80]}")
    if attribute.is_splat and type.num_elements:
        return _scalar(attribute.get_splat_value().value, type.dtype)
    if type.dtype.is_narrow and type.dtype is not DType.F16:
        return _printed_bytes(str(attribute), type.dtype)  # jaxlib gives them in no other form
    return bytes(np.array(attribute).astype(type.dtype.numpy).tobytes())


def _printed_bytes(text: str, dtype: DType) -> bytes:
    """Bytes of a printed constant: one hex string, or numbers where 0x.... are bits."""
    values = text[text.index("<") + 1 : text.rindex("> :")]
    if values.startswith('"0x'):
        return bytes.fromhex(values[3:-1])
    numbers = re.findall(r"[^\s\[\],]+", values)
    return b"".join(
        int(n, 16).to_bytes(dtype.bytes, "little") if n.startswith("0x") else _scalar(n, dtype)
        for n in numbers
    )


def _scalar(value: Any, dtype: DType) -> bytes:
    """One element; integers by their bits, so that either signedness of the reading is right."""
    if dtype.is_integer:
        bits = 8 * dtype.bytes
        return int(int(value) & ((1 << bits) - 1)).to_bytes(dtype.bytes, "little")
    number = value if dtype is DType.PRED else float(value)
    return bytes(np.array(number).astype(dtype.numpy).tobytes())


@imports("stablehlo.get_dimension_size")
def get_dimension_size(site: Site) -> Values:
    """A size, which is known."""
    size = site.operands[0].type.shape[site.int("dimension")]
    return (site.make.splat(size, site.result_type()),)


@imports("stablehlo.dynamic_iota", "stablehlo.iota")
def iota(site: Site) -> Values:
    """Counts along one dim of the result."""
    return site.emit("iota", (), IotaAttrs(site.int("iota_dimension"), site.result_type())).results


@imports("stablehlo.broadcast")
def broadcast(site: Site) -> Values:
    """The old form: new dims in front."""
    shape = site.result_type().shape
    rank = site.operands[0].type.rank
    return (site.make.broadcast(site.operands[0], shape, range(len(shape))[len(shape) - rank :]),)


@imports("stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_reshape")
def sized(site: Site) -> Values:
    """An op with the shape of its result as an operand: what a static type says anyway."""
    name = site.name.removeprefix("stablehlo.dynamic_")
    return site.emit(name, site.operands[:1], _ATTRIBUTES[name](site)).results


@imports("mhlo.copy")
def copy(site: Site) -> Values:
    """HLO's copy, which XLA's partitioner puts around manual regions: the same value."""
    return site.operands


@imports("stablehlo.set_dimension_size")
def set_dimension_size(site: Site) -> Values:
    """The first elements along a dim, of a number that is known when compiling."""
    operand, size = site.operands
    dim, known = site.int("dimension"), known_scalar(site.importer.scalars, size)
    most = operand.type.shape[dim]
    if known is None or not 0 <= known <= most:
        got = "a computed one" if known is None else known
        refuse(
            "NCC_EMOD025",
            f"set_dimension_size requires a constant size from 0 up to {most}, got {got}",
            "pad or bucket the inputs, and mask what is beyond the size",
        )
    return (operand if known == most else site.make.first(operand, dim, known),)


_ATTRIBUTES: dict[str, Callable[[Site], Any]] = {
    "broadcast_in_dim": lambda site: BroadcastInDimAttrs(
        site.ints("broadcast_dimensions"), site.result_type().shape
    ),
    "reshape": lambda site: ReshapeAttrs(site.result_type().shape),
    "transpose": lambda site: TransposeAttrs(site.ints("permutation")),
    "slice": lambda site: SliceAttrs(
        site.ints("start_indices"), site.ints("limit_indices"), site.ints("strides")
    ),
    "concatenate": lambda site: ConcatenateAttrs(site.int("dimension")),
    "pad": lambda site: PadAttrs(
        site.ints("edge_padding_low"), site.ints("edge_padding_high"), site.ints("interior_padding")
    ),
    "reverse": lambda site: ReverseAttrs(site.ints("dimensions")),
    "dynamic_slice": lambda site: DynamicSliceAttrs(site.ints("slice_sizes")),
    "dynamic_update_slice": lambda site: None,
    "optimization_barrier": lambda site: None,
}


@imports(*(f"stablehlo.{name}" for name in _ATTRIBUTES))
def regular(site: Site) -> Values:
    """An op of the same name and operands, with attributes one to one."""
    name = site.name.partition(".")[2]
    return site.emit(name, site.operands, _ATTRIBUTES[name](site)).results
