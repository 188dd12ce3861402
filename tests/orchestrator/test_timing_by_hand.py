"""What is asked about the time of a step, and about a published run: which questions, once each,
and whose answer is whose. Nothing is timed here: answers are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.road import timing
from shardwright.orchestrator.road.timing import Host, Question, answers, timed
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.unit_errors import UnitFailedError
from shardwright.orchestrator.validation import predict
from shardwright.orchestrator.validation.predict import Predictor, Timed
from shardwright.orchestrator.validation.published import Workload
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.profiles import PROFILES, STALL_RECOVERY, STREAMING, Profile
from shardwright.sim_cluster.timing.faults import NO_FAULTS, Faults
from shardwright.sim_cluster.timing.step_parts import StepParts
from shardwright.sim_cluster.timing.step_time import Step
from shardwright.sim_cluster.timing.timing_unit import Answer
from tests.support import invented_job
from tests.support.published_rows import BERT, GPT, parsed

SLOW = Faults(slow_cores={3: 2.0})
STEP = Step(
    programs={}, schedules=(), mesh={"dp": 32}, target=load_target("trn1n.32xlarge"), instances=1
)
MS = 10**9  # picoseconds


class Asked:
    """Answers question n with n + 1 ms, parts and a trace of that number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.questions: list[Question] = []
        monkeypatch.setattr(module, "answers", self)

    def __call__(self, asked: Sequence[Question], service: object) -> list[Answer]:
        first = len(self.questions)
        self.questions += asked
        return [
            Answer(
                timing=invented_job.timing((first + n) * MS),
                parts=StepParts(functions=(), runs=(), timelines=()),
                trace=b"%d" % (first + n) if q.traced else b"",
            )
            for n, q in enumerate(asked, start=1)
        ]


