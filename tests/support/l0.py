"""One kernel at L0, instruction by instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import Kernel
from shardwright.compiler.machine.target import Limits
from shardwright.sim_cluster.instructions.l0 import KernelCode
from shardwright.sim_cluster.instructions.operands import HbmTensors
from shardwright.sim_cluster.instructions.tiles import OnChip

DEFAULT_TARGET = "trn1n.32xlarge"


def run_kernel(
    kernel: Kernel,
    tensors: Sequence[np.ndarray],
    registers: Mapping[int, int],
    limits: Limits | None = None,
) -> None:
    """Execute a kernel's instructions on flat typed arrays, one per tensor of the function, in
    place.

    Raises SimulationError (SW_L0_...) naming kernel, instruction and engine when any check fails.
    """
    chip = OnChip(limits or limits_for(DEFAULT_TARGET))
    code = KernelCode(kernel, tuple(DType.from_numpy(t.dtype) for t in tensors), chip)
    code.run(HbmTensors(tensors), registers)
