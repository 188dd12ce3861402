"""Convolutions with channels innermost, compiled: values of L0 and L1 against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ConvolutionAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.sim_cluster.values.result import distance
from tests.harnesses.convolution import GRADIENT, HWIO, NHWC
from tests.support.compiled import run_levels

TOLERANCE = {DType.F32: 1e-6, DType.BF16: 2**-8}


def _check(graph: Graph, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs]
    tolerance = TOLERANCE[graph.inputs[0].type.dtype]
    for made in run_levels(graph, inputs):
        for want, have in zip(evaluate(graph, inputs), made, strict=True):
            assert distance(want, have) <= tolerance


def _attrs(**given: object) -> ConvolutionAttrs:
    fields = {
        "lhs": NHWC,
        "rhs": HWIO,
        "out": NHWC,
        "strides": (1, 1),
        "low": (1, 1),
        "high": (1, 1),
        "lhs_dilation": (1, 1),
        "rhs_dilation": (1, 1),
        "feature_groups": 1,
        "batch_groups": 1,
        "dtype": DType.F32,
    }
    return ConvolutionAttrs(**fields | given)


def _graph(
    images: tuple[int, ...], filters: tuple[int, ...], *, follow: bool = False, **given: object
) -> Graph:
    """A convolution; `follow` scales it per column, adds another tensor and clips."""
    dtype = given.get("dtype", DType.F32)
    b = Builder()
    y = b.op("convolution", b.input(images, dtype), b.input(filters, dtype), attrs=_attrs(**given))
    if follow:
        bias = b.input(y.type.shape[-1:], dtype)
        y = b.add(
            b.multiply(y, b.broadcast(bias, y.type.shape, (3,))), b.input(y.type.shape, dtype)
        )
        y = b.op("maximum", y, b.full(y.type.shape, 0, dtype))
    return b.finish(y)


small = st.tuples(st.integers(1, 6), st.integers(1, 6))
taps = st.tuples(st.integers(1, 3), st.integers(1, 3))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))
sides = st.tuples(st.integers(-1, 2), st.integers(-1, 2))


def _outputs(size, taps, low, high, stride, holes, gap) -> list[int]:
    rows = zip(size, taps, low, high, stride, holes, gap, strict=True)
    return [((n - 1) * h + lo + hi - (k - 1) * g) // s + 1 for n, k, lo, hi, s, h, g in rows]


@settings(max_examples=40, deadline=None)
@given(
    size=small,
    taps=taps,
    low=sides,
    high=sides,
    stride=steps,
    holes=steps,
    channels=st.sampled_from(((1, 1), (3, 5), (33, 4), (130, 2), (5, 140))),
    images=st.integers(1, 3),
    groups=st.sampled_from((1, 1, 2)),
    dtype=st.sampled_from((DType.F32, DType.BF16)),
    follow=st.booleans(),
)
def test_random_products(
    size, taps, low, high, stride, holes, channels, images, groups, dtype, follow
) -> None:
    dilated = max(holes) > 1
    stride, gap = ((1, 1), (1, 1)) if dilated else (stride, holes[::-1])
    counts = _outputs(size, taps, low, high, stride, holes, gap)
    lengths = [(n - 1) * h + 1 for n, h in zip(size, holes, strict=True)]
    assume(
        min(counts) > 0
        and min(n + min(lo, 0) + min(hi, 0) for n, lo, hi in zip(lengths, low, high, strict=True))
        > 0
    )
    inputs, outputs = channels
    graph = _graph(
        (images, *size, inputs * groups),
        (*taps, inputs, outputs * groups),
        follow=follow,
        strides=stride,
        low=low,
        high=high,
        lhs_dilation=holes,
        rhs_dilation=gap,
        feature_groups=groups,
        dtype=dtype,
    )
    _check(graph, sum(size))


@settings(max_examples=30, deadline=None)
@given(
    size=small,
    taps=small,
    low=sides,
    high=sides,
    stride=steps,
    gap=steps,
    channels=st.sampled_from(((1, 1), (3, 5), (33, 4), (130, 2), (5, 140))),
    images=st.integers(1, 3),
    groups=st.sampled_from((1, 1, 2, 8)),
)
def test_random_filter_gradients(
    size, taps, low, high, stride, gap, channels, images, groups
) -> None:
    counts = _outputs(size, taps, low, high, stride, (1, 1), gap)
    assume(min(counts) > 0 and max(counts) < 8)
    inputs, outputs = channels
    graph = _graph(
        (images, *size, inputs * groups),
        (images, *taps, outputs * groups),
        lhs=GRADIENT[0],
        rhs=GRADIENT[1],
        out=GRADIENT[2],
        strides=stride,
        low=low,
        high=high,
        rhs_dilation=gap,
        batch_groups=groups,
    )
    _check(graph, sum(size))


LARGE = {
    "two tiles of lines": ((1, 140, 6, 8), (3, 3, 8, 4), {}),
    "two tiles of lines, strided": (
        (1, 280, 6, 3),
        (5, 5, 3, 4),
        {"strides": (2, 2), "low": (2, 2), "high": (2, 2)},
    ),
    "long lines": ((1, 3, 500, 96), (3, 3, 96, 4), {}),
    "an odd image": ((5, 40, 4, 4), (3, 3, 4, 4), {}),
    "many columns": ((1, 4, 4, 8), (3, 3, 8, 1100), {}),
}


@pytest.mark.parametrize("name", LARGE)
def test_tiles(name: str) -> None:
    lhs, rhs, given = LARGE[name]
    _check(_graph(lhs, rhs, follow=True, **given))


def test_tiles_of_a_filter_gradient() -> None:
    dims = dict(zip(("lhs", "rhs", "out"), GRADIENT, strict=True))
    for lhs, rhs in (((1, 140, 6, 8), (1, 140, 6, 4)), ((5, 40, 4, 4), (5, 40, 4, 4))):
        _check(_graph(lhs, rhs, **dims))


NWC, WIO = (0, 2, 1), (2, 1, 0)


@pytest.mark.parametrize("channels", (3, 260))
@pytest.mark.parametrize("stride", (1, 2, 3))
def test_sequences(channels: int, stride: int) -> None:
    """One spatial dim: positions are lines where they have channels enough."""
    given = {"lhs_dilation": (1,), "low": (1,), "high": (2,), "lhs": NWC}
    forward = _graph(
        (3, 150, channels),
        (3, channels, 5),
        strides=(stride,),
        rhs_dilation=(2,),
        rhs=WIO,
        out=NWC,
        **given,
    )
    _check(forward)
    backward = _graph(
        (3, 150, channels),
        (3, 151 // stride, 5),
        strides=(1,),
        rhs_dilation=(stride,),
        **given | {"lhs": (2, 0, 1), "rhs": (2, 0, 1), "out": (1, 2, 0)},
    )
    _check(backward)
