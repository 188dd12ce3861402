"""One kernel, or one program, at L1: whole arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import Program
from shardwright.sim_cluster.values.functions import L1, CollectiveRequest
from shardwright.sim_cluster.values.kernels import Arrays, Registers, prepare
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode


def run_kernel(program: KernelProgram, tensors: Arrays, registers: Registers) -> None:
    """Execute a `compute` kernel on flat typed arrays, one per tensor of the function, in place.

    Raises SimulationError when a view leaves its tensor or an op is unknown.
    """
    with np.errstate(all="ignore"):
        prepare(program, tuple(DType.from_numpy(t.dtype) for t in tensors))(tensors, registers)


def run_program(
    program: Program, memory: CoreMemory, level: str = L1
) -> Iterator[CollectiveRequest]:
    """Run a program once, at L1 or another level."""
    return ProgramCode(program, level).run(memory)
