"""Localized graphs over reference ranks mean what the global graph means; what cannot be local is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import GatherAttrs, PadAttrs, ReverseAttrs, ScatterAttrs
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.ir.verify import verify
from shardwright.sharding.localize import localize
from shardwright.sharding.localize.context import localizes
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph
from tests.support.building import Builder
from tests.support.partitioned import partitioned, run_global, run_sharded

DP = make_mesh({"dp_shard": 4})
HSDP = make_mesh({"dp_replicate": 2, "dp_shard": 2})
S, R = ("dp_shard",), ("dp_replicate",)
RS = R + S
N = ()
LOC = Loc("model.py", 41)
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def check(part: PartitionedGraph, inputs: Sequence[np.ndarray]) -> Graph:
    """Sharded equals unsharded; returns the local graph."""
    local = localize(part).graph
    verify(local)
    expected = run_global(part.graph, inputs)
    for given_, wanted in zip(run_sharded(part, inputs), expected, strict=True):
        np.testing.assert_allclose(given_, wanted, rtol=1e-6, atol=1e-6)
    return local


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.walk()]


def test_constants_and_iota_take_the_rank_into_account() -> None:
    b = Builder()
    x = b.input((8, 6))
    dense = b.constant(np.arange(48, dtype=np.float32).reshape(8, 6))
    count = b.convert(b.iota((8, 6), 0), DType.F32)
    along = b.convert(b.iota((8, 6), 1), DType.F32)
    ints = [v for op in b.ops if op.name == "iota" for v in op.results]
    one = b.full((8, 6), 1.0)
    steps = [b.add(x, dense)]
    for other in (count, along, one):
        steps.append(b.multiply(steps[-1], other))
    part = partitioned(
        b.finish(steps[-1]), DP, dict.fromkeys([x, dense, count, along, one, *ints, *steps], (S, N))
    )
    local = check(part, [floats(8, 6)])
    assert names(local).count("axis_index") == 1
    assert {op.result.type.shape for op in local.ops if op.name == "constant"} >= {(2, 6), (8, 6)}


def test_sharded_on_two_axes_in_mesh_order() -> None:
    b = Builder()
    x = b.input((8, 4))
    sliced = b.all_slice(x, 0, RS)
    count = b.iota((8, 4), 0)
    converted = b.convert(count, DType.F32)
    moved = b.multiply(sliced, converted)
    half = b.all_gather(moved, 0, S)
    whole = b.all_gather(half, 0, R)
    part = partitioned(
        b.finish(moved, half, whole),
        HSDP,
        {sliced: (RS, N), count: (RS, N), converted: (RS, N), moved: (RS, N), half: (R, N)},
    )
    local = check(part, [floats(8, 4)])
    assert [op.attrs.group_size for op in local.ops if op.name == "all_gather"] == [2, 2]


def test_collectives_over_axes_of_one_core_vanish() -> None:
    mesh = make_mesh({"dp_replicate": 1, "dp_shard": 2})
    b = Builder()
    x = b.input((4, 4))
    kept = b.all_reduce(b.all_slice(b.all_gather(x, 0, R), 0, R), R)
    out = b.all_gather(kept, 1, RS)
    first, second = b.ops[0].result, b.ops[1].result
    part = partitioned(
        b.finish(out), mesh, {x: (N, S), first: (N, S), second: (N, S), kept: (N, RS)}
    )
    local = check(part, [floats(4, 4)])
    assert names(local) == ["all_gather"]
    assert local.ops[0].attrs.axes == S


def test_partial_products_are_reduced() -> None:
    b = Builder()
    x, y = b.input((8, 6)), b.input((8, 4))
    partial = b.dot(x, y, ((0,), (0,)))
    reduced = b.all_reduce(b.reduce_scatter(partial, 1, S), R)
    scattered = b.ops[-2].result
    total = b.all_reduce(b.reduce(x, "add", (0,)), RS)
    high = b.all_reduce(b.reduce(x, "max", (0,)), RS, reduction="max")
    part = partitioned(
        b.finish(reduced, total, high),
        HSDP,
        {x: (RS, N), y: (RS, N), scattered: (N, S), reduced: (N, S)},
    )
    check(part, [floats(8, 6), floats(8, 4)])


def test_batched_dot_keeps_batch_and_free_dims() -> None:
    b = Builder()
    q, k = b.input((4, 6, 5)), b.input((4, 8, 5))
    scores = b.dot(q, k, ((2,), (2,)), ((0,), (0,)))
    dims = {q: (S, N, N), k: (S, R, N), scores: (S, N, R)}
    check(partitioned(b.finish(scores), HSDP, dims), [floats(4, 6, 5), floats(4, 8, 5)])


def test_all_to_all_moves_a_shard_from_one_dim_to_another() -> None:
    b = Builder()
    x = b.input((8, 12, 3))
    y = b.all_to_all(x, split_dim=1, concat_dim=0, axes=S)
    check(partitioned(b.finish(y), DP, {x: (S, N, N), y: (N, S, N)}), [floats(8, 12, 3)])


def test_shape_ops_pass_whole_dims_through() -> None:
    b = Builder()
    x, zero, bias = b.input((8, 6)), b.input(()), b.input((6,))
    seen = [b.slice(x, (0, 1), (8, 5)), b.concatenate([x, x], 1)]
    seen.append(b.op("pad", x, zero, attrs=PadAttrs((0, 1), (0, 2), (0, 1))))
    seen.append(b.op("reverse", x, attrs=ReverseAttrs((1,))))
    seen.append(b.broadcast(bias, (8, 6), (1,)))
    turned = b.transpose(x, (1, 0))
    spread = b.broadcast(b.reshape(x, (8, 1, 6)), (8, 3, 6), (0, 1, 2))
    middle = b.ops[-2].result
    dims = dict.fromkeys([x, *seen], (S, N)) | {turned: (N, S)}
    dims |= {middle: (S, N, N), spread: (S, N, N)}
    part = partitioned(b.finish(*seen, turned, spread), DP, dims)
    check(part, [floats(8, 6), floats(), floats(6)])


def test_dynamic_slices_walk_unsharded_dims() -> None:
    b = Builder()
    x, row = b.input((5, 8)), b.input((), DType.I32)
    zero = b.constant(0, DType.I32)
    part_ = b.dynamic_slice(x, [row, zero], (2, 8))
    put = b.dynamic_update_slice(x, part_, [zero, zero])
    part = partitioned(b.finish(part_, put), DP, dict.fromkeys([x, part_, put], (N, S)))
    check(part, [floats(5, 8), np.int32(9)])  # past the end: clamped alike


def test_loops_localize_their_bodies_and_carry_the_coordinate() -> None:
    b = Builder()
    x = b.input((8, 4))
    inner_values: list[tuple[Value, tuple]] = []

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        (h,) = carries
        count = inner.iota((8, 4), 0)
        wide = inner.convert(count, DType.F32)
        scaled = inner.multiply(h, wide)
        gathered = inner.all_gather(scaled, 0, S)
        back = inner.all_slice(gathered, 0, S)
        inner_values.extend((v, (S, N)) for v in (h, count, wide, scaled, back))
        return (back,)

    (out,) = b.loop(3, [x], body)
    dims = {x: (S, N), out: (S, N), **dict(inner_values)}
    check(partitioned(b.finish(out), DP, dims), [floats(8, 4)])


def rows_gather(width: int) -> GatherAttrs:
    return GatherAttrs(
        offset_dims=(2,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=2,
        slice_sizes=(1, width),
    )


def test_vocabulary_sharded_lookup_masks_and_clamps() -> None:
    b = Builder()
    table, ids = b.input((12, 6)), b.input((2, 5, 1), DType.I32)
    partial = b.op("gather", table, ids, attrs=rows_gather(6))
    total = b.all_reduce(partial, S)
    part = partitioned(b.finish(total), DP, {table: (S, N)})
    indices = np.array([[[0], [2], [3], [11], [7]], [[99], [-4], [5], [6], [8]]], np.int32)
    local = check(part, [floats(12, 6), indices])
    # An index of one entry is the row, and as short as the number of the rank.
    assert not {"slice", "concatenate", "convert"} & set(names(local))


@pytest.mark.parametrize("rows", [S, N])
def test_padding_is_no_row_of_a_lookup_or_its_gradient(rows: tuple[str, ...]) -> None:
    """Of 12 rows the user has 10: what lies behind them is read as row 9, and never written; the
    text of the partitioner carries it."""
    b = Builder()
    table, ids, updates = b.input((12, 4)), b.input((6, 1), DType.I32), b.input((6, 4))
    gathers = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, 4),
        last_starts=(9,),
    )
    found = b.op("gather", table, ids, attrs=gathers)
    total = b.all_reduce(found, rows) if rows else found
    attrs = replace(embedding_gradient(), last_starts=(9,))
    added = b.op("scatter", table, ids, updates, attrs=attrs)
    graph = b.finish(total, added)
    given_ = [floats(12, 4), np.array([[0], [9], [10], [11], [99], [-4]], np.int32), floats(6, 4)]
    read, written = run_global(graph, given_)
    np.testing.assert_array_equal(read, given_[0][[0, 9, 9, 9, 9, 0]])
    np.testing.assert_array_equal(written[10:], given_[0][10:])
    local = check(partitioned(graph, DP, dict.fromkeys([table, added], (rows, N))), given_[:])
    assert {op.attrs.last_starts for op in local.ops if op.name in ("gather", "scatter")} == {(9,)}


def test_rows_of_a_lookup_that_stay_a_dim_may_be_sharded() -> None:
    """Windows of 1 x 6, one row each, whose dim of one is not taken away: of 12 rows every rank
    has three, and a window lies with one rank as a whole."""
    b = Builder()
    table, ids = b.input((12, 6)), b.input((5, 1), DType.I32)
    attrs = GatherAttrs(
        offset_dims=(1, 2),
        collapsed_slice_dims=(),
        start_index_map=(0,),
        index_vector_dim=1,
        slice_sizes=(1, 6),
    )
    total = b.all_reduce(b.op("gather", table, ids, attrs=attrs), S)
    part = partitioned(b.finish(total), DP, {table: (S, N)})
    check(part, [floats(12, 6), np.array([[0], [2], [3], [99], [-4]], np.int32)])


def test_lookup_with_sharded_columns_and_sharded_ids() -> None:
    b = Builder()
    table, ids = b.input((12, 6)), b.input((2, 5, 1), DType.I32)
    found = b.op("gather", table, ids, attrs=rows_gather(6))
    dims = {table: (N, S), ids: (R, N, N), found: (R, N, S)}
    indices = RNG.integers(0, 12, (2, 5, 1)).astype(np.int32)
    check(partitioned(b.finish(found), HSDP, dims), [floats(12, 6), indices])


def test_gather_with_two_index_entries_and_both_dims_sharded() -> None:
    b = Builder()
    table, ids = b.input((8, 4)), b.input((5, 2), DType.I32)
    attrs = GatherAttrs(
        offset_dims=(),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1),
        index_vector_dim=1,
        slice_sizes=(1, 1),
    )
    total = b.all_reduce(b.op("gather", table, ids, attrs=attrs), RS)
    part = partitioned(b.finish(total), HSDP, {table: (R, S)})
    check(part, [floats(8, 4), RNG.integers(-1, 9, (5, 2)).astype(np.int32)])


@pytest.mark.parametrize("width", [4, 8])
def test_gather_of_whole_rows_has_no_place_along_them(width: int) -> None:
    """Its index names both dims; of rows that are sharded every rank has its part, be it one
    element."""
    b = Builder()
    table, ids = b.input((8, width)), b.input((5, 2), DType.I32)
    attrs = GatherAttrs(
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0, 1),
        index_vector_dim=1,
        slice_sizes=(1, width),
    )
    out = b.op("gather", table, ids, attrs=attrs)
    part = partitioned(b.finish(out), DP, dict.fromkeys([table, out], (N, S)))
    indices = np.array([[0, 0], [7, 0], [3, 1], [9, 0], [5, -1]], np.int32)
    check(part, [floats(8, width), indices])


def batched(kind: str) -> GatherAttrs | ScatterAttrs:
    """take_along_axis over the last dim of [B, V] with indices [B, T, 1], and its transpose."""
    if kind == "gather":
        return GatherAttrs(
            offset_dims=(),
            collapsed_slice_dims=(1,),
            operand_batching_dims=(0,),
            start_indices_batching_dims=(0,),
            start_index_map=(1,),
            index_vector_dim=2,
            slice_sizes=(1, 1),
        )
    return ScatterAttrs(
        update_window_dims=(),
        inserted_window_dims=(1,),
        input_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=2,
        kind="add",
    )


def test_batching_dims_stay_sharded() -> None:
    b = Builder()
    x, ids = b.input((8, 6)), b.input((8, 3, 1), DType.I32)
    taken = b.op("gather", x, ids, attrs=batched("gather"))
    back = b.op("scatter", x, ids, taken, attrs=batched("scatter"))
    dims = {x: (S, N), ids: (S, N, N), taken: (S, N), back: (S, N)}
    indices = RNG.integers(0, 6, (8, 3, 1)).astype(np.int32)
    check(partitioned(b.finish(taken, back), DP, dims), [floats(8, 6), indices])


def embedding_gradient(kind: str = "add") -> ScatterAttrs:
    return ScatterAttrs(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=1,
        kind=kind,
    )


def test_spread_updates_count_the_operand_once() -> None:
    b = Builder()
    table, ids, updates = b.input((6, 4)), b.input((8, 1), DType.I32), b.input((8, 4))
    partial = b.op("scatter", table, ids, updates, attrs=embedding_gradient())
    total = b.all_reduce(partial, S)
    part = partitioned(b.finish(total), DP, {ids: (S, N), updates: (S, N)})
    check(part, [floats(6, 4), RNG.integers(0, 6, (8, 1)).astype(np.int32), floats(8, 4)])


@pytest.mark.parametrize("kind", ["add", "replace"])
def test_scatter_into_sharded_rows_drops_what_others_hold(kind: str) -> None:
    b = Builder()
    table, ids, updates = b.input((8, 4)), b.input((5, 1), DType.I32), b.input((5, 4))
    out = b.op("scatter", table, ids, updates, attrs=embedding_gradient(kind))
    part = partitioned(b.finish(out), DP, {table: (S, N), out: (S, N)})
    indices = np.array([[0], [7], [3], [99], [-1]], np.int32)
    check(part, [floats(8, 4), indices, floats(5, 4)])


def test_scatter_of_whole_rows_has_no_place_along_them() -> None:
    """Its index names both dims; of rows that are sharded, what begins at their begin fits."""
    b = Builder()
    table, ids, updates = b.input((8, 4)), b.input((5, 2), DType.I32), b.input((5, 4))
    attrs = replace(embedding_gradient(), scatter_dims_to_operand_dims=(0, 1))
    out = b.op("scatter", table, ids, updates, attrs=attrs)
    part = partitioned(b.finish(out), DP, dict.fromkeys([table, updates, out], (N, S)))
    indices = np.array([[0, 0], [7, 0], [3, 1], [9, 0], [5, -1]], np.int32)
    check(part, [floats(8, 4), indices, floats(5, 4)])


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Two shapes of the same elements, and an even dim of each."""
    factors = [*draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4)), 2]
    factors = draw(st.permutations(factors))
    shapes = []
    for _ in range(2):
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        shapes.append(tuple(shape))
    even = [draw(st.sampled_from([d for d, n in enumerate(s) if n % 2 == 0])) for s in shapes]
    return shapes[0], shapes[1], even[0], even[1]


