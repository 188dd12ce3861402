"""Conversions in front of transposes: the same values, and a form that is taken where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.lower.function import lower_to_fixpoint
from shardwright.compiler.lower.sink_transposes import sink_transposes

ROWS, WIDTH = 96, 64


def products(second: bool = False) -> Graph:
    """x transposed and then converted, times y; x is converted as it lies for another product,
    before that or after it.
    """
    b = Builder()
    x, y, z = b.input((ROWS, WIDTH)), b.input((ROWS, 32)), b.input((WIDTH, 32))

    def transposed() -> Value:
        short = b.convert(b.transpose(x, (1, 0)), DType.BF16)
        return b.dot(short, b.convert(y, DType.BF16), ((1,), (0,)))

    def straight() -> Value:
        return b.dot(b.convert(x, DType.BF16), b.convert(z, DType.BF16), ((1,), (0,)))

    return b.finish(
        *(make() for make in ((straight, transposed) if second else (transposed, straight)))
    )


@pytest.mark.parametrize("second", [False, True])
def test_a_value_is_converted_once_and_then_transposed(second: bool) -> None:
    graph = products(second)
    made = sink_transposes(graph)
    assert made is not None
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs]
    for want, have in zip(evaluate(graph, inputs), evaluate(made, inputs), strict=True):
        np.testing.assert_array_equal(want, have)
    count = [sum(op.name == "convert" for op in one.ops) for one in (graph, made)]
    assert count == [4, 3]
    (transpose,) = (op for op in made.ops if op.name == "transpose")
    assert transpose.operand.type.dtype is DType.BF16


def test_without_such_a_conversion_there_is_no_other_form() -> None:
    b = Builder()
    x = b.transpose(b.convert(b.input((ROWS, WIDTH)), DType.BF16), (1, 0))
    assert sink_transposes(b.finish(x)) is None


@dataclass(frozen=True)
class Against:
    """An oracle that finds slow what touches a passed tensor of one shape, and, so that something
    is passed, contractions that convert.
    """

    shape: tuple[int, ...]
    limit_bytes: int = 1 << 30

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        views = (n.attrs["view"] for n in program.nodes if "view" in n.attrs)
        passed = [t for t in (tensors[v.tensor] for v in views) if t.kind == "scratch"]
        mixed = {"contract", "convert"} <= {n.op for n in program.nodes}
        return 1 + any(t.shape == self.shape for t in passed) + 10 * mixed

    searched = __call__


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (WIDTH, ROWS)])
def test_the_faster_form_is_taken(shape: tuple[int, int]) -> None:
    b = Builder()
    x, y = b.input((ROWS, WIDTH)), b.input((ROWS, 32), DType.BF16)
    transposed = b.convert(b.transpose(x, (1, 0)), DType.BF16)
    lowered = lower_to_fixpoint(
        b.finish(b.dot(transposed, y, ((1,), (0,)))), oracle=Against(shape)
    ).lowered
    assert [t.shape for t in lowered.tensors if t.kind == "scratch"] == [shape[::-1]]
