"""What planners know and what they offer: rates of a machine, room on chip, candidates.

Planners estimate whole nests by a few rates from the nominal figures; what an instruction really
costs is `compiler/isa/costs.py` over the same machine. A run profile changes neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwright.compiler.codegen.builder import Builder
from shardwright.compiler.codegen.domain import Tensors
from shardwright.compiler.isa.program import Engine
from shardwright.compiler.machine.target import CoreModel, Limits

# documented: instruction costs of nki/api/nki/isa/__init__.py, shortest interval of an instruction
MIN_CYCLES = 64
_PER_NS = 1e9


@dataclass(frozen=True, slots=True)
class Rates:
    """Nanoseconds of transfers and of engine cycles on one core."""

    core: CoreModel

    def engine_ns(self, engine: Engine, cycles: float) -> float:
        """Time of `cycles` of an engine's clock; one element per lane and cycle at best."""
        core = self.core
        return cycles * _PER_NS / core.clock_hz[core.limits.issuer(engine.value)]

    def transfer_ns(self, total_bytes: float, run_bytes: float, rows: int) -> float:
        """Time of a DMA of `total_bytes` in runs of `run_bytes` to or from `rows` partitions."""
        core = self.core
        engines = min(core.dma_engines, math.ceil(rows / core.dma_partitions_per_engine))
        descriptors = math.ceil(total_bytes / run_bytes / engines)
        each = max(core.dma_descriptor_min_bytes, run_bytes + core.dma_descriptor_extra_bytes)
        return descriptors * each * _PER_NS / core.dma_engine_bytes_per_s


@dataclass(frozen=True, slots=True)
class Room:
    """What a planner knows of the machine: limits, rates, and about how many SBUF bytes per
    partition it may fill. `thorough` asks for more tilings than the best of each kind; Scalar may
    make sums as it makes what is summed, in `passing`.
    """

    limits: Limits
    rates: Rates
    tensors: Tensors
    budget: int
    thorough: bool = False
    passing: bool = True


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to tile a nest: estimated nanoseconds, and what appends its code. A `variant` is
    estimated as another candidate is; it is tried beside those, not instead. A `note` tells the
    user what is special about it, and `plan` is what the planner chose, for people.
    """

    cost: float
    emit: Callable[[Builder], None]
    variant: bool = False
    note: str = ""
    plan: object = field(default=None, compare=False, repr=False)
