"""Time units: an answer is that of `time_step`, whoever computes it, and is computed once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import pytest

from shardwright.compiler.diagnostics import LoadError, SimulationError
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.road.timing import Question, Timings, answers, step_of, timed
from shardwright.orchestrator.service.executor import Executor, InlineExecutor, WorkUnit
from shardwright.orchestrator.service.process_backend import ProcessExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.service.units import run_unit
from shardwright.sharding.partition.partitioner import PYTHON_VARIABLE
from shardwright.sim_cluster.profiles import PROFILES
from shardwright.sim_cluster.timing import timing_unit
from shardwright.sim_cluster.timing.contention import Packets
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.sensitivity import with_moved
from shardwright.sim_cluster.timing.step_time import Step, StepTiming, time_step
from shardwright.sim_cluster.timing.timing_unit import decode_answer, encode_question
from shardwright.sim_cluster.timing.trace import trace_json
from tests.support import invented_job
from tests.support.small_job import Road

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Faults(slow_cores={1: 1.5}, links={0: {(0, 1): 0.5}}, jitter=0.01, seed=7)


@pytest.fixture(scope="module")
def step(small_road: Road, small_bundle: Bundle) -> Step:
    """The small llama on four cores, with faults of every kind but a dead core."""
    healthy = step_of(small_road.built, small_bundle.programs)
    return replace(healthy, packets=Packets(4096, (32768, 65536)), faults=FAULTS)


def service(path: Path, executor: Callable[[], Executor] = InlineExecutor) -> UnitService:
    return UnitService(executor, Cache(path))


def key(kind: str, payload: bytes) -> str:
    return WorkUnit.of(kind, "", payload).key


def plain(timing: StepTiming) -> list[object]:
    return [getattr(timing, f.name) for f in fields(StepTiming)]


def units_of(asked: UnitService) -> list[str]:
    return [f"{row.kind} {row.cache}" for row in asked.rows]


def test_answers_are_those_of_time_step(step: Step, tmp_path: Path) -> None:
    with service(tmp_path) as asked:
        timings = timed(step, "nominal", asked, traced=True)
    assert list(timings.band) == list(PROFILES)
    for name, timing in timings.band.items():
        whole = time_step(step, name, traced=name == "nominal")
        assert plain(timing) == plain(whole)
        if name == "nominal":
            assert timings.trace == trace_json(whole)
    assert timings.healthy is not None
    assert plain(timings.healthy) == plain(time_step(replace(step, faults=Faults())))
    assert timings.healthy.step_time_ps < timings.chosen.step_time_ps


def test_a_step_is_timed_once_by_any_executor(step: Step, tmp_path: Path) -> None:
    found: list[Timings] = []
    for executor in (ProcessExecutor, InlineExecutor):
        with service(tmp_path, executor) as asked:
            found.append(timed(step, "peak", asked))
        kinds = set(units_of(asked))
        assert kinds == {"time miss" if len(found) == 1 else "time hit"}
    assert found[0] == found[1]


def test_the_key_covers_what_the_time_depends_on(step: Step, small_road: Road) -> None:
    """Programs as they were linked or as they were read from a bundle are the same; lines of the
    user's files make no difference; everything else does."""
    nominal = PROFILES["nominal"]
    linked = replace(step, programs=small_road.built.programs)
    moved = {n: replace(p, locations=()) for n, p in step.programs.items()}
    same = {encode_question(s, "nominal") for s in (step, linked, replace(step, programs=moved))}
    assert len(same) == 1
    slower = with_moved(step.target, "efa_hop_us", 18.0, 0.2)
    others = [
        encode_question(step, "peak"),
        encode_question(step, "nominal", replace(nominal, streaming=nominal.streaming / 2)),
        encode_question(step, "nominal", traced=True),
        encode_question(replace(step, target=slower), "nominal"),
        encode_question(replace(step, placement="linear"), "nominal"),
        encode_question(replace(step, packets=Packets()), "nominal"),
        encode_question(replace(step, faults=replace(FAULTS, seed=8)), "nominal"),
        encode_question(replace(step, collectives={"mesh_max_bytes": 0}), "nominal"),
        encode_question(replace(step, schedules=step.schedules * 2), "nominal"),
        encode_question(replace(step, mesh={"dp": 2, "tp": 2}), "nominal"),
        encode_question(replace(step, mesh={"tp": 2, "dp": 2}), "nominal"),
    ]
    assert len({key("time", q) for q in (*same, *others)}) == 1 + len(others)


