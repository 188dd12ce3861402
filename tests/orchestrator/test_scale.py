"""Scaling studies: meshes that grow, efficiency, which machine is best from where, the screen, and
the page that is made from the same rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import scaling
from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE
from shardwright.orchestrator.terminal import text_plots
from shardwright.orchestrator.whatif.rows import METRICS, Row
from shardwright.orchestrator.whatif.scale import (
    MODES,
    Study,
    curves,
    mesh_sizes,
    orders,
    points,
    verdicts,
)
from shardwright.orchestrator.whatif.scale_screen import batch_text, show, show_plot, steps_text
from shardwright.sharding.settings import AUTO
from tests.support.small_job import write_job


def test_every_point_of_the_page_fills_its_cluster() -> None:
    """`layout_of` refuses a mesh or a batch that does not go into the cluster."""
    base = scaling.job_of("llama2-7b", "")
    asked = points(
        scaling.study_of(scaling.INSTANCES), base, lambda k: scaling.job_of("llama2-7b", "", k)
    )
    assert len(asked) == len(MODES) * len(scaling.TARGETS) * len(scaling.INSTANCES)
    for point in asked:
        layout = layout_of(point.job)
        assert layout.mesh.num_cores == layout.target.cores * int(point.values["instances"])
        assert point.values["mode"] == "weak" or layout.global_batch == scaling.STRONG_BATCH


@pytest.mark.parametrize(
    ("axes", "cores", "limits", "expected"),
    [
        ({"dp_shard": AUTO}, 64, (0, 0), {"dp_shard": 64}),
        ({"dp_shard": AUTO}, 1024, (256, 0), {"dp_replicate": 4, "dp_shard": 256}),
        ({"dp_shard": AUTO, "tp": 8}, 1024, (256, 0), {"dp_shard": 128, "tp": 8}),
        ({"dp_shard": AUTO}, 1024, (256, 256), {"dp_shard": 256, "tp": 4}),
        ({"dp_shard": AUTO, "tp": 2}, 1024, (0, 128), {"dp_shard": 128, "tp": 8}),
        (
            {"dp_replicate": 4, "dp_shard": AUTO},
            64,
            (2, 32),
            {"dp_replicate": 4, "dp_shard": 8, "tp": 2},
        ),
        ({"dp_shard": 8, "pp": AUTO}, 32, (4, 4), {"dp_shard": 8, "pp": 4}),
    ],
)
def test_the_open_axis_takes_what_others_leave(
    axes: Mapping[str, int], cores: int, limits: tuple[int, int], expected: Mapping[str, int]
) -> None:
    found = mesh_sizes(axes, cores, *limits)
    assert found == expected
    assert math.prod(found.values()) == cores


def odd(key: str, value: object = 0) -> Study:
    return Study(targets=["trn1n.32xlarge", "trn2.48xlarge"], instances=[3, 5], **{key: value})


def test_a_cluster_of_odd_size_has_the_mesh_of_its_plan() -> None:
    """No mesh is named, so that weights that 96 ranks do not divide lie on 32 of them; tensor
    parallelism that a small batch asks for, and copies of 512, are the study's own."""
    base = small({})
    weak = points(odd("modes", ["weak"]), base, small)
    assert not any(any(dataclasses.asdict(point.job.mesh).values()) for point in weak)
    named = points(odd("modes", ["weak"]), small({"mesh.dp_shard": "auto"}), small)
    assert [point.job.mesh.dp_shard for point in named] == [96, 160, 192, 320]
    assert points(odd("most_shards", 32), base, small)[0].job.mesh.dp_replicate == 3
    assert not points(odd("most_shards", 64), base, small)[0].job.mesh.dp_replicate


def test_the_usual_batch_goes_into_every_cluster() -> None:
    """96, 160, 192 and 320 ranks have 960 samples in common; 7 and 11 instances more than 2048."""
    strong = points(odd("modes", ["strong"]), small({}), small)
    assert {layout_of(point.job).global_batch for point in strong} == {960}
    more = dataclasses.replace(odd("modes", ["strong"]), instances=[7, 11])
    assert {p.job.strategy.global_batch for p in points(more, small({}), small)} == {1024}
    asked = points(odd("modes", ["strong"]), small({"strategy.global_batch": 1920}), small)
    assert {layout_of(point.job).global_batch for point in asked} == {1920}


