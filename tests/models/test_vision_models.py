"""Image models from capture to tile programs: inference at L0 and L1, training steps on one and on
four cores, against JAX. `system/test_models.py` has their functions at both optimization levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.reference import initial_state, reference_step, task_batches
from tests.support.cells import diagonals, long_in_matrix
from tests.support.compiled import FIRST_TILINGS, check_against_jax, graph_of, run_levels
from tests.support.models_vision import MODELS, VisionModel
from tests.support.road import leaf_error, worst
from tests.support.small_job import build_on, bundle_of, run_steps

FP32_BOUND = 1e-5
BATCH = 4
NAMES = sorted(MODELS)


def inference(model: VisionModel) -> tuple[Any, list[np.ndarray]]:
    """(function of flat arguments, arguments): two images first, then the variables."""
    variables = model.variables(model.task.init(jax.random.key(0)))
    leaves, tree = jax.tree.flatten(variables)
    rng = np.random.default_rng(1)
    images = rng.standard_normal(model.images(2).shape).astype(np.float32)

    def forward(images: jax.Array, *leaves: jax.Array) -> jax.Array:
        return model.forward(jax.tree.unflatten(tree, leaves), images)

    return forward, [images, *map(np.asarray, leaves)]


@pytest.mark.parametrize("name", long_in_matrix(NAMES, ["unet"]))
def test_inference(name: str) -> None:
    forward, arguments = inference(MODELS[name]())
    check_against_jax(forward, *arguments, bound=FP32_BOUND)


@pytest.mark.parametrize("name", diagonals(NAMES, 2))
def test_inference_in_bf16(name: str) -> None:
    """Bound by what bf16 costs JAX itself (docs/numerics.md)."""
    forward, arguments = inference(MODELS[name](jnp.bfloat16))
    precise, _ = inference(MODELS[name]())
    want = np.asarray(jax.jit(precise)(*arguments))
    bound = max(1e-2, leaf_error(np.asarray(jax.jit(forward)(*arguments)), want))
    for (have,) in run_levels(graph_of(forward, *arguments), arguments):
        assert leaf_error(have, want) <= bound


def errors_after_a_step(model: VisionModel, cores: int, folder: Path) -> dict[str, float]:
    """Errors per leaf of the state after a step on compiled programs, against fp32 JAX."""
    task = model.task
    mesh = {"dp_shard": cores}
    road = build_on(
        task, mesh, num_microbatches=1, micro_batch=BATCH // cores, options=FIRST_TILINGS
    )
    steps = run_steps(bundle_of(road, folder / "bundle"), task, BATCH)
    want = precise_step(task.name)
    return {name: leaf_error(steps.after_one[name], want[name]) for name in steps.after_one}


def precise_step(name: str, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    """The state after JAX's own step, unsharded."""
    task = MODELS[name](dtype).task
    return dict(reference_step(task, initial_state(task, 0), next(task_batches(task, 0, BATCH))))


@pytest.mark.parametrize(
    ("name", "cores"),
    diagonals([(name, cores) for name in NAMES for cores in (1, 4)], 3),
)
def test_training_step(name: str, cores: int, tmp_path: Path) -> None:
    errors = errors_after_a_step(MODELS[name](), cores, tmp_path)
    assert len(errors) > 40
    assert worst(errors)[1] <= FP32_BOUND, worst(errors)


@pytest.mark.parametrize(
    "name", long_in_matrix(NAMES, ["resnet"], [n for n in NAMES if n != "resnet"])
)
def test_training_step_in_bf16(name: str, tmp_path: Path) -> None:
    """Bound by what bf16 costs JAX itself (docs/numerics.md)."""
    errors = errors_after_a_step(MODELS[name](jnp.bfloat16), 1, tmp_path)
    want, theirs = precise_step(name), precise_step(name, jnp.bfloat16)
    bound = worst({leaf: leaf_error(theirs[leaf], want[leaf]) for leaf in want})[1]
    assert worst(errors)[1] <= max(1e-2, bound), worst(errors)
