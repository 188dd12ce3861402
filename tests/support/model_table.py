"""The table of small real models: forward and training step, values and figures, as plain rows.

`benchmarks/model_table.py` prints it and writes `docs/models.md`; `tests/system/test_models.py`
holds the values. A model is added by adding it to `MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.options import DEFAULTS
from tests.support import models_index, models_vision
from tests.support.model_run import (
    CompiledFunction,
    Figures,
    compile_function,
    figures,
    jax_results,
    worst_distance,
)
from tests.support.model_zoo import SEQUENCE_MODELS, Model, training_step

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
PARTS = ("forward", "step")
SAMPLES = 2
FP32_BOUND = 1e-5  # docs/numerics.md
BF16_BOUND = 1e-2

Function = tuple[Callable[..., Any], tuple[Any, ...]]
"""What to compile, and its arguments with values."""


def zoo_part(make: Callable[..., Model], part: str, dtype: Any, seed: int) -> Function:
    """A part of a model of `model_zoo`."""
    return arguments(make(dtype=dtype), part, seed)


def index_part(name: str, part: str, dtype: Any, seed: int) -> Function:
    """A part of a model of `models_index`; short types round parameters and floats of the batch."""
    task, loss = models_index.TASKS[name](), models_index.FORWARD[name]
    assert task.batches is not None and task.init is not None
    params, _ = task.init(jax.random.key(seed))
    batch = next(iter(task.batches(seed, SAMPLES, None)))

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def forward(z: Any, batch: Any) -> jax.Array:
        return loss(cast(z), cast(batch)).astype(jnp.float32)

    model = Model(
        name=name,
        init=lambda key: params,
        batch=lambda key: (jax.tree.map(jnp.asarray, batch),),
        forward=forward,
        loss=forward,
    )
    return arguments(model, part, seed)


def vision_part(name: str, part: str, dtype: Any, seed: int) -> Function:
    """A part of a model of `models_vision`."""
    model = models_vision.MODELS[name](dtype=dtype)
    assert model.task.init is not None and model.task.batches is not None
    state = model.task.init(jax.random.key(seed))
    batch = jax.tree.map(jnp.asarray, next(iter(model.task.batches(seed, SAMPLES, None))))
    if part == "forward":
        return model.forward, (model.variables(state), batch["images"])
    return model.task.step, (*state, batch)


Part = Callable[[str, Any, int], Function]
"""Of the part's name, the compute type and the seed of weights and batch."""

MODELS: dict[str, Part] = {
    **{make.__name__: partial(zoo_part, make) for make in SEQUENCE_MODELS},
    **{name: partial(index_part, name) for name in models_index.TASKS},
    **{name: partial(vision_part, name) for name in models_vision.MODELS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model part in one compute type. `errors` per level against fp32 JAX, `bound` what
    docs/numerics.md allows.
    """

    model: str
    part: str
    dtype: str
    errors: dict[str, float]
    bound: float
    figures: Figures

    @property
    def passes(self) -> bool:
        """Whether every level is within the bound."""
        return all(error <= self.bound for error in self.errors.values())


@cache
def compiled_part(
    name: str, part: str, dtype: str, optlevel: int = DEFAULTS.optlevel
) -> CompiledFunction:
    """A part compiled, with the arguments of seed 0."""
    options = replace(DEFAULTS, optlevel=optlevel)
    return compile_function(*MODELS[name](part, DTYPES[dtype], 0), options)


def measure(name: str, part: str, dtype: str, optlevel: int = DEFAULTS.optlevel) -> Row:
    """Compile one part and compare it with the fp32 one of JAX on the same values."""
    compiled = compiled_part(name, part, dtype, optlevel)
    errors, bound = distances(compiled, name, part, dtype, 0)
    return Row(
        model=name,
        part=part,
        dtype=dtype,
        errors=errors,
        bound=bound,
        figures=figures(compiled),
    )


def distances(
    compiled: CompiledFunction,
    name: str,
    part: str,
    dtype: str,
    seed: int,
    levels: Sequence[str] = ("L0", "L1"),
) -> tuple[dict[str, float], float]:
    """Errors per level of a compiled part on the weights and batch of `seed`, and their bound."""
    fn, args = MODELS[name](part, DTYPES[dtype], seed)
    given = replace(compiled, fn=fn, args=args)
    wanted = jax_results(*MODELS[name](part, jnp.float32, seed))
    errors = {level: worst_distance(given.run(level), wanted) for level in levels}
    if dtype == "float32":
        return errors, FP32_BOUND
    return errors, max(BF16_BOUND, worst_distance(given.expected(), wanted))


def arguments(model: Model, part: str, seed: int = 0) -> Function:
    """What to compile for `forward` or `step`, with values."""
    params = model.init(jax.random.key(2 * seed))
    batch = model.batch(jax.random.key(2 * seed + 1))
    if part == "forward":
        return model.forward, (params, *batch)
    init, step = training_step(model)
    return step, (params, _warm(init(params)), *batch)


def _warm(state: Any) -> Any:
    """Optimizer moments as after some steps: at zero, Adam's first update is sign(gradient), which
    turns rounding of tiny gradients into whole steps.
    """

    def moved(path: Any, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf + 10
        rng = np.random.default_rng(len(jax.tree_util.keystr(path)))
        return jnp.asarray(np.abs(rng.normal(1e-2, 1e-3, leaf.shape)), leaf.dtype)

    return jax.tree_util.tree_map_with_path(moved, state)
