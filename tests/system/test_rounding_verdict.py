"""A correct run passes where its step leaves nothing but rounding, with every cast; a wrong one
still fails there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.frontend.reference import initial_state
from shardwright.compiler.ir.sampled import sample
from shardwright.compiler.ir.types import Graph
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.road import numerics
from shardwright.orchestrator.road.numerics import (
    Reference,
    Rounding,
    differences,
    measure_rounding,
    run_unsharded,
)
from tests.support.cells import long_in_matrix
from tests.system import no_means

ENTRY = "tests.system.attention_with_biases:make_task"
BATCH = 8
NO_MEANS = (("make_masked", ""), ("make_batch_norm", ""), ("make_dropout", "from rng are"))
"""Makers of losses that are no means, and what is said of one beyond that."""
CASTS = ("matmult bf16", "matmult fp16", "matmult tf32", "matmult fp8_e4m3", "all tf32")
MATRIX_CASTS = ("matmult fp8_e4m3",)
Leaves = dict[str, np.ndarray]


def run(folder: Path, *settings: str) -> tuple[int, dict[str, Any]]:
    (folder / "job.toml").write_text(
        f"""
        [model]
        entry = "{ENTRY}"
        [cluster]
        target = "trn1.2xlarge"
        [mesh]
        dp_shard = 2
        [strategy]
        global_batch = {BATCH}
        [run]
        steps = 3
        executor = "inline"
        """
    )
    keys = [part for setting in settings for part in ("--set", setting)]
    code = main(["run", str(folder / "job.toml"), "--out", str(folder / "out"), *keys])
    return code, json.loads((folder / "out" / "report.json").read_text())["numerics"]


@pytest.mark.matrix
def test_a_gradient_that_is_zero_passes(tmp_path: Path) -> None:
    """Of the bias of the keys, no digit is the same: 2 of 1 is usual."""
    code, found = run(tmp_path)
    assert code == 0 and found["passed"]
    assert found["rounding"] == {"samples": 3, "times": 4}
    assert found["worst_l0"]["error"] <= found["worst_l0"]["allowed"]


@pytest.mark.parametrize(
    "kind", long_in_matrix(CASTS, MATRIX_CASTS, [c for c in CASTS if c not in MATRIX_CASTS])
)
def test_casts_pass_within_what_they_do(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cast, of = kind.split()
    code, found = run(tmp_path, f"compiler.auto_cast={cast}", f"compiler.auto_cast_type={of}")
    assert code == 0, capsys.readouterr().out
    assert found["worst_param_error"]["error"] > 1e-5


@pytest.mark.matrix
def test_a_cast_that_makes_nan_fails_and_the_cast_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bf16 the decay 0.999 of AdamW is 1, and its correction a division by zero."""
    code, found = run(tmp_path, "compiler.auto_cast=all", "compiler.auto_cast_type=bf16")
    assert code == 72 and not found["passed"]
    leaf = found["worst_param_error"]
    assert leaf["error"] is None and leaf["note"].startswith("nan at [")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("error") and "SW_VALUES" in lines[0]
    told = " ".join(line.strip() for line in lines[1:9])
    assert leaf["leaf"] in told and leaf["note"] in told
    assert "compiler.auto_cast = none" in told


