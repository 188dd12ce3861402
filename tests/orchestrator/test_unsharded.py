"""The process of the unsharded run: what is asked of it, what comes back, and that it ends with its
block. Here the other side of the socket is a thread of the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.diagnostics import (
    DiagnosticError,
    InternalError,
    SimulationError,
    UsageError,
)
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.road import unsharded as module
from shardwright.orchestrator.road.numerics import Reference, Rounding
from shardwright.orchestrator.road.unsharded import unsharded

REFERENCE = Reference(losses=(2.0,), after_one={}, bound=1e-5)
ROUNDING = Rounding({"w": 1e-7}, (2e-7,))
FIRST = {"w": 1.0, "b": 2.0}  # the first state: leaves by name


@dataclass
class Other:
    """A worker whose process does as the test says."""

    connection: Connection
    ended: list[bool] = field(default_factory=list)

    @property
    def process(self) -> Any:
        return self

    def wait(self) -> int:
        return 7

    def end(self) -> None:
        self.ended.append(True)


@contextmanager
def other_side(
    patch: pytest.MonkeyPatch, act: Callable[[Connection], None]
) -> Iterator[tuple[Other, list[str]]]:
    """What `act` does with the socket of the process."""
    ours, theirs = Pipe()
    worker, started = Other(ours), list[str]()

    def start(name: str) -> Other:
        started.append(name)
        return worker

    patch.setattr(module, "start_worker", start)
    thread = Thread(target=act, args=(theirs,))
    thread.start()
    try:
        yield worker, started
    finally:
        thread.join()
        ours.close()


def answering(answer: object, asked: list[Any]) -> Callable[[Connection], None]:
    def act(theirs: Connection) -> None:
        asked.append(theirs.recv())
        if answer is REFERENCE:
            for leaf in FIRST.items():
                theirs.send(leaf)
            theirs.send(None)
        theirs.send(answer)

    return act


def test_the_job_goes_there_and_its_reference_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with other_side(monkeypatch, answering(REFERENCE, asked)) as (worker, started):
        with unsharded(JobConfig(), 12) as result:
            assert result is not None and result.first_state() == FIRST
            assert result.first_state() is None  # it is kept nowhere
            assert result.reference() == REFERENCE and not worker.ended
        assert worker.ended == [True] and started == ["shardwright.orchestrator.road.unsharded"]
    assert asked == [(sys.path, JobConfig(), 12)]


def test_what_rounding_does_is_asked_for_when_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def act(theirs: Connection) -> None:
        answering(REFERENCE, asked)(theirs)
        asked.append(theirs.recv())
        theirs.send(ROUNDING)

    with (
        other_side(monkeypatch, act) as (_, _),
        unsharded(JobConfig(), 12) as result,
    ):
        assert result is not None
        assert (result.reference(), result.rounding(2)) == (REFERENCE, ROUNDING)
    assert asked[1:] == [2]


def test_a_run_that_needs_no_first_state_has_its_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that goes on from a checkpoint."""
    with (
        other_side(monkeypatch, answering(REFERENCE, [])) as (_, _),
        unsharded(JobConfig(), 12) as result,
    ):
        assert result is not None and result.reference() == REFERENCE


def test_a_job_that_is_not_compared_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_worker", None)
    job = JobConfig()
    with unsharded(replace(job, run=replace(job.run, compare=False)), 12) as result:
        assert result is None


def test_an_error_there_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = UsageError("SW_CONFIG", "a batch is required")
    with (
        other_side(monkeypatch, answering(refusal, [])) as (worker, _),
        pytest.raises(UsageError, match="a batch is required"),
        unsharded(JobConfig(), 12) as result,
    ):
        assert result is not None
        result.reference()
    assert worker.ended == [True]


def _ends(theirs: Connection) -> None:
    theirs.recv()
    theirs.close()


@pytest.mark.parametrize("act", [Connection.close, _ends])
def test_a_process_that_died_is_told_with_its_code(
    act: Callable[[Connection], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has read what it is asked, and after that."""
    with (
        other_side(monkeypatch, act) as (_, _),
        pytest.raises(SimulationError, match="exit code 7") as died,
        unsharded(JobConfig(), 12) as result,
    ):
        assert result is not None
        result.reference()
    assert died.value.code == "SW_REFERENCE"


def test_a_socket_that_breaks_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(theirs: Connection) -> None:
        theirs.recv()

    with (
        other_side(monkeypatch, broken) as (worker, _),
        pytest.raises(SimulationError, match="exit code 7"),
        unsharded(JobConfig(), 12) as run,
    ):
        assert run is not None
        monkeypatch.setattr(worker, "connection", SimpleNamespace(recv=_reset))
        run.reference()


def _reset() -> None:
    raise ConnectionResetError


def test_it_ends_with_its_block_whatever_happens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        other_side(monkeypatch, lambda theirs: theirs.recv()) as (worker, _),
        pytest.raises(KeyboardInterrupt),
        unsharded(JobConfig(), 12),
    ):
        raise KeyboardInterrupt
    assert worker.ended == [True]


@pytest.mark.parametrize("error", [None, UsageError("SW_CONFIG", "no")])
def test_the_process_answers_with_what_the_run_gave(
    error: DiagnosticError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a path of modules that is the asker's."""
    asked: list[tuple[JobConfig, int, list[Any]]] = []

    def run(job: JobConfig, global_batch: int, begun: Callable[[Any], None]) -> Reference:
        asked.append((job, global_batch, sys.path[:]))
        if error:
            raise error
        begun(FIRST)
        return REFERENCE

    def measure(job: JobConfig, batch: int, reference: Reference, count: int) -> Rounding:
        asked.append((job, batch, [reference.losses, count]))
        return ROUNDING

    monkeypatch.setattr(module, "run_unsharded", run)
    monkeypatch.setattr(module, "measure_rounding", measure)
    monkeypatch.setattr(module.logs, "start", lambda: None)
    monkeypatch.setattr(sys, "path", sys.path[:])
    ours, theirs = Pipe()
    ours.send((["/theirs", *sys.path], JobConfig(), 3))
    if not error:
        ours.send(2)
    module._serve(theirs)
    state = [] if error else list(iter(ours.recv, None))
    assert state == ([] if error else list(FIRST.items()))
    answer = ours.recv()
    assert str(answer) == str(error) if error else answer == REFERENCE
    job, count, path = asked.pop(0)
    assert (job, count, path[0]) == (JobConfig(), 3, "/theirs")
    if not error:
        assert ours.recv() == ROUNDING
        assert asked == [(JobConfig(), 3, [REFERENCE.losses, 2])]
    ours.close()
    module._serve(theirs)  # nobody asks any more: it ends


def test_the_module_is_a_program_that_ends_when_nobody_asks() -> None:
    ours, theirs = Pipe()
    command = [
        sys.executable,
        "-m",
        "shardwright.orchestrator.road.unsharded",
        str(theirs.fileno()),
    ]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    ours.send((sys.path, None, 0))  # no job: whatever it raises, it has read the socket
    _, told = process.communicate()
    assert process.returncode == 0, told
    answer = ours.recv()
    assert isinstance(answer, InternalError) and "run_unsharded" in "".join(answer.__notes__)
    ours.close()
