"""GpSimd only: index patterns. Its elementwise work shares the decoders of `vector.py`."""

from __future__ import annotations

import numpy as np

from compiler.dtypes import DType
from compiler.isa.program import Instr
from sim_cluster.engines.registry import Kernel, Registers, Views, executes, require, writer


@executes("iota")
def iota(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Kernel:
    """dst[p, i...] = start + p * partition_step + sum(i_k * steps[k])."""
    assert instr.dst is not None
    shape, steps = instr.dst.shape, (instr.attrs["partition_step"], *instr.attrs["steps"])
    require(
        len(steps) == len(shape),
        "SW_L0_SHAPE",
        f"iota requires one step per free dim of {list(shape)}, got {list(steps[1:])}",
    )
    pattern = np.zeros(shape, np.int64)
    for axis, step in enumerate(steps):
        line = np.arange(shape[axis], dtype=np.int64) * step
        pattern += line.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    start, write = instr.attrs["start"], writer(dst, DType.I64)

    def kernel(out: np.ndarray, views: Views, registers: Registers) -> None:
        write(out, pattern + start.value(registers))

    return kernel