def test_a_step_is_asked_for_under_every_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the profiles, 1, 2, 3 ms; the host's 500 us are in all of them."""
    asked, service = Asked(monkeypatch, timing), object()
    second = list(PROFILES)[1]
    found = timed(STEP, second, service, traced=True, host=Host(500))
    assert [q.profile for q in asked.questions] == list(PROFILES) and len(PROFILES) == 3
    assert [q.name for q in asked.questions] == [f"step {name}" for name in PROFILES]
    assert [q.traced for q in asked.questions] == [False, True, False]
    assert all(q.step is STEP and q.credit is None for q in asked.questions)
    times = {name: step.step_time_ps for name, step in found.band.items()}
    assert times == dict(zip(PROFILES, (1.5 * MS, 2.5 * MS, 3.5 * MS), strict=True))
    assert found.chosen is found.band[second] and found.healthy is None
    assert found.trace == b"2"
    assert found.chosen.breakdown_ps == {"compute": 2 * MS, "host": MS // 2}
    assert found.chosen.stages_ps == ({"compute": 2 * MS, "host": MS // 2},)
    plain = timed(STEP, second, service)
    assert plain.trace == b"" and plain.chosen.breakdown_ps == {"compute": 5 * MS}


def test_a_host_that_runs_ahead_is_waited_for_only_beyond_the_step() -> None:
    """Of 1.5 ms of the host a step of 1 ms covers 1 ms, one of 2 ms all."""
    assert Host(1500).waited_ps(MS) == 1.5 * MS
    assert Host(1500, ahead=3).waited_ps(MS) == MS // 2
    assert Host(1500, ahead=1).waited_ps(2 * MS) == 0


def test_a_step_with_faults_is_asked_for_without_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the profile that was chosen, after all the others: 4 ms."""
    asked = Asked(monkeypatch, timing)
    step = replace(STEP, faults=SLOW)
    found = timed(step, "peak", object(), host=Host(1000))
    assert [q.step.faults for q in asked.questions] == [SLOW] * 3 + [NO_FAULTS]
    last = asked.questions[-1]
    assert (last.name, last.profile) == ("step peak healthy", "peak")
    assert replace(last.step, faults=SLOW) == step
    assert found.healthy is not None and found.healthy.step_time_ps == 5 * MS
    assert sorted(t.step_time_ps for t in found.band.values()) == [2 * MS, 3 * MS, 4 * MS]


class Service:
    """Answers a unit with its name, or refuses all of them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.units = error, list[WorkUnit]()

    def run(self, units: Sequence[WorkUnit]) -> dict[str, bytes]:
        if self.error:
            raise self.error
        self.units += units
        return {unit.key: unit.name.encode() for unit in reversed(units)}


def test_programs_are_packed_once_however_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come in the order of the questions."""
    packed: list[object] = []
    monkeypatch.setattr(timing, "packed_programs", lambda own: packed.append(own) or {})
    monkeypatch.setattr(timing, "decode_answer", lambda data: data)
    other = replace(STEP, programs={}, mesh={"dp": 16})
    asked = [
        Question(name=name, step=step, profile=profile)
        for name, step, profile in (("a", STEP, "peak"), ("b", STEP, "nominal"), ("c", other, "x"))
    ]
    service: Any = Service()
    assert answers(asked, service) == [b"a", b"b", b"c"]
    assert [own is step.programs for own, step in zip(packed, (STEP, other), strict=True)] == [
        True,
        True,
    ]
    assert [unit.kind for unit in service.units] == ["time"] * 3
    assert len({unit.key for unit in service.units}) == 3
    # Everything that is asked is in the key, the name of the question is not.
    changes: list[dict[str, Any]] = [{"traced": True}, {"credit": PROFILES["peak"]}]
    changes += [{"profile": "conservative"}, {"step": other}, {"name": "again"}]
    answers([replace(asked[0], **change) for change in changes], service)
    known = [unit.key == service.units[0].key for unit in service.units[3:]]
    assert known == [False, False, False, False, True]


def test_a_refusal_is_that_of_who_refused() -> None:
    error = SimulationError("SW_DEAD_CORE", "a core is dead")
    unit = WorkUnit("time", "0" * 64, "step", b"")
    service: Any = Service(UnitFailedError(unit, error))
    with pytest.raises(SimulationError) as raised:
        answers([Question(name="a", step=STEP, profile="peak")], service)
    assert raised.value is error and isinstance(raised.value.__cause__, UnitFailedError)


# Predictions of published runs


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return parsed(tmp_path_factory.mktemp("rows"), BERT).workload


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """The workloads that were built; programs and steps of them are made up."""
    found: list[Workload] = []

    def build(workload: Workload, service: object) -> object:
        found.append(workload)
        return type("Built", (), {"programs": {}})()

    monkeypatch.setattr(predict, "build_workload", build)
    monkeypatch.setattr(predict, "step_of", lambda built, programs: STEP)
    return found


def test_a_prediction_is_made_once_and_kept(
    tmp_path: Path, built: list[Workload], workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two profiles of one run build it once; another run, and the first again, build anew; what is
    stored builds nothing. Answers take 1, 2, 3, ... ms."""
    asked, cache, service = Asked(monkeypatch, predict), Cache(tmp_path), object()
    predictor = Predictor(service, cache)
    nominal, peak = PROFILES["nominal"], PROFILES["peak"]
    wider = replace(workload, hidden=128, host_us=250)
    first = predictor.time(workload, nominal)
    assert first == Timed(1e-3, {"compute": 1.0}, {})
    assert predictor.time(workload, peak).seconds == 2e-3 and built == [workload]
    (question, other) = asked.questions
    assert (question.name, question.profile, question.credit) == (
        "step nominal",
        "nominal",
        nominal,
    )
    assert (question.step, question.traced, other.credit) == (STEP, False, peak)
    assert predictor.time(wider, nominal).seconds == pytest.approx(3.25e-3)  # 250 us of the host
    assert built == [workload, wider] and predictor.time(workload, nominal) == first
    assert len(built) == 2 and (predictor.asked, predictor.stored_s) == (4, [])
    assert dict(cache.tally._new) == {"prediction hits": 1, "prediction misses": 3}
    # Of an answer that another process stored it is known when.
    later = Predictor(service, Cache(tmp_path))
    assert later.time(workload, peak).seconds == 2e-3 and len(built) == 2
    assert (later.asked, len(later.stored_s)) == (1, 1)
    fast = replace(peak, streaming=0.5)
    assert later.time(workload, fast).seconds == 4e-3 and built == [workload, wider, workload]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        b'{"seconds": 1.0, "shares": {}}',
        b'{"seconds": "1", "shares": {}, "busy": {}}',
    ],
    ids=["nothing", "list", "empty", "less", "text"],
)
def test_a_stored_prediction_that_makes_no_sense_is_made_again(
    payload: bytes, tmp_path: Path, built: list[Workload], workload: Workload, monkeypatch: Any
) -> None:
    Asked(monkeypatch, predict)
    cache, profile = Cache(tmp_path), PROFILES["nominal"]
    cache.put(predict.KIND, predict._key(workload, profile), payload)
    predictor = Predictor(object(), cache)
    assert predictor.time(workload, profile).seconds == 1e-3
    assert dict(cache.tally._new) == {"prediction misses": 1} and predictor.stored_s == []
    (kept,) = (s for s in cache.local.files() if s.suffix == ".corrupt")
    assert kept.name is not None and kept.name.kind == "prediction"
    stored = cache.get(predict.KIND, predict._key(workload, profile))
    assert json.loads(stored or b"") == {"seconds": 1e-3, "shares": {"compute": 1.0}, "busy": {}}


def test_what_a_prediction_depends_on(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run, the profile, the machine, the sources, and of the constants those that are not in
    the profile."""
    own = Profile(name="own", streaming=0.9, stall_recovery=0.1)
    key = predict._key(workload, own)
    assert key == predict._key(replace(workload), replace(own))
    assert key != predict._key(replace(workload, layers=3), own)
    assert key != predict._key(workload, replace(own, stall_recovery=0.2))
    known = constants()
    assert {STREAMING, STALL_RECOVERY} < set(known)
    for name, constant in known.items():
        values = {"value": constant.value * 1.5}
        changed = known | {name: replace(constant, **values)}
        monkeypatch.setattr(predict, "constants", lambda changed=changed: changed)
        assert (predict._key(workload, own) == key) is (name in (STREAMING, STALL_RECOVERY)), name
    monkeypatch.setattr(predict, "constants", constants)
    for digests in ("source_digest", "load_target"):
        real = getattr(predict, digests)
        other = "00" if digests == "source_digest" else replace(STEP.target, digest="00")
        monkeypatch.setattr(predict, digests, lambda *_, other=other: other)
        assert predict._key(workload, own) != key, digests
        monkeypatch.setattr(predict, digests, real)
    seen: list[object] = []
    real = predict.source_digest
    monkeypatch.setattr(predict, "source_digest", lambda *what: seen.append(what) or real(*what))
    assert predict._key(workload, own) == key
    assert seen == [(predict.PACKAGES, (".py", ".json"))]


def test_a_run_is_a_job_of_its_own_mesh(tmp_path: Path) -> None:
    """GPT of the rows: 4 x 8 cores on one instance, one micro-batch of one sample a replica times
    as many micro-batches as the row says."""
    run = parsed(tmp_path, GPT)
    job = predict.job_of(run.workload)
    assert (job.cluster.instances, job.cluster.target) == (1, run.workload.target)
    assert job.strategy.micro_batch == 1
    assert job.strategy.global_batch == 8 * run.workload.num_microbatches
