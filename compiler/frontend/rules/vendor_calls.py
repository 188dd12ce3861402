"""Custom calls of the vendor's frameworks that stand for more than one op, written out in ours.

Forms as the front ends emit them (transformers-neuronx, torch-neuronx): the dim, or k, is text in
`backend_config`; indices are u32 or s64; the epsilon of RmsNorm is a scalar operand; the backward
pass of softmax takes the gradient and the forward's result. No front end that is public writes
SiluBackward and IntMatmult: they are taken by analogy (design note 0094), and other forms refused.
"""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.mlir import call_target, text_of
from shardwright.compiler.frontend.rules.registry import Site, Values, refuse
from shardwright.compiler.ir.ops import DotGeneralAttrs, SortAttrs


def first_extreme(site: Site, kind: str) -> Values:
    """First position of the largest (`max`) or smallest (`min`) element along a dim."""
    (x,) = _operands(site, 1)
    dim, make = _number(site, x.type.rank - 1), site.make
    best = make.reduce(x, kind, (dim,))
    found = make.compare(x, make.spread_back(best, (dim,), x), "EQ")
    place = make.iota(x.type.shape, dim, DType.U32)
    beyond = make.splat(x.type.shape[dim], place.type)
    first = make.reduce(make.op("select", found, place, beyond), "min", (dim,))
    return (make.convert(first, site.result_type().dtype),)


def top_k(site: Site) -> Values:
    """The k largest elements of the last dim, descending, and their u32 positions."""
    (x,) = _operands(site, 1)
    if not x.type.dtype.is_float:
        refuse("NCC_EVRF013", f"TopK requires float elements, got {x.type}", "cast to float")
    dim, k = x.type.rank - 1, _number(site, None)
    if not 0 < k <= x.type.shape[dim]:
        refuse("NCC_EVRF064", f"TopK requires k up to {x.type.shape[dim]}, got {k}")
    keys = SortAttrs(dim, ((0, "GT", "numeric"),))
    positions = site.make.iota(x.type.shape, dim, DType.U32)
    ordered = site.emit("sort", (x, positions), keys).results
    return tuple(site.make.first(v, dim, k) for v in ordered)


def rms_norm(site: Site) -> Values:
    """x / sqrt(mean(x^2) + eps) * weight along a dim, in fp32."""
    given, weight, eps = _operands(site, 3)
    dim = _number(site, given.type.rank - 1)
    make = site.make
    x = make.convert(given, DType.F32)
    total = make.reduce(make.multiply(x, x), "add", (dim,))
    mean = make.with_number("multiply", total, 1.0 / given.type.shape[dim])
    scalar = make.reshape(make.convert(eps, DType.F32), ())
    scale = make.op("rsqrt", make.add(mean, make.broadcast(scalar, mean.type.shape)))
    normal = make.multiply(x, make.spread_back(scale, (dim,), x))
    gain = make.broadcast(make.convert(weight, DType.F32), given.type.shape, (dim,))
    return (make.convert(make.multiply(normal, gain), given.type.dtype),)


def softmax(site: Site) -> Values:
    """exp(x - max) / sum along a dim (the last one unless named), in fp32."""
    (given,) = _operands(site, 1)
    dim = _number(site, given.type.rank - 1)
    make = site.make
    x = make.convert(given, DType.F32)
    top = make.reduce(x, "max", (dim,))
    weight = make.op("exponential", make.op("subtract", x, make.spread_back(top, (dim,), x)))
    total = make.reduce(weight, "add", (dim,))
    result = make.op("divide", weight, make.spread_back(total, (dim,), x))
    return (make.convert(result, given.type.dtype),)


def softmax_backward(site: Site) -> Values:
    """y * (g - sum(g * y)) along a dim, of the gradient g and the result y, in fp32."""
    given = _operands(site, 2)
    type = given[0].type
    if given[1].type.shape != type.shape:
        refuse("NCC_EVRF064", f"SoftmaxBackward requires equal shapes, got {type}, {given[1].type}")
    dim, make = _number(site, type.rank - 1), site.make
    grad, y = (make.convert(v, DType.F32) for v in given)
    total = make.reduce(make.multiply(grad, y), "add", (dim,))
    rest = make.op("subtract", grad, make.spread_back(total, (dim,), grad))
    return (make.convert(make.multiply(y, rest), type.dtype),)


def silu_backward(site: Site) -> Values:
    """The derivative of Silu, s + x s (1 - s) with s = logistic(x), in fp32; of two operands, the
    gradient before x, times the gradient (as SoftmaxBackward and GeluBackward have theirs).
    """
    given = site.operands if len(site.operands) == 2 else _operands(site, 1)
    types = {v.type for v in given} | {site.result_type()}
    if len(types) > 1 or not given[0].type.dtype.is_float:
        refuse("NCC_EVRF064", f"SiluBackward requires floats of one type, got {_types(site)}")
    make = site.make
    x = make.convert(given[-1], DType.F32)
    gate = make.op("logistic", x)
    rest = make.op("subtract", make.splat(1.0, x.type), gate)
    slope = make.add(gate, make.multiply(make.multiply(x, gate), rest))
    for grad in given[:-1]:
        slope = make.multiply(make.convert(grad, DType.F32), slope)
    return (make.convert(slope, given[0].type.dtype),)


def int_matmult(site: Site) -> Values:
    """The product of two matrices of integers, the last dim of lhs with the first of rhs."""
    lhs, rhs = _operands(site, 2)
    result = site.result_type()
    if not all(type.rank == 2 and type.dtype.is_integer for type in (lhs.type, rhs.type, result)):
        refuse("NCC_EVRF064", f"IntMatmult requires matrices of integers, got {_types(site)}")
    attrs = DotGeneralAttrs((), (), (1,), (0,), dtype=result.dtype)
    return site.emit("dot_general", (lhs, rhs), attrs).results


def _types(site: Site) -> str:
    given = ", ".join(str(v.type) for v in site.operands)
    return f"{given} -> {', '.join(map(str, site.result_types()))}"


def _operands(site: Site, count: int) -> Values:
    """The operands. Refuses another number of them."""
    if len(site.operands) != count:
        name, given = call_target(site.op), len(site.operands)
        refuse("NCC_EVRF064", f"{name} requires {count} operands, got {given}")
    return site.operands


def _number(site: Site, default: int | None) -> int:
    """The whole number in `backend_config`, counted from the end of the shape when negative."""
    text = text_of(site.op, "backend_config")
    if not text and default is not None:
        return default
    try:
        number = int(text)
    except ValueError:
        name = call_target(site.op)
        refuse("NCC_EVRF064", f"{name} requires a whole number in backend_config, got {text!r}")
    return number + site.operands[0].type.rank if number < 0 else number
