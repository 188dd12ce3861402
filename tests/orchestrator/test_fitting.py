"""What the memory decides: which candidates are looked at, in which order, what is said of them,
and that it is the same on every verb."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.diagnostics import (
    CapacityError,
    DiagnosticError,
    InternalError,
    ShardingError,
    UsageError,
)
from shardwright.orchestrator import api
from shardwright.orchestrator.cache.explain import explain
from shardwright.orchestrator.changes.change import as_chosen, compared, fixed
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.compare import compare, side
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.report.tried import auto_text
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.road.fitting import Road, chosen
from shardwright.sharding.settings import AUTO, REMATS, StrategySettings
from tests.support.small_job import write_job

LIMIT = 100
STATE = 10
WAITING = {"none": 30, "selective": 20, "full": 5}
"""Bytes of a sample that wait for the backward pass."""
EXTP = {"code": "NCC_EXTP004", "severity": "warning", "message": "", "hint": ""}
LEFT_OPEN = ("strategy.micro_batch", "strategy.remat")
OPEN = ("strategy.remat=auto", "strategy.micro_batch=auto")


def named(remat: str, size: int) -> int:
    return STATE + WAITING[remat] * size


class Machine:
    """A road that ends at figures: the peak is what is named and `extra` per sample."""

    def __init__(self, samples: int, extra: int = 10, pp: int = 1, refused_from: int = 99) -> None:
        self.samples, self.extra, self.pp, self.refused_from = samples, extra, pp, refused_from
        self.planned: list[tuple[str, int]] = []

    def ready(self, job: JobConfig) -> Any:
        remat, size = job.strategy.remat, job.strategy.micro_batch
        memory = {"parameters": STATE, "activations": WAITING[remat] * size}
        return SimpleNamespace(
            layout=SimpleNamespace(
                num_microbatches=self.samples // size,
                mesh=SimpleNamespace(sizes={"pp": self.pp, "dp_shard": 4}),
                target=SimpleNamespace(limit_bytes=LIMIT),
            ),
            plan=SimpleNamespace(footprint=SimpleNamespace(argument_bytes=memory)),
        )

    def plan(self, job: JobConfig) -> dict[str, Any]:
        remat, size = job.strategy.remat, job.strategy.micro_batch
        self.planned.append((remat, size))
        peak = named(remat, size) + self.extra * size
        return {
            "job": job.as_dict(),
            "resolved": {},
            "memory": {"fits": peak <= LIMIT, "peak_bytes": peak},
            "timing": {"step_time_s": 1.0},
            "findings": [EXTP] if size >= self.refused_from else [],
            "provenance": {"stages_s": {}},
        }

    def chosen(self, *settings: str) -> dict[str, Any]:
        job = load(None, ["model.preset=llama2-7b", *(settings or OPEN)])
        return chosen(job, Road(self.ready, self.plan))


def taken(report: Mapping[str, Any]) -> tuple[str, int]:
    return report["auto"]["remat"], report["auto"]["micro_batch"]


@pytest.mark.parametrize(
    ("samples", "extra", "best"),
    [
        (1, 10, ("none", 1)),  # 10 + 30 + 10
        (2, 10, ("none", 2)),  # 10 + 60 + 20
        (8, 10, ("none", 2)),  # 4 hold 130 under names alone
        (3, 10, ("none", 1)),  # 3 hold 100 and 30: divisors of 3 are 1 and 3
        (8, 65, ("selective", 1)),  # 10 + 20 + 65
        (8, 80, ("full", 1)),  # 10 + 5 + 80
        (8, 1, ("none", 2)),
        (6, 0, ("none", 3)),  # the limit itself fits
    ],
)
def test_the_least_recomputation_then_the_largest_micro_batch(
    samples: int, extra: int, best: tuple[str, int]
) -> None:
    report = Machine(samples, extra).chosen()
    assert taken(report) == best
    fits = {
        (remat, size)
        for remat in REMATS
        for size in range(1, samples + 1)
        if samples % size == 0 and named(remat, size) + extra * size <= LIMIT
    }
    remat = min((remat for remat, _ in fits), key=REMATS.index)
    assert best == (remat, max(size for name, size in fits if name == remat))
    assert report["resolved"]["strategy.remat"]["value"] == best[0]
    assert report["resolved"]["strategy.micro_batch"]["value"] == best[1]
    assert report["job"]["strategy"]["remat"] == "auto"


def test_what_is_named_alone_is_not_compiled() -> None:
    """None of 64 samples: 10 + 30 x 4 is above 100; full: bisection of 1, 2, 4, 8, 16."""
    machine = Machine(64, extra=60)
    report = machine.chosen("strategy.remat=full", "strategy.micro_batch=auto")
    assert taken(report) == ("full", 1)
    assert machine.planned == [("full", 16), ("full", 2), ("full", 1)]
    rows = report["auto"]["tried"]
    assert rows[0] == {
        "remat": "full",
        "micro_batch": 32,
        "status": "does not fit",
        "peak_bytes": 10 + 5 * 32,
        "compiled": False,
        "refused": [],
    }


def test_what_the_vendors_compiler_refuses_is_not_taken() -> None:
    report = Machine(2, refused_from=2).chosen()
    assert taken(report) == ("none", 1)
    text = auto_text(report["auto"], LIMIT)
    told = "not remat none, micro_batch 2: 90 B of 100 B, and neuronx-cc would refuse it"
    assert f"{told}, NCC_EXTP004" in text


def test_where_nothing_fits_the_nearest_is_told() -> None:
    report = Machine(2, extra=200).chosen()
    assert taken(report) == ("full", 1)  # 215, the others 230 and 240
    text = auto_text(report["auto"], LIMIT)
    assert text.startswith("remat full, micro_batch 1 of 2 samples per rank, the nearest: nothing")
    assert report["resolved"]["strategy.remat"]["why"].startswith("the nearest")
    assert text.count("remat full, micro_batch 1") == 1
    assert "remat none, micro_batch 2: 470 B of 100 B" in text


def test_where_everything_is_refused_the_smallest_that_fits_is_taken() -> None:
    """A refusal of the vendor's compiler that no candidate is without decides nothing."""
    report = Machine(2, refused_from=1).chosen()
    assert taken(report) == ("none", 2)
    assert "nearest, though neuronx-cc would refuse it, NCC_EXTP004" in auto_text(
        report["auto"], LIMIT
    )


