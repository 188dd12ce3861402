"""Public-style training scripts of PyTorch, unmodified: ten steps on eight and on thirty-two cores
end with the parameters that torch itself has after ten turns of the script's loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers")

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.entry import load_task
from shardwright.compiler.frontend.pytorch.entry import seeded, training_of
from shardwright.compiler.frontend.pytorch.training import loss_module
from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.prepare.reroll import reroll
from shardwright.sharding.settings import StrategySettings
from tests.corpus.programs import check_equal
from tests.support.cells import long_in_matrix
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import captured_graph, split_batch
from tests.support.step_plans import build_plan

FOLDER = Path(__file__).parents[3] / "models" / "torch_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
SAMPLES, STEPS, BOUND = 32, 10, 1e-5
MESHES = {
    "fsdp 8": ("fsdp", {"dp_shard": 8}),
    "fsdp 32": ("fsdp", {"dp_replicate": 2, "dp_shard": 16}),
    "tp 8": ("llm-training", {"dp_shard": 2, "tp": 4}),
    "tp 32": ("llm-training", {"dp_shard": 8, "tp": 4}),
    "pp 8": ("llm-training", {"dp_shard": 4, "pp": 2}),
    "pp 32": ("llm-training", {"dp_shard": 8, "tp": 2, "pp": 2}),
}
CELLS = [(script, mesh) for script in SCRIPTS for mesh in MESHES]
QUICK = [("lstm", "fsdp 8"), ("gpt2", "tp 8"), ("masked_lm", "fsdp 8")]
REFUSED: Mapping[tuple[str, str], str] = {
    ("unet", "pp 8"): "SW_PIPELINE_LAYERS",
    ("unet", "pp 32"): "SW_PIPELINE_LAYERS",
}
"""Cells that are refused -> the code: no two levels of a U-Net are alike, so there is no layer that
repeats and could be cut between."""


@cache
def of_torch(name: str) -> Mapping[str, np.ndarray]:
    """Parameters and buffers after ten turns of the script's own loop, in torch, by the first of
    their names."""
    with seeded():
        made = training_of(_module(name).make())
    loss = loss_module(made).train()
    for _ in range(STEPS):
        made.optimizer.zero_grad()
        loss(made.batch).backward()
        made.optimizer.step()
        if made.scheduler is not None:
            made.scheduler.step()
    found = {**dict(made.module.named_parameters()), **dict(made.module.named_buffers())}
    return {key: value.detach().numpy() for key, value in found.items()}


def _module(name: str) -> object:
    import importlib

    return importlib.import_module(f"tests.models.torch_scripts.{name}")


@cache
def task_of(name: str) -> TrainTask:
    return load_task(f"{name}:make", FOLDER)


@pytest.mark.parametrize(("script", "mesh"), long_in_matrix(CELLS, [], set(CELLS) - set(QUICK)))
def test_ten_steps_are_those_of_torch(script: str, mesh: str) -> None:
    strategy, axes = MESHES[mesh]
    task = task_of(script)
    settings = StrategySettings(name=strategy)
    graph, inputs, outputs = captured_graph(task, SAMPLES)
    rolled = reroll(run(graph, step_passes(DEFAULTS, SAMPLES, False)), inputs, outputs)

    def planned() -> object:
        return build_plan(
            rolled.graph,
            tuple(rolled.inputs),
            tuple(rolled.outputs),
            make_mesh(axes),
            settings=settings,
            unit=answer_request,
        )

    if (script, mesh) in REFUSED:
        with pytest.raises(DiagnosticError, match=REFUSED[script, mesh]):
            planned()
        return
    ranks = ReferenceRanks(planned().step, initial_state(task, 0))
    for batch in itertools.islice(task_batches(task, 0, SAMPLES), STEPS):
        ranks.run_step(split_batch(batch_leaves(batch), SAMPLES))
    state, wanted = initial_state(task, 0), of_torch(script)
    parts = {name: "params" if f"params/{name}" in state else "buffers" for name in wanted}
    have = [ranks.gather(f"{part}/{name}") for name, part in parts.items()]
    assert len(have) > 5
    check_equal(
        have,
        [own.astype(made.dtype) for own, made in zip(wanted.values(), have, strict=True)],
        BOUND,
    )
