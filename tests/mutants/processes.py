"""A forked child with a budget of processor time, its descendants counted and ended with it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MEMORY_BYTES = 12 * 2**30
POLL_S = 0.03
SCAN_EVERY = 15
STUCK_S = 90.0


@dataclass(frozen=True)
class End:
    """How a child ended: `exit`, `budget` (its processor time was used up), or `stuck` (no
    processor time for a minute and a half)."""

    how: str
    status: int
    cpu_s: float


def run_child(work: Callable[[], None], budget_s: float, log: Path) -> End:
    """Fork, do `work` with its output in `log`, and wait for it."""
    child = os.fork()
    if child == 0:
        _become(log)
        try:
            work()
        except BaseException as error:  # the parent reads it from the exit status and the log
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(70)
        os._exit(0)
    return _watch(child, budget_s)


def _become(log: Path) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, end in ((null, 0), (out, 1), (out, 2)):
        os.dup2(number, end)


def _watch(child: int, budget_s: float) -> End:
    used, moved, family = 0.0, time.monotonic(), {child: _started(child)}
    for turn in count():
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            _end(family)
            return End("exit", status, max(used, usage.ru_utime + usage.ru_stime))
        if turn % SCAN_EVERY == SCAN_EVERY - 1:
            processes = _processes()
            family |= {p: _started(p) for p in _descendants(child, processes) - family.keys()}
            now = sum(processes[p][1] for p in family if p in processes)
            if now > used + 0.01:
                used, moved = now, time.monotonic()
            if used > budget_s or time.monotonic() - moved > STUCK_S:
                _end(family)
                os.waitpid(child, 0)
                return End("budget" if used > budget_s else "stuck", 0, used)
        time.sleep(POLL_S)
    raise AssertionError("count() has no end")


def _stat(process: int) -> list[str]:
    """Fields of /proc from the state on; none when the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(process: int) -> str:
    """When a process began: tells it from a later one of the same number."""
    fields = _stat(process)
    return fields[19] if fields else ""


def _processes() -> dict[int, tuple[int, float]]:
    """Every process: (parent, processor seconds with those of its ended children)."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (fields := _stat(int(path.name))):
            ticks = sum(int(n) for n in fields[11:15])
            found[int(path.name)] = (int(fields[1]), ticks / TICKS_PER_S)
    return found


def _descendants(root: int, processes: Mapping[int, tuple[int, float]]) -> set[int]:
    found = {root}
    while more := {p for p, (parent, _) in processes.items() if parent in found} - found:
        found |= more
    return found


def _end(family: Mapping[int, str]) -> None:
    for process, started in family.items():
        if started and _started(process) == started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