def test_one_that_is_given_stays() -> None:
    report = Machine(8).chosen("strategy.remat=auto", "strategy.micro_batch=4")
    assert taken(report) == ("full", 4)
    assert list(report["resolved"]) == ["strategy.remat"]
    assert auto_text(report["auto"], LIMIT).startswith("remat full; not remat none: at least 130 B")


@pytest.mark.parametrize(
    ("samples", "pp", "why"),
    [(1, 1, "a rank has one sample per step"), (8, 4, "stages want many micro-batches")],
)
def test_why_there_is_one_size(samples: int, pp: int, why: str) -> None:
    report = Machine(samples, pp=pp).chosen()
    assert taken(report)[1] == 1
    assert report["resolved"]["strategy.micro_batch"]["why"] == why


def test_a_candidate_that_is_refused_is_passed_over() -> None:
    machine = Machine(1)
    plan = machine.plan

    def refusing(job: JobConfig) -> dict[str, Any]:
        if job.strategy.remat == "none":
            raise CapacityError("SW_CAPACITY", "too much")
        return plan(job)

    job = load(None, ["model.preset=llama2-7b", *OPEN])
    report = chosen(job, Road(machine.ready, refusing))
    assert taken(report) == ("selective", 1)
    assert "remat none, micro_batch 1: SW_CAPACITY, too much" in auto_text(report["auto"], LIMIT)


@pytest.mark.parametrize(
    "error", [UsageError("SW_USAGE", "no"), InternalError("SW_INTERNAL", "no")]
)
def test_what_says_nothing_about_a_candidate_is_raised(error: DiagnosticError) -> None:
    """Else a worker that died once would decide."""
    machine = Machine(1)

    def fails(job: JobConfig) -> dict[str, Any]:
        if job.strategy.remat == "none":
            raise error
        return machine.plan(job)

    with pytest.raises(type(error)):
        chosen(load(None, ["model.preset=llama2-7b", *OPEN]), Road(machine.ready, fails))


def test_what_refuses_every_candidate_is_raised() -> None:
    def refuses(_: JobConfig) -> Any:
        raise ShardingError("SW_SHARDING", "no")

    with pytest.raises(ShardingError, match="no"):
        chosen(load(None, ["model.preset=llama2-7b", *OPEN]), Road(refuses, refuses))


def test_a_step_of_ones_own_keeps_its_recomputation() -> None:
    machine = Machine(2)
    job = load(None, ["model.entry=m:f", *OPEN])
    report = chosen(job, Road(machine.ready, machine.plan))
    assert report["resolved"]["strategy.remat"]["value"] == "as the step says"
    assert {remat for remat, _ in machine.planned} == {StrategySettings().remat}
    assert "strategy.remat" not in fixed(job, "full", 1).given
    assert auto_text(report["auto"], LIMIT).startswith("micro_batch 2 of 2 samples per rank")
    given = load(None, ["model.entry=m:f", "strategy.remat=auto"])
    assert sections.laid(sections.auto(chosen(given, Road(machine.ready, machine.plan))), 80) == []


def test_words_and_numbers() -> None:
    settings = load(None, list(OPEN)).strategy
    assert (settings.remat, settings.micro_batch) == ("auto", AUTO)
    assert settings.open_keys == LEFT_OPEN
    assert (settings.frugal.remat, settings.frugal.micro_batch) == (REMATS[-1], 1)
    for value in ("0", "-1"):
        with pytest.raises(UsageError, match="micro_batch requires 1 to"):
            load(None, [f"strategy.micro_batch={value}"])