@pytest.mark.parametrize("steps", long_in_matrix((1, 3), (3,), (1,)))
def test_a_step_that_is_no_mean_over_its_micro_batches_is_told_so(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum over the samples: of two micro-batches the mean is half of it."""
    entry = "tests.system.attention_with_biases:make_task_of_a_sum"
    settings = f"model.entry={entry}", "strategy.micro_batch=2", f"run.steps={steps}"
    code, found = run(tmp_path, *settings)
    assert code == 72
    assert found["parts"]["count"] == 2
    assert found["parts"]["mean_loss"] == pytest.approx(found["parts"]["loss"] / 2)
    assert "attention_with_biases.py:" in found["parts"]["place"]
    told = " ".join(line.strip() for line in capsys.readouterr().out.splitlines()[1:6])
    assert "no mean over its samples" in told and "strategy.micro_batch" in told


@pytest.mark.parametrize(
    ("make", "said"),
    long_in_matrix(NO_MEANS, NO_MEANS[1:]),
)
def test_losses_that_are_no_means_are_told_so(
    make: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = f"model.entry=tests.system.no_means:{make}", "strategy.micro_batch=2", "run.steps=1"
    code, found = run(tmp_path, *settings)
    assert code == 72
    assert "no_means.py:" in found["parts"]["place"]
    told = " ".join(line.strip() for line in capsys.readouterr().out.splitlines()[1:8])
    assert "no mean over its samples" in told and said in told
    assert ("Random numbers" in told) is bool(said)


@pytest.fixture(scope="module")
def judged() -> tuple[JobConfig, Reference, Rounding]:
    job = load(None, [f"model.entry={ENTRY}", "run.steps=2"])
    reference = run_unsharded(job, BATCH)
    return job, reference, measure_rounding(job, BATCH, reference, 2)


def without_mean(leaf: np.ndarray) -> np.ndarray:
    """A sum over two ranks instead of their mean."""
    return leaf * 2


def with_shards_swapped(leaf: np.ndarray) -> np.ndarray:
    return np.concatenate([leaf[len(leaf) // 2 :], leaf[: len(leaf) // 2]])


def with_one_rank_scaled(leaf: np.ndarray) -> np.ndarray:
    """One of two ranks counts a tenth too much."""
    return np.concatenate([leaf[: len(leaf) // 2] * np.float32(1.1), leaf[len(leaf) // 2 :]])


def test_the_loss_of_micro_batches_is_that_of_a_mean_and_its_line_is_known(
    judged: tuple[JobConfig, Reference, Rounding],
) -> None:
    _, reference, rounding = judged
    assert rounding.parts is not None and rounding.parts.count == 2
    assert rounding.parts.mean_loss == pytest.approx(reference.losses[0], rel=1e-6)
    assert "attention_with_biases.py:" in rounding.parts.place


def test_the_largest_of_three_draws_counts_and_one_that_is_no_number_does_not(
    judged: tuple[JobConfig, Reference, Rounding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves of NaN, and 1.5 and 2 times as large as they are."""
    job, reference, _ = judged
    factors = {0: np.nan, 1: 1.5, 2: 2.0}

    def drawn(graph: Graph, inputs: list[np.ndarray], seed: int, casts: object) -> list[np.ndarray]:
        return [array * np.float32(factors[seed]) for array in sample(graph, inputs, seed, None)]

    monkeypatch.setattr(numerics, "sample", drawn)
    job = replace(job, run=replace(job.run, steps=1))
    found = measure_rounding(job, BATCH, replace(reference, losses=reference.losses[:1]), 1)
    assert found.leaves["params/out"] == pytest.approx(1.0, rel=1e-3)
    assert found.losses == (pytest.approx(1.0, rel=1e-3),) and found.parts is None


@pytest.mark.parametrize("fault", [without_mean, with_shards_swapped, with_one_rank_scaled])
@pytest.mark.parametrize("name", ["words", "query", "value_bias", "out"])
def test_a_wrong_gradient_is_more_than_rounding(
    name: str,
    fault: Callable[[np.ndarray], np.ndarray],
    judged: tuple[JobConfig, Reference, Rounding],
) -> None:
    _, reference, rounding = judged
    wrong = f"opt_state/0/mu/{name}"
    given = dict(reference.after_one) | {wrong: fault(reference.after_one[wrong])}
    leaf, loss = differences(given, reference.losses, reference, rounding)
    assert leaf.name == wrong and leaf.share > 100
    assert loss.error == 0


def test_a_stale_parameter_and_a_stale_batch_are_more_than_rounding(
    judged: tuple[JobConfig, Reference, Rounding],
) -> None:
    job, reference, rounding = judged
    stale = dict(reference.after_one) | {
        name: leaf
        for name, leaf in initial_state(resolve_task(job), job.run.seed).items()
        if name == "params/out"
    }
    losses = (reference.losses[0], reference.losses[0])
    leaf, loss = differences(stale, losses, reference, rounding)
    assert (leaf.name, loss.name) == ("params/out", "step 2")
    assert leaf.share > 10 and loss.share > 10


def test_metrics_that_are_no_means_are_told_so(tmp_path: Path) -> None:
    settings = (
        "model.entry=tests.system.no_means:make_counted",
        "strategy.micro_batch=2",
        "run.steps=1",
    )
    code, found = run(tmp_path, *settings)
    assert code == 0 and found["passed"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (told,) = [f for f in report["findings"] if f["code"] == "SW_METRIC_PARTS"]
    whole = int(next(no_means.batches(0, BATCH, None))["length"].sum())
    assert told["severity"] == "warning"
    assert f"metrics/valid of the first step is {whole // 2}, the mean over 2" in told["message"]
    assert f"and {whole} of the whole batch" in told["message"]
