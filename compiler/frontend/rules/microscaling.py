"""Microscaling (MX) calls of the vendor: `QuantizeMX` and the block-scaled dot, written out in our
ops.

32 elements along one dim share a scale, a power of two held as its exponent in 8 bits (E8M0); four
8-bit elements along that dim are one U32. Products are of the scaled elements in bf16, which holds
them exactly, summed in fp32. Operands, fields and refusals: error pages NCC_EVRF036 to 058; how a
scale is found: NKI's page of `quantize_mx`; the type: OCP MX 1.0. Decisions: design note 0094.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.mlir import text_of
from shardwright.compiler.frontend.rules.bits import apart, together
from shardwright.compiler.frontend.rules.registry import Maker, Site, Values, refuse
from shardwright.compiler.ir.ops import DotGeneralAttrs
from shardwright.compiler.ir.types import TensorType, Value, tensor_type

QUANTIZE, SCALED_DOT = "QuantizeMX", "__op$block_scaled_dot"
BLOCK = 32
"""Elements that share a scale (documented: error page EVRF039)."""
_PACKED = 4  # 8-bit elements in a U32 (documented: error page EVRF042)
_FORMATS = {"float8_e5m2": DType.F8E5M2, "float8_e4m3fn": DType.F8E4M3FN}
_LARGEST_EXPONENT = {DType.F8E5M2: 15, DType.F8E4M3FN: 8}
"""Of the largest number of a type: 57344 is 1.75 * 2^15, 448 is 1.75 * 2^8 (OCP MX 1.0)."""
_HEADROOM = 1
"""A scale is twice that of OCP's sample algorithm, so that rounding the largest element up never
saturates (documented: NKI, `nki.isa.quantize_mx`)."""
_NAN_SCALE = 255  # OCP MX 1.0; a block with a NaN or an infinity has it (our choice)
_MANTISSA_BITS, _HIGHEST_MANTISSA = 23, 1 << 22


def quantize(site: Site) -> Values:
    """The elements of a tensor in fp8, packed, and the scale of each block along a dim."""
    config = _config(site, "NCC_EVRF036", empty=False)
    given, dim, dtype = _checked(site, config)
    make, count = site.make, given.type.shape[dim]
    x = make.convert(given, DType.F32)
    scale = _scale_of(make, _in_blocks(make, x, dim), dim, dtype)
    inverse = _inverse(make, scale)
    inverse = make.reshape(_per_element(make, inverse, dim, count), x.type.shape)
    narrow = make.convert(make.multiply(x, inverse), dtype)
    packed = _split(make, narrow, dim, _PACKED)
    data = together(site, packed, DType.U32, dim + 1)
    site.importer.formats[data] = dtype
    return data, make.convert(scale, DType.U8)


def _checked(site: Site, config: dict[str, Any]) -> tuple[Value, int, DType]:
    """(operand, quantised dim, element type). Refuses what the vendor's verification does."""
    if len(site.operands) != 1:
        refuse("NCC_EVRF037", f"QuantizeMX requires 1 operand, got {len(site.operands)}")
    results = site.result_types()
    if len(results) != 2:
        refuse("NCC_EVRF057", f"QuantizeMX requires 2 results, data and scale, got {len(results)}")
    (given,) = site.operands
    if given.type.dtype not in (DType.BF16, DType.F16):
        refuse("NCC_EVRF041", f"QuantizeMX requires bf16 or f16, got {given.type}")
    dtype = _FORMATS.get(str(config.get("dtype", "")))
    if dtype is None:
        known = " or ".join(_FORMATS)
        refuse("NCC_EVRF042", f"QuantizeMX requires dtype {known}, got {config.get('dtype')!r}")
    dim = _dim_of(given.type, config.get("dim", 0))
    block, method = config.get("block_size", BLOCK), config.get("scale_method", "EMAX")
    if block != BLOCK:
        refuse("NCC_EVRF039", f"QuantizeMX requires block_size {BLOCK}, got {block!r}")
    if method != "EMAX":
        refuse("NCC_EVRF040", f"QuantizeMX requires scale_method EMAX, got {method!r}")
    data, scale = _quantized_types(given.type, dim)
    if results[0] != data:
        refuse("NCC_EVRF042", f"QuantizeMX of {given.type} requires data {data}, got {results[0]}")
    if results[1] != scale:
        refuse("NCC_EVRF064", f"QuantizeMX requires scales {scale} of {data}, got {results[1]}")
    return given, dim, dtype


def _dim_of(type: TensorType, dim: Any) -> int:
    """The quantised dim from 0 on: one of the last two, of a size that packs."""
    rank = type.rank
    place = dim + rank if isinstance(dim, int) and dim < 0 else dim
    if not isinstance(dim, int) or not max(rank - 2, 0) <= place < rank:
        refuse(
            "NCC_EVRF038",
            f"QuantizeMX requires the last dim of {type} or the one before, got {dim}",
        )
    if type.shape[place] % _PACKED:
        refuse(
            "NCC_EVRF058",
            f"QuantizeMX requires a dim that is divisible by {_PACKED}, got {type.shape[place]}",
        )
    return place


