"""Layouts that trade axes between dims: every rank ends with the shard its new layout names."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardwright.collectives.algorithms.pairwise import collective_permute
from shardwright.collectives.values.execute import execute
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import CollectivePermuteAttrs, ConstantAttrs, GatherAttrs
from shardwright.compiler.ir.types import tensor_type
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.permutes import permute_pairs, ring_pairs
from shardwright.sharding.partition.shardy import answer_request, partition
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies import INPUT, OUTPUT
from shardwright.sim_cluster.values.exchange import ring_schedules
from tests.support.partitioned import partitioned, run_sharded

MESH = Mesh((("a", 2), ("b", 2), ("c", 3)))
A, B, C = ("a",), ("b",), ("c",)
CASES = {
    "order of axes": ((A + B, ()), (B + A, ())),
    "another axis of its size": ((A, ()), (B, ())),
    "dims trade axes": ((A, B), (B, A)),
    "beside an axis that stays": ((A + C, B), (B + C, A)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_shard_of_the_new_layout(name: str) -> None:
    before, after = CASES[name]
    axes, pairs = permute_pairs(MESH, ShardingSpec(before), ShardingSpec(after))
    assert axes == MESH.order([axis for dim in before + after for axis in dim])
    b = Builder()
    x = b.input((12, 8))
    y = b.collective_permute(x, pairs, axes)
    part = partitioned(b.finish(y), MESH, {x: before, y: after})
    whole = np.arange(96, dtype=np.float32).reshape(12, 8)
    (given,) = run_sharded(part, [whole])
    np.testing.assert_array_equal(given, whole)


ORDERS = {
    "shards": ([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7], (C,), {"collective_permute": 1}),
    "shards over axes out of order": (
        [*range(9, 12), *range(9)],
        (B + A,),
        {"collective_permute": 1},
    ),
    "slices of several shards": ([11, *range(11)], (A,), {"all_gather": 1, "all_slice": 1}),
    "a dim that is whole": ([11, *range(11)], ((), A), {"gather": 1}),
}


@pytest.mark.parametrize("name", ORDERS)
def test_slices_in_another_order_stay_split(name: str) -> None:
    places, dims, wanted = ORDERS[name]
    spec = ShardingSpec((*dims, ()) if len(dims) == 1 else dims)
    b = Builder()
    x = b.input((12, 8))
    indices = ConstantAttrs(np.array(places, np.int32).tobytes(), tensor_type((12,), DType.I32))
    attrs = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, 8),
    )
    graph = b.finish(b.op("gather", x, b.op("constant", attrs=indices), attrs=attrs))
    given = {(INPUT, 0): spec, (OUTPUT, 0): spec}
    slots = (Slot("x", "parameter"),), (Slot("y", "metric"),)
    part = partition(graph, MESH, given, *slots, unit=answer_request)
    kinds = Counter(op.name for op in part.graph.ops)
    assert all(kinds[kind] == count for kind, count in wanted.items()), kinds
    whole = np.arange(96, dtype=np.float32).reshape(12, 8)
    (moved,) = run_sharded(part, [whole])
    np.testing.assert_array_equal(moved, whole[places])


def test_a_ring_moves_every_shard_to_the_next_rank() -> None:
    sources = [np.full(4, r) for r in range(3)]
    given = execute(collective_permute(3, ring_pairs(3)), sources)
    assert [int(g.flat[0]) for g in given] == [2, 0, 1]


def test_the_table_of_a_function_holds_the_pairs() -> None:
    call = CollectiveCall("collective_permute", C, DType.F32, (1, 4, 1), pairs=ring_pairs(3))
    assert ring_schedules(call, 3).pairs == ring_pairs(3)


@pytest.mark.parametrize("pairs", [((0, 1), (1, 1)), ((0, 1),), ((0, 2), (2, 0))])
def test_a_rank_that_would_get_nothing_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    type = tensor_type((4,), DType.F32)
    with pytest.raises(ValueError, match="once as source and once as target"):
        OPS["collective_permute"].infer([type], CollectivePermuteAttrs(("a",), pairs, 2), ())
