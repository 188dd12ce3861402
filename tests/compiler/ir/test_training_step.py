"""A decoder training step through IR, passes, serialisation and printing, against JAX."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.analysis import count_ops, flops
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.result import distance
from tests.support import xla
from tests.support.graphs import structural_hash

BATCH, TIME, WIDTH, HEADS, LAYERS, VOCAB = 2, 7, 12, 3, 3, 17
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OTHER_ROUNDINGS = 1.5
"""How far the worst leaf of a bf16 step may lie above that of JAX: the same graph rounded at other
places (not fused, or fused otherwise) draws other errors of the same size.
"""


def init() -> dict[str, jax.Array]:
    shapes = {"embed": (VOCAB, WIDTH), "qkv": (LAYERS, WIDTH, 3 * WIDTH)}
    shapes |= {"out": (LAYERS, WIDTH, WIDTH), "up": (LAYERS, WIDTH, 20)}
    shapes |= {"down": (LAYERS, 20, WIDTH), "scale": (LAYERS, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in pairs}


def block(h: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    p = {k: v.astype(h.dtype) for k, v in p.items()}
    wide = h.astype(jnp.float32)
    x = (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(h.dtype) * p[
        "scale"
    ]
    q, k, v = jnp.split((x @ p["qkv"]).reshape(BATCH, TIME, HEADS, -1), 3, -1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / 2.0
    scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores, -1).astype(h.dtype)
    h = h + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(BATCH, TIME, WIDTH) @ p["out"]
    return h + jax.nn.silu(h @ p["up"]) @ p["down"]


def make_step(scanned: bool, dtype: Any) -> Callable[..., Any]:
    def loss_of(params: dict[str, jax.Array], tokens: jax.Array, labels: jax.Array) -> jax.Array:
        h = params["embed"].astype(dtype)[tokens]
        layers = {k: v for k, v in params.items() if k != "embed"}
        if scanned:
            body = jax.checkpoint(lambda h, p: (block(h, p), None))
            h, _ = jax.lax.scan(body, h, layers)
        else:
            for i in range(LAYERS):
                h = jax.checkpoint(block)(h, {k: v[i] for k, v in layers.items()})
        logits = (h @ params["embed"].T.astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: Any, state: Any, tokens: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, labels)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@cache
def captured(scanned: bool, dtype_name: str) -> tuple[Graph, list[np.ndarray], list[np.ndarray]]:
    """The imported graph, its inputs, and what JAX computes."""
    params = init()
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, VOCAB, (2, BATCH, TIME)).astype(np.int32)
    args = (params, OPTIMIZER.init(params), tokens, labels)
    step = jax.jit(make_step(scanned, jnp.dtype(dtype_name)))
    code = io.BytesIO()
    step.lower(*args).compiler_ir("stablehlo").operation.write_bytecode(code)
    graph = verify(import_module(code.getvalue()))
    inputs = [np.asarray(a) for a in jax.tree.leaves(args)]
    return graph, inputs, [np.asarray(a) for a in jax.tree.leaves(step(*args))]


def worst_error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Largest leaf error: norm of the difference over the norm of the reference."""
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        errors.append(distance(a, b))
    return max(errors)


@pytest.mark.parametrize("scanned", [True, False])
def test_fp32_step_equals_jax(scanned: bool) -> None:
    graph, inputs, want = captured(scanned, "float32")
    assert worst_error(evaluate(graph, inputs), want) <= 1e-5
    clean = run(graph, PASSES)
    assert worst_error(evaluate(clean, inputs), want) <= 1e-5
    assert len(list(clean.walk())) < 0.8 * len(list(graph.walk()))
    assert count_ops(clean)["optimization_barrier"] == (1 if scanned else LAYERS)


@pytest.mark.parametrize("scanned", [True, False])
def test_bf16_error_is_that_of_jax(scanned: bool) -> None:
    graph, inputs, theirs = captured(scanned, "bfloat16")
    _, _, exact = captured(scanned, "float32")
    ours = worst_error(evaluate(run(graph, PASSES), inputs), exact)
    assert ours <= max(1e-2, OTHER_ROUNDINGS * worst_error(theirs, exact))


def test_printed_step_runs_in_xla() -> None:
    graph, inputs, want = captured(True, "float32")
    assert worst_error(xla.run(to_stablehlo(run(graph, PASSES)), inputs), want) <= 1e-5


def test_printed_bf16_step_is_as_exact_as_that_of_jax() -> None:
    graph, inputs, theirs = captured(True, "bfloat16")
    _, _, exact = captured(True, "float32")
    ours = worst_error(xla.run(to_stablehlo(run(graph, PASSES)), inputs), exact)
    assert ours <= max(1e-2, OTHER_ROUNDINGS * worst_error(theirs, exact))


def test_serialised_step_is_the_same() -> None:
    graph, inputs, _ = captured(True, "float32")
    copy = verify(load(dump(graph, True)))
    assert structural_hash(copy) == structural_hash(graph)
    assert [op.loc for op in copy.walk()] == [op.loc for op in graph.walk()]
    for a, b in zip(evaluate(copy, inputs), evaluate(graph, inputs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_scanned_and_unrolled_cost_the_same() -> None:
    """Trip counts are honoured: dots dominate, loop bookkeeping is the rest."""
    scanned, unrolled = (flops(run(captured(s, "float32")[0], PASSES)) for s in (True, False))
    assert abs(scanned - unrolled) < 0.05 * unrolled