@settings(max_examples=150, deadline=None)
@given(reshapes())
def test_reshape_is_exact_or_refused(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int],
) -> None:
    before, after, source, target = case
    mesh = make_mesh({"dp_shard": 2})
    b = Builder()
    x = b.input(before)
    y = b.reshape(x, after)
    dims = {
        x: tuple(S if d == source else N for d in range(len(before))),
        y: tuple(S if d == target else N for d in range(len(after))),
    }
    part = partitioned(b.finish(y), mesh, dims)
    whole = np.arange(math.prod(before), dtype=np.float32).reshape(before)
    try:
        (given_,) = run_sharded(part, [whole])
    except ShardingError as error:
        assert error.code == "SW_LOCALIZE_RESHAPE"
        half = [np.split(whole, 2, source)[i].reshape(-1) for i in range(2)]
        wanted = [np.split(whole.reshape(after), 2, target)[i].reshape(-1) for i in range(2)]
        assert any((a != w).any() for a, w in zip(half, wanted, strict=True))
    else:
        np.testing.assert_array_equal(given_, whole.reshape(after))


def refuse(part: PartitionedGraph, code: str, *texts: str) -> None:
    with pytest.raises(ShardingError) as caught:
        localize(part)
    assert caught.value.code == code
    for text in texts:
        assert text in str(caught.value)


