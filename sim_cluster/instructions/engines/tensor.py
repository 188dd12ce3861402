"""Tensor engine: matrix products and transposes into PSUM, fp32 accumulation."""

from __future__ import annotations

import math

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Instr
from shardwright.sim_cluster.instructions.engines.registry import (
    Executor,
    Registers,
    Views,
    executes,
    overwrites,
    reader,
    require,
    writer,
)


@executes("matmul")
def matmul(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst [M, N] = or += stationary [K, M]^T @ moving [K, N]."""
    assert instr.dst is not None
    stationary, moving = (s.shape for s in instr.srcs)
    k, m, n = stationary[0], math.prod(stationary[1:]), math.prod(moving[1:])
    shape = instr.dst.shape
    require(
        moving[0] == k and shape[0] == m and math.prod(shape[1:]) == n,
        "SW_L0_SHAPE",
        f"matmul requires [K, M]^T @ [K, N] -> [M, N], got {stationary}, {moving} -> {shape}",
    )
    read_a, read_b = (reader(s, DType.F32) for s in srcs)
    zero = overwrites(instr.attrs.get("zero_when", ()))

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        a, b = read_a(views[0]).reshape(k, m), read_b(views[1]).reshape(k, n)
        product = np.matmul(a.T, b).reshape(shape)
        if zero(registers):
            out[...] = product
        else:
            np.add(out, product, out=out)

    return execute


@executes("transpose")
def transpose(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst [F, P] = src [P, F]^T, passed through fp32.

    On NeuronCore-v2 this is a product with the identity: an infinity or NaN at [p, f] makes every
    other element of row f of the result NaN (inferred from `--enable-saturate-infinity`, which
    exists to prevent it).
    """
    assert instr.dst is not None
    given, shape = instr.srcs[0].shape, instr.dst.shape
    p, f = given[0], math.prod(given[1:])
    require(
        shape[0] == f and math.prod(shape[1:]) == p,
        "SW_L0_SHAPE",
        f"transpose requires [P, F] -> [F, P], got {given} -> {shape}",
    )
    read, write = reader(srcs[0], DType.F32), writer(dst, DType.F32)
    return lambda out, views, registers: write(
        out, _times_identity(read(views[0]).reshape(p, f)).reshape(shape)
    )


def _times_identity(source: np.ndarray) -> np.ndarray:
    """source^T as the sum of products with zeros and ones gives it."""
    transposed: np.ndarray = source.T
    special = ~np.isfinite(transposed)
    if not special.any():
        return transposed
    others = special.sum(axis=1, keepdims=True) - special
    return np.where(others > 0, np.float32(np.nan), transposed)
