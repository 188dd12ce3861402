"""Units on worker processes: the same bytes as in this process, whatever happens to the workers.

Only processes that the executor of a test started are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from compiler.options import CompileOptions
from orchestrator.cache import Cache
from orchestrator.config import load
from orchestrator.executor import InlineExecutor, Outcome, WorkUnit
from orchestrator.job import executor_of
from orchestrator.process_backend import AutoExecutor, ProcessExecutor
from orchestrator.seats import MAX_ATTEMPTS
from orchestrator.service import UnitFailedError, UnitService
from orchestrator.units import compile_payload
from tests.support.interrupts import heard_by_children

WORKERS = 2


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    made = ProcessExecutor(WORKERS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(units: list[WorkUnit]) -> dict[str, bytes | None]:
    return results(InlineExecutor().run(units))


def results(outcomes: Iterator[Outcome] | list[Outcome]) -> dict[str, bytes | None]:
    return {outcome.unit.key: outcome.result for outcome in outcomes}


def pid_of(outcome: Outcome) -> int:
    return int(outcome.worker.partition(":")[2])


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_bytes_are_the_same_as_inline_and_workers_load_no_jax(
    executor: ProcessExecutor, units: list[WorkUnit], expected: dict[str, bytes | None]
) -> None:
    outcomes = list(executor.run(units))
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
        (alone,) = executor.run(units[:1])
        together = list(executor.run(units[1:]))
    finally:
        executor.close()
    assert results([alone, *together]) == expected
    assert pid_of(alone) == os.getpid()
    assert {o.worker.partition(":")[0] for o in together} == {"process-0", "process-1"}
    assert isinstance(executor_of(load(None, ["run.workers=1"]))(), InlineExecutor)


def test_a_refused_unit_brings_its_diagnostic_home(
    executor: ProcessExecutor, compile_units: list[WorkUnit]
) -> None:
    graph, _, options = msgpack.unpackb(compile_units[0].payload)
    payload = compile_payload(graph, "trn9.32xlarge", CompileOptions.unpacked(options))
    unit = replace(compile_units[0], payload=payload)
    (here,), (there,) = list(InlineExecutor().run([unit])), list(executor.run([unit]))
    assert here.error is not None and there.error is not None
    assert there.error.diagnostic == here.error.diagnostic
    assert there.error.code == "NCC_EARG001"
    assert type(there.error) is type(here.error)


def test_what_is_not_diagnosed_is_raised_with_the_workers_traceback(
    executor: ProcessExecutor, compile_units: list[WorkUnit], expected: dict[str, bytes | None]
) -> None:
    broken = replace(compile_units[0], kind="no such kind", name="layer#1")
    with pytest.raises(RuntimeError, match=r"unit layer#1 raised\n(?s:.*)KeyError") as caught:
        list(executor.run([broken]))
    assert "run_unit" in str(caught.value)


def test_a_killed_worker_loses_nothing(
    executor: ProcessExecutor, units: list[WorkUnit], expected: dict[str, bytes | None]
) -> None:
    """Both are killed while the partition unit (about a second) runs on one."""
    (partition,) = [unit for unit in units if unit.kind == "partition"]
    pids = {worker.process.pid for worker in executor.workers()}
    outcomes: list[Outcome] = []
    runner = threading.Thread(target=lambda: outcomes.extend(executor.run([partition])))
    runner.start()
    time.sleep(0.3)
    assert runner.is_alive(), "the unit is over before the kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    runner.join(60)
    assert results(outcomes) == {partition.key: expected[partition.key]}
    assert [outcome.attempts for outcome in outcomes] == [2]
    assert pid_of(outcomes[0]) not in pids


class Doomed(ProcessExecutor):
    """Ends every worker that is given the unit `name`; it stands still meanwhile, or it might be
    done with a small unit before.
    """

    doomed = ""

    def _give(self, worker, unit):
        if unit.name != self.doomed:
            return super()._give(worker, unit)
        os.kill(worker.process.pid, signal.SIGSTOP)
        ticket = super()._give(worker, unit)
        worker.process.kill()
        return ticket


def test_a_unit_that_always_ends_its_worker_is_given_up_and_the_others_are_kept(
    compile_units: list[WorkUnit], tmp_path: Path
) -> None:
    first, *others = [replace(u, name=str(n)) for n, u in enumerate(compile_units)]
    executor, cache = Doomed(WORKERS), Cache(tmp_path)
    executor.doomed = first.name
    with UnitService(lambda: executor, cache) as service:
        with pytest.raises(UnitFailedError) as caught:
            service.run([first, *others])
        pids = [worker.process.pid for worker in executor.workers()]
    assert caught.value.error.code == "SW_UNIT_POISONED" and caught.value.unit == first
    assert f"ended {MAX_ATTEMPTS} workers" in str(caught.value.error)
    assert all(cache.get(unit.kind, unit.key) is not None for unit in others)
    assert not any(map(is_running, pids))


_LONG_JOB = """
import sys
from pathlib import Path
from orchestrator import cli
from orchestrator.executor import WorkUnit
from orchestrator.process_backend import ProcessExecutor

def forever(_):
    executor, payload = ProcessExecutor(2), Path(sys.argv[1]).read_bytes()
    try:
        for number, outcome in enumerate(executor.run(
            [WorkUnit("compile", str(n), str(n), payload) for n in range(100_000)]
        )):
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


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "job alone"])
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
