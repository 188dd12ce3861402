"""Units on Ray actors: the same bytes as in this process, whatever happens to the actors.

One local Ray for the whole file. Only processes whose ids came from our own actors are killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from compiler.neff.bundle import Bundle
from compiler.options import CompileOptions
from orchestrator import ray_backend
from orchestrator.cache import Cache
from orchestrator.executor import InlineExecutor, Outcome, WorkUnit
from orchestrator.ray_backend import RayExecutor
from orchestrator.seats import MAX_ATTEMPTS
from orchestrator.service import UnitFailedError, UnitService
from orchestrator.units import compile_payload
from tests.support.dying_actor import PREFIX, DyingActor
from tests.support.small_job import (
    TARGET,
    Road,
    build_on,
    bundle_bytes,
    bundle_of,
    small_llama,
)

pytestmark = pytest.mark.ray
WORKERS = 2


@pytest.fixture(scope="module")
def executor() -> Iterator[RayExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_backend, "CompileActor", DyingActor)
        made = RayExecutor(WORKERS)
        yield made
        made.close()


class Shared(InlineExecutor):
    """The executor of this file for a service that closes its own; keeps the outcomes."""

    def __init__(self, executor: RayExecutor) -> None:
        self.executor, self.outcomes = executor, []

    def run(self, units: list[WorkUnit]) -> Iterator[Outcome]:
        for outcome in self.executor.run(units):
            self.outcomes.append(outcome)
            yield outcome


def pid_of(outcome: Outcome) -> int:
    return int(outcome.worker.partition(":")[2])


def results(outcomes: list[Outcome]) -> dict[str, bytes | None]:
    return {outcome.unit.key: outcome.result for outcome in outcomes}


def test_bundles_are_the_same_as_inline(
    executor: RayExecutor, small_road: Road, small_bundle: Bundle, tmp_path: Path
) -> None:
    shared = Shared(executor)
    road = build_on(small_llama(), {"dp_shard": 4}, tmp_path / "cache", executor=lambda: shared)
    assert {row.cache for row in road.rows} == {"miss"}
    assert sum(row.kind == "partition" for row in road.rows) == 1
    assert sum(row.kind == "compile" for row in road.rows) >= 6
    workers = {row.worker.partition(":")[0] for row in road.rows}
    assert workers == {f"ray-{n}" for n in range(WORKERS)}
    assert all(row.seconds > 0 for row in road.rows)
    assert os.getpid() not in {pid_of(outcome) for outcome in shared.outcomes}
    ray_bundle = bundle_of(road, tmp_path / "bundle")
    assert bundle_bytes(ray_bundle.path) == bundle_bytes(small_bundle.path)
    assert {row.worker.partition(":")[0] for row in small_road.rows} == {"inline"}


def test_a_killed_actor_loses_nothing(executor: RayExecutor, units: list[WorkUnit]) -> None:
    """Both actors are killed from outside while the partition unit (about a second) runs on one."""
    (partition,) = [unit for unit in units if unit.kind == "partition"]
    expected = results(list(InlineExecutor().run([partition])))
    small = [unit for unit in units if unit.kind == "compile"]
    pids = {pid_of(outcome) for outcome in executor.run(small)}
    assert len(pids) == WORKERS
    outcomes: list[Outcome] = []
    runner = threading.Thread(target=lambda: outcomes.extend(executor.run([partition])))
    runner.start()
    time.sleep(0.3)
    assert runner.is_alive(), "the unit is over before the kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    runner.join(60)
    assert results(outcomes) == expected
    assert [outcome.attempts for outcome in outcomes] == [2]
    assert pid_of(outcomes[0]) not in pids


def test_a_unit_that_dies_twice_is_done_at_the_third_try(
    executor: RayExecutor, compile_units: list[WorkUnit], tmp_path: Path
) -> None:
    first, *others = compile_units
    list(executor.run(others))  # every seat has a living actor, whatever happened before
    dying = replace(first, name=f"{PREFIX}{MAX_ATTEMPTS - 1} {tmp_path}")
    outcomes = list(executor.run([dying, *others]))
    assert results(outcomes) == results(list(InlineExecutor().run(compile_units)))
    tries = {outcome.unit.key: outcome.attempts for outcome in outcomes}
    assert tries.pop(dying.key) == MAX_ATTEMPTS
    # Units that only stood behind it in the queue of its actor are not blamed.
    assert set(tries.values()) == {1}
    assert len(list(tmp_path.iterdir())) == MAX_ATTEMPTS


def test_a_unit_that_always_dies_is_given_up_and_the_others_are_kept(
    executor: RayExecutor, compile_units: list[WorkUnit], tmp_path: Path
) -> None:
    first, *others = compile_units
    starts = tmp_path / "starts"
    starts.mkdir()
    dying = replace(first, name=f"{PREFIX}99 {starts}")
    cache = Cache(tmp_path / "cache")
    with (
        UnitService(lambda: Shared(executor), cache) as service,
        pytest.raises(UnitFailedError) as caught,
    ):
        service.run([dying, *others])
    assert caught.value.error.code == "SW_UNIT_POISONED"
    assert caught.value.unit == dying
    assert f"ended {MAX_ATTEMPTS} workers" in str(caught.value.error)
    assert "--executor inline" in str(caught.value.error)
    assert len(list(starts.iterdir())) == MAX_ATTEMPTS
    assert cache.get(dying.kind, dying.key) is None
    assert all(cache.get(unit.kind, unit.key) is not None for unit in others)


def test_a_refused_unit_brings_its_diagnostic_home(
    executor: RayExecutor, compile_units: list[WorkUnit]
) -> None:
    graph, target, options = msgpack.unpackb(compile_units[0].payload)
    assert target == TARGET
    payload = compile_payload(graph, "trn9.32xlarge", CompileOptions.unpacked(options))
    unit = replace(compile_units[0], payload=payload)
    (here,), (there,) = list(InlineExecutor().run([unit])), list(executor.run([unit]))
    assert here.error is not None
    assert there.error is not None
    assert there.error.diagnostic == here.error.diagnostic
    assert there.error.code == "NCC_EARG001"
    assert type(there.error) is type(here.error)