def _quantized_types(type: TensorType, dim: int) -> tuple[TensorType, TensorType]:
    """The types of packed data and of scales."""
    data, scale = list(type.shape), list(type.shape)
    data[dim] //= _PACKED
    scale[dim] = -(-scale[dim] // BLOCK)
    return tensor_type(tuple(data), DType.U32), tensor_type(tuple(scale), DType.U8)


def _config(site: Site, code: str, *, empty: bool) -> dict[str, Any]:
    """The JSON object in `backend_config`; `empty` allows none."""
    text = text_of(site.op, "backend_config").strip()
    if empty and text in ("", "None"):
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        refuse(code, f"{_NAMES[code]} requires a JSON object in backend_config, got {text!r}")
    return found


_NAMES = {"NCC_EVRF036": QUANTIZE, "NCC_EVRF049": SCALED_DOT}


def _split(make: Maker, x: Value, dim: int, size: int) -> Value:
    """`x` with `dim` as two: as many groups as fill it, and `size` elements of each."""
    shape = x.type.shape
    return make.reshape(x, (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :]))


def _in_blocks(make: Maker, x: Value, dim: int) -> Value:
    """`x` with a dim of blocks and one of their elements; zeros fill up the last block."""
    missing = -x.type.shape[dim] % BLOCK
    if missing:
        high = tuple(missing if d == dim else 0 for d in range(x.type.rank))
        zero = make.splat(0.0, tensor_type((), x.type.dtype))
        x = make.pad(x, zero, (0,) * x.type.rank, high)
    return _split(make, x, dim, BLOCK)


def _scale_of(make: Maker, blocks: Value, dim: int, dtype: DType) -> Value:
    """The biased exponents of the scales, as i32: that of the largest element less the largest
    exponent of `dtype`, and one more of headroom."""
    size = make.reduce(make.op("abs", blocks), "max", (dim + 1,))
    bits = make.bitcast(size, DType.I32)
    exponent = make.with_number("shift_right_logical", bits, _MANTISSA_BITS)
    lower = make.with_number("subtract", exponent, _LARGEST_EXPONENT[dtype] - _HEADROOM)
    lower = make.with_number("maximum", lower, 0)
    is_lost = make.compare(exponent, make.splat(_NAN_SCALE, exponent.type), "EQ")
    return make.op("select", is_lost, make.splat(_NAN_SCALE, exponent.type), lower)


def _inverse(make: Maker, scale: Value) -> Value:
    """One over the scales, in fp32; NaN of a scale that is."""
    negated = make.op("subtract", make.splat(2 * 127, scale.type), scale)
    bits = make.with_number("shift_left", negated, _MANTISSA_BITS)
    is_lost = make.compare(scale, make.splat(_NAN_SCALE, scale.type), "EQ")
    nan = make.splat(_NAN_SCALE << _MANTISSA_BITS | _HIGHEST_MANTISSA, scale.type)
    return make.bitcast(make.op("select", is_lost, nan, bits), DType.F32)


def _factor(make: Maker, scale: Value) -> Value:
    """The scales as numbers of fp32: 0 stands for 2^-127, a subnormal, and 255 for NaN."""
    scale = make.convert(scale, DType.I32)
    bits = make.with_number("shift_left", scale, _MANTISSA_BITS)
    ends = [make.compare(scale, make.splat(end, scale.type), "EQ") for end in (0, _NAN_SCALE)]
    mantissa = make.splat(_HIGHEST_MANTISSA, scale.type)
    other = make.op("select", make.op("or", *ends), mantissa, make.splat(0, scale.type))
    return make.bitcast(make.op("or", bits, other), DType.F32)


def _per_element(make: Maker, scale: Value, dim: int, count: int) -> Value:
    """A value of every block for each of the `count` elements along `dim`."""
    shape = scale.type.shape
    kept = [d if d <= dim else d + 1 for d in range(len(shape))]
    spread = make.broadcast(scale, (*shape[: dim + 1], BLOCK, *shape[dim + 1 :]), kept)
    whole = make.reshape(spread, (*shape[:dim], shape[dim] * BLOCK, *shape[dim + 1 :]))
    return make.first(whole, dim, count) if whole.type.shape[dim] != count else whole


@dataclass(frozen=True, slots=True)
class _Side:
    """An operand of a scaled dot: packed data, scales, batch dims and the contracted one."""

    name: str
    data: Value
    scale: Value
    batch: tuple[int, ...]
    contract: int

    def sizes(self, dims: tuple[int, ...]) -> list[int]:
        return [self.data.type.shape[d] for d in dims]


