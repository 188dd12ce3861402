"""Reductions over ranks of truth values, bits, counts and products: lowered code on four ranks has
what the unsharded step gives, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    reference_step,
    task_batches,
)
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import AllReduceAttrs, ReduceScatterAttrs
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import unit_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.mesh import make_mesh
from tests.support.kernel_reference import lower_function
from tests.support.lowered_ranks import LoweredRanks
from tests.support.road import fsdp_plan, split_batch

WIDTH, RANKS = 8, 4
Metrics = Callable[[Any, Any], dict[str, jax.Array]]


def task(chain: Any, metrics: Metrics) -> TrainTask:
    """A linear model; `metrics` sees the batch and the gradients."""

    def init(key: jax.Array) -> Any:
        params = {"w": jax.random.normal(key, (WIDTH, WIDTH))}
        return params, chain.init(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((batch["x"] @ params["w"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = chain.update(gradients, state, params)
        told = {"loss": value, **metrics(batch, gradients)}
        return optax.apply_updates(params, updates), state, told

    def batches(seed: int, n: int, data: str | None) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        while True:
            x = rng.normal(size=(n, WIDTH)).astype(np.float32)
            yield {"x": x, "n": rng.integers(0, 2**31, (n, WIDTH), np.int32)}

    def batch(n: int) -> Any:
        types = {"x": jnp.float32, "n": jnp.int32}
        return {name: jax.ShapeDtypeStruct((n, WIDTH), t) for name, t in types.items()}

    return TrainTask(step=step, init=init, batch=batch, batches=batches)


def _flags(batch: Any, gradients: Any) -> dict[str, jax.Array]:
    return {
        "finite": jnp.all(jnp.isfinite(batch["x"])),
        "all": jnp.all(batch["x"] > -1, axis=0),
        "any": jnp.any(batch["x"] > 2),
        "some": jnp.any(batch["x"] > 1.5, axis=0),
        "grads": jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)])),
    }


def _bits(batch: Any, gradients: Any) -> dict[str, jax.Array]:
    n, start = batch["n"], jnp.int32
    return {
        "and": jax.lax.reduce(n | 12345, start(-1), jax.lax.bitwise_and, (0,)),
        "or": jax.lax.reduce(n & 12345, start(0), jax.lax.bitwise_or, (0,)),
        "xor": jax.lax.reduce(n, start(0), jax.lax.bitwise_xor, (0,)),
        "product": jnp.prod(n, axis=0),
        "floats": jnp.prod(batch["x"], axis=0),
        "count": jnp.sum(batch["x"] > 0),
        "most": jnp.max(n & 0xFFFF),
    }


def _order(batch: Any, gradients: Any) -> dict[str, jax.Array]:
    return {"median": jnp.median(batch["x"][:, 0]), "first": jnp.argmax(batch["x"][:, 0])}


CASES = {
    "flags": (optax.sgd(0.1), _flags),
    "bits": (optax.sgd(0.1), _bits),
    "order": (optax.sgd(0.1), _order),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.1), 3), lambda b, g: {}),
    "zero_nans": (optax.chain(optax.zero_nans(), optax.sgd(0.1)), lambda b, g: {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reduction_over_ranks_is_that_over_samples(case: str) -> None:
    given = task(*CASES[case])
    plan = fsdp_plan(given, make_mesh({"dp_shard": RANKS}), 2)
    state, batch = initial_state(given, 0), next(task_batches(given, 0, 2 * RANKS))
    ranks = LoweredRanks(plan.step, state)
    ranks.run_step(split_batch(batch_leaves(batch), 2 * RANKS))
    for name, leaf in reference_step(given, state, batch).items():
        np.testing.assert_allclose(ranks.gather(name), leaf, 1e-5, 1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "kind", "moved"),
    [
        (DType.PRED, "and", ("min", DType.F32)),
        (DType.PRED, "or", ("max", DType.F32)),
        (DType.I32, "xor", ("", DType.I32)),
        (DType.I32, "and", ("", DType.I32)),
        (DType.F32, "multiply", ("", DType.F32)),
        (DType.F32, "max", ("max", DType.F32)),
    ],
)
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_what_is_sent(op: str, dtype: DType, kind: str, moved: tuple[str, DType]) -> None:
    b = Builder()
    x, axes = b.input((6, 8, 3), dtype), ("dp_shard",)
    whole = AllReduceAttrs(axes, kind, RANKS)
    attrs = whole if op == "all_reduce" else ReduceScatterAttrs(1, axes, kind, RANKS)
    graph = run(
        b.finish(b.op(op, x, attrs=attrs)),
        unit_passes(CompileOptions(implicit_integer_downcast="none")),
    )
    (call,) = lower_function(graph).collectives
    assert (call.reduction, call.dtype) == moved
    gathers = {"all_reduce": "all_gather", "reduce_scatter": "all_to_all"}
    assert call.kind == (op if moved[0] else gathers[op])