def test_a_dim_that_does_not_divide_is_refused_with_its_line() -> None:
    b = Builder(loc=LOC)
    x = b.input((6, 4))
    y = b.op("negate", x)
    refuse(partitioned(b.finish(y), DP, {x: (S, N)}), "SW_LOCALIZE_DIVIDE", "multiple of 4, got 6")
    b = Builder(loc=LOC)
    y = b.full((6, 4), 1.0)
    refuse(partitioned(b.finish(y), DP, {y: (S, N)}), "SW_LOCALIZE_DIVIDE", "model.py:41")


def test_operands_that_lie_differently_are_refused() -> None:
    b = Builder(loc=LOC)
    x, y = b.input((4, 4)), b.input((4, 4))
    out = b.add(x, y)
    dims = {x: (S, N), y: (R, N), out: (S, N)}  # equal local shapes, other elements
    refuse(partitioned(b.finish(out), HSDP, dims), "SW_LOCALIZE_AXES", "model.py:41", "add")


@pytest.mark.parametrize("case", ["slice", "concatenate", "pad", "reverse", "dynamic_slice"])
def test_ops_along_a_sharded_dim_are_refused(case: str) -> None:
    b = Builder(loc=LOC)
    x, zero = b.input((8, 4)), b.input(())
    start = b.constant(0, DType.I32)
    make = {
        "slice": lambda: b.slice(x, (0, 0), (4, 4)),
        "concatenate": lambda: b.concatenate([x, x], 0),
        "pad": lambda: b.op("pad", x, zero, attrs=PadAttrs((4, 0), (0, 0), (0, 0))),
        "reverse": lambda: b.op("reverse", x, attrs=ReverseAttrs((0,))),
        "dynamic_slice": lambda: b.dynamic_slice(x, [start, start], (4, 4)),
    }
    y = make[case]()
    part = partitioned(b.finish(y), DP, {x: (S, N), y: (S, N)})
    refuse(part, "SW_LOCALIZE_DIM", "model.py:41", f"{case} requires dim 0 whole", "dp_shard")