def small(changes: Mapping[str, Any]) -> JobConfig:
    return load(None, ["model.preset=llama2-7b", *(f"{k}={v}" for k, v in changes.items())])


def test_a_mesh_that_cannot_grow_is_refused() -> None:
    study = Study(targets=["trn1.32xlarge"], instances=[1])
    with pytest.raises(UsageError, match="an axis that grows, got dp_shard=32"):
        points(study, small({"mesh.dp_shard": 32}), small)


def row(target: str, count: int, speed: float, cost: float | None, status: str = FITS) -> Row:
    values = {"mode": "weak", "target": target, "instances": str(count)}
    figures = {"tokens_per_s": speed, "usd_per_1e6_tokens": cost, "exposed": 0.31}
    figures["tokens_per_step"] = 4096 * count
    return Row(f"{target}{count}", values, status, metrics={} if status == REFUSED else figures)


def test_efficiency_is_against_the_smallest_cluster_that_fits() -> None:
    rows = [
        row("a", 4, 360.0, 1.0),
        row("a", 1, 50.0, 1.0, TOO_LARGE),
        row("a", 2, 200.0, 1.0),
        row("a", 8, 0.0, None, REFUSED),
    ]
    (curve,) = curves(rows)
    assert list(curve.rows) == [1, 2, 4, 8]
    found = [r.metrics.get("efficiency") for r in curve.rows.values()]
    assert found == [0.5, 1.0, 0.9, None]


def test_break_even_is_among_machines_that_fit_and_are_not_alike() -> None:
    rows = [
        *(row("a", n, 100.0 * n, 1.0) for n in (1, 2, 4, 8)),
        row("b", 1, 500.0, 0.5, TOO_LARGE),
        row("b", 2, 150.0, 1.5),
        row("b", 4, 400.01, 1.0001),
        row("b", 8, 900.0, None),
    ]
    found = curves(rows)
    fastest = [(r.first, r.last, r.order) for r in orders(found, METRICS["tokens_per_s"])]
    assert fastest[0] == (1, 1, (("a",),))
    assert verdicts(found) == {
        "weak, fastest first": ["1: a", "2: a, b", "4: b = a", "8: b, a"],
        "weak, cheapest first": ["1: a", "2: a, b", "4: a = b", "8: a"],
    }
    assert verdicts([curve for curve in found if curve.target == "a"]) == {}


def test_machines_of_one_family_keep_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    targets = ("trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge")
    rows = [row(t, n, 100.0 * n, 1.0 + n) for t in targets for n in (1, 2, 4)]
    show_plot(Console(width=100), curves(rows))
    drawn = capsys.readouterr().out
    assert all(name in drawn for name in ("trn1.2xlarge", "trn1.32xlarge", "trn1n"))


