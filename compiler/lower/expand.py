"""Composite elementwise ops in terms of the ones an engine has, right before lowering.

Until here they are one op each, so that partitioning, flops and export see what the user wrote.
Float rules compute in fp32 and round once. Integer dots and sums over ranks become those of fp32,
as the vendor does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import pairing
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    BitcastConvertAttrs,
    CompareAttrs,
    ConstantAttrs,
    ConvertAttrs,
)
from shardwright.compiler.ir.rewrite import Level
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.lower.collective import REDUCTIONS
from shardwright.compiler.lower.whole import as_integers

SIGN_BIT = -(2**31)


class Site:
    """Where one op is expanded: new ops take its location."""

    def __init__(self, level: Level, op: Op) -> None:
        self.level = level
        self.op = op

    def emit(self, name: str, *operands: Value | float, attrs: object = None) -> Value:
        """A new op; numbers become splats like the first operand that is a value."""
        like = next(v for v in operands if isinstance(v, Value))
        values = [v if isinstance(v, Value) else self.splat(v, like) for v in operands]
        op = make_op(name, values, attrs, loc=self.op.loc)
        self.level.ops.append(op)
        return op.result

    def splat(self, number: float, like: Value) -> Value:
        """`number` in the type of `like`; integers keep their bits."""
        dtype = like.type.dtype
        if dtype.is_integer:
            bits = int(number) & ((1 << 8 * dtype.bytes) - 1)
            data = bits.to_bytes(dtype.bytes, "little")
        else:
            data = np.asarray(number).astype(dtype.numpy).tobytes()
        attrs = ConstantAttrs(data, tensor_type(like.type.shape, dtype))
        op = make_op("constant", (), attrs, loc=self.op.loc)
        self.level.ops.append(op)
        return op.result

    def convert(self, value: Value, dtype: DType) -> Value:
        """`value` as `dtype`."""
        if value.type.dtype is dtype:
            return value
        return self.emit("convert", value, attrs=ConvertAttrs(dtype))

    def bits(self, value: Value, dtype: DType = DType.I32) -> Value:
        """The bits of a 32-bit value as another type."""
        return self.emit("bitcast_convert", value, attrs=BitcastConvertAttrs(dtype))

    def compare(self, a: Value, direction: str, b: Value | float) -> Value:
        """An i1 comparison."""
        return self.emit("compare", a, b, attrs=CompareAttrs(direction))

    def select(self, pred: Value, on_true: Value | float, on_false: Value) -> Value:
        """Elementwise choice."""
        chosen = on_true if isinstance(on_true, Value) else self.splat(on_true, on_false)
        return self.emit("select", pred, chosen, on_false)

    def with_sign(self, size: Value, sign: Value) -> Value:
        """`size` (fp32, not negative) with the sign bit of `sign`."""
        bit = self.emit("and", self.bits(sign), SIGN_BIT)
        return self.bits(self.emit("or", self.bits(size), bit), DType.F32)


Rule = Callable[[Site, tuple[Value, ...]], Value]


def expand(graph: Graph) -> Graph:
    """`graph` (loop-free) without composite elementwise ops and sums of integer products or over
    ranks.
    """
    if not any(is_composite(op) for op in graph.ops):
        return graph
    level = Level()
    for op in graph.ops:
        op = level.update(op)
        if not is_composite(op):
            level.ops.append(op)
        elif op.name in _SUMS:
            level.replace(op.results, [_integer_sum(Site(level, op))])
        else:
            level.replace(op.results, [_RULES[op.name](Site(level, op))])
    return level.finish(graph)


def is_composite(op: Op) -> bool:
    """Whether `op` is computed by others."""
    return op.name in _RULES or _is_integer_sum(op)


def _is_integer_sum(op: Op) -> bool:
    """Whether fp32 stands in for integers: for sums, and for what compares them, not for bits and
    products over ranks (`rank_reduce.py`)."""
    if op.name not in _SUMS or not op.operands[0].type.dtype.is_integer:
        return False
    return getattr(op.attrs, "reduction", "add") in REDUCTIONS


def _in_fp32(rule: Rule) -> Callable[[Site], Value]:
    """A rule of fp32 operands, for any float type."""

    def expanded(site: Site) -> Value:
        operands = tuple(site.convert(v, DType.F32) for v in site.op.operands)
        return site.convert(rule(site, operands), site.op.result.type.dtype)

    return expanded


# log(erfc(z) exp(z^2) / t) over t = 1 / (1 + z / 2), z in 0..10: the Chebyshev interpolant of
# degree 9 in powers of t, which misses erfc by 5e-8 of its size (fitted in fp64, math.erfc).
_ERFC = (
    -1.2654549301833748, 0.9987824595578948, 0.3852836335254231, 0.04139596447009486,
    -0.019508004280699043, -0.039866316107367065, -0.7464698964387478, 1.1953276758766376,
    -0.6975365912779016, 0.14804605408043492,
)  # fmt: skip


def _erfc(site: Site, operands: tuple[Value, ...]) -> Value:
    """t exp(-z^2 + polynomial of t) of z = |x|, mirrored for negative x."""
    (x,) = operands
    z = site.emit("abs", x)
    t = site.emit("divide", 2.0, site.emit("add", z, 2.0))
    sum_ = site.emit("multiply", t, _ERFC[-1])
    for coefficient in reversed(_ERFC[1:-1]):
        sum_ = site.emit("multiply", site.emit("add", sum_, coefficient), t)
    exponent = site.emit("subtract", site.emit("add", sum_, _ERFC[0]), site.emit("multiply", z, z))
    tail = site.emit("multiply", t, site.emit("exponential", exponent))
    return site.select(site.compare(x, "LT", 0.0), site.emit("subtract", 2.0, tail), tail)


def _tan(site: Site, operands: tuple[Value, ...]) -> Value:
    (x,) = operands
    return site.emit("divide", site.emit("sine", x), site.emit("cosine", x))


def _cbrt(site: Site, operands: tuple[Value, ...]) -> Value:
    """exp(log(a) / 3) and one Newton step; zero and infinity are their own roots."""
    (x,) = operands
    a = site.emit("abs", x)
    third = site.emit("multiply", site.emit("log", a), 1 / 3)
    root = site.emit("exponential", third)
    quotient = site.emit("divide", a, site.emit("multiply", root, root))
    step = site.emit("multiply", site.emit("subtract", quotient, root), 1 / 3)
    root = site.emit("add", root, step)
    inside = site.emit("and", site.compare(a, "GT", 0.0), site.compare(a, "LT", math.inf))
    return site.with_sign(site.select(inside, root, a), x)


def _atan2(site: Site, operands: tuple[Value, ...]) -> Value:
    """The arctangent of the smaller side over the larger one, mirrored into the octant."""
    y, x = operands
    height, width = site.emit("abs", y), site.emit("abs", x)
    large, small = site.emit("maximum", height, width), site.emit("minimum", height, width)
    ratio = site.emit("divide", small, large)
    ratio = site.select(site.compare(small, "EQ", large), 1.0, ratio)
    ratio = site.select(site.compare(large, "EQ", 0.0), 0.0, ratio)
    angle = site.emit("atan", ratio)
    steep = site.compare(height, "GT", width)
    angle = site.select(steep, site.emit("subtract", math.pi / 2, angle), angle)
    left = site.compare(site.bits(x), "LT", 0)
    angle = site.select(left, site.emit("subtract", math.pi, angle), angle)
    return site.with_sign(angle, y)


def _round_away(site: Site, operands: tuple[Value, ...]) -> Value:
    (x,) = operands
    size = site.emit("abs", x)
    whole = site.emit("floor", size)
    up = site.compare(site.emit("subtract", size, whole), "GE", 0.5)
    return site.with_sign(site.select(up, site.emit("add", whole, 1.0), whole), x)


def _count_ones(site: Site, x: Value) -> Value:
    """Set bits by adding neighbours: pairs, nibbles, bytes, then all bytes in one product."""
    width = 8 * x.type.dtype.bytes
    every = ((1 << width) - 1) // 0xFF  # 0x01 in every byte

    def halves(value: Value, shift: int, mask: int) -> Value:
        upper = site.emit("shift_right_logical", value, shift)
        masked = site.emit("and", upper, mask * every)
        return site.emit("add", site.emit("and", value, mask * every), masked)

    for shift, mask in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        x = halves(x, shift, mask)
    if width == 8:
        return x
    return site.emit("shift_right_logical", site.emit("multiply", x, every), width - 8)


def _popcnt(site: Site) -> Value:
    return _count_ones(site, site.op.operands[0])


def _leading_zeros(site: Site) -> Value:
    """Smear the highest bit downwards; the zeros left are the leading ones."""
    (x,) = site.op.operands
    shift = 1
    while shift < 8 * x.type.dtype.bytes:
        x = site.emit("or", x, site.emit("shift_right_logical", x, shift))
        shift *= 2
    return _count_ones(site, site.emit("not", x))


def _integer_sum(site: Site) -> Value:
    """An integer dot or reducing collective in fp32; who may use it is the business of
    `passes/integers.py`.
    """
    op = site.op
    operands = [site.convert(v, DType.F32) for v in op.operands]
    attrs = op.attrs if pairing(op) is None else replace(op.attrs, dtype=DType.F32)
    total = site.emit(op.name, *operands, attrs=attrs)
    return as_integers(site.emit, total, op.result.type.dtype, op.operands)


_SUMS = ("dot_general", "all_reduce", "reduce_scatter")


_RULES: dict[str, Callable[[Site], Value]] = {
    "atan2": _in_fp32(_atan2),
    "cbrt": _in_fp32(_cbrt),
    "erfc": _in_fp32(_erfc),
    "tan": _in_fp32(_tan),
    "round_nearest_afz": _in_fp32(_round_away),
    "popcnt": _popcnt,
    "count_leading_zeros": _leading_zeros,
}
