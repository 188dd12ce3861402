"""Custom calls of the vendor's frameworks that stand for more than one op, written out in ours.

Forms as the front ends emit them (transformers-neuronx, torch-neuronx): the dim, or k, is text in
`backend_config`; indices are u32 or s64; the epsilon of RmsNorm is a scalar operand; the backward
pass of softmax takes the gradient and the forward's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.bits import binary, constant, convert
from shardwright.compiler.frontend.rules.registry import refuse
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    CompareAttrs,
    IotaAttrs,
    ReduceAttrs,
    ReshapeAttrs,
    SliceAttrs,
    SortAttrs,
)
from shardwright.compiler.ir.types import Value, tensor_type

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site


def arg_max(site: Site) -> Sequence[Value]:
    """First position of the largest element along a dim."""
    return (_extreme_position(site, "max"),)


def arg_min(site: Site) -> Sequence[Value]:
    """First position of the smallest element along a dim."""
    return (_extreme_position(site, "min"),)


def top_k(site: Site) -> Sequence[Value]:
    """The k largest elements of the last dim, descending, and their u32 positions."""
    (x,) = _operands(site, 1)
    if not x.type.dtype.is_float:
        refuse("NCC_EVRF013", f"TopK requires float elements, got {x.type}", "cast to float")
    dim, k = x.type.rank - 1, _number(site, None)
    if not 0 < k <= x.type.shape[dim]:
        refuse("NCC_EVRF064", f"TopK requires k up to {x.type.shape[dim]}, got {k}")
    keys = SortAttrs(dim, ((0, "GT", "numeric"),))
    ordered = site.emit("sort", (x, _positions(site, x, dim)), keys).results
    window = SliceAttrs((0,) * x.type.rank, (*x.type.shape[:-1], k), (1,) * x.type.rank)
    return tuple(site.emit("slice", (v,), window).result for v in ordered)


def rms_norm(site: Site) -> Sequence[Value]:
    """x / sqrt(mean(x^2) + eps) * weight along a dim, in fp32."""
    given, weight, eps = _operands(site, 3)
    dim = _number(site, given.type.rank - 1)
    x = convert(site, given, DType.F32)
    square = site.emit("multiply", (x, x)).result
    total = site.emit("reduce", (square,), ReduceAttrs("add", (dim,))).result
    mean = binary(site, "multiply", total, 1.0 / given.type.shape[dim])
    scalar = site.emit("reshape", (convert(site, eps, DType.F32),), ReshapeAttrs(())).result
    offset = _spread(site, scalar, (), mean.type.shape)
    scale = site.emit("rsqrt", (site.emit("add", (mean, offset)).result,)).result
    others = tuple(d for d in range(given.type.rank) if d != dim)
    normal = site.emit("multiply", (x, _spread(site, scale, others, given.type.shape))).result
    gain = _spread(site, convert(site, weight, DType.F32), (dim,), given.type.shape)
    result = site.emit("multiply", (normal, gain)).result
    return (convert(site, result, given.type.dtype),)


def softmax(site: Site) -> Sequence[Value]:
    """exp(x - max) / sum along a dim (the last one unless named), in fp32."""
    (given,) = _operands(site, 1)
    dim = _number(site, given.type.rank - 1)
    x = convert(site, given, DType.F32)
    top = site.emit("reduce", (x,), ReduceAttrs("max", (dim,))).result
    others = tuple(d for d in range(given.type.rank) if d != dim)
    shifted = site.emit("subtract", (x, _spread(site, top, others, x.type.shape))).result
    weight = site.emit("exponential", (shifted,)).result
    total = site.emit("reduce", (weight,), ReduceAttrs("add", (dim,))).result
    result = site.emit("divide", (weight, _spread(site, total, others, x.type.shape))).result
    return (convert(site, result, given.type.dtype),)


def softmax_backward(site: Site) -> Sequence[Value]:
    """y * (g - sum(g * y)) along a dim, of the gradient g and the result y, in fp32."""
    given = _operands(site, 2)
    type = given[0].type
    if given[1].type.shape != type.shape:
        refuse("NCC_EVRF064", f"SoftmaxBackward requires equal shapes, got {type}, {given[1].type}")
    dim = _number(site, type.rank - 1)
    others = tuple(d for d in range(type.rank) if d != dim)
    grad, y = (convert(site, v, DType.F32) for v in given)
    product = site.emit("multiply", (grad, y)).result
    total = site.emit("reduce", (product,), ReduceAttrs("add", (dim,))).result
    rest = site.emit("subtract", (grad, _spread(site, total, others, type.shape))).result
    return (convert(site, site.emit("multiply", (y, rest)).result, type.dtype),)


def _extreme_position(site: Site, kind: str) -> Value:
    (x,) = _operands(site, 1)
    dim = _number(site, x.type.rank - 1)
    best = site.emit("reduce", (x,), ReduceAttrs(kind, (dim,))).result
    others = tuple(d for d in range(x.type.rank) if d != dim)
    spread = _spread(site, best, others, x.type.shape)
    found = site.emit("compare", (x, spread), CompareAttrs("EQ")).result
    place = _positions(site, x, dim)
    beyond = constant(site, x.type.shape[dim], place.type)
    candidate = site.emit("select", (found, place, beyond)).result
    first = site.emit("reduce", (candidate,), ReduceAttrs("min", (dim,))).result
    return convert(site, first, site.result_type().dtype)


def _positions(site: Site, like: Value, dim: int) -> Value:
    type = tensor_type(like.type.shape, DType.U32)
    return site.emit("iota", (), IotaAttrs(dim, type)).result


def _spread(site: Site, value: Value, dims: tuple[int, ...], shape: tuple[int, ...]) -> Value:
    return site.emit("broadcast_in_dim", (value,), BroadcastInDimAttrs(dims, shape)).result


def _operands(site: Site, count: int) -> Sequence[Value]:
    """The operands. Refuses another number of them."""
    if len(site.operands) != count:
        name = site.op.attributes["call_target_name"].value
        refuse("NCC_EVRF064", f"{name} requires {count} operands, got {len(site.operands)}")
    return site.operands


def _number(site: Site, default: int | None) -> int:
    """The whole number in `backend_config`, counted from the end of the shape when negative."""
    attributes = site.op.attributes
    text = attributes["backend_config"].value if "backend_config" in attributes else ""
    if not text and default is not None:
        return default
    try:
        number = int(text)
    except ValueError:
        name = attributes["call_target_name"].value
        refuse("NCC_EVRF064", f"{name} requires a whole number in backend_config, got {text!r}")
    return number + site.operands[0].type.rank if number < 0 else number