def test_no_figure_of_a_wide_study_is_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines that do not fit beside the others get a table of their own."""
    rows = [
        row(f"trn{i}.48xlarge", n, 1.23e7 * n, 0.000123 * i) for i in (1, 2, 3) for n in (1, 64)
    ]
    show(Console(width=80), curves(rows), JobConfig())
    shown = capsys.readouterr().out
    assert "…" not in shown and all(len(line) <= 80 for line in shown.splitlines())
    assert all(shown.count(cost) == 2 for cost in ("0.000123", "0.000246", "0.000369"))
    assert shown.count("tokens/s  eff") == 3  # two tables: two machines, and one


def test_the_tokens_of_a_step_are_told_by_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """Weak and strong scaling differ in nothing else; a point that is refused has none."""
    weak, refused = [row("a", n, 1.0, 1.0) for n in (1, 4)], row("b", 8, 0.0, None, REFUSED)
    strong = [row("a", 2, 1.0, 1.0)]
    strong[0].values["mode"] = "strong"
    show(Console(width=80), curves([*weak, *strong]), JobConfig())
    assert "\ntokens per step: weak 4,096 to 16,384; strong 8,192\n" in capsys.readouterr().out
    assert steps_text(curves([*weak, refused])) == "tokens per step: weak 4,096 to 16,384"
    assert steps_text(curves([refused])) == ""


def test_the_batch_of_a_job_gives_way_under_weak_scaling(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weak, strong = row("a", 1, 1.0, 1.0), row("a", 2, 1.0, 1.0)
    strong.values["mode"] = "strong"
    given = JobConfig().but({"strategy.global_batch": 1024})
    told = (
        "weak: a step has one micro-batch per data-parallel rank; the 1,024 samples of the job"
        " (strategy.global_batch) count under strong alone"
    )
    assert batch_text(curves([weak, strong]), given) == told
    show(Console(width=200), curves([weak, strong]), given)
    assert f"\n{told}\n" in capsys.readouterr().out
    tokens = JobConfig().but({"strategy.global_batch_tokens": 4096})
    assert "the 4,096 tokens of the job (strategy.global_batch_tokens)" in batch_text(
        curves([weak]), tokens
    )
    assert batch_text(curves([strong]), given) == batch_text(curves([weak]), JobConfig()) == ""


def test_curves_side_by_side_can_be_told_apart() -> None:
    """No legend lies on points of a corner, and every series has its own sign."""
    points = ([1.0, 2.0, 4.0], [4.0, 2.0, 1.0])
    drawn = str(text_plots.dots({"fits": points, "best": ([1.0], [4.0])}, "s", "GiB"))
    *plot, legend = drawn.splitlines()
    assert legend == "• fits   x best"
    body = "".join(plot)
    assert (body.count("•"), body.count("x")) == (2, 1)
    alone = str(text_plots.dots({"fits": points}, "s", "GiB"))
    assert "fits" not in alone and "•" not in alone


@pytest.mark.matrix
def test_a_study_of_two_machines_fits_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--instances", "1,2", "--targets", "trn1.32xlarge,trn1n.32xlarge", "--mode", "weak"]
    command = ["scale", str(write_job(tmp_path)), "--out", str(tmp_path / "out"), *flags]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("files in"))
    assert "  1 to 2: trn1.32xlarge, trn1n.32xlarge" in lines
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "out" / "scale.json").read_text())
    efficiency = [p["metrics"]["efficiency"] for p in told["points"]]
    assert efficiency[0] == efficiency[2] == 1.0 and 0 < efficiency[1] < 1
    cheapest = told["orders"]["weak"]["usd_per_1e6_tokens"]
    order = [["trn1.32xlarge"], ["trn1n.32xlarge"]]
    assert cheapest == [{"first": 1, "last": 2, "order": order}]


@pytest.mark.parametrize("flags", [["--instances", "1,x"], ["--instances", "0"]])
def test_counts_are_numbers(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(write_job(tmp_path)), *flags]) == 2
    assert "--instances requires numbers" in capsys.readouterr().err


def test_the_page_holds_every_row() -> None:
    metrics = {
        "target": "a",
        "mesh": "dp_shard=32",
        "remat": "none",
        "micro_batch": 2,
        **dict.fromkeys(
            ("step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s"), 1.0
        ),
        **dict.fromkeys(("exposed", "mfu", "peak_gib", "usd_per_1e6_tokens"), 0.5),
    }
    values = {"mode": "weak", "target": "a"}
    rows = [
        Row("x", {**values, "instances": "1"}, TOO_LARGE, metrics=metrics),
        Row("y", {**values, "instances": "2"}, REFUSED, "SW_TEST", "why"),
    ]
    text = scaling.page({"model": curves(rows)})
    assert "| 1 | a | dp_shard 32 | none x 2 | 1.000 | 1.000 .. 1.000 |" in text
    assert "0.50 (does not fit)" in text and "| 2 | a | SW_TEST |" in text
