"""How long a file runs on a machine, with a band where figures of the machine are not published."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.isa.program import Program
from shardwright.compiler.linking.budget import memory_of
from shardwright.compiler.machine.target import (
    PS_PER_S,
    Fact,
    Target,
    altered,
    facts_of,
    hypothetical_text,
    logical,
    undocumented_clocks,
)
from shardwright.compiler.neff.serial import SerialFile, Stage
from shardwright.orchestrator.neff.neff_files import ProgramFile, mesh_of
from shardwright.orchestrator.terminal.terminal import say
from shardwright.sim_cluster.timing.faults import NO_FAULTS, Delay, Faults
from shardwright.sim_cluster.timing.macro import Stretch, program_macros
from shardwright.sim_cluster.timing.resident import (
    room_on_chip,
    weight_bytes,
    with_resident_weights,
)
from shardwright.sim_cluster.timing.sensitivity import TIMED
from shardwright.sim_cluster.timing.step_time import Replayed, Step, time_step

Timed = Callable[[Target], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executions:
    """How often a program is timed, after so many executions that do not count, and the `jitter`
    of each: the mean random delay of a stretch of code, as a part of its time."""

    count: int = 1
    warmup: int = 0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Raises UsageError for no execution at all, or a delay that cannot be."""
        if self.count < 1 or self.warmup < 0 or not 0 <= self.jitter <= MOST_JITTER:
            raise UsageError(
                "SW_USAGE",
                "--iterations requires at least 1, --warmup at least 0, --jitter a number from 0 to"
                f" {MOST_JITTER:g}, got {self.count}, {self.warmup} and {self.jitter:g}",
            )

    @property
    def faults(self) -> list[Faults]:
        """Of every execution, those of the warm-up left out: without jitter all are alike."""
        seeds = range(self.warmup, self.warmup + self.count)
        return [Faults(jitter=self.jitter, seed=seed) for seed in seeds]


MOST_JITTER = 10.0  # as `[faults] jitter`


def print_time(opened: ProgramFile, target: Target, executions: Executions) -> None:
    """The simulated time of a program, for people."""
    program, mesh = opened.program, mesh_of(opened)[0]
    where = f"on {math.prod(mesh.values())} cores" if mesh else "on one core"

    def timed(machine: Target, faults: Faults = NO_FAULTS) -> int:
        return simulated_ps(opened, machine, faults)

    loading = _constants_ps(opened, target)
    note = f", {loading / PS_PER_S:.9f} s of them loading constants" if loading else ""
    cores = f" ({program.lnc} physical cores)" if program.lnc > 1 else ""
    say(f"simulated time {_said(timed, target)} {where} of {target.name}{cores}{note}", err=True)
    if executions.count > 1:
        if executions.jitter:
            found = [timed(target, faults) for faults in executions.faults]
        else:
            found = [timed(target)] * executions.count
        say(_statistics(found, executions), err=True)
    if opened.meta.get("hypothetical"):
        machine = logical(target, program.lnc, hypothetical=True)
        say(hypothetical_text(machine), err=True)
    _say_clocks(target)


def _statistics(found: Sequence[int], executions: Executions) -> str:
    """Milliseconds over executions, by the names of the runtime's benchmark mode."""
    mean, low, high = (f(found) / PS_PER_MS for f in (statistics.fmean, min, max))
    spread = statistics.pstdev(found) / PS_PER_MS
    return (
        f"mean {mean:.6f} ms, min {low:.6f} ms, max {high:.6f} ms, std_dev {spread:.6f} ms of"
        f" {executions.count} executions after {executions.warmup}"
    )


PS_PER_MS = PS_PER_S // 1000