def test_a_moved_machine_and_another_credit_are_timed_by_value(step: Step) -> None:
    slower = with_moved(step.target, "hbm_gb_per_s_per_chip", 820.0, -0.5)
    credit = replace(PROFILES["nominal"], streaming=0.4)
    given = replace(step, target=slower)
    found = decode_answer(run_unit("time", encode_question(given, "nominal", credit))).timing
    assert plain(found) == plain(time_step(given, "nominal", credit=credit))
    assert found.step_time_ps > time_step(step).step_time_ps


@pytest.mark.parametrize("damage", ["size", "frame"])
def test_a_trace_from_a_cache_that_others_write_is_bounded(
    step: Step, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """What is unpacked is decided by the size it says it has, before memory is taken."""
    data = run_unit("time", encode_question(step, "nominal", traced=True))
    size = len(decode_answer(data).trace)
    if damage == "size":
        monkeypatch.setattr(timing_unit, "MAX_TRACE_BYTES", size)
        assert len(decode_answer(data).trace) == size
        monkeypatch.setattr(timing_unit, "MAX_TRACE_BYTES", size - 1)
    else:
        row = msgpack.unpackb(data, strict_map_key=False)
        data = msgpack.packb(row | {"trace": row["trace"][:-9]})
    with pytest.raises(LoadError, match="trace of a stored time"):
        decode_answer(data)


def stored(**changed: object) -> bytes:
    """The time of an invented step, some of its fields others."""
    known = invented_job.timing(70)
    own = {f.name: getattr(known, f.name) for f in fields(StepTiming)}
    parts = {"functions": [], "runs": [], "timelines": []}
    data: bytes = msgpack.packb({"timing": {**own, **changed}, "parts": parts, "trace": b""})
    return data


@pytest.mark.parametrize("lnc", ["1", 1.5, None])
def test_a_stored_time_of_other_types_is_refused(lnc: object) -> None:
    assert decode_answer(stored()).timing == invented_job.timing(70)
    with pytest.raises(LoadError, match=r"SW_UNIT_FORMAT.*timing\.lnc requires"):
        decode_answer(stored(lnc=lnc))


@pytest.mark.parametrize(
    "data",
    [
        stored(colour=1),
        stored(collectives=[1]),
        msgpack.packb({}),
        msgpack.packb({"timing": [], "parts": {}, "trace": b""}),
        b"\xc1",
        b"",
    ],
    ids=["field", "collective", "empty", "list", "no msgpack", "nothing"],
)
def test_what_no_unit_answers_is_refused(data: bytes) -> None:
    with pytest.raises(LoadError, match="SW_UNIT_FORMAT"):
        decode_answer(data)


def test_a_step_that_hangs_is_a_stored_refusal(step: Step, tmp_path: Path) -> None:
    dead = replace(step, faults=Faults(dead_cores=frozenset({2})))
    question = Question(name="dead", step=dead, profile="nominal")
    for expected in ("time miss", "time hit"):
        with service(tmp_path) as asked, pytest.raises(SimulationError, match="ranks hang") as hung:
            answers([question], asked)
        assert hung.value.code == "SW_DEAD_CORE"
        assert units_of(asked) == [expected]


def test_time_units_load_no_jax(step: Step, tmp_path: Path) -> None:
    (tmp_path / "question").write_bytes(encode_question(step, "nominal"))
    code = (
        "import sys; from shardwright.orchestrator.service.units import run_unit;"
        "run_unit('time', open(sys.argv[1], 'rb').read());"
        "sys.exit(str([m for m in ('jax', 'jaxlib', 'ray', 'sharding') if m in sys.modules]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "question")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


def test_partition_units_are_keyed_by_the_partitioner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release of jaxlib of the interpreter that partitions, not of this one."""
    own = key("partition", b"request")
    keys = {own}
    for version in ("0.0.1", "0.0.2"):
        python = tmp_path / version
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        monkeypatch.setenv(PYTHON_VARIABLE, str(python))
        keys.add(key("partition", b"request"))
    assert len(keys) == 3
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert key("partition", b"request") == own
