"""The table of small real models: forward and training step, values and figures, as plain rows.

`benchmarks/model_table.py` prints it and writes `docs/models.md`; `tests/system/test_models.py`
holds the values. A model is added by adding it to `MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.model_run import (
    Figures,
    compile_function,
    figures,
    jax_results,
    worst_distance,
)
from tests.support.model_zoo import SEQUENCE_MODELS, Model, training_step

MODELS: tuple[Callable[..., Model], ...] = SEQUENCE_MODELS
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
PARTS = ("forward", "step")
FP32_BOUND = 1e-5  # docs/numerics.md
BF16_BOUND = 1e-2


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


def measure(
    make: Callable[..., Model], part: str, dtype: str, levels: tuple[str, ...] = ("L0", "L1")
) -> Row:
    """Compile one part and compare it with the fp32 step of JAX on the same values."""
    model, exact = make(dtype=DTYPES[dtype]), make()
    compiled = compile_function(*arguments(model, part))
    wanted = jax_results(*arguments(exact, part))
    errors = {level: worst_distance(compiled.run(level), wanted) for level in levels}
    bound = FP32_BOUND
    if dtype != "float32":
        bound = max(BF16_BOUND, worst_distance(compiled.expected(), wanted))
    return Row(
        model=model.name,
        part=part,
        dtype=dtype,
        errors=errors,
        bound=bound,
        figures=figures(compiled),
    )


def arguments(model: Model, part: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to compile for `forward` or `step`, with values."""
    params = model.init(jax.random.key(0))
    batch = model.batch(jax.random.key(1))
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
