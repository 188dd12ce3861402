"""Scalar engine: one function of one tensor with a scale and a bias, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Instr
from shardwright.sim_cluster.instructions.engines.registry import (
    Executor,
    Registers,
    Views,
    executes,
    reader,
    require,
    same_shape,
    scalar_operand,
    writer,
)
from shardwright.sim_cluster.values import elementwise as ew

Arithmetic = Callable[[Views], np.ndarray]


def _arithmetic(instr: Instr, srcs: tuple[DType, ...]) -> Arithmetic:
    """func(scale * src + bias); scale and bias are immediates or [P, 1] sources."""
    same_shape(instr, 0)
    name = instr.attrs["func"]
    fn = None if name == "identity" else ew.function(name, DType.F32)
    scale, bias = instr.attrs.get("scale", 1.0), instr.attrs.get("bias", 0.0)
    factor, used = scalar_operand(instr, srcs, 1, scale, DType.F32)
    shift, _ = scalar_operand(instr, srcs, used, bias, DType.F32)
    scales = scale is None or np.float32(scale) != 1
    shifts = bias is None or np.float32(bias) != 0
    read = reader(srcs[0], DType.F32)

    def value_of(views: Views) -> np.ndarray:
        value = read(views[0])
        if scales:
            value = value * factor(views)
        if shifts:
            value = value + shift(views)
        return value if fn is None else fn(value)

    return value_of


@executes("activation")
def activation(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = func(scale * src + bias)."""
    value_of, write = _arithmetic(instr, srcs), writer(dst, DType.F32)
    return lambda out, views, registers: write(out, value_of(views))


@executes("activation_reduce")
def activation_reduce(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """The same, and the sums of rows in the view behind the sources."""
    require(instr.row_sum is not None, "SW_L0_OPERANDS", "activation_reduce has two destinations")
    value_of, write = _arithmetic(instr, srcs), writer(dst, DType.F32)
    assert instr.dst is not None
    free = tuple(range(1, len(instr.dst.shape)))

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        value, sums = value_of(views), views[-1]
        sums[...] = ew.reduce_array(value, "add", free).reshape(sums.shape)
        write(out, value)

    return execute
