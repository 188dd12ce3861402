"""Checkpointed modules of PyTorch: computed again in the backward pass, with the same values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.entry import load_task
from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.recomputing import layers_of
from shardwright.compiler.frontend.task import TrainTask

FOLDER = Path(__file__).parents[3] / "models" / "torch_distributed"
LAYERS = {f"layers.{n}" for n in range(4)}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files find each other, as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [p.stem for p in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)


def task(function: str = "build", **settings: str) -> TrainTask:
    named = {f"strategy.{name}": value for name, value in settings.items()}
    return load_task(f"trained:{function}", FOLDER, settings=named, ranks=8)


def after_one_step(found: TrainTask) -> list[np.ndarray]:
    assert found.init is not None
    state = found.init(jax.random.key(0))
    (batch,) = [{name: np.arange(8 * 2).reshape(2, 8) % 7 for name in ("tokens", "labels")}]
    keys = [jax.random.key(1)] if len(state) < len(found.state_names) else []
    return [np.asarray(x) for x in jax.tree.leaves(found.step(*state, batch, *keys))]


def checkpoints(found: TrainTask) -> int:
    """How many functions of the step are computed again."""
    shapes = [*(found.state or ()), found.batch(2)]
    text = str(jax.make_jaxpr(found.step)(*shapes, *_key(found)))
    return text.count("checkpoint[") + text.count("remat2[") + text.count("remat[")


def _key(found: TrainTask) -> list[jax.Array]:
    return [] if len(found.state or ()) == 3 else [jax.random.key(0)]


def test_wrappers_and_the_setting_change_no_value() -> None:
    plain = after_one_step(task())
    for found in (task("build_checkpointed"), task(remat="full"), task(remat="selective")):
        again = after_one_step(found)
        for one, other in zip(plain, again, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_layers_are_computed_again() -> None:
    assert checkpoints(task()) == checkpoints(task(remat="none")) == 0
    wrapped, asked = checkpoints(task("build_checkpointed")), checkpoints(task(remat="full"))
    assert wrapped == asked >= len(LAYERS)


def test_the_setting_lies_above_the_wrappers() -> None:
    assert checkpoints(task("build_checkpointed", remat="none")) == 0


def test_distribution_of_the_entry_is_noted() -> None:
    assert any("trained.py" in note and "--from pytorch" in note for note in task().notes)


def test_layers_of_a_model() -> None:
    import torch

    inner, other = ([torch.nn.Linear(2, 2) for _ in range(2)] for _ in range(2))
    blocks = [torch.nn.ModuleDict({"parts": torch.nn.Sequential(*m)}) for m in (inner, other)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks)})
    assert layers_of(model, "full").keys() == {"layers.0", "layers.1"}
    assert {*layers_of(model, "selective").values()} == {Recompute.SELECTIVE}
    assert layers_of(model, "none") == {}
    assert layers_of(torch.nn.Sequential(*inner), "full").keys() == {"0", "1"}


def test_settings_of_other_entries_are_still_refused() -> None:
    with pytest.raises(UsageError, match="requires a function that takes clip"):
        load_task("trained:build", FOLDER, settings={"model.clip": 1.0}, ranks=8)
