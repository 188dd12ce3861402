"""Local graphs with collectives, exported: XLA runs them on CPU devices as replicas and gives what
the ops mean.

The expected values are written out over the whole arrays here, independent of the `collectives`
package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.ir.verify import verify
from tests.support import xla
from tests.support.building import Builder

MESH = {"replicate": 2, "shard": 4}
RANKS = 8
Ranks = list[np.ndarray]


def coordinates(rank: int) -> dict[str, int]:
    return {"replicate": rank // 4, "shard": rank % 4}


def group_of(rank: int, axes: Sequence[str]) -> list[int]:
    """Ranks that differ from `rank` only along `axes`, ascending."""
    fixed = {a: c for a, c in coordinates(rank).items() if a not in axes}
    others = (r for r in range(RANKS) if fixed.items() <= coordinates(r).items())
    return list(others)


def graph_of(shape: tuple[int, ...], build: Callable[[Builder, Value], Value]) -> Graph:
    b = Builder()
    x = b.input(shape)
    return verify(b.finish(build(b, x)))


def gathered(x: Ranks, rank: int, axes: Sequence[str], dim: int) -> np.ndarray:
    return np.concatenate([x[r] for r in group_of(rank, axes)], dim)


def summed(x: Ranks, rank: int, axes: Sequence[str]) -> np.ndarray:
    return np.sum([x[r] for r in group_of(rank, axes)], axis=0, dtype=np.float32)


def own_part(x: np.ndarray, rank: int, axes: Sequence[str], dim: int) -> np.ndarray:
    group = group_of(rank, axes)
    return np.split(x, len(group), dim)[group.index(rank)]


def before(rank: int) -> int:
    """The rank in front of `rank` on the ring of its shards."""
    group = group_of(rank, ("shard",))
    return group[group.index(rank) - 1]


RING = ((0, 1), (1, 2), (2, 3), (3, 0))
SHARD, BOTH = ("shard",), ("replicate", "shard")
CASES: dict[str, tuple[Callable[[Builder, Value], Value], Callable[[Ranks, int], np.ndarray]]] = {
    "all_gather": (
        lambda b, x: b.all_gather(x, 0, SHARD, 4),
        lambda x, r: gathered(x, r, SHARD, 0),
    ),
    "all_gather_both": (
        lambda b, x: b.all_gather(x, 1, BOTH, 8),
        lambda x, r: gathered(x, r, BOTH, 1),
    ),
    "all_reduce": (
        lambda b, x: b.all_reduce(x, ("replicate",), 2),
        lambda x, r: summed(x, r, ("replicate",)),
    ),
    "all_reduce_max": (
        lambda b, x: b.all_reduce(x, SHARD, 4, "max"),
        lambda x, r: np.max([x[q] for q in group_of(r, SHARD)], axis=0),
    ),
    "reduce_scatter": (
        lambda b, x: b.reduce_scatter(x, 1, SHARD, 4),
        lambda x, r: own_part(summed(x, r, SHARD), r, SHARD, 1),
    ),
    "all_to_all": (
        lambda b, x: b.all_to_all(x, 1, 0, SHARD, 4),
        lambda x, r: own_part(gathered(x, r, SHARD, 0), r, SHARD, 1),
    ),
    "collective_permute": (
        lambda b, x: b.collective_permute(x, RING, SHARD, 4),
        lambda x, r: x[before(r)],
    ),
    "all_slice": (
        lambda b, x: b.all_slice(x, 1, BOTH, 8),
        lambda x, r: own_part(x[r], r, BOTH, 1),
    ),
    "axis_index": (
        lambda b, x: b.add(x, b.broadcast(b.convert(b.axis_index(SHARD), DType.F32), x.type.shape)),
        lambda x, r: x[r] + np.float32(coordinates(r)["shard"]),
    ),
    "axis_index_both": (
        lambda b, x: b.add(x, b.broadcast(b.convert(b.axis_index(BOTH), DType.F32), x.type.shape)),
        lambda x, r: x[r] + np.float32(r),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_export_runs_as_replicas(name: str) -> None:
    build, expected = CASES[name]
    graph = graph_of((8, 16), build)
    rng = np.random.default_rng(3)
    x = [rng.normal(size=(8, 16)).astype(np.float32) for _ in range(RANKS)]
    results = xla.run_ranks(to_stablehlo(graph, mesh=MESH), [[a] for a in x])
    for rank, (out,) in enumerate(results):
        np.testing.assert_allclose(out, expected(x, rank), rtol=1e-6, atol=1e-6)


def test_collective_inside_a_loop() -> None:
    b = Builder()
    x = b.input((4,))

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        return (inner.all_reduce(carries[0], SHARD, 4),)

    (y,) = b.loop(2, [x], body)
    text = to_stablehlo(verify(b.finish(y)), mesh=MESH)
    inputs = [np.full(4, float(r), np.float32) for r in range(RANKS)]
    results = xla.run_ranks(text, [[a] for a in inputs])
    for rank, (out,) in enumerate(results):
        np.testing.assert_array_equal(out, 4 * summed(inputs, rank, SHARD))