def test_rows_and_indices_over_one_axis_are_refused() -> None:
    b = Builder(loc=LOC)
    table, ids = b.input((12, 6)), b.input((4, 5, 1), DType.I32)
    found = b.op("gather", table, ids, attrs=rows_gather(6))
    dims = {table: (S, N), ids: (S, N, N), found: (S, N, N)}
    refuse(partitioned(b.finish(found), DP, dims), "SW_LOCALIZE_AXES", "rows and indices")


def test_spread_replacing_updates_are_refused() -> None:
    b = Builder(loc=LOC)
    table, ids, updates = b.input((6, 4)), b.input((8, 1), DType.I32), b.input((8, 4))
    out = b.op("scatter", table, ids, updates, attrs=embedding_gradient("replace"))
    part = partitioned(b.finish(out), DP, {ids: (S, N), updates: (S, N)})
    refuse(part, "SW_LOCALIZE_SCATTER", "replace")


def test_group_axes_out_of_mesh_order_are_refused() -> None:
    b = Builder(loc=LOC)
    x = b.input((8, 4))
    y = b.all_gather(x, 0, S + R)
    refuse(partitioned(b.finish(y), HSDP, {x: (S + R, N)}), "SW_LOCALIZE_ORDER", "mesh order")


def test_a_gather_of_the_major_axis_alone_is_refused() -> None:
    b = Builder(loc=LOC)
    x = b.input((8, 4))
    y = b.all_gather(x, 0, R)  # would interleave shards
    refuse(partitioned(b.finish(y), HSDP, {x: (RS, N), y: (S, N)}), "SW_LOCALIZE_AXES", "gathered")


def test_a_second_rule_for_an_op_is_refused() -> None:
    with pytest.raises(ValueError, match="gather has two localization rules"):
        localizes("gather")(lambda context, op: ())
