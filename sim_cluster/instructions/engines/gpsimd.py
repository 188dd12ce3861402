"""GpSimd only: index patterns, and selects by them.

Its elementwise work shares the decoders of `vector.py`.
"""

from __future__ import annotations

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
    writer,
)
from shardwright.sim_cluster.instructions.indexed import grid
from shardwright.sim_cluster.values import elementwise as ew


def _pattern(instr: Instr) -> np.ndarray:
    """p * partition_step + sum(i_k * steps[k]) over the destination."""
    assert instr.dst is not None
    shape, steps = instr.dst.shape, (instr.attrs["partition_step"], *instr.attrs["steps"])
    require(
        len(steps) == len(shape),
        "SW_L0_SHAPE",
        f"{instr.opcode} requires one step per free dim of {list(shape)}, got {list(steps[1:])}",
    )
    return grid(shape, steps)


@executes("iota")
def iota(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst[p, i...] = start + p * partition_step + sum(i_k * steps[k])."""
    pattern = _pattern(instr)
    start, write = instr.attrs["start"], writer(dst, DType.I64)
    return lambda out, views, registers: write(out, pattern + start.value(registers))


@executes("affine_select")
def affine_select(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = src where start + pattern is direction 0, elsewhere fill."""
    same_shape(instr, 0)
    pattern, start = _pattern(instr), instr.attrs["start"]
    holds = ew.COMPARE[instr.attrs["direction"]]
    read, write = reader(srcs[0], DType.F32), writer(dst, DType.F32)
    fill = np.float32(instr.attrs["fill"])

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        kept = holds(pattern, -start.value(registers))
        write(out, np.where(kept, read(views[0]), fill))

    return execute
