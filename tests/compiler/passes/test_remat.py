"""Quadratic values are made again for far readers: within a level, across loops, behind
checkpoints; nothing else is.

Graphs are traced from JAX code. Values after the pass must be equal bit by bit, because only the
user's own arithmetic is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.traits import ALIASING
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline import outline_programs
from shardwright.compiler.passes.pipeline import (
    REMAT_PASSES,
    REMATERIALISE,
    SAVE_PASSES,
    STEP_PASSES,
    Pass,
    step_passes,
    unit_passes,
)
from shardwright.compiler.passes.remat.groups import Readers
from shardwright.compiler.passes.remat.recipes import Recipes, constant_exprs
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from tests.support.compiled import graph_of

LAYERS, T, HEADS, D = 3, 96, 2, 4  # no two sizes equal: nothing can lean on them
WIDTH = HEADS * D
SCORES = T * T * HEADS


def attention(x: jax.Array, w: dict[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Causal self-attention with a residual connection; dropout when a key is given."""
    q, k, v = (jnp.tanh(x @ w[n]).reshape(T, HEADS, D) for n in "qkv")
    scores = jnp.einsum("thd,shd->hts", q, k) / D**0.5
    p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9))
    if key is not None:
        p = jnp.where(jax.random.bernoulli(key, 0.75, p.shape), p / 0.75, 0.0)
    return x + jnp.einsum("hts,shd->thd", p, v).reshape(T, WIDTH) @ w["o"]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (LAYERS, WIDTH, WIDTH)
    return {n: rng.normal(size=shape).astype(np.float32) / WIDTH**0.5 for n in "qkvo"}


def scanned(w: dict[str, jax.Array], x: jax.Array, layer: Callable = attention) -> jax.Array:
    h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)
    return jnp.sum(h * h)


def unrolled(w: dict[str, jax.Array], x: jax.Array, layer: Callable = attention) -> jax.Array:
    for i in range(LAYERS):
        x = layer(x, {n: a[i] for n, a in w.items()})
    return jnp.sum(x * x)


def dropped(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    keys = jax.random.key_data(jax.random.split(jax.random.key(7), LAYERS))

    def layer(h: jax.Array, wk: tuple) -> tuple[jax.Array, None]:
        return attention(h, wk[0], jax.random.wrap_key_data(wk[1])), None

    h, _ = jax.lax.scan(layer, x, (w, keys))
    return jnp.sum(h * h)


def example() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(T, WIDTH)).astype(np.float32)


def before_and_after(
    loss: Callable, *arguments: object, passes: Sequence[Pass] = REMAT_PASSES
) -> tuple[Graph, Graph]:
    """The gradient graph after the step passes, without and with rematerialisation."""
    graph = run(graph_of(jax.value_and_grad(loss), *arguments), STEP_PASSES)
    return graph, run(graph, passes)


