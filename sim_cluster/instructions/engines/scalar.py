"""Scalar engine: one function of one tensor with a scale and a bias, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Instr
from shardwright.sim_cluster.instructions.engines.registry import (
    Kernel,
    Registers,
    Views,
    executes,
    per_partition,
    reader,
    require,
    same_shape,
    writer,
)
from shardwright.sim_cluster.values import elementwise as ew

Arithmetic = Callable[[Views], np.ndarray]


def _arithmetic(instr: Instr, srcs: tuple[DType, ...]) -> Arithmetic:
    """func(scale * src + bias); scale and bias are immediates or [P, 1] sources."""
    same_shape(instr, 0)
    name = instr.attrs["func"]
    fn = None if name == "identity" else ew.function(name, DType.F32)
    used = 1
    terms: list[tuple[int, tuple[int, ...], Any, Any]] = []
    for term in ("scale", "bias"):
        given = instr.attrs.get(term, 1.0 if term == "scale" else 0.0)
        if given is None:
            terms.append((used, per_partition(instr, used), reader(srcs[used], DType.F32), None))
            used += 1
        else:
            terms.append((0, (), None, np.float32(given)))
    (scale_at, scale_shape, read_scale, scale), (bias_at, bias_shape, read_bias, bias) = terms
    read = reader(srcs[0], DType.F32)

    def value_of(views: Views) -> np.ndarray:
        value = read(views[0])
        if read_scale is not None:
            value = value * read_scale(views[scale_at]).reshape(scale_shape)
        elif scale != 1:
            value = value * scale
        if read_bias is not None:
            value = value + read_bias(views[bias_at]).reshape(bias_shape)
        elif bias != 0:
            value = value + bias
        return value if fn is None else fn(value)

    return value_of


@executes("activation")
def activation(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Kernel:
    """dst = func(scale * src + bias)."""
    value_of, write = _arithmetic(instr, srcs), writer(dst, DType.F32)

    def kernel(out: np.ndarray, views: Views, registers: Registers) -> None:
        write(out, value_of(views))

    return kernel


@executes("activation_reduce")
def activation_reduce(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Kernel:
    """The same, and the sums of rows in the view behind the sources."""
    require(instr.row_sum is not None, "SW_L0_OPERANDS", "activation_reduce has two destinations")
    value_of, write = _arithmetic(instr, srcs), writer(dst, DType.F32)
    assert instr.dst is not None
    free = tuple(range(1, len(instr.dst.shape)))

    def kernel(out: np.ndarray, views: Views, registers: Registers) -> None:
        value, sums = value_of(views), views[-1]
        sums[...] = ew.reduce_array(value, "add", free).reshape(sums.shape)
        write(out, value)

    return kernel
