"""Nominal figures that tile choices weigh against each other: DMA descriptors, engine clocks.

Only ratios matter here; what an instruction really costs is `compiler/isa/costs.py` over a target.
The numbers are those of NeuronCore-v2 and are part of the compiler, so a change of a run profile
changes no code.
"""

from __future__ import annotations

# inferred: hardware.json dma_model, max(2400, bytes + 140) fits the published efficiency chart
# within 5 percent
DESCRIPTOR_MIN_BYTES = 2400
DESCRIPTOR_EXTRA_BYTES = 140
# documented: nki/deep-dives/nki-dma-bandwidth-guide.rst, 16 engines of 17 bytes per ns
DMA_BYTES_PER_NS = 272.0
# documented: nki/deep-dives/nki-dma-bandwidth-guide.rst, start of a transfer
DMA_FIXED_NS = 1300.0
# documented: trainium_inferentia2_arch.rst, vector clock; one element per lane and cycle
VECTOR_ELEMENTS_PER_NS = 1.12
# documented: trainium_inferentia2_arch.rst, tensor clock
TENSOR_COLUMNS_PER_NS = 2.8
# documented: instruction costs of nki/api/nki/isa/__init__.py, shortest interval of an instruction
MIN_CYCLES = 64


def transfer_ns(total_bytes: float, run_bytes: int) -> float:
    """Time to move `total_bytes` in runs of `run_bytes` on all DMA engines of a core."""
    descriptors = total_bytes / run_bytes
    return (
        descriptors
        * max(DESCRIPTOR_MIN_BYTES, run_bytes + DESCRIPTOR_EXTRA_BYTES)
        / DMA_BYTES_PER_NS
    )
