"""Published runs, layouts and serving settings as jobs: what `plan` says of a recipe is what
`validate` says of its run, and what was set up somewhere fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.changes.change import compared
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.config.job_flags import add_job_flags, changed_keys, job_config
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.validation.predict import Predictor, job_of
from shardwright.orchestrator.validation.published import PublishedRun
from shardwright.orchestrator.validation.recipes import (
    Served,
    recipe,
    recipe_names,
    recipe_source,
    trained_recipe,
)
from shardwright.sim_cluster.profiles import fitted_profile
from tests.support.cells import long_in_matrix

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"
QUICK = "vit-base-1n"
RUNS = [name for name in recipe_names() if isinstance(recipe(name), PublishedRun)]
SERVED = [name for name in recipe_names() if isinstance(recipe(name), Served)]
LAYOUTS = [name for name in recipe_names() if name not in (*RUNS, *SERVED)]
SHORT = ("gpt3-6.7b-nemo-1n", "llama-3b-nemo-1n", "llama2-7b-nemo-4n")
"""Without pipeline stages, which make a plan minutes long where micro-batches are many."""


@pytest.mark.parametrize("name", long_in_matrix(RUNS, (QUICK,), {*RUNS} - {QUICK}))
def test_plan_is_validate_to_the_picosecond(name: str) -> None:
    run = trained_recipe(name)
    job = load(None, [f"model.recipe={name}"])
    report = plan_cache.plan(job)
    with unit_service(job, None) as service:
        nominal = fitted_profile("nominal")
        timed = Predictor(service, open_cache(job.cache)).time(run.workload, nominal)
    assert report["timing"]["step_time_s"] == timed.seconds
    total = report["timing"]["step_time_ps"]
    shares = {n: ps / total for n, ps in report["timing"]["breakdown_ps"].items() if ps}
    assert shares == timed.shares
    assert report["timing"]["confidence"].startswith("calibrated on")


@pytest.mark.parametrize("name", long_in_matrix(LAYOUTS, SHORT, {*LAYOUTS} - {*SHORT}))
def test_a_published_layout_fits(name: str) -> None:
    """All of them ran; how long a step of them takes is told as what no run was compared with."""
    report = plan_cache.plan(load(None, [f"model.recipe={name}"]))
    assert report["memory"]["fits"]
    timing = report["timing"]
    assert timing["step_time_s"] > 0 and timing["confidence"] == "extrapolated"


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(
    "name",
    long_in_matrix(SERVED, (), SERVED),
)
def test_published_serving_settings_fit(name: str, mode: str) -> None:
    """Weights and cache of the example lie on its cores."""
    one, report = (
        recipe(name),
        plan_cache.plan(load(None, [f"model.recipe={name}", f"model.mode={mode}"])),
    )
    assert isinstance(one, Served) and report["memory"]["fits"]
    assert report["mesh"] == {"tp": one.tp}
    assert report["batch"]["global_batch"] == one.sequences


@pytest.mark.parametrize("name", SERVED)
def test_a_served_recipe_is_its_example(name: str) -> None:
    one = recipe(name)
    assert isinstance(one, Served) and recipe_source(name)
    job = load(None, [f"model.recipe={name}"])
    task = resolve_task(job)
    assert (job.model.mode, job.cluster.target) == ("decode", one.target)
    assert task.tokens_per_sample == 1 and task.name == one.preset
    assert (job.model.seq_len, job.strategy.global_batch) == (one.context, one.sequences)
    longer = load(None, [f"model.recipe={name}", "model.mode=prefill", "model.seq_len=512"])
    assert resolve_task(longer).tokens_per_sample == 512
    assert f"| `{name}` | {one.preset} | {one.target} |" in PAGE.read_text()
    with pytest.raises(UsageError, match="requires a recipe of training") as refused:
        resolve_task(load(None, [f"model.recipe={name}", "model.mode=train"]))
    assert refused.value.code == "SW_MODE"


@pytest.mark.parametrize("name", [*RUNS, *LAYOUTS])
def test_a_recipe_is_the_job_of_its_run(name: str) -> None:
    run = trained_recipe(name)
    assert not run.unsupported() and recipe_source(name)
    job, own = load(None, [f"model.recipe={name}"]), job_of(run.workload)
    assert layout_of(job) == layout_of(own)
    for table in ("strategy", "mesh", "cluster", "compiler"):
        assert getattr(job, table) == getattr(own, table)
    assert not compared(job).strategy.open_keys  # it says both
    cell = f"| `{name}` | {run.id if isinstance(run, PublishedRun) else run.model} |"
    assert cell in PAGE.read_text(), cell


def test_what_is_said_overrules_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nrecipe = "llama3.1-8b-32n-zero1"\n[strategy]\nremat = "full"\n')
    job = load(path, ["strategy.sequence_parallel=false"])
    own = load(None, ["model.recipe=llama3.1-8b-32n-zero1"])
    assert (job.strategy.remat, own.strategy.remat) == ("full", "none")
    assert not job.strategy.sequence_parallel and own.strategy.sequence_parallel
    assert job.mesh == own.mesh and job.strategy.accumulate_dtype == own.strategy.accumulate_dtype


def test_a_recipe_goes_with_its_tensor_parallel_ranks() -> None:
    """Key-value heads of every rank, and a vocabulary that they divide."""
    job = load(None, ["model.recipe=llama3.1-8b-32n-zero1", "mesh.tp=8", "mesh.dp_shard=128"])
    assert resolve_task(job).tokens_per_sample == 8192
    shorter = load(None, ["model.recipe=llama3.1-8b-32n-zero1", "model.seq_len=1024"])
    assert resolve_task(shorter).tokens_per_sample == 1024


def test_what_a_recipe_cannot_obey_is_refused() -> None:
    for setting in ("model.dtype=float32", "model.optimizer=sgd"):
        with pytest.raises(UsageError, match="a published run"):
            resolve_task(load(None, [f"model.recipe={QUICK}", setting]))
    with pytest.raises(UsageError, match="got 'vit-base'") as refused:
        load(None, ["model.recipe=vit-base"])
    assert QUICK in (refused.value.diagnostic.hint or "")
    keys = "preset, config, entry, hlo, onnx, mxnet, tensorflow, recipe"
    with pytest.raises(UsageError, match=f"exactly one of {keys}"):
        resolve_task(load(None, [f"model.recipe={QUICK}", "model.preset=llama2-7b"]))


def test_a_recipe_has_a_flag_and_gives_way_to_a_model() -> None:
    assert changed_keys("recipe", QUICK) == {"model.recipe": QUICK}
    assert changed_keys("model", "llama2-7b")["model.recipe"] == ""


def test_a_recipe_and_a_model_on_one_command_are_refused(tmp_path: Path) -> None:
    """Neither is dropped in silence; a flag still takes the place of what a file trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", nargs="?", type=Path)
    add_job_flags(parser)
    both = job_config(parser.parse_args(["--model", "llama2-7b", "--recipe", QUICK]))
    with pytest.raises(UsageError, match=r"got \['preset', 'recipe'\]"):
        resolve_task(both)
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\nrecipe = "{QUICK}"\n')
    other = job_config(parser.parse_args([str(path), "--model", "llama2-7b"]))
    assert (other.model.preset, other.model.recipe) == ("llama2-7b", "")