def simulated_ps(opened: ProgramFile, target: Target, faults: Faults = NO_FAULTS) -> int:
    """How long one execution takes on a machine, in ps, with the constants that its start loads.
    Raises UsageError as `timed_step`."""
    program, mesh = opened.program, mesh_of(opened)[0]
    if mesh:
        total = timed_step(opened, target, faults).step_time_ps
    else:
        total = _alone_ps(program, target, faults)
    return total + _constants_ps(opened, target)


def _said(timed: Timed, target: Target) -> str:
    """Seconds, and the band of a machine whose clocks are not published."""
    text = f"{timed(target) / PS_PER_S:.9f} s"
    if not undocumented_clocks(target):
        return text
    low, high = (f"{ps / PS_PER_S:.9f} s" for ps in band_ps(timed, target))
    return f"{text} (band {low} .. {high})"


def _say_clocks(target: Target) -> None:
    if engines := undocumented_clocks(target):
        names = " and ".join(engines)
        say(
            f"hypothetical: no clock of {target.core.name} is published for its {names} engines;"
            " the band is that of all its figures without a source",
            err=True,
        )


def band_ps(timed: Timed, target: Target) -> tuple[int, int]:
    """The fastest and the slowest time within the ranges of figures that have no source: each moved
    alone tells which of its ends is slower, then all go to their fast and to their slow ends."""
    fast, slow = dict[str, Any](), dict[str, Any]()
    for name, fact in _ranged(target).items():
        low, high = ((timed(altered(target, {name: end})), end) for end in fact.range)
        (_, fast[name]), (_, slow[name]) = sorted((low, high))
    return timed(altered(target, fast)), timed(altered(target, slow))


def _ranged(target: Target) -> dict[str, Fact]:
    """The figures that times are worked out from, and that have a range instead of a source."""
    facts = facts_of(target)
    return {n: facts[n] for n in TIMED if n in facts and len(facts[n].range) == 2}


def _stretches(program: Program, target: Target) -> list[int]:
    """The launch of a program, and what follows it on one core, in ps."""
    return [op.full_ps for op in program_macros(program, target) if isinstance(op, Stretch)]


def _alone_ps(program: Program, target: Target, faults: Faults) -> int:
    """One run on one core, its stretches of code late by the jitter."""
    delay = Delay(1.0, faults.jitter, 1, f"{faults.seed}/0")
    return sum(round(ps * delay.factor()) for ps in _stretches(program, target))


