"""Indices outside of what they index: refused when compiling, counted when running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import CompileError, SimulationError
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.ops.gather import last_starts
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Op
from shardwright.compiler.isa.program import Program
from shardwright.compiler.options import CompileOptions
from shardwright.sim_cluster.instructions.index_watch import IndexWatch
from shardwright.sim_cluster.values.run_single import run_single
from tests.support.compiled import graph_of, link, run_levels

TABLE = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def positions(table: jax.Array) -> jax.Array:
    return table[jnp.arange(9)]


def constants(table: jax.Array) -> jax.Array:
    return table[np.array([0, 8, 2])]


def two_dims(table: jax.Array) -> jax.Array:
    return table[jnp.arange(5), jnp.arange(5)]


def counted_writes(table: jax.Array) -> jax.Array:
    return table.at[jnp.arange(9)].add(1.0)


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        (positions, "NCC_EVRF056", "dim 0 from 0 to 7, got 8"),
        (constants, "NCC_ESMP002", "dim 0 from 0 to 7, got 8"),
        (two_dims, "NCC_EVRF056", "dim 1 from 0 to 2, got 4"),
        (counted_writes, "NCC_EVRF031", "dim 0 from 0 to 7, got 8"),
    ],
)
def test_known_indices_are_checked(function: Callable, code: str, words: str) -> None:
    with pytest.raises(CompileError) as caught:
        graph_of(function, TABLE)
    assert caught.value.code == code and words in caught.value.diagnostic.message
    assert caught.value.loc is not None
    assert caught.value.loc.file.endswith("test_index_checks.py")
    assert caught.value.loc.line == function.__code__.co_firstlineno + 1


def test_known_indices_inside_and_dropped_constants_pass() -> None:
    inside = graph_of(lambda t: t[jnp.arange(8)] + t[-np.arange(8) - 1], TABLE)
    for (have,) in run_levels(inside, [TABLE]):
        np.testing.assert_array_equal(have, TABLE + TABLE[::-1])
    dropped = link(graph_of(lambda t: t.at[np.array([3, 9])].add(1.0, mode="drop"), TABLE))
    for level in ("L0", "L1"):
        have = run_single(dropped, {"arg0": TABLE}, level, IndexWatch(strict=True))["out0"]
        np.testing.assert_array_equal(have, TABLE + (np.arange(8) == 3)[:, None])


def lookup(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index].get(mode="promise_in_bounds")


def points(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index, index].get(mode="promise_in_bounds")


def added(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index].add(1.0, mode="promise_in_bounds")


def placed_once(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index].set(1.0, mode="promise_in_bounds", unique_indices=True)


def largest(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index].max(1.0, mode="promise_in_bounds")


def points_added(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index, index].add(1.0, mode="promise_in_bounds")


def windows_added(table: jax.Array, index: jax.Array) -> jax.Array:
    """Windows of two rows, which overlap: a row number per window and row."""
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    ones = jnp.ones((len(index), 2, 3), jnp.float32)
    return jax.lax.scatter_add(
        table, index[:, None], ones, numbers, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )


INDEXING = [
    *((lookup, "gather", 8), (points, "gather", 3), (added, "scatter", 8)),
    *((placed_once, "scatter", 8), (largest, "scatter", 8), (points_added, "scatter", 3)),
    (windows_added, "scatter", 7),
]


@cache
def linked(function: Callable) -> Program:
    return link(graph_of(function, TABLE, np.zeros(6, np.int32)))


@pytest.mark.parametrize(("function", "access", "room"), INDEXING)
@pytest.mark.parametrize("level", ["L0", "L1"])
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_data_out_of_bounds_is_counted_and_the_run_goes_on(
    function: Callable, access: str, room: int, level: str, data: st.DataObject
) -> None:
    """Once per index, be it of a window of several rows; the values are JAX's."""
    ends = [900, -900, -(2**31), 2**31 - 1]  # what is near 0 and negative counts from the end
    starts = st.integers(0, room + 2) | st.sampled_from(ends)
    unique = function is placed_once
    drawn = data.draw(st.lists(starts, min_size=6, max_size=6, unique=unique))
    index = np.array(drawn, np.int32)
    program, loaded, watch = linked(function), {"arg0": TABLE, "arg1": index}, IndexWatch()
    if access == "gather":
        rows = np.clip(index, 0, 7)
        wanted = TABLE[rows] if function is lookup else TABLE[rows, np.clip(index, 0, 2)]
    else:
        wanted = np.asarray(_expected(function, index, room))
    have = run_single(program, loaded, level, watch)["out0"]
    np.testing.assert_allclose(have, wanted, rtol=1e-6, atol=1e-6)
    wrong = int(((index < 0) | (index >= room)).sum())
    assert len(watch.findings) == (wrong > 0)
    for found in watch.findings:
        said = "1 index lies" if wrong == 1 else f"{wrong} indices lie"
        assert found.severity == "warning" and found.code == "SW_SIM_INDEX"
        assert found.message.startswith(f"{access}: {said} out of bounds")
        assert "failed to run scatter/gather (indirect memory copy)" in found.message
        assert "1006" in found.message
        assert found.loc is not None and found.loc.file.endswith("test_index_checks.py")
        code = function.__code__
        assert code.co_firstlineno < found.loc.line <= code.co_firstlineno + 8
    if wrong:
        with pytest.raises(SimulationError, match=f"{access} requires indices inside") as caught:
            run_single(program, loaded, level, IndexWatch(strict=True))
        assert caught.value.code == "SW_SIM_INDEX" and caught.value.loc == watch.findings[0].loc


