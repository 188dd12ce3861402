"""Nominal figures that tile choices weigh against each other: DMA descriptors, engine clocks.

Only ratios matter here; what an instruction really costs is `compiler/isa/costs.py` over a target.
The numbers are those of NeuronCore-v2 and are part of the compiler, so a change of a run profile
changes no code.
"""

from __future__ import annotations

import math

# inferred: hardware.json dma_model, max(2400, bytes + 140) fits the published efficiency chart
# within 5 percent
DESCRIPTOR_MIN_BYTES = 2400
DESCRIPTOR_EXTRA_BYTES = 140
# documented: nki/deep-dives/nki-dma-bandwidth-guide.rst, sustained rate of one of the engines
DMA_ENGINE_BYTES_PER_NS = 17.0
# documented: nki/get-started/about/nki-dma-overview.rst
DMA_ENGINES = 16
# documented: nki/get-started/about/nki-dma-overview.rst, one engine moves 8 partitions
DMA_PARTITIONS_PER_ENGINE = 8
# documented: trainium_inferentia2_arch.rst, vector clock; one element per lane and cycle
VECTOR_ELEMENTS_PER_NS = 1.12
# documented: trainium_inferentia2_arch.rst, scalar clock; one element per lane and cycle
SCALAR_ELEMENTS_PER_NS = 1.4
# documented: trainium_inferentia2_arch.rst, tensor clock
TENSOR_COLUMNS_PER_NS = 2.8
# documented: instruction costs of nki/api/nki/isa/__init__.py, shortest interval of an instruction
MIN_CYCLES = 64


def transfer_ns(total_bytes: float, run_bytes: int, rows: int) -> float:
    """Time of a DMA of `total_bytes` in runs of `run_bytes` to or from `rows` partitions."""
    engines = min(DMA_ENGINES, math.ceil(rows / DMA_PARTITIONS_PER_ENGINE))
    descriptors = math.ceil(total_bytes / run_bytes / engines)
    each = max(DESCRIPTOR_MIN_BYTES, run_bytes + DESCRIPTOR_EXTRA_BYTES)
    return descriptors * each / DMA_ENGINE_BYTES_PER_NS
