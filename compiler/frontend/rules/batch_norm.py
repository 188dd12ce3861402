"""The batch norm family, written out in ops that exist: means over every dim but the features.

JAX never emits these; HLO from other front ends does. Statistics are computed in fp32 and rounded
to the type of the operand at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import imports
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    ConstantAttrs,
    ConvertAttrs,
    ReduceAttrs,
)
from shardwright.compiler.ir.types import Value, tensor_type

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site


class _Norm:
    """Arithmetic over one operand shape; values are fp32, per feature or per element."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.type = site.operands[0].type
        self.feature = site.int("feature_index")
        self.others = tuple(d for d in range(self.type.rank) if d != self.feature)
        self.count = math.prod(self.type.shape[d] for d in self.others)

    def op(self, name: str, *operands: Value, attrs: Any = None) -> Value:
        """One op on values of one shape; per-feature values are spread when shapes differ."""
        shapes = {v.type.shape for v in operands}
        given = operands if len(shapes) == 1 else tuple(self.spread(v) for v in operands)
        return self.site.emit(name, given, attrs).result

    def wide(self, value: Value) -> Value:
        """`value` in fp32."""
        if value.type.dtype is DType.F32:
            return value
        return self.site.emit("convert", (value,), ConvertAttrs(DType.F32)).result

    def narrow(self, value: Value) -> Value:
        """`value` in the type of the operand."""
        if self.type.dtype is DType.F32:
            return value
        return self.site.emit("convert", (value,), ConvertAttrs(self.type.dtype)).result

    def spread(self, value: Value) -> Value:
        """A per-feature value on every element; an element-wise value as it is."""
        if value.type.rank == self.type.rank:
            return value
        attrs = BroadcastInDimAttrs((self.feature,), self.type.shape)
        return self.site.emit("broadcast_in_dim", (value,), attrs).result

    def number(self, value: float, like: Value) -> Value:
        """A splat of the shape of `like`."""
        kind = tensor_type(like.type.shape, DType.F32)
        return self.op("constant", attrs=ConstantAttrs.full(value, kind))

    def sum(self, value: Value) -> Value:
        """Per feature."""
        return self.op("reduce", value, attrs=ReduceAttrs("add", self.others))

    def mean(self, value: Value) -> Value:
        """Per feature."""
        total = self.sum(value)
        return self.op("divide", total, self.number(self.count, total))

    def inverse_deviation(self, variance: Value) -> Value:
        """1 / sqrt(variance + epsilon)."""
        epsilon = float(self.site.op.attributes["epsilon"].value)
        return self.op("rsqrt", self.op("add", variance, self.number(epsilon, variance)))

    def normal(self, mean: Value, variance: Value, scale: Value, offset: Value) -> Value:
        """The operand, normalised, scaled and shifted."""
        centred = self.op("subtract", self.wide(self.site.operands[0]), mean)
        factor = self.op("multiply", self.inverse_deviation(variance), self.wide(scale))
        scaled = self.op("multiply", centred, factor)
        return self.narrow(self.op("add", scaled, self.wide(offset)))


@imports("stablehlo.batch_norm_inference")
def batch_norm_inference(site: Site) -> Sequence[Value]:
    """(operand, scale, offset, mean, variance) -> normalised operand."""
    _, scale, offset, mean, variance = site.operands
    norm = _Norm(site)
    return [norm.normal(norm.wide(mean), norm.wide(variance), scale, offset)]


@imports("stablehlo.batch_norm_training")
def batch_norm_training(site: Site) -> Sequence[Value]:
    """(operand, scale, offset) -> normalised operand, mean and variance of the batch."""
    operand, scale, offset = site.operands
    norm = _Norm(site)
    mean = norm.mean(norm.wide(operand))
    centred = norm.op("subtract", norm.wide(operand), mean)
    variance = norm.mean(norm.op("multiply", centred, centred))
    result = norm.normal(mean, variance, scale, offset)
    return [result, norm.narrow(mean), norm.narrow(variance)]


@imports("stablehlo.batch_norm_grad")
def batch_norm_grad(site: Site) -> Sequence[Value]:
    """(operand, scale, mean, variance, gradient) -> gradients of operand, scale and offset."""
    operand, scale, mean, variance, gradient = site.operands
    norm = _Norm(site)
    grad, inverse = norm.wide(gradient), norm.inverse_deviation(norm.wide(variance))
    centred = norm.op("subtract", norm.wide(operand), norm.wide(mean))
    normal = norm.op("multiply", centred, inverse)
    grad_offset = norm.sum(grad)
    grad_scale = norm.sum(norm.op("multiply", grad, normal))
    count = norm.number(norm.count, grad_scale)
    shift = norm.op("divide", grad_offset, count)
    along = norm.op("multiply", normal, norm.op("divide", grad_scale, count))
    rest = norm.op("subtract", norm.op("subtract", grad, shift), along)
    factor = norm.op("multiply", norm.wide(scale), inverse)
    grad_operand = norm.op("multiply", rest, factor)
    return [norm.narrow(v) for v in (grad_operand, grad_scale, grad_offset)]
