"""Conditions of `while` that say in a roundabout way that a counter is below its bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.ir.reference import evaluate
from tests.support.compiled import graph_of, run_levels

X = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
Condition = Callable[[Any], Any]

SCALAR: dict[str, Condition] = {
    "reshaped": lambda i: (i < 5).reshape((1,)).reshape(()),
    "converted": lambda i: (i < 5).astype(jnp.int32).astype(bool),
    "not": lambda i: ~(i >= 5),
    "and": lambda i: jnp.logical_and(i < 5, True),
    "or": lambda i: jnp.logical_or(i < 5, False),
    "both": lambda i: jnp.logical_and(i < 7, i < 5),
    "one always": lambda i: jnp.logical_and(i < 5, i > -3),
    "neither": lambda i: ~jnp.logical_or(i >= 5, i >= 9),
    "xor": lambda i: jnp.logical_xor(i >= 5, True),
    "is 1": lambda i: (i < 5).astype(jnp.int32) == 1,
    "is not 0": lambda i: (i < 5).astype(jnp.int32) != 0,
    "other is 0": lambda i: (i >= 5).astype(jnp.int32) == 0,
    "two turns": lambda i: ~((i >= 5).astype(jnp.int32) != 0),
}
ONE_ELEMENT: dict[str, Condition] = {
    "reshaped": lambda i: (i < 5).reshape(()),
    "indexed": lambda i: (i < 5)[0],
    "any": lambda i: jnp.any(i < 5),
}


def loop(condition: Condition, shape: tuple[int, ...], start: int, step: int) -> Callable[..., Any]:
    def body(carry: Any) -> Any:
        return carry[0] + step, carry[1] * 2 + carry[0]

    first = jnp.full(shape, start, jnp.int32)
    return lambda x: lax.while_loop(lambda c: condition(c[0]), body, (first, x))


def check(fn: Callable[..., Any]) -> None:
    graph, wanted = graph_of(fn, X), jax.jit(fn)(X)
    for outputs in (evaluate(graph, [X]), *run_levels(graph, [X])):
        for have, want in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", SCALAR)
def test_a_scalar_counter(name: str) -> None:
    check(loop(SCALAR[name], (), 0, 1))


@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_a_counter_of_one_element(name: str) -> None:
    check(loop(ONE_ELEMENT[name], (1,), 0, 1))
    check(loop(ONE_ELEMENT[name], (1,), -4, 3))


def test_a_loop_counts_down_from_where_another_ended() -> None:
    def there_and_back(x: jax.Array) -> Any:
        turns, there = loop(lambda i: i < 5, (), 0, 1)(x)
        first = jnp.int32(0), there
        back = lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, c[1] * 0.5), first)
        return turns, back[1]

    check(there_and_back)


@pytest.mark.parametrize(
    ("condition", "got"),
    [
        (lambda i: jnp.logical_and(i > -1, i > -3), "reaches its bound"),
        (lambda i: jnp.logical_or(i < 5, True), "or"),
        (lambda i: (i < 5).astype(jnp.int32) == 2, "a condition on a counter carry"),
    ],
)
def test_other_conditions_are_refused(condition: Condition, got: str) -> None:
    with pytest.raises(ImportRuleError, match=got) as caught:
        graph_of(loop(condition, (), 0, 1), X)
    assert caught.value.code == "NCC_EVRF001"
    assert caught.value.loc is not None and caught.value.loc.file.endswith("conditions.py")
