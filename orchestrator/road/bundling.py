"""The manifest of a built job: named buffers placed in HBM, programs, schedule."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from shardwright.compiler.ir.ops.host import DEVICE, HOST
from shardwright.compiler.linking.residency import Residency
from shardwright.compiler.neff.manifest import Manifest, NamedBuffer
from shardwright.compiler.program import BufferInfo
from shardwright.orchestrator.service.units import source_digest
from shardwright.sharding.memory import footprint
from shardwright.sharding.memory.footprint import Footprint

if TYPE_CHECKING:
    from shardwright.orchestrator.road.build import Built

_ALIGNMENT = 256


def manifest_of(built: Built) -> Manifest:
    """The manifest of a job, its digests still empty."""
    step = built.plan.step
    buffers, named_bytes = _placed(step.buffers, len(step.schedules))
    return Manifest(
        name=built.name,
        target=built.layout.target.name,
        instances=built.job.cluster.instances,
        lnc=built.layout.target.lnc,
        mesh=dict(step.mesh),
        buffers=buffers,
        programs={},
        schedules=step.schedules,
        transfers=step.transfers,
        stacks=step.stacks,
        num_microbatches=step.num_microbatches,
        named_bytes=named_bytes,
        arena_bytes=max(program.arena_bytes for program in built.programs.values()),
        compiler_version=compiler_version(),
        metadata={
            "strategy": built.plan.strategy,
            "hypothetical": built.layout.target.is_hypothetical,
            "placement": built.placement,
            "packets": built.layout.packets.as_dict(),
            "collectives": dict(built.layout.collectives),
        },
    )


def compiled_footprints(built: Built) -> tuple[Footprint, ...]:
    """Memory per core of every stage with the arenas of the compiled programs."""
    programs = [Residency(program) for program in built.programs.values()]
    return footprint.compiled_footprints(built.plan.step, programs)


def compiler_version() -> str:
    """Release and source digest of the compiler that made a file."""
    try:
        release = metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        release = "source"
    return f"{release}+{source_digest(('compiler', 'collectives'))[:12]}"


def _placed(infos: Mapping[str, BufferInfo], num_stages: int) -> tuple[dict[str, NamedBuffer], int]:
    """Buffers one after the other in plan order, aligned, and where those in HBM end; stages place
    theirs side by side, a buffer of several stages lies at one offset on all of them."""
    placed = {}
    memories = {memory: dict.fromkeys(range(num_stages), 0) for memory in (DEVICE, HOST)}
    for info in infos.values():
        ends = memories[info.memory]
        stages = [stage for stage in ends if info.on(stage)]
        offset = max(ends[stage] for stage in stages)
        placed[info.name] = NamedBuffer(
            name=info.name,
            role=info.role,
            dtype=info.local_type.dtype,
            local_shape=info.local_type.shape,
            global_shape=info.global_type.shape,
            axes=info.axes,
            initial=info.initial,
            offset_bytes=offset,
            part=info.part,
            stages=info.stages,
            slots=info.slots,
            memory=info.memory,
        )
        size = -(-info.local_type.num_bytes // _ALIGNMENT) * _ALIGNMENT
        ends.update({stage: offset + size * info.slots_on(stage) for stage in stages})
    return placed, max(memories[DEVICE].values())
