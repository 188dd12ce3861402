"""Overlap knobs that change nothing in a step, each said with its reason.

A knob that was set and moves no collective is not an error: sweeps set all of them. But whoever set
it should know that no time in the report comes from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.program import StepPlan
from shardwright.sharding.cut.overlap.assign import GATHER, Shifts, delays
from shardwright.sharding.cut.overlap.streams import Route

EARLY, LATE = "early_all_gather_shift", "late_reduce_scatter_shift"


def idle_shifts(step: StepPlan, shifts: Shifts) -> Iterator[Diagnostic]:
    """Notes on shifts that find nothing to move in the loops of `step`."""
    loops = (op for p in step.programs for op in p.graph.ops if op.regions and op.attrs.trip)
    moved = [found for loop in loops if (found := delays(loop, shifts)) is not None]
    if shifts.gather and not any(one.moves((GATHER,)) for one in moved):
        yield note(EARLY, shifts.gather, "no loop over layers gathers weights")
    if shifts.reduce and not any(one.moves(REDUCTIONS_OF_RANKS) for one in moved):
        yield note(LATE, shifts.reduce, "no loop over layers reduces gradients")


def idle_streams(streams: Mapping[Route, int], count: int) -> Iterator[Diagnostic]:
    """A note when some streams have no collectives."""
    used = len(set(streams.values()))
    if used < count:
        yield note("cc_streams", count, f"collectives of this step need {used or 'no'} of them")


def note(knob: str, value: object, why: str) -> Diagnostic:
    """What is said about a knob."""
    return Diagnostic(
        "SW_OVERLAP_IDLE",
        f"strategy.{knob} = {value} does less than it says: {why}",
        hint="leave the key out, or choose a mesh and model that have what it moves",
        severity="note",
    )


def waiting_layers() -> Diagnostic:
    """What is said about tokens in layers that wait for their own weights."""
    return Diagnostic(
        "SW_OVERLAP_TOKENS",
        "strategy.dependency_tokens = true starts gathers of weights behind the collectives of the"
        " layer that waits for them: without strategy.early_all_gather_shift a step can get longer",
        hint="add early_all_gather_shift = 1 (and late_reduce_scatter_shift = 1), or leave the"
        " tokens out",
        severity="warning",
    )
