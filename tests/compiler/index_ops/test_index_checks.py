"""Indices outside of what they index: refused when compiling, counted when running."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError, SimulationError
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
    dropped = graph_of(lambda t: t.at[np.array([3, 9])].add(1.0, mode="drop"), TABLE)
    for (have,) in run_levels(dropped, [TABLE]):
        np.testing.assert_array_equal(have, TABLE + (np.arange(8) == 3)[:, None])


def lookup(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index].get(mode="promise_in_bounds")


def points(table: jax.Array, index: jax.Array) -> jax.Array:
    return table.at[index, index].get(mode="promise_in_bounds")


@pytest.mark.parametrize(("function", "room"), [(lookup, 8), (points, 3)])
def test_data_out_of_bounds_is_counted_and_the_run_goes_on(function: Callable, room: int) -> None:
    index = np.array([0, -20, 2, room - 1, room, 900], np.int32)
    program = link(graph_of(function, TABLE, index))
    given = {"arg0": TABLE, "arg1": index}
    watch = IndexWatch()
    rows = np.clip(index, 0, 7)
    wanted = TABLE[rows] if function is lookup else TABLE[rows, np.clip(index, 0, 2)]
    np.testing.assert_array_equal(run_single(program, given, "L1", watch)["out0"], wanted)
    (found,) = watch.findings
    assert found.severity == "warning" and "gather: 3 indices" in found.message
    assert found.loc is not None and found.loc.file.endswith("test_index_checks.py")
    assert found.loc.line == function.__code__.co_firstlineno + 1
    with pytest.raises(SimulationError) as caught:
        run_single(program, given, "L1", IndexWatch(strict=True))
    assert caught.value.code == "SW_SIM_INDEX" and caught.value.loc == found.loc


def test_data_in_bounds_gives_no_warning() -> None:
    index = np.array([0, 7, 3], np.int32)
    watch = IndexWatch(strict=True)
    run_single(link(graph_of(lookup, TABLE, index)), {"arg0": TABLE, "arg1": index}, "L1", watch)
    assert not watch.findings


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
