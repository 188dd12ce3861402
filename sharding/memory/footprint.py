"""Bytes per core by category and over time: exact named buffers, and the arena all programs share.

Named buffers in HBM stay for the whole step. The arena is an estimate before compiling and exact
after it (`arena.py`); the peak is where the largest arena is. `check_limit` turns a plan that does
not fit into an error that says what to do, with the bytes each change saves (`advice.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.diagnostics import UNKNOWN_LOC, CapacityError
from shardwright.compiler.ir.ops.host import DEVICE, HOST
from shardwright.compiler.linking.residency import Residency
from shardwright.compiler.program import BufferInfo, StepPlan
from shardwright.sharding.memory.arena import (
    Arena,
    Holding,
    Moment,
    compiled_arena,
    estimated_arena,
)
from shardwright.sharding.memory.places import buffer_places

CATEGORIES = (
    "parameters",
    "frozen",
    "gradients",
    "optimizer",
    "cache",
    "activations",
    "gathered",
    "scratch",
    "other",
)
CATEGORY_OF_ROLE = {
    "parameter": "parameters",
    "frozen": "frozen",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "cache": "cache",
    "residual": "activations",
    "gathered": "gathered",
}
OF_SOME = ("frozen", "cache")
"""Categories of steps with adapters, and of inference."""
_NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one core over a step.

    Units: bytes. `categories` are those at the peak and sum to `peak_bytes`; what the arena
    reserves beyond its live bytes at the peak is scratch. `argument_bytes` are the exact named
    buffers by category; `arena_bytes` is what each program reserves; `timeline` has every position
    of every program, named buffers included; `held` are the tensors at the peak, largest first.
    """

    categories: Mapping[str, int]
    peak_bytes: int
    peak_program: str
    argument_bytes: Mapping[str, int]
    arena_bytes: Mapping[str, int]
    timeline: tuple[Moment, ...]
    held: tuple[Holding, ...]
    estimated: bool = True


def footprints(plan: StepPlan) -> tuple[Footprint, ...]:
    """The memory of one core of every stage before compiling; the arena is an upper estimate."""
    stages = range(len(plan.schedules))
    arenas = [[estimated_arena(p) for p in plan.programs if p.stage == s] for s in stages]
    return tuple(_assembled(plan, s, arenas[s], 0, estimated=True) for s in stages)


def compiled_footprints(plan: StepPlan, programs: Sequence[Residency]) -> tuple[Footprint, ...]:
    """The memory of one core of every stage with compiled programs: every byte that is reserved."""
    stage_of = {p.name: p.stage for p in plan.programs}
    found = []
    for stage in range(len(plan.schedules)):
        own = [r for r in programs if stage_of[r.program.name] == stage]
        constants = sum(r.program.constant_bytes for r in own)
        arenas = [compiled_arena(r) for r in own]
        found.append(_assembled(plan, stage, arenas, constants, estimated=False))
    return tuple(found)


def worst_stage(found: Sequence[Footprint]) -> Footprint:
    """The largest footprint of all stages."""
    return max(found, key=lambda one: one.peak_bytes)


def footprint(plan: StepPlan) -> Footprint:
    """The memory of one core of the fullest stage before compiling."""
    return worst_stage(footprints(plan))


def _assembled(
    plan: StepPlan, stage: int, arenas: Sequence[Arena], constants: int, *, estimated: bool
) -> Footprint:
    places = buffer_places(plan)
    named = [
        Holding(
            f"{info.name} {info.local_type}",
            category_of(info),
            buffer_bytes(plan, info, stage),
            places.get(info.name, UNKNOWN_LOC),
        )
        for info in plan.buffers.values()
        if info.on(stage) and info.memory == DEVICE
    ]
    if constants:
        named.append(Holding("constants of the programs", "other", constants))
    arguments = _by_category(named)
    worst = max(arenas, key=lambda a: a.num_bytes)
    at_peak = _by_category(worst.held)
    at_peak["scratch"] += worst.num_bytes - sum(at_peak.values())
    categories = {c: arguments[c] + at_peak.get(c, 0) for c in arguments}
    held = sorted([*named, *worst.held], key=lambda h: -h.num_bytes)
    return Footprint(
        categories=categories,
        peak_bytes=sum(categories.values()),
        peak_program=worst.program,
        argument_bytes=arguments,
        arena_bytes={a.program: a.num_bytes for a in arenas},
        timeline=tuple(
            replace(m, categories={c: n + m.categories.get(c, 0) for c, n in arguments.items()})
            for a in arenas
            for m in a.timeline
        ),
        held=tuple(h for h in held if h.num_bytes),
        estimated=estimated,
    )


def _by_category(holdings: Sequence[Holding]) -> dict[str, int]:
    """Bytes of every category; what few steps have is one of those that have some."""
    found = Counter[str]()
    for holding in holdings:
        found[holding.category] += holding.num_bytes
    return {c: found[c] for c in CATEGORIES if c not in OF_SOME or found[c]}


def buffer_bytes(plan: StepPlan, info: BufferInfo, stage: int = 0) -> int:
    """Bytes of a named buffer with all its slots on a core of `stage`; a batch buffer holds every
    micro-batch of the step.
    """
    copies = plan.num_microbatches if info.role == "batch" else info.slots_on(stage)
    return info.local_type.num_bytes * copies


def host_bytes(plan: StepPlan, stage: int) -> int:
    """Bytes that a core of `stage` keeps in the memory of its host; no part of a footprint."""
    hosted = (b for b in plan.buffers.values() if b.on(stage) and b.memory == HOST)
    return sum(buffer_bytes(plan, info, stage) for info in hosted)


def category_of(info: BufferInfo) -> str:
    """The category of a named buffer."""
    return CATEGORY_OF_ROLE.get(info.role, "other")


def check_limit(memory: Footprint, limit_bytes: int, hint: str) -> None:
    """Raises CapacityError when the peak is above `limit_bytes`: the largest tensors, both numbers,
    and `hint`, what to change.
    """
    if memory.peak_bytes <= limit_bytes:
        return
    shown = memory.held[:_NUM_SHOWN]
    lines = [f"{h.name} ({h.category}) {_gib(h.num_bytes)}" for h in shown]
    known = (h.loc for h in shown if h.loc != UNKNOWN_LOC)
    raise CapacityError(
        "SW_CAPACITY",
        f"memory per core requires {_gib(memory.peak_bytes)} ({memory.peak_bytes} bytes), "
        f"the limit is {_gib(limit_bytes)} ({limit_bytes} bytes); largest: {'; '.join(lines)}",
        next(known, UNKNOWN_LOC),
        hint,
    )


def _gib(num_bytes: int) -> str:
    """Bytes as GiB."""
    return f"{num_bytes / 2**30:.3f} GiB"
