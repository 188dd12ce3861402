"""What tile choices weigh against each other, from the nominal figures of a machine.

Planners estimate whole nests by these few rates; what an instruction really costs is
`compiler/isa/costs.py` over the same machine. A run profile changes neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.compiler.isa.program import Engine
from shardwright.compiler.machine.target import CoreModel

# documented: instruction costs of nki/api/nki/isa/__init__.py, shortest interval of an instruction
MIN_CYCLES = 64
_PER_NS = 1e9


@dataclass(frozen=True, slots=True)
class Rates:
    """Nanoseconds of transfers and of engine cycles on one core."""

    core: CoreModel

    def engine_ns(self, engine: Engine, cycles: float) -> float:
        """Time of `cycles` of an engine's clock; one element per lane and cycle at best."""
        return cycles * _PER_NS / self.core.clock_hz[engine.value]

    def transfer_ns(self, total_bytes: float, run_bytes: float, rows: int) -> float:
        """Time of a DMA of `total_bytes` in runs of `run_bytes` to or from `rows` partitions."""
        core = self.core
        engines = min(core.dma_engines, math.ceil(rows / core.dma_partitions_per_engine))
        descriptors = math.ceil(total_bytes / run_bytes / engines)
        each = max(core.dma_descriptor_min_bytes, run_bytes + core.dma_descriptor_extra_bytes)
        return descriptors * each * _PER_NS / core.dma_engine_bytes_per_s
