"""Slices of global arrays by rank, worked out by hand on a mesh of 2 by 3.

Ranks are row-major: rank 4 is (1, 1), rank 5 is (1, 2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.neff.manifest import NamedBuffer
from shardwright.compiler.neff.schedule import LeafPart
from shardwright.sim_cluster.values import layout

MESH = {"dp": 2, "tp": 3}


def buffer(local: tuple[int, ...], axes: Any, **more: Any) -> NamedBuffer:
    given: dict[str, Any] = {
        "name": "w",
        "role": "param",
        "dtype": DType.F32,
        "local_shape": local,
        "global_shape": local,
        "axes": axes,
        "initial": "",
        "offset_bytes": 0,
    }
    return NamedBuffer(**(given | more))


BOTH = buffer((4, 2), (("dp",), ("tp",)))
ONE_DIM = buffer((4, 2), (("dp", "tp"), ()))


def test_the_mesh_and_the_whole_array() -> None:
    assert layout.sharded_shape(BOTH, MESH) == (8, 6)
    assert layout.sharded_shape(ONE_DIM, MESH) == (24, 2)


def test_where_a_shard_lies() -> None:
    assert layout.shard_slices(BOTH, MESH, 5) == (slice(4, 8), slice(4, 6))
    assert layout.shard_slices(ONE_DIM, MESH, 4) == (slice(16, 20), slice(0, 2))
    assert layout.shard_start(BOTH, MESH, 1) == (0, 2)


def test_a_coordinate_is_the_place_along_its_axes() -> None:
    assert layout.coordinate(buffer((), (("dp", "tp"),)), MESH, 5) == 5
    assert layout.coordinate(buffer((), (("tp",),)), MESH, 5) == 2
    assert layout.coordinate(buffer((), (("tp",), ("dp",))), MESH, 4) == 3  # (tp 1, dp 1)


def test_leaves_of_a_stack_become_one_array() -> None:
    state = {n: np.full((2,), i) for i, n in enumerate("abc")}
    found = layout.stacked(state, {"s": ("c", "a"), "none": ("x", "y")})
    assert {name: array.tolist() for name, array in found.items()} == {
        "b": [1, 1],
        "s": [[2, 2], [0, 0]],
    }
    assert list(state) == ["a", "b", "c"]
    with pytest.raises(SimulationError, match="every one of its leaves, x is not given"):
        layout.stacked(state, {"s": ("a", "x")})
    with pytest.raises(SimulationError, match=r"one shape, got \[\(2,\), \(3,\)\]"):
        layout.stacked({"a": np.zeros(3), "b": np.zeros(2)}, {"s": ("a", "b")})


def part(first: int, size: int) -> NamedBuffer:
    shape = (2, size)
    return buffer(shape, ((), ()), part=LeafPart("leaf", 1, first))


def test_parts_of_a_leaf() -> None:
    leaf = np.arange(12).reshape(2, 6)
    low, high = part(0, 2), part(2, 4)
    assert layout.part_of(high, leaf).tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]
    assert layout.part_of(BOTH, leaf) is leaf
    pieces = [(high, leaf[:, 2:]), (low, leaf[:, :2])]
    assert layout.join_parts(pieces).tolist() == leaf.tolist()
    assert layout.join_parts([(BOTH, leaf), (BOTH, leaf[:1])]) is leaf
    assert layout.check_leaf([low, high], leaf) is leaf
    assert layout.check_leaf([BOTH], leaf) is leaf
    with pytest.raises(SimulationError, match=r"leaf leaf .* shape \[2, 6\], got \[2, 5\]"):
        layout.check_leaf([low, high], leaf[:, :5])


def test_zeros_behind_a_leaf_and_off_again() -> None:
    array = np.arange(1, 5).reshape(2, 2)
    own = buffer((2, 2), ((), ()))
    assert layout.padded(own, array, (3, 2)).tolist() == [[1, 2], [3, 4], [0, 0]]
    assert layout.padded(own, array, (2, 3)).tolist() == [[1, 2, 0], [3, 4, 0]]
    assert layout.padded(own, array, (2, 2)) is array
    assert layout.padded(buffer((1, 2), ((), ())), array, (3, 2)) is array  # no leaf of its shape
    assert layout.cropped(own, np.pad(array, 1, mode="constant")[1:, 1:]).tolist() == [
        [1, 2],
        [3, 4],
    ]


def test_an_array_has_the_shape_and_gets_the_type() -> None:
    found = layout.check_global(BOTH, np.ones((8, 6)), (8, 6))
    assert found.dtype == np.float32
    assert layout.check_global(BOTH, found, (8, 6)) is found  # nothing is copied for nothing
    with pytest.raises(SimulationError, match=r"w \(param\) requires shape \[8, 6\], got \[8, 5\]"):
        layout.check_global(BOTH, np.ones((8, 5)), (8, 6))


def test_micro_batches_are_cut_along_the_longer_dim() -> None:
    """Ranks take 8 by 6 together; 24 by 6 are three of it one way, 8 by 18 the other."""
    batch = buffer((4, 2), (("dp",), ("tp",)), role="batch")
    rows = np.arange(144, dtype=np.float32).reshape(24, 6)
    assert np.array_equal(layout.micro_batch(batch, MESH, rows, 1, 3), rows[8:16])
    columns = rows.reshape(8, 18)
    assert np.array_equal(layout.micro_batch(batch, MESH, columns, 2, 3), columns[:, 12:])
    whole = rows[:8]
    assert np.array_equal(layout.micro_batch(batch, MESH, whole, 0, 1), whole)
    assert np.array_equal(layout.micro_batch(BOTH, MESH, whole, 1, 3), whole)  # no batch
    scalar = buffer((), (), role="batch")
    assert layout.micro_batch(scalar, MESH, np.float32(3), 1, 3) == 3
    for shape in ((8, 6), (16, 6), (24, 7)):
        with pytest.raises(SimulationError, match="requires shape"):
            layout.micro_batch(batch, MESH, np.zeros(shape), 0, 3)
    with pytest.raises(SimulationError, match="requires shape"):
        layout.micro_batch(batch, MESH, rows, 0, 1)


def test_one_of_equal_shards_and_the_array_of_all() -> None:
    """Sharded over dp alone, ranks 0 to 2 hold the first half, 3 to 5 the second."""
    half = buffer((2, 2), (("dp",), ()))
    shards = {rank: np.full(4, rank // 3, np.float32) for rank in range(6)}
    assert list(layout.distinct(half, MESH, shards)) == [0, 3]
    found = layout.gather_array(half, MESH, shards)
    assert found.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]] and found.dtype == np.float32
    shards[4] = shards[4] + 1
    with pytest.raises(SimulationError, match="equal copies on ranks 3 and 4"):
        layout.distinct(half, MESH, shards)
    shards[4] = np.full(4, -0.0, np.float32)
    shards[3] = shards[5] = np.zeros(4, np.float32)
    with pytest.raises(SimulationError, match="ranks 3 and 4"):  # bits, not values
        layout.distinct(half, MESH, shards)
