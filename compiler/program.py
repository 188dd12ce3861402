"""What partitioning hands to compilation and linking: local programs over named buffers, and the
schedule of a step.

`sharding` builds a `StepPlan`; `compiler` outlines, compiles and links it; the container stores the
same names. Nothing here knows strategies, Shardy or machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler.ir.types import Graph, TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """A named HBM buffer of every core that lives across programs of a step.

    role: parameter, optimizer, batch, gradient (accumulator), residual (forward to backward),
    metric (loss and other reported scalars), rng, constant, coordinate (this rank's index along
    `axes`, int32 scalar, filled by the loader).
    `axes` holds, per dim of `global_type`, the mesh axes that shard it, major to minor. `initial`
    is "zeros" for accumulators, "given" for what the user supplies, "computed" for what a program
    writes first.
    """

    name: str
    role: str
    local_type: TensorType
    global_type: TensorType
    axes: tuple[tuple[str, ...], ...]
    initial: str = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """One program of a step in local shapes.

    Equal names in `inputs` and `outputs` mean an update in place.
    """

    name: str  # forward, backward, update, or step when the graph was not cut
    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A partitioned step: mesh, buffers, programs, and the schedule [(program, repeat group)].

    `schedule` is a tuple of (programs, count): the programs of an entry run in order, `count`
    times; micro-batch `m` of the entry reads slice `m` of every batch buffer.
    """

    mesh: Mapping[str, int]  # axis -> size, major to minor
    buffers: Mapping[str, BufferInfo]
    programs: tuple[StepProgram, ...]
    schedule: tuple[tuple[tuple[str, ...], int], ...]
    num_microbatches: int = 1
    metadata: Mapping[str, object] = field(default_factory=dict)
