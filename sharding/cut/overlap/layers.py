"""Layers of the programs of a step, as a strategy asks for them: in groups, in buckets, shifted.

A knob that was set and moves no collective is not an error: sweeps set all of them. But whoever set
it should know that no time in the report comes from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.driver import in_programs
from shardwright.sharding.cut.overlap.assign import GATHER, Shifts, delays
from shardwright.sharding.cut.overlap.buckets import UNLIMITED
from shardwright.sharding.cut.overlap.streams import Route, streams_of
from shardwright.sharding.cut.rewrites import BUCKETED, GROUPED, PRIORITISED, SHIFTED


def overlap(
    step: StepPlan,
    shifts: Shifts,
    streams: int = 1,
    bucket_bytes: int = 0,
    tokens: bool = False,
    group: int = 0,
    root: str = "each",
) -> StepPlan:
    """`step` with layers in groups of `group` and what lies outside of them in units as `root` says
    (`StrategySettings.root_unit`), collectives in buckets, those of its layer loops
    moved by `shifts` iterations, behind tokens of a layer's own, on so many streams;
    `metadata["findings"]` says which of that finds nothing to change.
    """
    notes: list[Diagnostic] = []
    if group:
        whole, limit = step, bucket_bytes or UNLIMITED
        step = in_programs(step, GROUPED, group, limit, root)
        if step is whole:
            why = "no loop over layers gathers weights or reduces gradients"
            notes.append(_note("layers_per_group", group, why))
    if bucket_bytes:
        whole = step
        step = in_programs(step, BUCKETED, bucket_bytes)
        if step is whole:
            why = "no two collectives over data axes are ready together and fit"
            notes.append(_note("bucket_mb", bucket_bytes >> 20, why))
    notes += _idle_shifts(step, shifts)
    step = in_programs(step, SHIFTED, shifts)
    if tokens:
        whole = step
        step = in_programs(step, PRIORITISED)
        if step is whole:
            why = "no layer has collectives of its own beside those of weights and gradients"
            notes.append(_note("dependency_tokens", "true", why))
        elif not shifts.gather:
            notes.append(_waiting_layers())
    found = streams_of(step, streams)
    notes += _idle_streams(found, streams)
    findings = step.metadata.get("findings", ())
    assert isinstance(findings, tuple)
    return replace(step, streams=found, metadata={**step.metadata, "findings": (*findings, *notes)})


def _idle_shifts(step: StepPlan, shifts: Shifts) -> Iterator[Diagnostic]:
    """Notes on shifts that find nothing to move in the loops of `step`."""
    loops = (op for p in step.programs for op in p.graph.ops if op.regions and op.attrs.trip)
    moved = [found for loop in loops if (found := delays(loop, shifts)) is not None]
    if shifts.gather and not any(one.moves((GATHER,)) for one in moved):
        yield _note("early_all_gather_shift", shifts.gather, "no loop over layers gathers weights")
    if shifts.reduce and not any(one.moves(REDUCTIONS_OF_RANKS) for one in moved):
        yield _note(
            "late_reduce_scatter_shift", shifts.reduce, "no loop over layers reduces gradients"
        )


def _idle_streams(streams: Mapping[Route, int], count: int) -> Iterator[Diagnostic]:
    """A note when some streams have no collectives."""
    used = len(set(streams.values()))
    if used < count:
        yield _note("cc_streams", count, f"collectives of this step need {used or 'no'} of them")


def _note(knob: str, value: object, why: str) -> Diagnostic:
    """What is said about a knob."""
    return Diagnostic(
        "SW_OVERLAP_IDLE",
        f"strategy.{knob} = {value} does less than it says: {why}",
        hint="leave the key out, or choose a mesh and model that have what it moves",
        severity="note",
    )


def _waiting_layers() -> Diagnostic:
    """What is said about tokens in layers that wait for their own weights."""
    return Diagnostic(
        "SW_OVERLAP_TOKENS",
        "strategy.dependency_tokens = true starts gathers of weights behind the collectives of the"
        " layer that waits for them: without strategy.early_all_gather_shift a step can get longer",
        hint="add early_all_gather_shift = 1 (and late_reduce_scatter_shift = 1), or leave the"
        " tokens out",
        severity="warning",
    )
