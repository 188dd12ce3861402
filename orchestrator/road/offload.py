"""What a step keeps in the memory of its hosts, against what an instance has.

Cores of an instance share its memory: what counts is the instance whose cores keep most. All that
the machine's data sheet says is taken as free; what the system and the input pipeline need of it is
the user's to leave.
"""

from __future__ import annotations

import math

from shardwright.compiler.diagnostics import CapacityError, UsageError
from shardwright.compiler.machine.target import Target
from shardwright.compiler.program import StepPlan
from shardwright.orchestrator.report.text import Facts
from shardwright.sharding.memory.footprint import host_bytes


def instance_bytes(step: StepPlan, cores: int) -> int:
    """Bytes of host memory on the instance whose `cores` keep most; ranks fill instances in order,
    stage after stage."""
    sizes = _per_stage(step)
    ranks = math.prod(step.mesh.values()) // len(sizes)
    kept = [size for size in sizes for _ in range(ranks)]
    return max(sum(kept[first : first + cores]) for first in range(0, len(kept), cores))


def check_offload(step: StepPlan, target: Target) -> None:
    """Refuse a step whose residuals the hosts cannot take. Raises: UsageError SW_OFFLOAD for a
    machine whose host link or memory is not known, CapacityError SW_CAPACITY for more than an
    instance has."""
    needed, limit = instance_bytes(step, target.cores), target.host_memory_bytes
    if not needed:
        return
    if not limit or not target.host_link_bytes_per_s:
        raise UsageError(
            "SW_OFFLOAD",
            "residuals in host memory require a machine with a known host link and host memory,"
            f" got {target.name} with {target.host_link_bytes_per_s / 1e9:g} GB/s and"
            f" {limit / 2**30:g} GiB",
            hint="use strategy.remat = selective or full, a trn1 or trn2 machine, or a JSON file of"
            " the machine with host_link_gb_per_s and host_memory_gib (docs/network.md)",
        )
    if needed > limit:
        raise CapacityError(
            "SW_CAPACITY",
            f"residuals in host memory require {needed / 2**30:.3f} GiB per instance ({needed}"
            f" bytes), {target.name} has {limit / 2**30:g} GiB",
            hint="use more instances, a smaller strategy.micro_batch, or strategy.remat = full",
        )


def host_section(step: StepPlan, target: Target) -> Facts:
    """The part of the report's memory about the hosts; empty where nothing is kept there."""
    per_core = max(_per_stage(step))
    if not per_core:
        return {}
    return {
        "host": {
            "per_core_bytes": per_core,
            "bytes": instance_bytes(step, target.cores),
            "limit_bytes": target.host_memory_bytes,
        }
    }


def _per_stage(step: StepPlan) -> list[int]:
    """Bytes that a core of each stage keeps in the memory of its host."""
    return [host_bytes(step, stage) for stage in range(len(step.schedules))]
