"""Image operators over reference ranks: split over batch and groups, refused over space."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ConvolutionAttrs, ReduceWindowAttrs, SelectAndScatterAttrs
from shardwright.compiler.ir.types import Value
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sim_cluster.values.result import distance
from tests.support.building import Builder
from tests.support.partitioned import partitioned, run_global, run_sharded

DP = make_mesh({"dp_shard": 4})
S: tuple[str, ...] = ("dp_shard",)
N: tuple[str, ...] = ()
LOC = Loc("model.py", 41)
NHWC, HWIO = (0, 3, 1, 2), (3, 2, 0, 1)
FILTER_GRADIENT = ((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))
WINDOW = ((1, 2, 2, 1), (1, 2, 2, 1), (0, 0, 0, 0), (0, 0, 0, 0))


def convolution(
    b: Builder,
    x: Value,
    w: Value,
    dims: tuple = (NHWC, HWIO, NHWC),
    groups: int = 1,
    batches: int = 1,
) -> Value:
    windows = ((1, 1), (1, 1), (1, 1), (1, 1), (1, 1))
    attrs = ConvolutionAttrs(*dims, *windows, groups, batches, DType.F32)
    return b.op("convolution", x, w, attrs=attrs)


def test_images_are_sharded_over_the_batch() -> None:
    """A convolution, a pooling and their gradients as JAX writes them."""
    b = Builder(loc=LOC)
    x, w = b.input((8, 6, 6, 4)), b.input((3, 3, 4, 5))
    y = convolution(b, x, w)
    pooled = b.op("reduce_window", y, attrs=ReduceWindowAttrs("max", *WINDOW))
    back = b.op("select_and_scatter", y, pooled, attrs=SelectAndScatterAttrs("GE", *WINDOW))
    partial = convolution(b, x, back, FILTER_GRADIENT)
    gradient = b.all_reduce(partial, S)
    dims = {v: (S, N, N, N) for v in (x, y, pooled, back)}
    part = partitioned(b.finish(pooled, back, gradient), DP, dims)
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(v.type.shape).astype(np.float32) for v in (x, w)]
    wanted = run_global(part.graph, inputs)
    for have, want in zip(run_sharded(part, inputs), wanted, strict=True):
        assert distance(have, want) <= 1e-6


def test_features_are_sharded_where_no_group_splits_them() -> None:
    """Output features stay split, input features give partial sums."""
    b = Builder(loc=LOC)
    x, w, v = b.input((2, 6, 6, 4)), b.input((3, 3, 4, 8)), b.input((3, 3, 8, 4))
    y = convolution(b, x, w)
    total = b.all_reduce(convolution(b, y, v), S)
    dims = {w: (N, N, N, S), y: (N, N, N, S), v: (N, N, S, N)}
    part = partitioned(b.finish(total), DP, dims)
    rng = np.random.default_rng(4)
    inputs = [rng.standard_normal(u.type.shape).astype(np.float32) for u in (x, w, v)]
    (have,), (want,) = run_sharded(part, inputs), run_global(part.graph, inputs)
    assert distance(have, want) <= 1e-6


TWO = make_mesh({"dp_shard": 2, "tp": 2})
BOTH = ("dp_shard", "tp")
SHARED_GROUPS = {
    "each core two of eight groups": (8, 16, 32, DP, S, S, N),
    "each core one of four": (4, 16, 16, DP, S, S, N),
    "one group of two, inputs apart": (2, 8, 8, TWO, BOTH, S, ("tp",)),
    "one group of two, outputs apart": (2, 8, 8, TWO, S, BOTH, N),
}
"""Groups, input and output features, mesh, axes of the features of the operand, of the output and
of the input features of the filter."""


@pytest.mark.parametrize("case", SHARED_GROUPS)
def test_cores_share_groups_out(case: str) -> None:
    groups, features, outputs, mesh, of_x, of_w, inner = SHARED_GROUPS[case]
    b = Builder(loc=LOC)
    x, w = b.input((2, 6, 6, features)), b.input((3, 3, features // groups, outputs))
    y = convolution(b, x, w, groups=groups)
    total = b.all_reduce(y, inner) if inner else y
    split = {v: (N, N, N, of_w) for v in (y, total)}
    check(b, total, mesh, {x: (N, N, N, of_x), w: (N, N, inner, of_w), **split})


BATCH_GROUPS = {
    "each core two of eight groups": (8, 16, 32, DP, S, S, N),
    "one group of two, elements apart": (2, 8, 8, TWO, BOTH, S, ("tp",)),
}
"""Groups, features of the image and of what comes back, mesh, their axes, those of the gradient's
input features."""


@pytest.mark.parametrize("case", BATCH_GROUPS)
def test_gradients_of_grouped_filters_share_groups_out(case: str) -> None:
    groups, features, outputs, mesh, of_x, of_y, inner = BATCH_GROUPS[case]
    b = Builder(loc=LOC)
    x, dy = b.input((2, 6, 6, features)), b.input((2, 6, 6, outputs))
    dw = convolution(b, x, dy, FILTER_GRADIENT, batches=groups)
    dims = {x: (N, N, N, of_x), dy: (N, N, N, of_y), dw: (N, N, inner, of_y)}
    check(b, dw, mesh, dims)


def test_gradients_of_grouped_filters_are_summed_over_the_batch() -> None:
    b = Builder(loc=LOC)
    x, dy = b.input((8, 6, 6, 4)), b.input((8, 6, 6, 8))
    dw = convolution(b, x, dy, FILTER_GRADIENT, batches=4)
    check(b, b.all_reduce(dw, S), DP, {x: (S, N, N, N), dy: (S, N, N, N)})


def check(b: Builder, result: Value, mesh: Mesh, dims: dict) -> None:
    """Values over the ranks of `mesh` equal those of one."""
    part = partitioned(b.finish(result), mesh, dims)
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal(v.type.shape).astype(np.float32) for v in part.graph.inputs]
    (have,), (want,) = run_sharded(part, inputs), run_global(part.graph, inputs)
    assert distance(have, want) <= 1e-6


@pytest.mark.parametrize(
    ("groups", "of_x", "of_w", "code"),
    [
        pytest.param(2, S, S, "SW_LOCALIZE_DIM", id="fewer groups than cores"),
        pytest.param(4, N, S, "SW_LOCALIZE_DIM", id="outputs alone"),
        pytest.param(4, S, N, "SW_LOCALIZE_DIM", id="inputs alone"),
    ],
)
def test_parts_of_groups_are_not_sharded(
    groups: int, of_x: tuple[str, ...], of_w: tuple[str, ...], code: str
) -> None:
    b = Builder(loc=LOC)
    x, w = b.input((2, 4, 4, 8)), b.input((3, 3, 8 // groups, 8))
    y = convolution(b, x, w, groups=groups)
    dims = {x: (N, N, N, of_x), w: (N, N, N, of_w), y: (N, N, N, of_w)}
    with pytest.raises(ShardingError) as caught:
        localize(partitioned(b.finish(y), DP, dims))
    assert caught.value.code == code and "groups split it" in str(caught.value)


def test_filters_and_results_of_groups_lie_alike() -> None:
    b = Builder(loc=LOC)
    x, w = b.input((2, 4, 4, 8)), b.input((3, 3, 2, 8))
    y = convolution(b, x, w, groups=4)
    with pytest.raises(ShardingError) as caught:
        localize(partitioned(b.finish(y), DP, {x: (N, N, N, S), y: (N, N, N, S)}))
    assert caught.value.code == "SW_LOCALIZE_AXES"


def test_space_is_not_sharded() -> None:
    b = Builder(loc=LOC)
    x, w = b.input((4, 4, 4, 4)), b.input((3, 3, 4, 4))
    y = convolution(b, x, w)
    spec = (N, S, N, N)
    with pytest.raises(ShardingError) as caught:
        localize(partitioned(b.finish(y), DP, {x: spec, y: spec}))
    assert caught.value.code == "SW_LOCALIZE_DIM"
    assert "model.py:41" in str(caught.value)


def test_pooled_dims_are_not_sharded() -> None:
    b = Builder(loc=LOC)
    x = b.input((4, 8, 8, 4))
    y = b.op("reduce_window", x, attrs=ReduceWindowAttrs("max", *WINDOW))
    with pytest.raises(ShardingError) as caught:
        localize(partitioned(b.finish(y), DP, {x: (N, S, N, N), y: (N, S, N, N)}))
    assert caught.value.code == "SW_LOCALIZE_DIM"
