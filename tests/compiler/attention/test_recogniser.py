"""Attention is found in every spelling of the corpus, forward and backward, with scores stored or
made again, and nowhere else.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.attention import find_attention
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import PASSES, step_passes
from shardwright.compiler.rewriting.driver import run
from tests.corpus.all_spellings import ALL, NONE, SOME
from tests.corpus.case import SIZES, Spelling
from tests.support.cells import diagonals
from tests.support.compiled import graph_of
from tests.support.road import captured_graph
from tests.support.small_job import small_llama


def counts(graph: Graph) -> Counter[str]:
    return Counter(instance.kind for instance in find_attention(graph))


def graphs(case: Spelling, backward: bool) -> list[Graph]:
    """The case with scores stored, and with scores made again."""
    graph = graph_of(case.gradient if backward else case.fn, *case.arguments())
    forms = (CompileOptions(attention=form) for form in ("fused", "flash"))
    return [run(graph, step_passes(form)) for form in forms]


def check(case: Spelling) -> None:
    for graph in graphs(case, backward=False):
        assert counts(graph) == Counter(forward=case.forward)
    for graph in graphs(case, backward=True):
        assert counts(graph)["backward"] == case.backward


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_a_spelling_is_found(case: Spelling) -> None:
    check(case)


@pytest.mark.parametrize("case", diagonals(ALL, 3), ids=lambda c: c.name)
def test_every_spelling_is_found(case: Spelling) -> None:
    check(case)


@pytest.mark.parametrize("case", NONE, ids=lambda c: c.name)
def test_nothing_else_is_found(case: Spelling) -> None:
    for backward in (False, True):
        assert not any(counts(graph) for graph in graphs(case, backward))


def test_the_corpus_is_large_enough() -> None:
    assert len(ALL) >= 60 and len(NONE) >= 11


def test_an_instance_says_what_and_where() -> None:
    t, s, d = (SIZES[c] for c in "tsd")

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.einsum("td,sd->ts", q, k)) @ k

    graph = run(
        graph_of(attend, np.zeros((t, d), np.float32), np.zeros((s, d), np.float32)), PASSES
    )
    (found,) = find_attention(graph)
    assert (found.kind, found.rows, found.keys) == ("forward", t, s)
    assert found.op.name == "dot_general" and found.level is graph
    assert {v.type.shape for v in found.scores} == {(t, s)}
    scores = [op for op in graph.ops if op.result.type.shape == (t, s)]
    made = {v for op in scores for v in op.results}
    assert set(found.scores) == made


def test_a_training_step_has_one_instance_per_loop_body() -> None:
    graph, _, _ = captured_graph(small_llama(seq_len=12), 2)
    graph = run(graph, step_passes())
    assert counts(graph)["backward"] == 1
    assert 1 <= counts(graph)["forward"] <= 2, "the checkpoint makes the forward part again"
    assert all(i.level is not graph for i in find_attention(graph)), "not the loss head"
