"""Real units on worker processes: the same bytes as in this process, and an end within 3 seconds.

What happens when workers are lost: `tests/orchestrator/test_executors.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.road.units import executor_of
from shardwright.orchestrator.service.executor import InlineExecutor, WorkUnit
from shardwright.orchestrator.service.process_backend import AutoExecutor, ProcessExecutor
from tests.support.interrupts import heard_by_children
from tests.support.scripted_units import is_running, pid_of, results, run
from tests.support.small_job import build_on, bundle_bytes, bundle_of, small_llama

WORKERS = 2


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    made = ProcessExecutor(WORKERS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(units: list[WorkUnit]) -> dict[str, bytes | None]:
    return results(run(InlineExecutor(), units))


def test_bytes_are_the_same_as_inline_and_workers_load_no_jax(
    executor: ProcessExecutor, units: list[WorkUnit], expected: dict[str, bytes | None]
) -> None:
    outcomes = run(executor, units)
    assert results(outcomes) == expected
    assert [outcome.unit for outcome in outcomes if not outcome.unit.payload] == []
    pids = {pid_of(outcome) for outcome in outcomes}
    assert len(pids) == WORKERS and os.getpid() not in pids
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" in maps and "jaxlib" not in maps


def test_auto_takes_processes_for_several_units_and_this_one_for_a_single_one(
    units: list[WorkUnit], expected: dict[str, bytes | None]
) -> None:
    executor = executor_of(load(None, [f"run.workers={WORKERS}"]))()
    assert isinstance(executor, AutoExecutor)
    try:
        (alone,) = run(executor, units[:1])
        together = run(executor, units[1:])
    finally:
        executor.close()
    assert results([alone, *together]) == expected
    assert pid_of(alone) == os.getpid()
    assert {o.worker.partition(":")[0] for o in together} == {"process-0", "process-1"}
    assert isinstance(executor_of(load(None, ["run.workers=1"]))(), InlineExecutor)


class Striking(ProcessExecutor):
    """Ends the worker of every second unit the first time the unit is given."""

    def __init__(self) -> None:
        self.given: list[str] = []
        super().__init__(WORKERS)

    def _give(self, worker, unit):
        self.given.append(unit.key)
        if self.given.count(unit.key) > 1 or len(set(self.given)) % 2:
            return super()._give(worker, unit)
        # It stands still meanwhile, or it might be done with a small unit before.
        os.kill(worker.process.pid, signal.SIGSTOP)
        ticket = super()._give(worker, unit)
        worker.process.kill()
        return ticket


@pytest.mark.matrix
def test_files_are_the_same_when_workers_are_killed(small_bundle: Bundle, tmp_path: Path) -> None:
    road = build_on(small_llama(), {"dp_shard": 4}, tmp_path / "cache", executor=Striking)
    assert [row.attempts for row in road.rows].count(2) == len(road.rows) // 2 >= 3
    bundle = bundle_of(road, tmp_path / "bundle")
    assert bundle_bytes(bundle.path) == bundle_bytes(small_bundle.path)


_LONG_JOB = """
import sys
from pathlib import Path
from shardwright.orchestrator import cli
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from tests.support.scripted_units import Listed
from shardwright.orchestrator.service.flight import fly

def forever(_):
    executor, payload = ProcessExecutor(2), Path(sys.argv[1]).read_bytes()
    try:
        for number, outcome in enumerate(fly(lambda: executor, Listed(
            [WorkUnit("compile", str(n), str(n), payload) for n in range(100_000)]
        ))):
            if number == 2:
                print(*(w.process.pid for w in executor.workers()), flush=True)
    finally:
        executor.close()

cli._plan = forever
sys.exit(cli.main(["plan"]))
"""


def test_a_child_of_a_background_test_run_hears_an_interrupt() -> None:
    ask = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heard_by_children():
            answer = subprocess.check_output([sys.executable, "-c", ask], text=True)
        assert answer.split() == ["True"]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "whole_group",
    [pytest.param(True, marks=pytest.mark.matrix), False],
    ids=["terminal", "job alone"],
)
def test_an_interrupt_ends_the_job_and_its_workers(
    compile_units: list[WorkUnit], tmp_path: Path, whole_group: bool
) -> None:
    payload = tmp_path / "payload"
    payload.write_bytes(max((u.payload for u in compile_units), key=len))
    with heard_by_children():
        job = subprocess.Popen(
            [sys.executable, "-c", _LONG_JOB, str(payload)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    assert job.stdout is not None
    pids = [int(word) for word in job.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    (os.killpg if whole_group else os.kill)(job.pid, signal.SIGINT)
    try:
        assert job.wait(timeout=3) == 130
    finally:
        job.kill()
        job.stdout.close()
    assert not any(map(is_running, pids))
