"""The batch norm family, written out in ops that exist: means over every dim but the features.

JAX never emits these; HLO from other front ends does. Statistics are computed in fp32 and rounded
to the type of the operand at the end.
"""

from __future__ import annotations

import math

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import Maker, Site, Values, imports
from shardwright.compiler.ir.types import Value


class _Norm(Maker):
    """Arithmetic over one operand shape; values are fp32, per feature or per element."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.operand, self.type = site.operands[0], site.operands[0].type
        self.feature = site.int("feature_index")
        self.others = tuple(d for d in range(self.type.rank) if d != self.feature)
        self.count = math.prod(self.type.shape[d] for d in self.others)
        self.epsilon = float(site.op.attributes["epsilon"].value)

    def on(self, name: str, *operands: Value) -> Value:
        """One op on values of one shape; per-feature values are spread when shapes differ."""
        if len({v.type.shape for v in operands}) > 1:
            operands = tuple(self.spread(v) for v in operands)
        return self.op(name, *operands)

    def wide(self, value: Value) -> Value:
        """`value` in fp32."""
        return self.convert(value, DType.F32)

    def narrow(self, value: Value) -> Value:
        """`value` in the type of the operand."""
        return self.convert(value, self.type.dtype)

    def spread(self, value: Value) -> Value:
        """A per-feature value on every element; an element-wise value as it is."""
        is_whole = value.type.rank == self.type.rank
        return value if is_whole else self.spread_back(value, self.others, self.operand)

    def sum(self, value: Value) -> Value:
        """Per feature."""
        return self.reduce(value, "add", self.others)

    def mean(self, value: Value) -> Value:
        """Per feature."""
        return self.with_number("divide", self.sum(value), self.count)

    def inverse_deviation(self, variance: Value) -> Value:
        """1 / sqrt(variance + epsilon)."""
        return self.op("rsqrt", self.with_number("add", variance, self.epsilon))

    def normal(self, mean: Value, variance: Value, scale: Value, offset: Value) -> Value:
        """The operand, normalised, scaled and shifted."""
        centred = self.on("subtract", self.wide(self.operand), mean)
        factor = self.multiply(self.inverse_deviation(variance), self.wide(scale))
        scaled = self.on("multiply", centred, factor)
        return self.narrow(self.on("add", scaled, self.wide(offset)))


@imports("stablehlo.batch_norm_inference")
def batch_norm_inference(site: Site) -> Values:
    """(operand, scale, offset, mean, variance) -> normalised operand."""
    _, scale, offset, mean, variance = site.operands
    norm = _Norm(site)
    return [norm.normal(norm.wide(mean), norm.wide(variance), scale, offset)]


@imports("stablehlo.batch_norm_training")
def batch_norm_training(site: Site) -> Values:
    """(operand, scale, offset) -> normalised operand, mean and variance of the batch."""
    operand, scale, offset = site.operands
    norm = _Norm(site)
    mean = norm.mean(norm.wide(operand))
    centred = norm.on("subtract", norm.wide(operand), mean)
    variance = norm.mean(norm.on("multiply", centred, centred))
    result = norm.normal(mean, variance, scale, offset)
    return [result, norm.narrow(mean), norm.narrow(variance)]


@imports("stablehlo.batch_norm_grad")
def batch_norm_grad(site: Site) -> Values:
    """(operand, scale, mean, variance, gradient) -> gradients of operand, scale and offset."""
    operand, scale, mean, variance, gradient = site.operands
    norm = _Norm(site)
    grad, inverse = norm.wide(gradient), norm.inverse_deviation(norm.wide(variance))
    centred = norm.on("subtract", norm.wide(operand), norm.wide(mean))
    normal = norm.on("multiply", centred, inverse)
    grad_offset = norm.sum(grad)
    grad_scale = norm.sum(norm.on("multiply", grad, normal))
    count = norm.splat(norm.count, grad_scale.type)
    shift = norm.on("divide", grad_offset, count)
    along = norm.on("multiply", normal, norm.on("divide", grad_scale, count))
    rest = norm.on("subtract", norm.on("subtract", grad, shift), along)
    factor = norm.on("multiply", norm.wide(scale), inverse)
    grad_operand = norm.on("multiply", rest, factor)
    return [norm.narrow(v) for v in (grad_operand, grad_scale, grad_offset)]