def equal(before: Graph, after: Graph, *arguments: object) -> None:
    arrays = [np.asarray(a) for a in jax.tree.leaves(arguments)]
    for a, b in zip(evaluate(before, arrays), evaluate(after, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def waiting(graph: Graph) -> int:
    """Elements of the largest non-boolean value that crosses a loop border."""
    carried = [v.type for op in graph.walk() if op.name == "loop" for v in op.results]
    return max((t.num_elements for t in carried if t.dtype.value != "i1"), default=0)


@pytest.mark.parametrize("loss", [scanned, dropped], ids=["plain", "dropout"])
def test_no_score_is_stacked_across_a_layer_loop(loss: Callable) -> None:
    before, after = before_and_after(loss, weights(), example())
    assert waiting(before) == LAYERS * SCORES
    assert waiting(after) < SCORES
    assert not any(
        v.type.num_elements >= LAYERS * SCORES for op in after.walk() for v in op.results
    ), "a mask is stacked"
    assert count_ops(after)["dot_general"] == count_ops(before)["dot_general"] + 1
    equal(before, after, weights(), example())


@pytest.mark.parametrize(("short_row", "stacked"), [(T, 0), (T - 1, 6)])
def test_maximum_and_sum_of_a_short_row_are_made_again(short_row: int, stacked: int) -> None:
    """Where rows are long they cross to the backward loop, and a factor of the sum's derivative
    with them, which autograd keeps too.
    """
    rematerialise_short = REMATERIALISE.given(short_row=short_row)
    passes = (rematerialise_short, *REMAT_PASSES[1:])
    before, after = before_and_after(scanned, weights(), example(), passes=passes)
    crossing = {v for op in after.walk() if op.name == "loop" for v in op.results}
    stacks = [v for v in crossing if v.type.num_elements == LAYERS * HEADS * T]
    assert len(stacks) == stacked
    equal(before, after, weights(), example())


def test_a_mask_of_segments_is_made_inside_the_loops() -> None:
    ids = np.repeat(np.arange(T // 24, dtype=np.int32), 24)

    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        legal = jnp.asarray(ids)[:, None] == x[:, 0].astype(int)[None]

        def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            q = jnp.tanh(h @ w["q"])
            p = jax.nn.softmax(jnp.where(legal, q @ q.T, -1e9))
            return h + p @ h @ w["o"], None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    before, after = before_and_after(loss, weights(), example())
    loops = [[op for op in g.walk() if op.name == "loop"] for g in (before, after)]
    carried = [{v.type.shape for op in found for v in op.results} for found in loops]
    assert (T, T) in carried[0] and (T, T) not in carried[1]
    equal(before, after, weights(), example())


def far_reads(graph: Graph) -> int:
    """Score-size values that wait for a reader far behind: longer than a quarter of the graph."""
    position = {op: i for i, op in enumerate(graph.ops)}
    users, free = graph.uses(), constant_exprs(graph)
    last = {v: max(position[u] for u in ops) for v, ops in users.items()}
    computed = (op for op in graph.ops if op.name not in ALIASING)
    return sum(
        last.get(v, 0) - position[op] > len(graph.ops) // 4
        for op in computed
        for v in op.results
        if v.type.num_elements >= SCORES and v not in free
    )


def test_unrolled_layers_get_a_copy_each_and_cse_leaves_it() -> None:
    before, after = before_and_after(unrolled, weights(), example())
    assert far_reads(before) > 0 and far_reads(after) == 0
    contractions = count_ops(before)["dot_general"]
    assert count_ops(after)["dot_general"] == contractions + LAYERS
    again = run(after, REMAT_PASSES)
    assert count_ops(again)["dot_general"] == contractions + LAYERS, "the pass is not stable"
    equal(before, after, weights(), example())


def test_a_checkpointed_layer_makes_scores_again_for_its_backward_part() -> None:
    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return scanned(w, x, jax.checkpoint(wide_attention))

    before, after = before_and_after(loss, weights(), example())
    assert waiting(before) == waiting(after) == LAYERS * T * WIDTH, "only the input is stored"
    assert count_ops(after)["dot_general"] == count_ops(before)["dot_general"] + 1
    equal(before, after, weights(), example())


def wide_attention(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Attention and something nonlinear behind it, so that its output is computed again too."""
    return jnp.tanh(attention(x, w) @ w["o"])


def test_a_copy_survives_into_the_compile_unit() -> None:
    _, graph = before_and_after(unrolled, weights(), example())
    arguments = tuple(f"arg{i}" for i in range(len(graph.inputs)))
    results = tuple(f"out{i}" for i in range(len(graph.outputs)))
    step = StepProgram(name="step", graph=graph, inputs=arguments, outputs=results)
    units = outline_programs((step,)).functions
    made = [run(unit.graph, unit_passes(CompileOptions())) for unit in units]
    assert sum(count_ops(g).get("dot_general", 0) for g in made) == _distinct_dots(units)
    assert not any("optimization_barrier" in count_ops(g) for g in made)


def _distinct_dots(units: object) -> int:
    return sum(count_ops(unit.graph).get("dot_general", 0) for unit in units)


def test_other_attention_forms_keep_their_scores() -> None:
    for form in ("unfused", "fused"):
        assert step_passes(CompileOptions(attention=form)) == STEP_PASSES + SAVE_PASSES


def wide_mlp(w: jax.Array, x: jax.Array) -> jax.Array:
    """Its hidden values are larger than its input, but dear to make again."""
    return jnp.sum((jax.nn.gelu(x @ w) @ w.T) ** 2)


def clipped(w: jax.Array, x: jax.Array) -> jax.Array:
    """A gradient larger than what it is made of, scaled by its own norm, is kept as it is."""
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return g / jnp.sqrt(jnp.vdot(g, g))


def cross_entropy(w: jax.Array, x: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ w))[:, 0])


def graph_after(fn: Callable, *shapes: tuple[int, ...]) -> tuple[Graph, Graph]:
    arguments = [np.zeros(s, np.float32) for s in shapes]
    graph = run(graph_of(fn, *arguments), STEP_PASSES)
    return graph, run(graph, REMAT_PASSES)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (jax.grad(wide_mlp), ((1024, 8192), (64, 1024))),
        (clipped, ((256, 288), (8, 256))),
        (jax.grad(cross_entropy), ((8, 512), (T, 8))),
    ],
    ids=["wide mlp", "clipped gradient", "cross-entropy"],
)
def test_what_does_not_pay_is_left_alone(fn: Callable, shapes: tuple[tuple[int, ...], ...]) -> None:
    before, after = graph_after(fn, *shapes)
    assert count_ops(after) == count_ops(before)


LEGAL = np.abs(np.arange(T) * 7 % T - T // 2)  # a table: positions in an order of their own


def shared_by_heads(ids: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where((ids[:, None] == ids)[None], x, -1e9)


def from_a_table(ids: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jnp.asarray(LEGAL)[:, None] >= jnp.asarray(LEGAL), x, -1e9)


def clipped(ids: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.clip(x, -3.0, 3.0)


def capped(ids: jax.Array, x: jax.Array) -> jax.Array:
    return 5.0 * jnp.tanh(x / 5.0)


def waits_for_a_contraction(graph: Graph) -> list[str]:
    """Ops whose quadratic result, no view, has readers on both sides of a contraction of it."""
    made, free = graph.producers(), constant_exprs(graph)
    large = [v for v in made if v not in free and v.type.num_elements >= T * T]
    values = [v for v in large if made[v].name not in ALIASING]
    readers = Readers(graph, values)
    return [made[v].name for v in readers.values if len(readers.groups(v)) > 1]


@pytest.mark.parametrize("change", [shared_by_heads, from_a_table, clipped, capped])
def test_what_the_backward_pass_wants_of_scores_is_made_there(change: Callable) -> None:
    ids = np.repeat(np.arange(T // 24, dtype=np.int32), 24)
    q, k, v = (np.random.default_rng(i).normal(size=(T, 4, D)).astype(np.float32) for i in range(3))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        p = jax.nn.softmax(change(ids, jnp.einsum("thd,shd->hts", q, k)))
        return jnp.sum(jnp.einsum("hts,shd->thd", p, v) ** 2)

    graph = run(graph_of(jax.grad(loss, (0, 1, 2)), q, k, v, ids), STEP_PASSES)
    after = run(graph, REMAT_PASSES)
    assert waits_for_a_contraction(graph)
    assert not waits_for_a_contraction(after)
    equal(graph, after, q, k, v, ids)


@pytest.mark.parametrize("build", [scanned, unrolled])
def test_what_cannot_pay_is_known_without_a_search(build: Callable) -> None:
    """`may_pay` is false only where `find` has nothing, for whatever is resident or available."""
    graph = run(graph_of(jax.grad(build), weights(), np.zeros((T, WIDTH), np.float32)), STEP_PASSES)
    levels = [graph, *(op.regions[0] for op in graph.ops if op.name == "loop")]
    refused = 0
    for level in levels:
        recipes = Recipes(level)
        values = [v for op in level.ops for v in op.results if v not in recipes.constants]
        for value in (v for v in values if not recipes.may_pay(v)):
            refused += 1
            for resident in (True, False):
                for available in (True, False):
                    found = recipes.find(value, lambda _, r=resident: r, lambda _, a=available: a)
                    assert found is None
    assert refused > 20


def test_a_long_chain_of_cheap_ops_is_followed_to_its_end() -> None:
    """As of a sort of all rows: behind it a figure of short rows is still one."""

    def chained(x: jax.Array, length: int) -> jax.Array:
        low = jnp.max(x, axis=-1)
        for _ in range(length):
            low = jnp.minimum(low, low[::-1])
        return jnp.exp(x - low[:, None])

    rows = np.random.default_rng(3).normal(size=(T, T)).astype(np.float32)
    found = []
    for length in (2, 1500):
        graph = graph_of(lambda x, n=length: chained(x, n), rows)
        recipes = Recipes(graph)
        recipe = recipes.find(graph.outputs[0], lambda _: True, lambda _: False)
        found.append(recipe and [leaf in graph.inputs for leaf in recipe.leaves])
    assert found[0] == found[1]
