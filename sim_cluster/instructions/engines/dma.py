"""DMA: strided copies with a cast, row gathers and row scatters between HBM and SBUF.

For the indexed forms the interpreter passes the whole window of legal rows, [rows, ...], instead of
one row.
"""

from __future__ import annotations

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
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
    writer,
)


@executes("dma")
def dma(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = src, dim by dim."""
    same_shape(instr, 0)
    write = writer(dst, srcs[0])
    if srcs[0].is_float and not dst.is_float:
        read = reader(srcs[0], DType.F32)
        return lambda out, views, registers: write(out, read(views[0]))
    return lambda out, views, registers: write(out, views[0])


def _index_shape(instr: Instr, partitions: int) -> None:
    shape = instr.srcs[1].shape
    require(
        shape[0] == partitions and int(np.prod(shape)) == partitions,
        "SW_L0_SHAPE",
        f"{instr.opcode} requires an index of shape [{partitions}, 1], got {list(shape)}",
    )


@executes("dma_gather")
def dma_gather(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst[p] = rows[index[p]]; out of range clamps or reads zero."""
    assert instr.dst is not None
    same_shape(instr, 0)
    _index_shape(instr, instr.dst.shape[0])
    rows, fill = instr.attrs["rows"], instr.attrs.get("mode", "clamp") == "fill"
    write = writer(dst, srcs[0])

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        index = views[1].reshape(-1)
        clamped = np.clip(index, 0, rows - 1)
        write(out, views[0][clamped])
        if fill:
            out[clamped != index] = 0

    return execute


@executes("dma_scatter")
def dma_scatter(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """rows[index[p]] = src[p]; strangers are dropped, equal rows must carry equal values."""
    same_shape(instr, 0)
    _index_shape(instr, instr.srcs[0].shape[0])
    rows, write = instr.attrs["rows"], writer(dst, srcs[0])

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        index = views[1].reshape(-1)
        legal = (index >= 0) & (index < rows)
        where, values = index[legal], views[0][legal]
        picked = np.empty(values.shape, dst.numpy)
        write(picked, values)
        _refuse_conflicts(where, picked)
        out[where] = picked

    return execute


def _refuse_conflicts(where: np.ndarray, values: np.ndarray) -> None:
    """Raise when one row is written twice with different values (the order of DMA writes is not
    defined)."""
    _, first, inverse = np.unique(where, return_index=True, return_inverse=True)
    if len(first) == len(where):
        return
    bits = np.ascontiguousarray(values).view(np.uint8).reshape(len(where), -1)
    different = (bits != bits[first[inverse]]).any(axis=1)
    if different.any():
        raise SimulationError(
            "SW_L0_SCATTER_CONFLICT",
            f"dma_scatter writes row {int(where[different][0])} twice with different values",
        )
