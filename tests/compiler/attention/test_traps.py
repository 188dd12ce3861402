"""The traps of attention by index structure, each with the graph that springs it.

Most are spellings of the corpus by name; the others look at the indexing maps themselves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.attention import find_attention
from shardwright.compiler.attention.indexing_maps import IndexingMaps
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.analysis import count_ops
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.lower.indexing_map import distinct
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import PASSES, step_passes
from shardwright.compiler.rewriting.driver import run
from tests.corpus.all_spellings import CORPUS, NEGATIVES
from tests.corpus.case import Spelling
from tests.support.compiled import check_against_jax, graph_of

T, D = 72, 4


def backward(case: Spelling, form: str = "flash") -> Graph:
    graph = graph_of(case.gradient, *case.arguments())
    return run(graph, step_passes(CompileOptions(attention=form)))


def square(*sizes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=sizes).astype(np.float32) / 2


@pytest.mark.parametrize("name", ["self_attention", "padding_of_rows_and_keys", "values_are_keys"])
def test_rows_and_keys_of_one_value_stay_two_indices(name: str) -> None:
    """Through a contraction, or through a mask of one vector against itself, they would become
    one.
    """
    graph = backward(CORPUS[name])
    maps = IndexingMaps(graph)
    scores = [v for i in find_attention(graph) for v in i.scores]
    assert scores and all(distinct(maps.indexing[v]) for v in scores)


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """From norm to output projection: its scores walk one index twice if uses are not apart."""
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = jnp.split(y @ w, 3, -1)
    return x + jax.nn.softmax(q @ k.T) @ v @ w[:, :D]


def test_a_whole_self_attention_block_keeps_its_values() -> None:
    check_against_jax(block, square(T, D), square(D, 3 * D, seed=1), bound=1e-5, levels=("L1",))


@pytest.mark.parametrize(
    "name", ["moe_router", "norm_and_mlp", "linear_attention", "cross_entropy_by_one_hot"]
)
@pytest.mark.parametrize("form", ["fused", "flash"])
def test_softmax_derivatives_of_something_else(name: str, form: str) -> None:
    assert not find_attention(backward(NEGATIVES[name], form))


def test_a_checkpoint_hides_nothing_and_is_not_undone() -> None:
    case = CORPUS["checkpointed"]
    plain = Spelling("plain", case.fn.__wrapped__, case.shapes)
    graph, without = backward(case, "fused"), backward(plain, "fused")
    kinds = [i.kind for i in find_attention(graph)]
    assert kinds.count("backward") == 1
    assert count_ops(graph)["exponential"] == count_ops(without)["exponential"] + 1


def unit_reduces(graph: Graph) -> int:
    """Sums over nothing but dims of size one."""
    return sum(
        all(op.operands[0].type.shape[d] == 1 for d in op.attrs.dims)
        for op in graph.walk()
        if op.name == "reduce"
    )


def test_sums_over_size_one_are_reshapes() -> None:
    """The softmax derivative inside of a scan writes them, and splits 1 / l."""
    case = CORPUS["scanned"]
    raw = graph_of(case.gradient, *case.arguments())
    assert unit_reduces(raw) and not unit_reduces(run(raw, PASSES[:2]))
    assert [i.kind for i in find_attention(backward(case, "fused"))].count("backward") == 1


def test_bf16_constants_keep_their_bits() -> None:
    wanted = np.asarray(jnp.asarray([0.1, -1e30, 3.0, float("-inf")], jnp.bfloat16))
    text = jax.jit(lambda: jnp.asarray(wanted)).lower().as_text()
    graph = import_module(text)
    (constant,) = (op for op in graph.ops if op.name == "constant")
    np.testing.assert_array_equal(constant.attrs.array().reshape(-1), wanted)