def scaled_dot(site: Site) -> Values:
    """The product of two packed tensors with their scales, over the dim that is packed."""
    if len(site.operands) != 4:
        refuse(
            "NCC_EVRF043",
            "a scaled matmul requires 4 operands, lhs, rhs and their scales, got"
            f" {len(site.operands)}",
        )
    _check_types(site)
    config = _config(site, "NCC_EVRF049", empty=True).get("scaled_dot_backend_config", {})
    if not isinstance(config, dict):
        refuse("NCC_EVRF049", f"scaled_dot_backend_config requires an object, got {config!r}")
    sides = [_side(site, number, config) for number in (0, 1)]
    _check_pair(*sides)
    values = [_dequantized(site, side, _format_of(site, side, config)) for side in sides]
    lhs, rhs = sides
    attrs = DotGeneralAttrs(
        lhs.batch, rhs.batch, (lhs.contract,), (rhs.contract,), dtype=site.result_type().dtype
    )
    return site.emit("dot_general", values, attrs).results


def _check_types(site: Site) -> None:
    lhs, rhs = (v.type for v in site.operands[:2])
    result = site.result_type()
    if lhs.dtype is not DType.U32:
        refuse("NCC_EVRF044", f"a scaled matmul requires a packed ui32 lhs, got {lhs}")
    if rhs.dtype is not DType.U32:
        refuse("NCC_EVRF064", f"a scaled matmul requires a packed ui32 rhs, got {rhs}")
    if result.dtype not in (DType.F32, DType.BF16):
        refuse("NCC_EVRF045", f"a scaled matmul requires a result of f32 or bf16, got {result}")
    for code, name, type in (("NCC_EVRF046", "lhs", lhs), ("NCC_EVRF047", "rhs", rhs)):
        if type.rank < 2:
            refuse(code, f"a scaled matmul requires rank 2 or more of its {name}, got {type}")


def _side(site: Site, number: int, config: dict[str, Any]) -> _Side:
    """An operand with its dims. Refuses dims that it does not have."""
    name, data, scale = ("lhs", "rhs")[number], site.operands[number], site.operands[number + 2]
    rank = data.type.rank
    batch = _dims(config, f"{name}_batch_dimensions")
    contract = _dims(config, f"{name}_contracting_dimensions") or (rank - 1,)
    for code, what, dims in (("NCC_EVRF054", "batch", batch), ("NCC_EVRF055", "", contract)):
        outside = [d for d in dims if not 0 <= d < rank]
        if outside:
            what = what or "contracting"
            refuse(code, f"{name} requires {what} dims from 0 to {rank - 1}, got {outside[0]}")
    both = sorted(set(batch) & set(contract))
    if both:
        refuse("NCC_EVRF053", f"{name} requires batch and contracting dims apart, got {both[0]}")
    if len(contract) != 1:
        refuse(
            "NCC_EVRF064", f"{name} requires one contracting dim, the packed one, got {contract}"
        )
    blocks = list(data.type.shape)
    blocks[contract[0]] = -(-blocks[contract[0]] * _PACKED // BLOCK)
    wanted = tensor_type(tuple(blocks), DType.U8)
    if scale.type != wanted:
        refuse("NCC_EVRF064", f"{name} {data.type} requires scales {wanted}, got {scale.type}")
    return _Side(name, data, scale, batch, contract[0])


def _dims(config: dict[str, Any], field: str) -> tuple[int, ...]:
    found = config.get(field, [])
    if not isinstance(found, list) or not all(type(d) is int for d in found):
        refuse("NCC_EVRF049", f"{field} requires a list of whole numbers, got {found!r}")
    return tuple(found)


def _check_pair(lhs: _Side, rhs: _Side) -> None:
    """Refuses operands whose batch or contracting dims are of other sizes."""
    sizes = lhs.sizes(lhs.batch), rhs.sizes(rhs.batch)
    if sizes[0] != sizes[1]:
        refuse("NCC_EVRF048", f"a scaled matmul requires equal batch dims, got {sizes}")
    depth = [side.sizes((side.contract,))[0] * _PACKED for side in (lhs, rhs)]
    if depth[0] != depth[1]:
        refuse(
            "NCC_EVRF050",
            f"a scaled matmul requires equal contracting dims, got lhs {depth[0]} and rhs"
            f" {depth[1]}",
        )


def _format_of(site: Site, side: _Side, config: dict[str, Any]) -> DType:
    """The element type: what the call says, else that of the `QuantizeMX` behind the operand."""
    asked = str(config.get("element_dtype", ""))
    found = _FORMATS.get(asked) if asked else site.importer.formats.get(side.data)
    if found is None:
        refuse(
            "NCC_EVRF064",
            f"a scaled matmul requires element_dtype {' or '.join(_FORMATS)} for {side.name}, got"
            f" {asked or 'none'}, and no QuantizeMX is in front of it",
        )
    return found


def _dequantized(site: Site, side: _Side, dtype: DType) -> Value:
    """Elements times scales as bf16: 8 bits of exponent, and more of mantissa than fp8 has."""
    make, dim = site.make, side.contract
    pieces = apart(site, side.data, DType.U8, dim + 1)
    shape = list(side.data.type.shape)
    shape[dim] *= _PACKED
    x = make.convert(make.bitcast(make.reshape(pieces, tuple(shape)), dtype), DType.F32)
    factor = _per_element(make, _factor(make, side.scale), dim, shape[dim])
    return make.convert(make.multiply(x, factor), DType.BF16)
