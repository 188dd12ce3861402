"""Composite elementwise ops in terms of the ones an engine has, right before lowering.

Until here they are one op each, so that partitioning, flops and export see what the user wrote.
Float rules compute in fp32 and round once. Integer dots and sums over ranks become those of fp32,
as the vendor does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import combination, pairing
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.collective import REDUCTIONS
from shardwright.compiler.lower.level import Rule, Site, rewritten
from shardwright.compiler.lower.whole import as_integers

SIGN_BIT = -(2**31)


def expand(graph: Graph) -> Graph:
    """`graph` (loop-free) without composite elementwise ops and sums of integer products or over
    ranks.
    """
    return rewritten(graph, rule_of)


def rule_of(op: Op) -> Rule | None:
    """How `op` is computed by others; None where an engine has it."""
    return _integer_sum if _is_integer_sum(op) else _RULES.get(op.name)


def _is_integer_sum(op: Op) -> bool:
    """Whether fp32 stands in for integers: for sums, and for what compares them, not for bits and
    products over ranks (`rank_reduce.py`)."""
    if pairing(op) is None and op.name not in REDUCTIONS_OF_RANKS:
        return False
    return combination(op) in REDUCTIONS and op.operands[0].type.dtype.is_integer


def in_fp32(rule: Callable[..., Value]) -> Rule:
    """A rule of fp32 operands, for any float type."""

    def expanded(b: Site, op: Op) -> Value:
        operands = [b.as_type(v, DType.F32) for v in op.operands]
        return b.as_type(rule(b, *operands), op.result.type.dtype)

    return expanded


def with_sign(b: Site, size: Value, sign: Value) -> Value:
    """`size` (fp32, not negative) with the sign bit of `sign`."""
    bit = b.op("and", b.bits(sign), SIGN_BIT)
    return b.bits(b.op("or", b.bits(size), bit), DType.F32)


# log(erfc(z) exp(z^2) / t) over t = 1 / (1 + z / 2), z in 0..10: the Chebyshev interpolant of
# degree 9 in powers of t, which misses erfc by 5e-8 of its size (fitted in fp64, math.erfc).
_ERFC = (
    -1.2654549301833748, 0.9987824595578948, 0.3852836335254231, 0.04139596447009486,
    -0.019508004280699043, -0.039866316107367065, -0.7464698964387478, 1.1953276758766376,
    -0.6975365912779016, 0.14804605408043492,
)  # fmt: skip


@in_fp32
def _erfc(b: Site, x: Value) -> Value:
    """t exp(-z^2 + polynomial of t) of z = |x|, mirrored for negative x."""
    z = b.op("abs", x)
    t = b.op("divide", 2.0, b.op("add", z, 2.0))
    sum_ = b.op("multiply", t, _ERFC[-1])
    for coefficient in reversed(_ERFC[1:-1]):
        sum_ = b.op("multiply", b.op("add", sum_, coefficient), t)
    exponent = b.op("subtract", b.op("add", sum_, _ERFC[0]), b.op("multiply", z, z))
    tail = b.op("multiply", t, b.op("exponential", exponent))
    return b.op("select", b.compare(x, 0.0, "LT"), b.op("subtract", 2.0, tail), tail)


@in_fp32
def _tan(b: Site, x: Value) -> Value:
    return b.op("divide", b.op("sine", x), b.op("cosine", x))


@in_fp32
def _cbrt(b: Site, x: Value) -> Value:
    """exp(log(a) / 3) and one Newton step; zero and infinity are their own roots."""
    a = b.op("abs", x)
    third = b.op("multiply", b.op("log", a), 1 / 3)
    root = b.op("exponential", third)
    quotient = b.op("divide", a, b.op("multiply", root, root))
    step = b.op("multiply", b.op("subtract", quotient, root), 1 / 3)
    root = b.op("add", root, step)
    inside = b.op("and", b.compare(a, 0.0, "GT"), b.compare(a, math.inf, "LT"))
    return with_sign(b, b.op("select", inside, root, a), x)


@in_fp32
def _atan2(b: Site, y: Value, x: Value) -> Value:
    """The arctangent of the smaller side over the larger one, mirrored into the octant."""
    height, width = b.op("abs", y), b.op("abs", x)
    large, small = b.op("maximum", height, width), b.op("minimum", height, width)
    ratio = b.op("divide", small, large)
    ratio = b.op("select", b.compare(small, large, "EQ"), 1.0, ratio)
    ratio = b.op("select", b.compare(large, 0.0, "EQ"), 0.0, ratio)
    angle = b.op("atan", ratio)
    steep = b.compare(height, width, "GT")
    angle = b.op("select", steep, b.op("subtract", math.pi / 2, angle), angle)
    left = b.compare(b.bits(x), 0, "LT")
    angle = b.op("select", left, b.op("subtract", math.pi, angle), angle)
    return with_sign(b, angle, y)


@in_fp32
def _round_away(b: Site, x: Value) -> Value:
    size = b.op("abs", x)
    whole = b.op("floor", size)
    up = b.compare(b.op("subtract", size, whole), 0.5, "GE")
    return with_sign(b, b.op("select", up, b.op("add", whole, 1.0), whole), x)


def _count_ones(b: Site, x: Value) -> Value:
    """Set bits by adding neighbours: pairs, nibbles, bytes, then all bytes in one product."""
    width = 8 * x.type.dtype.bytes
    every = ((1 << width) - 1) // 0xFF  # 0x01 in every byte

    def halves(value: Value, shift: int, mask: int) -> Value:
        upper = b.op("shift_right_logical", value, shift)
        masked = b.op("and", upper, mask * every)
        return b.op("add", b.op("and", value, mask * every), masked)

    for shift, mask in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        x = halves(x, shift, mask)
    if width == 8:
        return x
    return b.op("shift_right_logical", b.op("multiply", x, every), width - 8)


def _popcnt(b: Site, op: Op) -> Value:
    return _count_ones(b, op.operands[0])


def _leading_zeros(b: Site, op: Op) -> Value:
    """Smear the highest bit downwards; the zeros left are the leading ones."""
    (x,) = op.operands
    shift = 1
    while shift < 8 * x.type.dtype.bytes:
        x = b.op("or", x, b.op("shift_right_logical", x, shift))
        shift *= 2
    return _count_ones(b, b.op("not", x))


def _integer_sum(b: Site, op: Op) -> Value:
    """An integer dot or reducing collective in fp32; who may use it is the business of
    `passes/integers.py`.
    """
    operands = [b.as_type(v, DType.F32) for v in op.operands]
    attrs = op.attrs if pairing(op) is None else replace(op.attrs, dtype=DType.F32)
    total = b.op(op.name, *operands, attrs=attrs)
    return as_integers(b, total, op.result.type.dtype, op.operands)


_RULES: dict[str, Rule] = {
    "atan2": _atan2,
    "cbrt": _cbrt,
    "erfc": _erfc,
    "tan": _tan,
    "round_nearest_afz": _round_away,
    "popcnt": _popcnt,
    "count_leading_zeros": _leading_zeros,
}
