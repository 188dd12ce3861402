"""What partitioning hands to compilation and linking: local programs over named buffers, and the
schedule of a step.

`sharding` builds a `StepPlan`; `compiler` outlines, compiles and links it; the container stores the
same names. Nothing here knows strategies, Shardy or machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.compiler.ir.ops.host import DEVICE
from shardwright.compiler.ir.types import Graph, TensorType, Value
from shardwright.compiler.neff.schedule import LeafPart, Schedule, Staged, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo(Staged):
    """A named HBM buffer of every core that lives across programs of a step.

    role: parameter (trained), frozen, optimizer, cache, batch, gradient (accumulator), residual
    (forward to backward, of a micro-batch), gathered (weights that stay gathered from forward to
    backward), metric (loss and other reported scalars), rng, constant, coordinate (this rank's
    index along `axes`, int32 scalar, filled by the loader).
    `axes` holds, per dim of `global_type`, the mesh axes that shard it, major to minor; where local
    shapes make up more than the global one, the rest is padding that starts as zeros. `initial`
    is "zeros" for accumulators, "given" for what the user supplies, "computed" for what a program
    writes first. `part` is set when a leaf of the user lies in several buffers, for layers on
    several stages. `stages` are the pipeline stages that have the buffer, empty for all of them;
    `slots` how many micro-batches each of them holds at a time (empty: one); run `k` of a program
    uses slot `k % slots`. `memory` is `device` (HBM) or `host`, which only transfers reach.
    """

    name: str
    role: str
    local_type: TensorType
    global_type: TensorType
    axes: tuple[tuple[str, ...], ...]
    initial: str = "given"
    part: LeafPart | None = None
    stages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    memory: str = DEVICE

    @property
    def is_kept(self) -> bool:
        """True for what forward leaves to backward."""
        return self.role in ("residual", "gathered")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """One program of a step in local shapes, run by the cores of one pipeline stage.

    Equal names in `inputs` and `outputs` mean an update in place.
    """

    name: str  # forward, backward (.first, .last), update, or step when the graph was not cut
    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stage: int = 0

    @property
    def reads(self) -> tuple[tuple[str, Value], ...]:
        """The buffers it reads, each with the input that it is."""
        return tuple(zip(self.inputs, self.graph.inputs, strict=True))

    @property
    def writes(self) -> tuple[tuple[str, Value], ...]:
        """The buffers it writes, each with the output that it is."""
        return tuple(zip(self.outputs, self.graph.outputs, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A partitioned step: mesh, buffers, programs, the schedule of every pipeline stage, and what
    stages send each other.

    Run `k` of a program reads slice `k` of every batch buffer; a program that ends in `.first` or
    `.last` runs in the place of that run of another and is counted with it.
    """

    mesh: Mapping[str, int]  # axis -> size, major to minor
    buffers: Mapping[str, BufferInfo]
    programs: tuple[StepProgram, ...]
    schedules: tuple[Schedule, ...]
    num_microbatches: int = 1
    transfers: tuple[Transfer, ...] = ()
    streams: Mapping[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    """Stream of a core by (kind of collective, mesh axes); 0 for the others."""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The leaves of the user that a leaf of the plan stacks along dim 0, where it does."""
    metadata: Mapping[str, object] = field(default_factory=dict)
