"""Gathers and scatters of one window become slices and updates, with the values of both."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.passes import single_windows
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.fold import fold
from shardwright.compiler.passes.simplify import simplify
from tests.support.compiled import graph_of

RNG = np.random.default_rng(3)
INDEXED = {"gather", "scatter", "dynamic_slice", "dynamic_update_slice"}


@pytest.fixture(autouse=True)
def windows_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_windows, "LEAST_BYTES", 0)


def simplified(graph: Graph, at: np.ndarray) -> list[str]:
    """What indexes in the simplified graph, whose values are those of `graph`; `at` is the last
    input.
    """
    inputs = [RNG.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs[:-1]]
    made = dce(simplify(fold(graph)))
    for want, have in zip(
        evaluate(graph, [*inputs, at]), evaluate(made, [*inputs, at]), strict=True
    ):
        np.testing.assert_array_equal(want, have)
    return [op.name for op in made.ops if op.name in INDEXED]


def looked_up(t: jax.Array, e: jax.Array) -> jax.Array:
    """Matrices of one list by the samples' numbers."""
    return t[0].at[e].get(mode="promise_in_bounds")


def replaced(t: jax.Array, e: jax.Array) -> jax.Array:
    """A matrix of each sample's own list."""
    return jax.vmap(lambda one, i: jax.lax.dynamic_update_index_in_dim(one, one[0] * 2, i, 0))(t, e)


def read_and_replaced(t: jax.Array, e: jax.Array) -> jax.Array:
    def one(given: jax.Array, i: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(given, i, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(given, row + 1, i, 0)

    return jax.vmap(one)(t, e)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (looked_up, ["dynamic_slice"]),
        (replaced, ["dynamic_update_slice"]),
        (read_and_replaced, ["dynamic_slice", "dynamic_update_slice"]),
    ],
)
@pytest.mark.parametrize("number", [0, 4, 9])
def test_of_one_sample(function: Callable, wanted: list[str], number: int) -> None:
    """Numbers outside are clamped as before."""
    shapes = [jax.ShapeDtypeStruct((1, 5, 2, 3), "float32"), jax.ShapeDtypeStruct((1,), "uint32")]
    found = simplified(graph_of(function, *shapes), np.array([number], np.uint32))
    assert found == wanted


@pytest.mark.parametrize("function", [looked_up, replaced])
def test_of_several_samples_stay(function: Callable) -> None:
    shapes = [jax.ShapeDtypeStruct((2, 5, 2, 3), "float32"), jax.ShapeDtypeStruct((2,), "uint32")]
    found = simplified(graph_of(function, *shapes), np.array([3, 1], np.uint32))
    assert found and found[-1] in ("gather", "scatter")


GATHER = GatherAttrs(
    offset_dims=(0, 1),
    collapsed_slice_dims=(),
    start_index_map=(1, 0),
    index_vector_dim=0,
    slice_sizes=(2, 3),
)


@pytest.mark.parametrize("at", [(1, 2), (-4, 7), (9, -1)])
def test_an_index_vector_names_dims_in_any_order(at: tuple[int, int]) -> None:
    b = Builder()
    given, index = b.input((4, 6)), b.input((2,), DType.I32)
    graph = b.finish(b.op("gather", given, index, attrs=GATHER))
    assert simplified(graph, np.array(at, np.int32)) == ["dynamic_slice"]


SCATTER = ScatterAttrs(
    update_window_dims=(0, 1),
    inserted_window_dims=(),
    scatter_dims_to_operand_dims=(0, 1),
    index_vector_dim=0,
    kind="replace",
)


def scattered(last: tuple[int, int] | None, kind: str = "replace", least: int = 0) -> Graph:
    """A window of 2 x 3 put into 4 x 6 at an index vector, clamped up to `last`."""
    b = Builder()
    given, update, index = b.input((4, 6)), b.input((2, 3)), b.input((2,), DType.I32)
    at: Value = index
    if last:
        low = b.constant(np.full(2, least), DType.I32)
        at = b.op("clamp", low, index, b.constant(np.array(last), DType.I32))
    attrs = ScatterAttrs(**{n: getattr(SCATTER, n) for n in SCATTER.__slots__} | {"kind": kind})
    return b.finish(b.op("scatter", given, at, update, attrs=attrs))


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        (scattered((2, 3)), "dynamic_update_slice"),
        (scattered(None), "scatter"),  # a window that would leave the operand is dropped
        (scattered((2, 4)), "scatter"),
        (scattered((1, 3)), "scatter"),
        (scattered((2, 3), least=1), "scatter"),
        (scattered((2, 3), "add"), "scatter"),
    ],
)
@pytest.mark.parametrize("at", [(1, 2), (3, 3), (-1, 9), (2, 3)])
def test_only_windows_clamped_to_lie_inside_are_updates(
    graph: Graph, wanted: str, at: tuple[int, int]
) -> None:
    assert simplified(graph, np.array(at, np.int32)) == [wanted]


def test_small_windows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """To set the address takes as long."""
    monkeypatch.undo()
    shapes = [jax.ShapeDtypeStruct((1, 4, 8, 8), "float32"), jax.ShapeDtypeStruct((1,), "int32")]
    graph = graph_of(looked_up, *shapes)
    assert [op.name for op in simplify(graph).ops if op.name in INDEXED] == ["gather"]