def test_what_is_compared_is_left_to_the_memory_where_nobody_says() -> None:
    assert compared(load(None)).strategy.open_keys == LEFT_OPEN
    said = compared(load(None, ["strategy.remat=full"]))
    assert said.strategy.open_keys == ("strategy.micro_batch",)
    assert not load(None).strategy.open_keys


# With a small job


def small(folder: Path, cache: Path, **strategy: object) -> Path:
    """A job file of a step of two samples per rank."""
    return write_job(
        folder,
        mesh={"dp_shard": 32},
        strategy={"global_batch": 64, **strategy},
        cache={"dir": str(cache)},
        output={"dir": str(folder / "out")},
    )


LEFT = {"remat": "auto", "micro_batch": "auto"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    folder = tmp_path_factory.mktemp("fitting")
    return load(small(folder, folder / "cache", **LEFT))


@pytest.fixture(scope="module")
def report(job: JobConfig) -> dict[str, Any]:
    return plan_cache.plan(job)


def test_a_plan_is_that_of_the_job_with_what_was_chosen(
    job: JobConfig, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_report(report)
    own = as_chosen(job, report)
    assert (own.strategy.remat, own.strategy.micro_batch) == ("none", 2)
    never = pytest.fail
    monkeypatch.setattr(plan_cache, "_fresh", lambda *_: never("planned again"))
    same = plan_cache.plan(own)
    assert same["timing"] == report["timing"] and same["memory"] == report["memory"]
    again = plan_cache.plan(job)  # stored as the answer to the question
    assert again["provenance"]["stored_s"] > 0
    assert again["provenance"]["plan_key"] == plan_cache.plan_key(job)
    assert plan_cache.plan_key(job) != plan_cache.plan_key(own)
    assert again["auto"] == report["auto"]


def test_a_question_inside_a_process_is_answered_by_its_candidates(job: JobConfig) -> None:
    found = api.plan(job)
    assert found.data["auto"]["remat"] == "none"
    assert "auto       remat none, micro_batch 2 of 2 samples per rank" in repr(found)


def test_what_a_report_holds_is_checked(report: dict[str, Any]) -> None:
    for spoilt in ({"micro_batch": 3}, {"tried": []}, {"remat": 4}):
        with pytest.raises(ValueError, match="auto"):
            check_report(report | {"auto": report["auto"] | spoilt})


def test_the_page_says_what_was_looked_at(report: dict[str, Any]) -> None:
    page = report_page(report)
    assert "Left to the memory: remat none, micro_batch 2 of 2 samples per rank" in page
    assert "none x 2" in page


def test_values_are_run_with_what_was_chosen(job: JobConfig, tmp_path: Path) -> None:
    found = api.run(small(tmp_path, Path(job.cache.dir), **LEFT))
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["auto"]["micro_batch"] == stored["batch"]["micro_batch"] == 2
    assert stored["job"]["strategy"]["remat"] == "auto" and found.exit_code == 0


def test_sides_of_a_comparison_are_what_one_would_run(tmp_path: Path, job: JobConfig) -> None:
    """The file says nothing of either; the other side says one."""
    cache, files = Path(job.cache.dir), []
    for name, said in (("a", {}), ("b", {"remat": "full"})):
        (tmp_path / name).mkdir()
        files.append(small(tmp_path / name, cache, **said))
    first, second = map(side, files)
    assert taken(first) == ("none", 2) and taken(second) == ("full", 2)
    rows = {row["key"]: (row["a"], row["b"]) for row in compare(first, second)["settings"]}
    assert rows["strategy.remat"] == ("none", "full")
    assert "strategy.micro_batch" not in rows


def test_the_cache_explains_what_was_chosen(
    job: JobConfig, report: dict[str, Any], tmp_path: Path
) -> None:
    found = explain(job)
    assert not found.ends and {one.cache for one in found.units} == {"hit"}
    other = small(tmp_path, tmp_path / "cache", **LEFT)
    assert explain(load(other)).ends.startswith("the memory has not decided")


def test_bundles_are_of_what_was_chosen(job: JobConfig, tmp_path: Path) -> None:
    summary = api.compile_only(small(tmp_path, Path(job.cache.dir), **LEFT))
    assert summary.exit_code == 0 and summary.units.compiled == 0


@pytest.mark.matrix
def test_points_are_left_to_the_memory_each_by_itself(job: JobConfig, tmp_path: Path) -> None:
    """Two batches, each with what fits it; the table says what points have."""
    path = small(tmp_path, Path(job.cache.dir))
    asked = ["sweep", str(path), "--vary", "global-batch=32,64", "--json", "--workers", "1"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(asked) == 0
    rows = json.loads(out.getvalue())["points"]
    found = {row["values"]["global-batch"]: row["metrics"] for row in rows}
    assert {(m["remat"], m["micro_batch"]) for m in found.values()} == {("none", 1), ("none", 2)}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([word for word in asked if word != "--json"]) == 0
    shown = out.getvalue()
    assert shown.split()[:2] == ["global-batch", "micro_batch"]
    assert "every point: remat none\n" in shown
