"""What every instruction does to values, one file per engine; see `registry.py`."""

from shardwright.sim_cluster.instructions.engines import dma, gpsimd, scalar, sync, tensor, vector
from shardwright.sim_cluster.instructions.engines.registry import (
    DECODERS,
    Kernel,
    Registers,
    executes,
    overwrites,
)

__all__ = [
    "DECODERS",
    "Kernel",
    "Registers",
    "dma",
    "executes",
    "gpsimd",
    "overwrites",
    "scalar",
    "sync",
    "tensor",
    "vector",
]
