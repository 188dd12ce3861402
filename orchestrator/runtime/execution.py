"""An execution of a file under the runtime's variables: cores are held, the limit of time is kept,
profiles are left, and the end has a status.

`neff run` does its work inside of `executing`. Without any variable that costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.compiler.diagnostics import DiagnosticError, SimulationError
from shardwright.compiler.machine.target import PS_PER_S, Target, logical
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.environment.variables import Reader
from shardwright.orchestrator.neff.neff_files import ProgramFile, mesh_of
from shardwright.orchestrator.neff.neff_time import simulated_ps
from shardwright.orchestrator.runtime import memory_table
from shardwright.orchestrator.runtime.machine import Execution, Loading, Machine
from shardwright.orchestrator.runtime.status import Status, status_of, with_status
from shardwright.orchestrator.terminal.terminal import say

_TELLING = ("INFO", "DEBUG", "TRACE")
_OUTPUT = "output"  # the vendor's default of NEURON_RT_INSPECT_OUTPUT_DIR


@dataclass(slots=True)
class Run:
    """What is known of a run: its file, the machine, the cores it holds (none: one of its own), and
    how long one execution takes, worked out where it is asked for."""

    path: Path
    opened: ProgramFile
    target: Target
    cores: tuple[int, ...] = ()
    _ps: int | None = field(default=None, repr=False)

    @property
    def simulated_s(self) -> float:
        """Simulated seconds of one execution."""
        if self._ps is None:
            self._ps = simulated_ps(self.opened, self.target)
        return self._ps / PS_PER_S


@contextmanager
def executing(path: Path, opened: ProgramFile, target: Target) -> Iterator[Run]:
    """Load and execute a file of one program under the environment. Raises LoadError for a file
    that this machine does not take, and for cores and memory that are not free; every error of the
    block comes with its status."""
    said = reading.check(Reader.RUN)
    run, machine = Run(path, opened, target), None
    status = Status.NRT_SUCCESS
    try:
        with ExitStack() as stack:
            machine = _loaded(stack, run)
            _tell_loaded(run)
            _check_time(run)
            yield run
            if reading.value("NEURON_RT_INSPECT_ENABLE", False):
                _leave_profile(run)
    except DiagnosticError as error:
        status = status_of(error)
        raise with_status(error) from error
    finally:
        if machine is not None:
            _note(machine, run, status)
        if _is_telling() and said:
            say(f"{opened.program.name}: {status}", err=True)


def _loaded(stack: ExitStack, run: Run) -> Machine | None:
    """The machine whose cores the process holds; None where it names none."""
    from shardwright.sim_cluster.values.load_checks import check_loadable, memory_on

    program, meta = run.opened.program, run.opened.meta
    seen = logical(run.target, program.lnc, bool(meta.get("hypothetical")))
    machine = Machine(seen)
    if not machine.names_cores:
        check_loadable(program, meta, run.target)
        return None
    # A bank that neighbours share has room for one beyond its even part, as far as they leave it.
    check_loadable(program, meta, run.target, room_bytes=machine.bank_bytes)
    is_profiled = reading.value("NEURON_RT_INSPECT_ENABLE", False)
    ranks = 1
    for size in mesh_of(run.opened)[0].values():
        ranks *= size
    loading = Loading(
        model=program.name,
        uuid=str(meta.get("graph_digest", ""))[:32],
        ranks=ranks,
        memory=memory_on(program, seen, is_profiled),
    )
    run.cores = stack.enter_context(machine.held(loading))
    shown = ", ".join(map(str, run.cores))
    say(f"{program.name} holds core {shown} of this host's {run.target.name}", err=True)
    return machine


def _is_telling() -> bool:
    return reading.value("NEURON_RT_LOG_LEVEL", "ERROR") in _TELLING


def _tell_loaded(run: Run) -> None:
    """The memory of a program, from level INFO on."""
    if not _is_telling():
        return
    from shardwright.sim_cluster.values.load_checks import memory_on

    program = run.opened.program
    seen = logical(run.target, program.lnc, bool(run.opened.meta.get("hypothetical")))
    memory = memory_on(program, seen, reading.value("NEURON_RT_INSPECT_ENABLE", False))
    say(memory_table.report({program.name: memory}), err=True)


def _check_time(run: Run) -> None:
    """Refuse an execution beyond NEURON_RT_EXEC_TIMEOUT. Raises SimulationError."""
    limit_s = reading.value("NEURON_RT_EXEC_TIMEOUT", 0.0)
    if limit_s and run.simulated_s > limit_s:
        where = f"core {run.cores[0]}" if run.cores else "a core"
        raise SimulationError(
            "SW_EXEC_TIMEOUT",
            f"{run.opened.program.name} requires {run.simulated_s * 1e3:.6f} ms on {where} of"
            f" {run.target.name}, the limit is {limit_s * 1e3:g} ms (NEURON_RT_EXEC_TIMEOUT)",
            hint="raise the limit, or unset it",
        )


def _leave_profile(run: Run) -> None:
    from shardwright.orchestrator.runtime.profile import captured, write_session

    folder = Path(reading.value("NEURON_RT_INSPECT_OUTPUT_DIR", _OUTPUT))
    path = folder / f"{run.opened.program.name}_{os.getpid()}.ntff"
    write_session(path, captured(run.path, run.opened, run.target))
    say(f"profile {path}", err=True)


def _note(machine: Machine, run: Run, status: Status) -> None:
    """Add the execution to those of the machine."""
    from shardwright.orchestrator.runtime.counted import count

    if not run.cores:
        return
    is_done, latency_s = status is Status.NRT_SUCCESS, 0.0
    with suppress(DiagnosticError):  # of a mesh that no network of the machine carries
        latency_s = run.simulated_s if is_done else 0.0
    machine.note(
        Execution(
            ended_s=time.time(),
            pid=os.getpid(),
            cores=run.cores,
            model=run.opened.program.name,
            status=int(status),
            latency_s=latency_s,
            flops=count(run.opened.program).matmul_flops if is_done else 0,
        )
    )
