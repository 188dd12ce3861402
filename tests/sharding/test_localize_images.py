"""Image operators over reference ranks: split over the batch, refused over space and groups."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ConvolutionAttrs, ReduceWindowAttrs, SelectAndScatterAttrs
from shardwright.compiler.ir.types import Value
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.mesh import make_mesh
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


def convolution(b: Builder, x: Value, w: Value, dims: tuple = (NHWC, HWIO, NHWC), groups: int = 1):
    windows = ((1, 1), (1, 1), (1, 1), (1, 1), (1, 1))
    return b.op("convolution", x, w, attrs=ConvolutionAttrs(*dims, *windows, groups, 1, DType.F32))


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


@pytest.mark.parametrize(("dim", "groups"), [(1, 1), (3, 4)])
def test_space_and_groups_are_not_sharded(dim: int, groups: int) -> None:
    b = Builder(loc=LOC)
    x, w = b.input((4, 4, 4, 4)), b.input((3, 3, 4 // groups, 4))
    y = convolution(b, x, w, groups=groups)
    spec = tuple(S if d == dim else N for d in range(4))
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
