"""What every instruction does to values, one file per engine; see `registry.py`."""

from shardwright.sim_cluster.instructions.engines import dma, gpsimd, scalar, tensor, vector
from shardwright.sim_cluster.instructions.engines.registry import DECODERS, overwrites

__all__ = ["DECODERS", "dma", "gpsimd", "overwrites", "scalar", "tensor", "vector"]
