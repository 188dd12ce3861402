"""Micro-batches of one sample: only steps that take means over samples are traced with a phantom
replica."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.reference import evaluate
from shardwright.sharding.prepare.sample_means import scaled_output
from tests.support.reference_ranks import ReferenceRanks
from tests.support.staged_runs import captured, plan_of
from tests.support.strategy_cells import distribution, random_inputs

Loss = Callable[[jax.Array], jax.Array]


def task(loss: Loss, metric: Loss, rate: Callable[[int], float] = lambda _: 0.1) -> TrainTask:
    """Four layers, a loss of what they give per sample and element, and a second metric."""

    def step(params: dict, opt_state: dict, batch: dict) -> tuple[dict, dict, dict]:
        def of(p: dict) -> jax.Array:
            x = batch["x"]
            for w in p.values():
                x = x + jnp.tanh(x @ w)
            return loss(x)

        value, gradients = jax.value_and_grad(of)(params)
        by = rate(batch["x"].shape[0])
        new = jax.tree.map(lambda p, g: p - by * g, params, gradients)
        return new, opt_state, {"loss": value, "more": metric(batch["x"])}

    state = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in "abcd"}
    return TrainTask(
        step=step,
        state=(state, {}),
        batch=lambda samples: {"x": jax.ShapeDtypeStruct((samples, 12, 8), jnp.float32)},
    )


def squares(x: jax.Array) -> jax.Array:
    return jnp.mean(x * x)


def means() -> TrainTask:
    return task(squares, jnp.mean)


def sums() -> TrainTask:
    return task(jnp.sum, jnp.mean)


def sum_beside_means() -> TrainTask:
    return task(squares, lambda x: jnp.sum(x > 0.0, dtype=jnp.float32))


def rate_per_sample() -> TrainTask:
    return task(squares, jnp.mean, lambda samples: 0.1 / samples)


@pytest.mark.parametrize("make", [means, sums, sum_beside_means, rate_per_sample])
def test_only_means_are_proven(make: Callable[[], TrainTask]) -> None:
    where = scaled_output(captured(make, 2)[0], captured(make, 4)[0])
    assert (where is None) == (make is means)


def test_a_normalized_mean_of_maxima_is_proven() -> None:
    """Sums over samples divided by counts of them, in the step itself; a maximum of a factor."""

    def make() -> TrainTask:
        return task(
            lambda x: jnp.sum(x) / jnp.sum(jnp.ones_like(x)),
            lambda x: jnp.maximum(jnp.sum(x), -jnp.sum(x)) / x.shape[0],
        )

    assert scaled_output(captured(make, 2)[0], captured(make, 4)[0]) is None


@pytest.mark.parametrize("make", [means, sums, sum_beside_means])
@pytest.mark.parametrize("count", [1, 3])
def test_one_sample_is_not_counted_twice(make: Callable[[], TrainTask], count: int) -> None:
    """A step of plain gradient descent is the mean of the user's own steps of one sample."""
    step = plan_of(make, distribution("llm-training", pp=2), count, 1).step
    graph, inputs, outputs = captured(make, 1)
    given = dict(zip((s.name for s in inputs), random_inputs(graph, inputs), strict=True))
    name = next(s.name for s in inputs if s.role == "batch")
    rng = np.random.default_rng(3)
    shape = given[name].shape
    batches = [{name: rng.standard_normal(shape, np.float32)} for _ in range(count)]
    own = [evaluate(graph, list({**given, **batch}.values())) for batch in batches]
    ranks = ReferenceRanks(step, given)
    ranks.run_step(batches)
    for k, slot in enumerate(outputs):
        wanted = np.mean([arrays[k] for arrays in own], axis=0)
        np.testing.assert_allclose(ranks.gather(slot.name), wanted, rtol=1e-5, atol=1e-6)
