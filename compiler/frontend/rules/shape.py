"""Shape ops: attributes one to one; constants become bytes, a splat only one element."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import imports, refuse
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
from shardwright.compiler.ir.types import TensorType, Value

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site


@imports("stablehlo.constant")
def constant(site: Site) -> Sequence[Value]:
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


@imports("stablehlo.iota")
def iota(site: Site) -> Sequence[Value]:
    """Counts along one dim of the result."""
    return site.emit("iota", (), IotaAttrs(site.int("iota_dimension"), site.result_type())).results


@imports("stablehlo.broadcast_in_dim")
def broadcast_in_dim(site: Site) -> Sequence[Value]:
    """Broadcast to the result's shape."""
    attrs = BroadcastInDimAttrs(site.ints("broadcast_dimensions"), site.result_type().shape)
    return site.emit("broadcast_in_dim", site.operands, attrs).results


@imports("stablehlo.broadcast")
def broadcast(site: Site) -> Sequence[Value]:
    """The old form: new dims in front."""
    shape = site.result_type().shape
    dims = tuple(range(len(shape) - site.operands[0].type.rank, len(shape)))
    return site.emit("broadcast_in_dim", site.operands, BroadcastInDimAttrs(dims, shape)).results


@imports("mhlo.copy")
def copy(site: Site) -> Sequence[Value]:
    """HLO's copy, which XLA's partitioner puts around manual regions: the same value."""
    return site.operands


@imports("stablehlo.reshape")
def reshape(site: Site) -> Sequence[Value]:
    """Reshape to the result's shape."""
    return site.emit("reshape", site.operands, ReshapeAttrs(site.result_type().shape)).results


@imports("stablehlo.transpose")
def transpose(site: Site) -> Sequence[Value]:
    """Permutation of dims."""
    return site.emit("transpose", site.operands, TransposeAttrs(site.ints("permutation"))).results


@imports("stablehlo.slice")
def slice_(site: Site) -> Sequence[Value]:
    """Static slice."""
    attrs = SliceAttrs(site.ints("start_indices"), site.ints("limit_indices"), site.ints("strides"))
    return site.emit("slice", site.operands, attrs).results


@imports("stablehlo.concatenate")
def concatenate(site: Site) -> Sequence[Value]:
    """Operands one after the other."""
    return site.emit("concatenate", site.operands, ConcatenateAttrs(site.int("dimension"))).results


@imports("stablehlo.pad")
def pad(site: Site) -> Sequence[Value]:
    """Padding at the edges and between elements."""
    attrs = PadAttrs(
        site.ints("edge_padding_low"),
        site.ints("edge_padding_high"),
        site.ints("interior_padding"),
    )
    return site.emit("pad", site.operands, attrs).results


@imports("stablehlo.reverse")
def reverse(site: Site) -> Sequence[Value]:
    """Reversal of dims."""
    return site.emit("reverse", site.operands, ReverseAttrs(site.ints("dimensions"))).results


@imports("stablehlo.dynamic_slice")
def dynamic_slice(site: Site) -> Sequence[Value]:
    """Slice at computed starts."""
    attrs = DynamicSliceAttrs(site.ints("slice_sizes"))
    return site.emit("dynamic_slice", site.operands, attrs).results


@imports("stablehlo.dynamic_update_slice")
def dynamic_update_slice(site: Site) -> Sequence[Value]:
    """Write a slice at computed starts."""
    return site.emit("dynamic_update_slice", site.operands).results
