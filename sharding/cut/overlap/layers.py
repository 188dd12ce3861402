"""Layers of the programs of a step, as a strategy asks for them: in groups, in buckets, shifted."""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.driver import in_programs
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.overlap.buckets import UNLIMITED
from shardwright.sharding.cut.overlap.idle import idle_shifts, idle_streams, note, waiting_layers
from shardwright.sharding.cut.overlap.streams import streams_of
from shardwright.sharding.cut.rewrites import BUCKETED, GROUPED, SHIFTED, THREADED


def overlap(
    step: StepPlan,
    shifts: Shifts,
    streams: int = 1,
    bucket_bytes: int = 0,
    tokens: bool = False,
    group: int = 0,
) -> StepPlan:
    """`step` with layers in groups of `group`, collectives in buckets, those of its layer loops
    moved by `shifts` iterations, behind tokens of a layer's own, on so many streams;
    `metadata["findings"]` says which of that finds nothing to change.
    """
    notes: list[Diagnostic] = []
    if group:
        whole, limit = step, bucket_bytes or UNLIMITED
        step = in_programs(step, GROUPED, group, limit)
        if step is whole:
            why = "no loop over layers gathers weights or reduces gradients"
            notes.append(note("layers_per_group", group, why))
    if bucket_bytes:
        whole = step
        step = in_programs(step, BUCKETED, bucket_bytes)
        if step is whole:
            why = "no two collectives over data axes are ready together and fit"
            notes.append(note("bucket_mb", bucket_bytes >> 20, why))
    notes += idle_shifts(step, shifts)
    step = in_programs(step, SHIFTED, shifts)
    if tokens:
        whole = step
        step = in_programs(step, THREADED)
        if step is whole:
            why = "no layer has collectives of its own beside those of weights and gradients"
            notes.append(note("dependency_tokens", "true", why))
        elif not shifts.gather:
            notes.append(waiting_layers())
    found = streams_of(step, streams)
    notes += idle_streams(found, streams)
    findings = step.metadata.get("findings", ())
    assert isinstance(findings, tuple)
    return replace(step, streams=found, metadata={**step.metadata, "findings": (*findings, *notes)})
