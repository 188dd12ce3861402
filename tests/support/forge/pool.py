"""Cases in processes of their own: each has a limit of time and of memory, and one that ends its
process or does not come back is a finding like any other.

A process is started anew after it was lost; what a case left behind in it is seen by the next one,
as in a service that goes on.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

CASE_S = 20
CASE_BYTES = 3 * 10**9
_GRACE_S = 20
"""How much longer code that does not look at signals may take before its process is ended."""

Judge = Callable[[int], str]
"""How a case ended: a short text for the tally. What it raises is a finding."""
Prepare = Callable[[Any], Judge]


class CaseTimeout(BaseException):
    """A case took longer than it may."""


@dataclass
class Outcome:
    """What became of cases: how often each answer came, and of every finding its number and
    text."""

    tally: Counter[str] = field(default_factory=Counter)
    findings: dict[int, str] = field(default_factory=dict)


def run_cases(
    numbers: Sequence[int],
    prepare: Prepare,
    material: Any,
    workers: int = 1,
    tell: Callable[[int, str, str], None] = lambda number, answer, finding: None,
) -> Outcome:
    """Judge cases; `prepare(material)` makes the judge in each process. Both are pickled. `tell` is
    called with every (number, answer, text of the finding)."""
    outcome, todo = Outcome(), iter(numbers)
    started = (_Worker(prepare, material) for _ in range(min(workers, len(numbers))))
    busy = [worker for worker in started if worker.begin(todo)]
    while busy:
        for worker in _ready(busy):
            number, answer, finding = worker.answer()
            outcome.tally[answer] += 1
            if finding:
                outcome.findings[number] = finding
            tell(number, answer, finding)
            if not worker.begin(todo):
                worker.close()
                busy.remove(worker)
    return outcome


class _Worker:
    """One process and the case it is at."""

    def __init__(self, prepare: Prepare, material: Any) -> None:
        self.prepare, self.material = prepare, material
        self.number, self.since = -1, 0.0
        self.connection, self.process = self._started()

    def _started(self) -> tuple[Connection, BaseProcess]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, self.prepare, self.material), daemon=True
        )
        process.start()
        there.close()
        if not here.poll(120) or here.recv() != "ready":
            raise RuntimeError("a process of the forge does not start")
        return here, process

    def begin(self, todo: Iterator[int]) -> bool:
        """Start the next case; false when there is none."""
        number = next(todo, None)
        if number is None:
            return False
        self.number, self.since = number, time.monotonic()
        self.connection.send(number)
        return True

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.since > CASE_S + _GRACE_S

    def answer(self) -> tuple[int, str, str]:
        """(number, answer, text of the finding); a process that is gone is started anew."""
        try:
            if self.connection.poll():
                answer, finding = self.connection.recv()
                return self.number, answer, finding
            answer = "hang"
        except EOFError:
            self.process.join(_GRACE_S)
            answer = f"exit {self.process.exitcode}"
        self.close()
        self.connection, self.process = self._started()
        return self.number, answer, f"{answer}: its process was lost\n"

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _ready(busy: Sequence[_Worker]) -> list[_Worker]:
    """Workers with an answer, or without one for too long."""
    while True:
        answered = wait([worker.connection for worker in busy], timeout=1.0)
        ready = [w for w in busy if w.connection in answered or w.overdue]
        if ready:
            return ready


def _serve(connection: Connection, prepare: Prepare, material: Any) -> None:
    judge = prepare(material)
    used = int(_status("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + CASE_BYTES, used + CASE_BYTES))
    signal.signal(signal.SIGALRM, _expire)
    connection.send("ready")
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        connection.send(_judged(judge, number))


def _status(name: str) -> str:
    with open("/proc/self/status") as file:
        row = next(line for line in file if line.startswith(f"{name}:"))
    return row.split()[1]


def _judged(judge: Judge, number: int) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        return judge(number), ""
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        text = "".join(traceback.format_exception(error, limit=-7))
        return f"FINDING {type(error).__name__}", text
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _expire(_signal: int, _frame: FrameType | None) -> None:
    raise CaseTimeout(f"a case requires at most {CASE_S} s")
