"""One suite over the back ends of the executor protocol: same bytes, any order, kill, poison,
cancel, time and memory limits, bounded flight.

Units are shell scripts (`tests/support/scripted_units.py`), so a unit decides itself what happens
to its worker. Real units through every back end: `tests/system/test_ray.py`, `test_process.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from shardwright.orchestrator.service.executor import (
    Executor,
    InlineExecutor,
    Limits,
    Outcome,
    WorkUnit,
)
from shardwright.orchestrator.service.flight import fly
from shardwright.orchestrator.service.process_backend import ProcessExecutor, start_worker
from shardwright.orchestrator.service.ray_backend import RayExecutor
from shardwright.orchestrator.service.worker_pool import MAX_ATTEMPTS, PoolExecutor, WorkerLostError
from tests.support.scripted_units import (
    Listed,
    answer,
    killing,
    pid_of,
    refusal,
    results,
    run,
    scripted,
    unit,
)

WORKERS = 2
LIMITS = Limits(timeout_s=25.0, memory_bytes=64 << 20)
"""The time is long enough for a busy host to end none but the unit that sleeps it out."""
MAKERS: dict[str, Callable[[], Executor]] = {
    "inline": lambda: InlineExecutor(Limits(memory_bytes=LIMITS.memory_bytes)),
    "process": lambda: ProcessExecutor(WORKERS, LIMITS),
    "ray": lambda: RayExecutor(WORKERS, LIMITS),
}


@pytest.fixture(
    scope="module",
    params=["inline", "process", pytest.param("ray", marks=pytest.mark.ray)],
)
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Executor]:
    with scripted(tmp_path_factory.mktemp("scripts")):
        made = MAKERS[request.param]()
        yield made
        made.close()


WITH_WORKERS = pytest.mark.parametrize(
    "executor", ["process", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
"""Back ends whose units run in processes that can be lost; `inline` has this process alone."""


def letters(count: int) -> list[WorkUnit]:
    return [unit(f"u{n}", answer(bytes([65 + n]) * (n + 1))) for n in range(count)]


def letter_results(units: list[WorkUnit]) -> dict[str, bytes]:
    return {u.key: bytes([65 + n]) * (n + 1) for n, u in enumerate(units)}


def test_every_unit_has_one_outcome_with_the_same_bytes_in_any_order(executor: Executor) -> None:
    units = letters(9)
    for order in (units, units[::-1]):
        outcomes = run(executor, order)
        assert len(outcomes) == len(units)
        assert results(outcomes) == letter_results(units)
        assert {o.attempts for o in outcomes} == {1}
        assert all(o.unit.payload and o.seconds > 0 for o in outcomes)


def test_large_payloads_and_results_cross(executor: Executor) -> None:
    """Beyond what travels inside a message: a Ray call of 100 kB or more uses the object store."""
    payload = unit("payload", answer(b"x", f"# {'y' * 300_000}"))
    head = "printf '\\201\\245graph\\306\\000\\004\\223\\340'"  # {"graph": 300,000 bytes}
    result = unit("result", f'({head}; head -c 300000 /dev/zero) > "$answer"')
    units = [payload, result]
    outcomes = run(executor, units)
    assert results(outcomes) == {units[0].key: b"x", units[1].key: bytes(300_000)}


def test_a_refusal_comes_home_whole_and_the_others_go_on(executor: Executor) -> None:
    refused, *others = [unit("refused", refusal("SW_TEST")), *letters(3)]
    outcomes = {o.unit.key: o for o in run(executor, [refused, *others])}
    error = outcomes.pop(refused.key).error
    assert error is not None
    assert (type(error).__name__, error.code, error.diagnostic.hint) == (
        "ShardingError",
        "SW_TEST",
        "no",
    )
    assert all(o.result for o in outcomes.values())


def test_what_nobody_meant_to_raise_is_an_outcome_with_its_traceback(executor: Executor) -> None:
    broken, *others = [WorkUnit("no such kind", "0" * 64, "broken", b"x"), *letters(2)]
    outcomes = {o.unit.key: o for o in run(executor, [broken, *others])}
    found = outcomes.pop(broken.key)
    assert (found.result, found.error) == (None, None)
    assert "KeyError: 'no such kind'" in found.defect and "run_unit" in found.defect
    assert all(o.result for o in outcomes.values())


def test_a_crashed_child_is_no_refusal(executor: Executor) -> None:
    (outcome,) = run(
        executor, [unit("crash", "echo LLVM ERROR: boom >&2; kill -ABRT $partitioner")]
    )
    assert outcome.error is not None
    assert (type(outcome.error).__name__, outcome.error.code) == (
        "ExecutionError",
        "SW_PARTITIONER_CRASH",
    )


def test_a_unit_that_wants_too_much_memory_ends_alone(executor: Executor) -> None:
    """Its answer is larger than the 64 MiB that a unit may add, and than what earlier tests left
    free in this process, which a unit may use; the worker lives on.
    """
    head = "printf '\\201\\245graph\\306\\100\\000\\000\\000'"  # {"graph": 1 GiB}
    script = f'{head} > "$answer"; truncate -s +1G "$answer"'
    (outcome,) = run(executor, [unit("big", script)])
    assert outcome.error is not None
    assert (outcome.error.code, outcome.attempts) == ("SW_UNIT_MEMORY", 1)
    assert "64 MiB" in str(outcome.error)
    os.kill(pid_of(outcome), 0)  # raises when there is no such process
    assert all(o.error is None for o in run(executor, letters(4)))


@WITH_WORKERS
def test_a_worker_that_dies_costs_its_unit_one_try(executor: Executor, tmp_path: Path) -> None:
    dying = unit("dying", killing(MAX_ATTEMPTS - 1, tmp_path, b"late"))
    units = [dying, *letters(6)]
    outcomes = run(executor, units)
    assert len(outcomes) == len(units)
    tries = {o.unit.key: o.attempts for o in outcomes}
    assert results(outcomes)[dying.key] == b"late"
    assert tries.pop(dying.key) == MAX_ATTEMPTS
    # Units that only stood behind it in the queue of its worker are not blamed.
    assert set(tries.values()) == {1}
    assert len(list(tmp_path.iterdir())) == MAX_ATTEMPTS


@WITH_WORKERS
def test_a_unit_that_kills_three_workers_is_given_up(executor: Executor, tmp_path: Path) -> None:
    poisoned = unit("poison", killing(99, tmp_path, b"never"))
    events: list[str] = []
    executor.emit = lambda event, **_: events.append(event)
    outcomes = {o.unit.key: o for o in run(executor, [poisoned, *letters(6)])}
    given_up = outcomes.pop(poisoned.key)
    assert given_up.error is not None and given_up.error.code == "SW_UNIT_POISONED"
    assert f"ended {MAX_ATTEMPTS} workers" in str(given_up.error)
    assert given_up.attempts == MAX_ATTEMPTS == len(list(tmp_path.iterdir()))
    assert all(o.result for o in outcomes.values())
    assert events.count("worker.lost") == MAX_ATTEMPTS
    assert events.count("unit.retried") == MAX_ATTEMPTS - 1


@pytest.mark.matrix
@WITH_WORKERS
def test_a_unit_that_outlasts_its_time_is_ended_with_its_worker(executor: Executor) -> None:
    slow = unit("slow", answer(b"late", "sleep 600"))
    outcomes = {o.unit.key: o for o in run(executor, [slow, *letters(6)])}
    late = outcomes.pop(slow.key)
    assert late.error is not None and late.error.code == "SW_UNIT_TIMEOUT"
    assert late.attempts == 1 and late.seconds == LIMITS.timeout_s
    assert all(o.result and o.attempts == 1 for o in outcomes.values())


def test_cancel_ends_what_runs_and_the_executor_goes_on(executor: Executor, tmp_path: Path) -> None:
    """An abandoned run leaves nothing: no outcome of it comes later, no unit of it runs on."""
    marked = [unit(f"m{n}", answer(b"", f"sleep 1; : > {tmp_path}/{n}")) for n in range(12)]
    flight = fly(lambda: executor, Listed([*letters(1), *marked]))
    assert next(flight).result == b"A"
    flight.close()
    units = letters(3)
    assert results(run(executor, units)) == letter_results(units)
    assert executor.next(0) is None
    time.sleep(1.2)
    assert not list(tmp_path.iterdir())


class Counting:
    """A source that watches how many of its units are with the executor."""

    def __init__(self, units: list[WorkUnit]) -> None:
        self.units, self.out, self.most = units, 0, 0

    def take(self) -> WorkUnit | None:
        if not self.units:
            return None
        self.out += 1
        self.most = max(self.most, self.out)
        return self.units.pop()

    def __bool__(self) -> bool:
        return bool(self.units)


def test_flight_is_bounded(executor: Executor) -> None:
    source = Counting(letters(16))
    for outcome in fly(lambda: executor, source):
        assert outcome.result
        source.out -= 1
    assert source.most == executor.capacity
    assert executor.capacity <= 3 * WORKERS


class Scarce(PoolExecutor):
    """One worker with two units in flight, in this process. A unit named poison ends it, and with
    it the result of the unit before, which had not come home yet."""

    name = "scarce"
    in_flight_per_worker = 2

    def __init__(self) -> None:
        self.given: list[list[str]] = []  # names, by worker
        self.before: list[list[str]] = []  # names in flight when poison came
        super().__init__(1)

    def _start(self, number: int) -> int:
        self.given.append([])
        return len(self.given) - 1

    def _arrival(self, worker: int) -> tuple[int, str, int]:
        return worker, "", 0

    def _give(self, worker: int, unit: WorkUnit) -> tuple[int, str, int]:
        if unit.name == "poison":
            self.before.append([other.unit.name for other in self._pool[0].given.values()])
        self.given[worker].append(unit.name)
        return worker, unit.name, len(self.given[worker])

    def _first(
        self, tickets: Sequence[tuple[int, str, int]], timeout_s: float | None
    ) -> tuple[int, str, int]:
        return tickets[0]

    def _outcome(self, ticket: tuple[int, str, int]) -> object:
        worker, name, _ = ticket
        if "poison" in self.given[worker]:
            raise WorkerLostError
        return name and Outcome(unit(name, ""), b"done", None, "", 0.0, 0.0)

    def _stop(self, worker: int) -> None:
        return None


def test_what_was_in_flight_at_a_lost_worker_is_given_again_alone() -> None:
    """So that only the first loss can be laid to the unit before: a, whose result was lost, counts
    a try, and poison, which counts none for that, is given up after three workers of its own."""
    scarce = Scarce()
    units = [unit(name, "") for name in ("a", "poison", "b")]
    outcomes = {o.unit.name: o for o in run(scarce, units)}
    assert outcomes["poison"].error is not None
    assert outcomes["poison"].error.code == "SW_UNIT_POISONED"
    assert {name: o.attempts for name, o in outcomes.items()} == {"a": 2, "poison": 3, "b": 1}
    assert scarce.before == [["a"], *[[]] * MAX_ATTEMPTS]


def test_what_a_worker_prints_is_no_part_of_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    """The standard library's `platform` prints one line as a program."""
    worker = start_worker("platform")
    assert worker.process.wait() == 0
    worker.end()
    printed = capfd.readouterr()
    assert not printed.out and sys.platform in printed.err.lower()