def timed_step(
    opened: ProgramFile, target: Target, faults: Faults = NO_FAULTS, traced: bool = False
) -> Replayed:
    """One run of all ranks of the file's mesh, on as few instances as have the cores. Raises
    UsageError for more ranks than an instance without EFA has cores."""
    program, mesh = opened.program, mesh_of(opened)[0]
    ranks = math.prod(mesh.values())
    machine = logical(target, program.lnc, bool(opened.meta.get("hypothetical")))
    instances = -(-ranks // machine.cores)
    if instances > 1 and not machine.efa_devices:
        raise UsageError(
            "SW_NETWORK",
            f"--time of {ranks} ranks requires at most {machine.cores} cores, those of one"
            f" {machine.name}: it has no EFA devices",
            hint="compile with --target trn1 or trn2",
        )
    step = Step(
        programs={program.name: program},
        schedules=((((program.name,), 1),),),
        mesh=mesh,
        target=machine,
        instances=instances,
        faults=faults,
    )
    return time_step(step, traced=traced)


def _constants_ps(opened: ProgramFile, target: Target) -> int:
    """What the start of an execution spends on constants: with fast context switch they come then,
    at best at the full rate of the core's DMA engines (the rate of the host link is not published
    for trn1), else at model load."""
    if not opened.meta.get("options", {}).get("enable_fast_context_switch"):
        return 0
    core = target.core
    rate = opened.program.lnc * core.dma_engines * core.dma_engine_bytes_per_s
    return round(memory_of(opened.program).constants / rate * PS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialTime:
    """Of one request through a file of several pieces: what each core is busy, in ps, what tensors
    take from core to core, and what starts take."""

    cores: tuple[int, ...]
    hand_offs: int
    launches: int

    @property
    def request_ps(self) -> int:
        """From the first piece to the last, without what the host computes."""
        return sum(self.cores) + self.hand_offs + self.launches

    @property
    def slowest_ps(self) -> int:
        """What the core that takes longest needs of every request: their distance in a stream."""
        return max(self.cores)


def serial_time(file: SerialFile, target: Target) -> SerialTime:
    """Pieces one behind the other. The host starts the first piece, and every one behind an
    operator of its own; a core waits for what it is handed. Cores of a pipeline keep weights that
    fit into their memory on chip.
    """
    kept = _keeping(file, target)
    cores, moves, launches = [0] * int(file.meta["cores"]), 0, 0
    place: dict[str, int] = {}
    behind_host = True
    for stage in file.stages:
        if stage.program is not None:
            program = stage.program
            if stage.core in kept:
                program = with_resident_weights(program)
            launch, *rest = _stretches(program, target)
            cores[stage.core] += sum(rest)
            launches += launch if behind_host else 0
            moves += _handed_ps(stage, place, target)
        behind_host = stage.program is None
        place |= dict.fromkeys(stage.outputs, stage.core)
    return SerialTime(cores=tuple(cores), hand_offs=moves, launches=launches)


def _keeping(file: SerialFile, target: Target) -> set[int]:
    """The cores of a pipeline whose weights stay on chip."""
    held = [0] * int(file.meta["cores"])
    for stage in file.stages:
        if stage.program is not None:
            held[stage.core] += weight_bytes(stage.program)
    room = room_on_chip(target)
    return {core for core, size in enumerate(held) if size <= room and len(held) > 1}


def _handed_ps(stage: Stage, place: Mapping[str, int], target: Target) -> int:
    """What tensors of other cores take to a piece, one DMA transfer and a semaphore each, through
    the memory of a chip or the links between chips (`collectives` has rings of chips; here one link
    per chip on the way)."""
    core, types = target.core, stage.types
    total = 0.0
    for name in stage.inputs:
        source = place.get(name, stage.core)
        if source in (stage.core, -1):
            continue
        chips = abs(stage.core // target.cores_per_chip - source // target.cores_per_chip)
        rate = min(
            core.dma_engines * core.dma_engine_bytes_per_s, target.hbm_bytes_per_s_per_core / 2
        )
        if chips:
            rate = min(rate, *target.link_bytes_per_s)
        each = core.dma_fixed_ps + core.semaphore_ps + target.collectives.wire_ps * chips
        total += each + types[name].num_bytes / rate * PS_PER_S
    return round(total)


def print_serial_time(file: SerialFile, target: Target) -> None:
    """The simulated time of a request and of a stream of them, for people."""

    def request(machine: Target) -> int:
        return serial_time(file, machine).request_ps

    def slowest(machine: Target) -> int:
        return serial_time(file, machine).slowest_ps

    found, count = serial_time(file, target), int(file.meta["cores"])
    where = f"through {count} core{'s' * (count > 1)} of {target.name}"
    say(f"simulated time {_said(request, target)} of a request {where}", err=True)
    say(f"one request every {_said(slowest, target)}: the slowest core of {count}", err=True)
    kept = len(_keeping(file, target))
    if count > 1:
        say(f"weights of {kept} of {count} cores stay on chip", err=True)
    shown = ", ".join(f"core {k} {ps / PS_PER_S:.9f} s" for k, ps in enumerate(found.cores))
    handed, started = found.hand_offs / PS_PER_S, found.launches / PS_PER_S
    say(f"{shown}; handed over {handed:.9f} s, started {started:.9f} s", err=True)
    hosts = sum(row[1] - row[2] for row in file.meta.get("operators", ()))
    if hosts:
        say(f"without the time of {hosts} operators on the CPU, and of the way there", err=True)
    _say_clocks(target)