def _expected(function: Callable, index: np.ndarray, room: int) -> np.ndarray:
    """What a scatter leaves: updates of wrong indices are dropped."""
    table = TABLE.copy()
    for i in index[(index >= 0) & (index < room)]:
        if function is added:
            table[i] += 1
        elif function is placed_once:
            table[i] = 1
        elif function is largest:
            table[i] = np.maximum(table[i], 1)
        elif function is points_added:
            table[i, i] += 1
        else:
            table[i : i + 2] += 1
    return table


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_data_in_bounds_gives_no_warning(level: str) -> None:
    for function, _, room in INDEXING:
        index = np.array([0, room - 1, 1, 2, 0, 1], np.int32)
        if function is placed_once:
            index = np.array([0, 7, 1, 2, 4, 5], np.int32)
        watch = IndexWatch(strict=True)
        run_single(linked(function), {"arg0": TABLE, "arg1": index}, level, watch)
        assert not watch.findings


@pytest.mark.parametrize("level", ["L0", "L1"])
@pytest.mark.parametrize("function", [lookup, points, added, windows_added])
def test_padding_counts_as_outside(function: Callable, level: str) -> None:
    """A table that ends after five rows, whatever its memory has; by way of the text, too."""
    index = np.array([0, 5, 2, 7, 4, 1], np.int32)
    graph = graph_of(function, TABLE, index)
    (place,) = [n for n, op in enumerate(graph.ops) if op.name in ("gather", "scatter")]
    op = graph.ops[place]
    last = tuple(4 if d == 0 else n for d, n in zip((0, 1), last_starts(op), strict=False))
    padded = Op(
        op.name, op.operands, op.results, replace(op.attrs, last_starts=last), op.regions, op.loc
    )
    ops = (*graph.ops[:place], padded, *graph.ops[place + 1 :])
    graph = import_module(to_stablehlo(with_ops(graph, ops)))
    wrong = (index > 4) | (index > 2) if function is points else index > 4
    watch = IndexWatch()
    out = run_single(link(graph), {"arg0": TABLE, "arg1": index}, level, watch)["out0"]
    assert list(watch.counts.values()) == [int(wrong.sum())]
    if function is lookup:
        np.testing.assert_array_equal(out, TABLE[np.minimum(index, 4)])
    elif function is points:
        np.testing.assert_array_equal(out, TABLE[np.minimum(index, 4), np.minimum(index, 2)])
    else:
        wanted = _expected(function, index[~wrong], 8)
        np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.parametrize(("function", "width"), [(lookup, 3000), (added, 16)])
@pytest.mark.parametrize("level", ["L0", "L1"])
def test_two_physical_cores_count_an_index_once(function: Callable, width: int, level: str) -> None:
    """Cut along columns both look all indices up, cut along indices each some of them."""
    table, index = np.ones((8, width), np.float32), np.array([0, 8, 3, 900, 7], np.int32)
    graph = graph_of(function, table, index)
    program = link(graph, CompileOptions(optlevel=1, lnc=2), "trn2.48xlarge")
    watch = IndexWatch()
    run_single(program, {"arg0": table, "arg1": index}, level, watch)
    assert list(watch.counts.values()) == [2]


def test_integer_and_truth_value_scatters() -> None:
    """Integers go through fp32 when that is permitted; truth values have no sum."""
    index = np.array([0, 7, 3], np.int32)
    counts = np.zeros((300, 40), np.int32)
    graph = graph_of(lambda t, i: t.at[i].add(1), counts, index)
    link(graph)
    with pytest.raises(CompileError) as caught:
        link(graph, CompileOptions(implicit_integer_downcast="none"))
    assert caught.value.code == "NCC_EVRF060"
    flags = np.zeros((300, 40), np.bool_)
    with pytest.raises(CompileError) as caught:
        link(graph_of(lambda t, i: t.at[i].max(True), flags, index))
    assert caught.value.code == "NCC_EVRF016"
