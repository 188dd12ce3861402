"""Scores made once for all readers: the same values, and a form that is taken where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.lower.function import SPARE, lower_to_fixpoint
from shardwright.compiler.lower.made_once import made_once

HEADS, ROWS, WIDTH = 2, 128, 8
SCORES = 4 * HEADS * ROWS**2


def twice() -> Graph:
    """Scores of queries and keys for two readers, each of which makes its own, and a product of
    width 8 made twice that does not follow from little.
    """
    b = Builder()
    q, k = b.input((HEADS, ROWS, WIDTH)), b.input((HEADS, ROWS, WIDTH))

    def probabilities(kind: str) -> Value:
        made = b.op("tanh", b.dot(q, k, ((2,), (2,)), ((0,), (0,))))
        return b.reduce(made, kind, (2,))

    def small() -> Value:
        return b.op("tanh", b.dot(q, k, ((1,), (1,)), ((0,), (0,))))

    return b.finish(probabilities("add"), probabilities("max"), small(), small())


def test_only_quadratic_values_become_one() -> None:
    graph = twice()
    made = made_once(graph, SCORES)
    assert made is not None
    rng = np.random.default_rng(4)
    inputs = [rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs]
    for want, have in zip(evaluate(graph, inputs), evaluate(made, inputs), strict=True):
        np.testing.assert_array_equal(want, have)
    shapes = [op.result.type.shape for op in made.ops if op.name == "dot_general"]
    assert sorted(shapes) == sorted([(HEADS, ROWS, ROWS)] + 2 * [(HEADS, WIDTH, WIDTH)])


def test_values_that_are_too_large_to_pass_are_made_again() -> None:
    assert made_once(twice(), SCORES - 1) is None


@dataclass(frozen=True)
class ByContractions:
    """To this oracle a contraction with a large result takes a second, and nothing else does."""

    limit_bytes: int

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        sizes = (
            program.iter_dims[a] for n in program.nodes if n.op == "contract" for a in n.iter_dims
        )
        return sum(size == ROWS for size in sizes) // 2

    searched = __call__


@pytest.mark.parametrize(("limit", "contractions"), [(SPARE * SCORES, 1), (SPARE * SCORES - 1, 2)])
def test_the_faster_form_is_taken_where_memory_allows(limit: int, contractions: int) -> None:
    kernels = lower_to_fixpoint(twice(), oracle=ByContractions(limit)).lowered.kernels
    sizes = [
        [k.iter_dims[a] for a in n.iter_dims]
        for k in kernels
        for n in k.nodes
        if n.op == "contract"
    ]
    assert sum(one.count(ROWS) == 2 for one in sizes) == contractions
