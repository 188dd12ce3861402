"""The simulated machine that processes of this host share: cores that each holds, what has run.

A process that names cores (NEURON_RT_VISIBLE_CORES, NEURON_RT_NUM_CORES) takes them here, and a
core belongs to it until it ends; any other process simulates a machine of its own. Each core has a
lock file, which the system gives back when its process ends however it does, and beside it what
holds it. Banks of HBM are those of the real machine: cores that share one share its bytes.

Sources: runtime configuration page (cores), device memory page (banks), neuron-monitor user guide.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.machine.target import Target
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.runtime.status import Status

FOLDER = "SHARDWRIGHT_MACHINE"
MOST_KEPT = 1000
"""Executions that the log keeps (our choice)."""
_TAKE_S = 0.1
"""Our choice: who looks whether a core is held has its lock for some microseconds."""
_VISIBLE, _NUMBER = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
_SIZES_OF_TRN1 = (1, 2, 8, 32)
"""Cores that collectives of trn1 run on (documented: page on PyTorch's environment variables)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a core, and what of its bank: bytes by the runtime's categories."""

    core: int
    lnc: int
    pid: int
    command: str
    tag: str
    model: str
    uuid: str
    memory: Mapping[str, int]
    started_s: float = field(default_factory=time.time)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution on cores of the machine: when it ended, its status, its simulated seconds."""

    ended_s: float
    pid: int
    cores: Sequence[int]
    model: str
    status: int
    latency_s: float
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What is to be loaded: its name and identity, the cores it needs, bytes per core."""

    model: str
    uuid: str
    ranks: int
    memory: Mapping[str, int]


class Machine:
    """One machine of this host, `target` seen as logical cores."""

    def __init__(self, target: Target, environment: Mapping[str, str] | None = None) -> None:
        self.target = target
        self.environment = os.environ if environment is None else environment
        name = Path(target.name).stem if target.name.endswith(".json") else target.name
        self.folder = _root(self.environment) / name

    def holders(self) -> list[Holder]:
        """Who holds which core now, in the order of cores."""
        found = []
        for path in self.folder.glob("core-*.json"):
            with suppress(OSError, ValueError, TypeError):
                holder = Holder(**json.loads(path.read_text()))
                if self._is_held(holder.core):
                    found.append(holder)
        return sorted(found, key=lambda holder: holder.core)

    def executions(self) -> list[Execution]:
        """What has run, the newest last."""
        found = []
        with suppress(OSError):
            for line in self._log.read_text().splitlines()[-MOST_KEPT:]:
                with suppress(ValueError, TypeError):
                    found.append(Execution(**json.loads(line)))
        return found

    def note(self, execution: Execution) -> None:
        """Add to what has run; a disk that refuses is no reason to end."""
        with suppress(OSError, Timeout), FileLock(str(self._log) + ".lock", timeout=5):
            kept = self._log.read_text().splitlines()[1 - MOST_KEPT :] if self._log.exists() else []
            self._log.write_text("\n".join([*kept, json.dumps(asdict(execution))]) + "\n")

    @property
    def names_cores(self) -> bool:
        """Whether the environment has this process take cores of the machine."""
        return any(reading.said(name, self.environment) for name in (_VISIBLE, _NUMBER))

    @contextmanager
    def held(self, loading: Loading) -> Iterator[tuple[int, ...]]:
        """Hold the cores that the environment names, with what is loaded on those that it needs.
        Raises LoadError: SW_LOAD_CORES for cores that are not there or not free, SW_LOAD_MEMORY for
        a bank without room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            cores = self._taken(stack, loading.ranks)
            first = self._first(cores, loading.ranks)
            used = cores[first : first + loading.ranks]
            for core in used:
                self._check_bank(core, loading)
                self._write(core, loading)
                stack.callback(self._path(core, "json").unlink, missing_ok=True)
            yield used

    def _taken(self, stack: ExitStack, ranks: int) -> tuple[int, ...]:
        """Cores, locked until the stack is closed."""
        visible = reading.said(_VISIBLE, self.environment)
        if visible is not None:
            cores = tuple(visible.value)
            if cores[-1] >= self.target.cores:
                raise self._refused(visible.name, visible.text, "", "")
            for core in cores:
                if not self._lock(stack, core):
                    raise self._refused(visible.name, visible.text, f"{core}", self._who(core))
            return cores
        number = reading.said(_NUMBER, self.environment)
        assert number is not None
        count, every = number.value, range(self.target.cores)
        # Where collectives may lie, if there is such a place: a multiple of their number.
        for first in range(0, len(every) - count + 1, count):
            with ExitStack() as trial:
                if all(self._lock(trial, core) for core in every[first : first + count]):
                    stack.push(trial.pop_all())
                    return tuple(every[first : first + count])
        taken: list[int] = []
        for core in every:
            if len(taken) < count and self._lock(stack, core):
                taken.append(core)
        if len(taken) < count:
            raise self._refused(number.name, number.text, "", "", len(taken))
        return tuple(taken)

    def _refused(
        self, name: str, text: str, core: str, holder: str, free: int | None = None
    ) -> LoadError:
        """What is asked for, and how many there are."""
        count = self.target.cores
        if free is None and core:
            free = sum(not self._is_held(n) for n in range(count))
        there = f"0 to {count - 1}" if free is None else f"{free} of {count} that are free"
        who = f"; core {core} is held by {holder}" if core else ""
        return LoadError(
            "SW_LOAD_CORES",
            f"{name}={text} requires cores of {self.target.name}, available are {there}{who};"
            f" {Status.NRT_LOAD_NOT_ENOUGH_NC}",
            hint="`shardwright neuron-ls` shows who holds cores, each until its process ends",
        )

    def _first(self, cores: Sequence[int], ranks: int) -> int:
        """Where among the held cores a program of `ranks` begins: collectives of N cores on trn1
        begin at a multiple of N (documented). Raises LoadError."""
        is_trn1 = self.target.core.generation == "v2" and ranks > 1
        runs = (n for n in range(len(cores) - ranks + 1) if _is_run(cores[n : n + ranks]))
        fitting = [n for n in runs if not is_trn1 or cores[n] % ranks == 0]
        if fitting and not (is_trn1 and ranks not in _SIZES_OF_TRN1):
            return fitting[0]
        sizes = ", ".join(map(str, _SIZES_OF_TRN1))
        rule = f" ({sizes} of them, from a multiple of their number)" if is_trn1 else ""
        shown = ", ".join(map(str, cores))
        raise LoadError(
            "SW_LOAD_CORES",
            f"the program requires {ranks} neighbouring cores{rule}, the process holds {shown};"
            f" {Status.NRT_LOAD_NOT_ENOUGH_NC}",
            hint=f"set {_VISIBLE}=0-{ranks - 1}, or {_NUMBER}={ranks}",
        )

    def bank_of(self, core: int) -> tuple[int, range]:
        """The number of a core's first HBM bank, and the logical cores that share it."""
        shared = self.target.cores_per_stack
        first = core - core % shared
        return first // shared, range(first, first + shared)

    @property
    def bank_bytes(self) -> int:
        """HBM that the cores of a bank share."""
        return self.target.hbm_bytes_per_core * self.target.cores_per_stack

    def _check_bank(self, core: int, loading: Loading) -> None:
        """Refuse what a bank has no room for beside what its other cores hold."""
        number, sharers = self.bank_of(core)
        others = [h for h in self.holders() if h.core in sharers and h.core != core]
        need, held = sum(loading.memory.values()), sum(h.total_bytes for h in others)
        if need + held <= self.bank_bytes:
            return
        from shardwright.orchestrator.runtime.memory_table import GIB, report

        raise LoadError(
            "SW_LOAD_MEMORY",
            f"{loading.model} requires {need / GIB:.2f} GiB, HBM bank {number} of"
            f" {self.target.name} has {(self.bank_bytes - held) / GIB:.2f} of"
            f" {self.bank_bytes / GIB:.2f} GiB left for core {core}; {Status.NRT_RESOURCE}\n"
            + report({f"NC {h.core}: {h.model}": h.memory for h in others}),
            hint="cores that share a bank share its memory: use others, or logical cores of 2",
        )

    def _write(self, core: int, loading: Loading) -> None:
        holder = Holder(
            core=core,
            lnc=self.target.lnc,
            pid=os.getpid(),
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            tag=reading.value("NEURON_PROCESS_TAG", "", self.environment),
            model=loading.model,
            uuid=loading.uuid,
            memory=dict(loading.memory),
        )
        self._path(core, "json").write_text(json.dumps(asdict(holder)))

    def _lock(self, stack: ExitStack, core: int) -> bool:
        """Whether a core is ours now, until the stack is closed."""
        lock = FileLock(str(self._path(core, "lock")), timeout=_TAKE_S, poll_interval=_TAKE_S / 4)
        try:
            stack.enter_context(lock)
        except Timeout:
            return False
        return True

    def _is_held(self, core: int) -> bool:
        path = self._path(core, "lock")
        if not path.exists():
            return False
        lock = FileLock(str(path), timeout=0)
        try:
            with lock:
                return False
        except Timeout:
            return True

    def _who(self, core: int) -> str:
        with suppress(OSError, ValueError, KeyError):
            data: dict[str, Any] = json.loads(self._path(core, "json").read_text())
            return f"process {data['pid']} ({data['command']})"
        return "another process"

    def _path(self, core: int, kind: str) -> Path:
        return self.folder / f"core-{core}.{kind}"

    @property
    def _log(self) -> Path:
        return self.folder / "executions.jsonl"


def _is_run(cores: Sequence[int]) -> bool:
    return list(cores) == list(range(cores[0], cores[0] + len(cores)))


def _root(environment: Mapping[str, str]) -> Path:
    """Where machines of this host are described."""
    if given := environment.get(FOLDER, ""):
        return Path(given)
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "shardwright" / "machines"
