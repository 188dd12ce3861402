"""64-bit integers that are taken apart into words: both are right on engines of 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.integers import downcasts
from shardwright.compiler.passes.pipeline import DCE, WORDS
from shardwright.compiler.passes.words import in_words
from shardwright.compiler.rewriting.driver import run
from tests.support.compiled import run_levels

U64, I64, U32, I32 = jnp.uint64, jnp.int64, jnp.uint32, jnp.int32
EDGES = [0, 1, 2, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
PAIRS = np.array([(a, b) for a in EDGES for b in EDGES], np.uint32).T
RANDOM = np.random.default_rng(0).integers(0, 2**32, (2, 47), np.uint64).astype(np.uint32)
WORDS_GIVEN = np.concatenate([PAIRS, RANDOM], 1)
Words = tuple[jax.Array, jax.Array]


def right(x: jax.Array, by: int) -> jax.Array:
    return lax.shift_right_logical(x, jnp.full(x.shape, by, x.dtype))


def left(x: jax.Array, by: int) -> jax.Array:
    return lax.shift_left(x, jnp.full(x.shape, by, x.dtype))


def packed(a: jax.Array, b: jax.Array, dtype: Any = U64) -> jax.Array:
    """Of two words one number."""
    return left(a.astype(dtype), 32) | b.astype(dtype)


def counts(x: jax.Array) -> jax.Array:
    """What is known to fit 32 bits, by way of another type."""
    return (jnp.arange(x.size, dtype=U64).astype(I64) * 3).astype(U64)


def taken(x: jax.Array) -> Words:
    """The words of a number."""
    return x.astype(U32), right(x, 32).astype(U32)


def shifts(x: jax.Array, one: Callable[[jax.Array, int], jax.Array]) -> list[jax.Array]:
    return [word for by in (0, 1, 31, 32, 33, 63) for word in taken(one(x, by))]


def chosen(a: jax.Array, b: jax.Array) -> Words:
    """Through moves of elements, and a choice."""
    x, y = packed(a, b), packed(b, a)
    both = jnp.concatenate([jnp.where(a < b, x, y)[::-1], y[3:90:2]]).reshape(2, -1).T
    return taken(jnp.pad(both, 1, constant_values=np.uint64(2**40 + 3)))


CASES: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "product of words": lambda a, b: taken(a.astype(U64) * b.astype(U64)),
    "product": lambda a, b: taken(packed(a, b) * packed(b, a)),
    "product with a constant": lambda a, b: taken(packed(a, b) * np.uint64(0x9E3779B97F4A7C15)),
    "signed product": lambda a, b: taken(a.astype(I32).astype(I64) * b.astype(I32).astype(I64)),
    "sum": lambda a, b: taken(packed(a, b) + packed(b, a)),
    "sum with a word": lambda a, b: taken(packed(a, b) + b.astype(U64)),
    "sum with a high word": lambda a, b: taken(packed(a, b) + left(b.astype(U64), 32)),
    "product with counts": lambda a, b: taken(packed(a, b) * counts(a)),
    "signed sum": lambda a, b: taken(packed(a, b, I64) + b.astype(I32).astype(I64)),
    "difference": lambda a, b: taken(packed(a, b) - packed(b, a)),
    "signed difference": lambda a, b: taken(b.astype(I32).astype(I64) - packed(a, b, I64)),
    "bits": lambda a, b: taken(~(packed(a, b) ^ packed(b, b)) & packed(b, a)),
    "left": lambda a, b: shifts(packed(a, b), left),
    "right": lambda a, b: shifts(packed(a, b), right),
    "right of signed": lambda a, b: shifts(packed(a, b, I64), right),
    "negative": lambda a, b: taken(-packed(a, b, I64)),
    "other types": lambda a, b: (
        right(packed(a, b), 40).astype(jnp.uint8),
        right(packed(a, b), 16).astype(jnp.int16),
        right(packed(a, b, I64), 33).astype(I32),
        right(packed(a, b).astype(I64).astype(U64), 32).astype(I32),
    ),
    "bitcast": lambda a, b: lax.bitcast_convert_type(packed(a, b), U32),
    "moves": chosen,
}


def graph_of(fn: Callable[..., Any], *arguments: np.ndarray) -> tuple[Graph, list[np.ndarray]]:
    """(graph, results) of a function with 64-bit integers inside."""
    with jax.enable_x64(True):
        graph = import_module(artifact_of(jax.jit(fn).trace(*arguments)))
        return graph, [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*arguments))]


def check(graph: Graph, wanted: list[np.ndarray], inputs: list[np.ndarray]) -> None:
    for found in (evaluate(graph, inputs), *run_levels(graph, inputs)):
        for have, want in zip(found, wanted, strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_64_bits(name: str) -> None:
    inputs = list(WORDS_GIVEN)
    graph, wanted = graph_of(CASES[name], *inputs)
    assert downcasts(graph), "nothing is lost without"
    made = run(graph, (WORDS, DCE))
    assert downcasts(made) == []
    check(made, wanted, inputs)


def test_words_in_a_loop() -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        def body(n: int, x: jax.Array) -> jax.Array:
            return right(x.astype(U64) * b.astype(U64), 32).astype(U32) + x

        return lax.fori_loop(0, 9, body, a)

    inputs = list(WORDS_GIVEN)
    graph, wanted = graph_of(step, *inputs)
    made = run(graph, (WORDS, DCE))
    assert any(op.regions for op in made.ops) and downcasts(made) == []
    check(made, wanted, inputs)


UNCHANGED: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "counts": (lambda a: right(jnp.arange(a.size, dtype=U64), 32).astype(U32) + a, [RANDOM[0]]),
    "low words": (lambda a, b: (a.astype(U64) * b.astype(U64)).astype(U32), list(RANDOM)),
    "inputs": (lambda a: right(a, 32).astype(U32), [RANDOM[0].astype(np.uint64)]),
    "floats": (lambda a: right(a.astype(I64), 32).astype(I32), [np.ones(5, np.float32)]),
    "remainders": (
        lambda a, b: right(packed(a, b) % np.uint64(3**30), 32).astype(U32),
        list(RANDOM),
    ),
    "unknown shifts": (
        lambda a, b: lax.shift_right_logical(packed(a, b), b.astype(U64)).astype(U32),
        list(RANDOM),
    ),
}
"""What fits 32 bits as it is, and what has words that do not follow from words."""


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_integers_are_left_alone(name: str) -> None:
    fn, inputs = UNCHANGED[name]
    graph, _ = graph_of(fn, *inputs)
    assert in_words(graph) is graph
    assert bool(downcasts(graph)) == (name != "counts")
