"""Where image operators keep samples apart, add them up or mix them, on graphs of one operator."""

from __future__ import annotations

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import (
    ConvolutionAttrs,
    ReduceWindowAttrs,
    ScatterAttrs,
    SelectAndScatterAttrs,
)
from shardwright.compiler.ir.types import Value
from shardwright.sharding.linearity import Kind, Label, counts_samples, label_values

NHWC, HWIO = (0, 3, 1, 2), (3, 2, 0, 1)
FILTER_GRADIENT = ((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))
SHAPE = (4, 6, 6, 8)


def label(b: Builder, result: Value, batch: dict[Value, int]) -> Label:
    return label_values(b.finish(result), batch)[result]


def sample_dims(label: Label) -> list[int]:
    return [d for d, dim in enumerate(label.dims) if counts_samples(dim)]


def convolution(b: Builder, x: Value, w: Value, dims: tuple, groups: int = 1, batch: int = 1):
    windows = ((1, 1), (1, 1), (1, 1), (1, 1), (1, 1))
    attrs = ConvolutionAttrs(*dims, *windows, groups, batch, DType.F32)
    return b.op("convolution", x, w, attrs=attrs)


def test_a_convolution_keeps_samples_apart() -> None:
    b = Builder()
    x, w = b.input(SHAPE), b.input((3, 3, 8, 5))
    found = label(b, convolution(b, x, w, (NHWC, HWIO, NHWC)), {x: 0})
    assert found.kind is Kind.SAMPLE and sample_dims(found) == [0]


def test_a_filter_gradient_adds_samples_up() -> None:
    b = Builder()
    x, dy = b.input(SHAPE), b.input((4, 6, 6, 5))
    found = label(b, convolution(b, x, dy, FILTER_GRADIENT), {x: 0, dy: 0})
    assert found.kind is Kind.SUM


def test_a_convolution_with_a_sum_is_linear_in_it() -> None:
    b = Builder()
    x, dy, fixed = b.input(SHAPE), b.input((4, 6, 6, 5)), b.input((2, 6, 6, 8))
    total = convolution(b, x, dy, FILTER_GRADIENT)
    once = convolution(b, fixed, total, (NHWC, HWIO, NHWC))
    assert label(b, once, {x: 0, dy: 0}).kind is Kind.SUM
    twice = convolution(b, once, total, (NHWC, (2, 3, 0, 1), NHWC))
    assert label(b, twice, {x: 0, dy: 0}).kind is Kind.MIXED


@pytest.mark.parametrize(("dim", "groups", "batch"), [(1, 1, 1), (3, 4, 1), (0, 1, 2)])
def test_windows_and_groups_that_split_samples_mix_them(dim: int, groups: int, batch: int) -> None:
    b = Builder()
    x, w = b.input(SHAPE), b.input((3, 3, 8 // groups, 8))
    found = label(b, convolution(b, x, w, (NHWC, HWIO, NHWC), groups, batch), {x: dim})
    assert found.kind is Kind.MIXED


@pytest.mark.parametrize(("dim", "kind"), [(0, Kind.SAMPLE), (3, Kind.SAMPLE), (1, Kind.MIXED)])
def test_poolings_mix_samples_only_along_their_windows(dim: int, kind: Kind) -> None:
    window = ((1, 2, 2, 1), (1, 2, 2, 1), (0, 0, 0, 0), (0, 0, 0, 0))
    b = Builder()
    x = b.input(SHAPE)
    pooled = b.op("reduce_window", x, attrs=ReduceWindowAttrs("max", *window))
    back = b.op("select_and_scatter", x, pooled, attrs=SelectAndScatterAttrs("GE", *window))
    assert label(b, pooled, {x: dim}).kind is kind
    assert label(b, back, {x: dim}).kind is kind


@pytest.mark.parametrize(("kind", "expected"), [("add", Kind.SUM), ("max", Kind.MIXED)])
def test_a_pooling_of_a_sum(kind: str, expected: Kind) -> None:
    b = Builder()
    x = b.input(SHAPE)
    total = b.reduce(x, "add", (0,))
    attrs = ReduceWindowAttrs(kind, (2, 2, 1), (2, 2, 1), (0, 0, 0), (0, 0, 0))
    assert label(b, b.op("reduce_window", total, attrs=attrs), {x: 0}).kind is expected


def test_rows_scattered_alike_for_every_sample_do_not_count_samples() -> None:
    """The gradient of a nearest resize: constant positions, every sample its own window."""
    b = Builder()
    rows, updates = b.input((9, 1), DType.I32), b.input((4, 9, 8))
    attrs = ScatterAttrs(
        update_window_dims=(0, 2),
        inserted_window_dims=(1,),
        input_batching_dims=(),
        scatter_indices_batching_dims=(),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=1,
        kind="add",
    )
    result = b.op("scatter", b.full((4, 6, 8), 0.0), rows, updates, attrs=attrs)
    found = label(b, result, {updates: 0})
    assert found.kind is Kind.SAMPLE and sample_dims(found) == [0]


def test_rows_scattered_within_each_sample_stay_apart() -> None:
    """Positions computed from the batch and from a count, along a batching dim of samples."""
    b = Builder()
    picks, updates = b.input((4, 9, 1), DType.I32), b.input((4, 9, 8))
    rows = b.add(picks, b.iota((4, 9, 1), 1))
    attrs = ScatterAttrs(
        update_window_dims=(2,),
        inserted_window_dims=(1,),
        input_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=2,
        kind="add",
    )
    result = b.op("scatter", b.full((4, 6, 8), 0.0), rows, updates, attrs=attrs)
    found = label(b, result, {picks: 0, updates: 0})
    assert found.kind is Kind.SAMPLE and sample_dims(found) == [0]
