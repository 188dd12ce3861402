"""What a simulated machine checks before it takes a program, in the runtime's order.

Container checks (magic, format version, features, digests) are the reader's; here are those that
compare the file with the machine: architecture, logical NeuronCore size, memory, collectives. The
messages name the status the Neuron runtime would return (nrt_status of its API documentation).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import (
    HYPOTHETICAL_LNC,
    PROFILE_BUFFERS_BYTES,
    Target,
    load_target,
    logical,
    reserve_of,
)

MOST_GROUPS, MOST_GROUPS_BEFORE = 16, 12
"""Sets of replica groups of a file: documented, from SDK 2.32 on and before (NEC, release notes).
The status of a file with more is not: our reading is that of a resource that ran out."""
_SIXTEEN_SINCE = (2, 27, 5334)  # neuronx-cc of SDK 2.32 (release notes)
MOST_STREAMS = 4  # documented: streams of collectives of a logical core (overlap page)
_GENERATIONS = ("v1", "v2", "v3", "v4")
_GIB = 2**30
_OFTEN_NONE = ("model constants", "profiler buffers")
"""Told where there are any."""


def check_loadable(
    program: Program,
    meta: Mapping[str, Any],
    machine: Target,
    environment: Mapping[str, str] | None = None,
    room_bytes: int | None = None,
) -> None:
    """Refuse a program the machine cannot run; `meta` is the container's, `room_bytes` what the
    core's bank of HBM has, None: the core's even part.

    Raises LoadError: SW_LOAD_ARCHITECTURE, SW_LOAD_LNC, SW_LOAD_PAGE, SW_LOAD_MEMORY,
    SW_LOAD_GROUPS.
    """
    environment = os.environ if environment is None else environment
    _check_architecture(program, machine, environment)
    made, hypothetical = int(meta.get("lnc", 1)), bool(meta.get("hypothetical"))
    _check_lnc(made, program, environment)
    _check_cores(made, program, machine, hypothetical)
    _check_page(program, meta, environment)
    is_profiled = environment.get("NEURON_RT_INSPECT_ENABLE", "0") not in ("", "0")
    _check_memory(program, logical(machine, made, hypothetical), is_profiled, room_bytes)
    _check_collectives(program, str(meta.get("version_profile", "")))


def _check_page(program: Program, meta: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """The page of the scratchpad that a file was laid out for is the runtime's."""
    text = env.get("NEURON_SCRATCHPAD_PAGE_SIZE", "")
    made = int(meta.get("options", {}).get("hbm_scratchpad_page_size", 0))
    if text and made and text != str(made):
        raise LoadError(
            "SW_LOAD_PAGE",
            f"program {program.name} was compiled for scratchpad pages of {made} MB, the runtime is"
            f" set to {text}; NRT_INVALID (2)",
            None,
            f"compile with --hbm-scratchpad-page-size {text} or set"
            f" NEURON_SCRATCHPAD_PAGE_SIZE={made}",
        )


def _check_architecture(program: Program, machine: Target, env: Mapping[str, str]) -> None:
    made, here = load_target(program.target).core.generation, machine.core.generation
    newer = _GENERATIONS.index(made) > _GENERATIONS.index(here)
    legacy_allowed = env.get("NEURON_RT_ALLOW_LEGACY_NEFF", "0") not in ("", "0")
    if made == here or (not newer and legacy_allowed):
        return
    hint = f"compile with --target {machine.name}"
    if not newer:
        hint += ", or set NEURON_RT_ALLOW_LEGACY_NEFF=1 to try it"
    raise LoadError(
        "SW_LOAD_ARCHITECTURE",
        f"program {program.name} requires NeuronCore-{made} ({program.target}), got"
        f" NeuronCore-{here} ({machine.name}); NRT_UNSUPPORTED_NEFF_VERSION (10)",
        None,
        hint,
    )


def _check_lnc(made: int, program: Program, env: Mapping[str, str]) -> None:
    text = env.get("NEURON_LOGICAL_NC_CONFIG", "")
    if text and text != str(made):
        raise LoadError(
            "SW_LOAD_LNC",
            f"program {program.name} was compiled for logical NeuronCores of {made}, the runtime is"
            f" set to {text}; NRT_INVALID (2)",
            None,
            f"compile with --logical-nc-config {text} or set NEURON_LOGICAL_NC_CONFIG={made}",
        )


def _check_cores(made: int, program: Program, machine: Target, hypothetical: bool) -> None:
    if made != program.lnc and program.functions:
        raise LoadError(
            "SW_LOAD_LNC",
            f"program {program.name} has subgraphs for {program.lnc} physical cores, its file says"
            f" {made}; NRT_INVALID (2)",
            None,
            "the file is damaged; compile again",
        )
    allowed = HYPOTHETICAL_LNC if hypothetical else machine.allowed_lnc
    if made not in allowed:
        raise LoadError(
            "SW_LOAD_LNC",
            f"program {program.name} was compiled for logical NeuronCores of {made}, {machine.name}"
            f" has those of {' or '.join(map(str, allowed))}; NRT_INVALID (2)",
            None,
            f"compile with --logical-nc-config {allowed[0]}",
        )


def memory_on(program: Program, machine: Target, is_profiled: bool = False) -> dict[str, int]:
    """Bytes of HBM that a loaded program takes of a core of `machine` (a logical one), by the
    runtime's categories."""
    return {
        "tensors": sum(b.num_bytes for b in program.buffers if b.kind == "named"),
        "model constants": program.constant_bytes,
        "shared scratchpad": program.arena_bytes,
        **reserve_of(machine),
        "profiler buffers": PROFILE_BUFFERS_BYTES if is_profiled else 0,
    }


def _check_memory(
    program: Program, machine: Target, is_profiled: bool, room_bytes: int | None
) -> None:
    parts = memory_on(program, machine, is_profiled)
    parts = {name: n for name, n in parts.items() if n or name not in _OFTEN_NONE}
    total, room = sum(parts.values()), room_bytes or machine.hbm_bytes_per_core
    if total <= room:
        return
    split = ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts.items())
    raise LoadError(
        "SW_LOAD_MEMORY",
        f"program {program.name} requires {total / _GIB:.2f} GiB ({split}), a core of"
        f" {machine.name} has {room / _GIB:.2f} GiB; NRT_RESOURCE (4)",
        None,
        "use more cores, a smaller batch, or shard the tensors",
    )


def _check_collectives(program: Program, made_as: str) -> None:
    """Refuse more sets of replica groups, or streams, than the runtime has: every set of axes that
    a collective is over is one of groups."""
    calls = [c for f in program.functions for c in f.collectives if not c.is_transfer]
    groups, streams = {call.axes for call in calls}, {call.stream for call in calls}
    numbers = tuple(int(part) for part in made_as.split(".") if part.isdigit())
    most = MOST_GROUPS if not numbers or numbers >= _SIXTEEN_SINCE else MOST_GROUPS_BEFORE
    found = {"sets of replica groups": (len(groups), most), "streams": (len(streams), MOST_STREAMS)}
    for what, (count, limit) in found.items():
        if count > limit:
            raise LoadError(
                "SW_LOAD_GROUPS",
                f"program {program.name} has collectives over {count} {what}, a file may have"
                f" {limit}; NRT_RESOURCE (4)",
                None,
                "use fewer axes at once, or cut the step into programs; releases before SDK 2.32"
                f" take {MOST_GROUPS_BEFORE} sets of groups",
            )
