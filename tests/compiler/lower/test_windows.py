"""Convolutions, poolings and their gradients: lowered kernels and generated code against the
reference, on the rows of the op harness.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ConvolutionAttrs, ReduceWindowAttrs, UnfoldAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.windows import expand_windows, stored_windows
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.sim_cluster.values.result import distance
from tests.harnesses import convolution, shape, window
from tests.harnesses.agreement import assert_same_with_special_values
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.support.compiled import TARGET, levels_of, link, run_levels
from tests.support.kernel_reference import check_lowering, lower_function

MOVING = tuple(c for c in shape.CASES if c.op in ("pad", "reverse", "concatenate"))
CASES = (*convolution.CASES, *window.CASES, *MOVING)
NHWC, HWIO = convolution.NHWC, convolution.HWIO
NCHW, OIHW, IOHW = convolution.NCHW, convolution.OIHW, (1, 0, 2, 3)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_kernels_mean_the_op(case: OpCase) -> None:
    check_lowering(build_graph(case), case_inputs(case), tolerance=max(4 * case.rtol, 1e-6))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_generated_code_means_the_op(case: OpCase) -> None:
    graph, inputs = build_graph(case), case_inputs(case)
    program = link(graph)
    (made,) = levels_of(program, inputs, ("L0",))
    for want, have in zip(evaluate(graph, inputs), made, strict=True):
        assert distance(want, have) <= max(4 * case.rtol, 1e-6)
    assert_same_with_special_values(case, program)


def _attrs(**given: object) -> ConvolutionAttrs:
    """A padded 3 x 3 form, changed by `given`."""
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


def _conv(b: Builder, lhs: tuple[int, ...], rhs: tuple[int, ...], **given: object) -> Value:
    return b.op("convolution", b.input(lhs), b.input(rhs), attrs=_attrs(**given))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_convolutions(data: st.DataObject) -> None:
    """Any windows along one dim beside a fixed one: strides, dilations, crops, channels."""
    draw = data.draw
    size, taps = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    stride, gap, holes = (draw(st.integers(1, 3)) for _ in range(3))
    low, high = draw(st.integers(-2, 3)), draw(st.integers(-2, 3))
    channels, outputs = draw(st.sampled_from((1, 3, 33))), draw(st.sampled_from((1, 4)))
    if holes > 1:
        stride = gap = 1
    length = (size - 1) * holes + 1 + low + high
    assume(length >= (taps - 1) * gap + 1 and (size - 1) * holes + 1 + min(low, 0) > 0)
    b = Builder()
    y = _conv(
        b,
        (2, size, 3, channels),
        (taps, 2, channels, outputs),
        strides=(stride, 1),
        low=(low, 0),
        high=(high, 1),
        lhs_dilation=(holes, 1),
        rhs_dilation=(gap, 1),
    )
    rng = np.random.default_rng(size * 100 + taps)
    inputs = [rng.standard_normal(v.type.shape).astype(np.float32) for v in b.inputs]
    check_lowering(b.finish(y), inputs, tolerance=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 40)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 40)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    low=st.tuples(st.integers(-1, 2), st.integers(-1, 39)),
    kind=st.sampled_from(("add", "max", "min")),
)
def test_random_poolings(shape, sizes, strides, low, kind) -> None:
    counts = [(n + lo - k) // s + 1 for n, lo, k, s in zip(shape, low, sizes, strides, strict=True)]
    assume(min(counts) > 0 and min(n + lo for n, lo in zip(shape, low, strict=True)) > 0)
    b = Builder()
    attrs = ReduceWindowAttrs(kind, sizes, strides, low, (0, 0))
    y = b.op("reduce_window", b.input(shape), attrs=attrs)
    x = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    check_lowering(b.finish(y), [x], tolerance=1e-5)


def test_unfold_reference_is_numpys_sliding_window() -> None:
    x = np.arange(60.0, dtype=np.float32).reshape(10, 6)
    b = Builder()
    attrs = UnfoldAttrs((0, 1), (1, 0), (3, 4), (2, 1), (2, 3), (3, 1))
    y = b.op("unfold", b.input(x.shape), attrs=attrs)
    (have,) = evaluate(b.finish(y), [x])
    rows = np.lib.stride_tricks.sliding_window_view(x, (4, 3))[1:6:2, :4, ::3, :]
    np.testing.assert_array_equal(have, rows)


def test_unfold_of_a_reversed_slice_is_a_view() -> None:
    """Views compose: one kernel, no copy."""
    b = Builder()
    x = b.input((9, 5))
    turned = b.reverse(b.slice(x, (1, 0), (9, 5), (2, 1)), (0, 1))
    y = b.reduce(b.unfold(turned, (0,), counts=(3,), sizes=(2,)), "add", (2,))
    lowered = check_lowering(b.finish(y), [np.arange(45.0, dtype=np.float32).reshape(9, 5)])
    assert len(lowered.kernels) == 1


def test_long_running_windows_do_not_read_every_window() -> None:
    """A cumulative sum of n elements takes about log2(n) additions per element, not n."""
    b = Builder()
    attrs = ReduceWindowAttrs("add", (1, 512), (1, 1), (0, 511), (0, 0))
    graph = expand_windows(b.finish(b.op("reduce_window", b.input((2, 512)), attrs=attrs)))
    adds = [op for op in graph.ops if op.name == "add"]
    assert len(adds) == 9 and not any(op.name == "unfold" for op in graph.ops)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 8), (3, 64)])
def test_windows_of_short_rows_or_few_outputs_are_a_view(inputs: int, outputs: int) -> None:
    b = Builder()
    y = _conv(b, (1, 8, 8, inputs), (3, 3, inputs, outputs), low=(0, 0), high=(0, 0))
    (kernel,) = lower_function(b.finish(y)).kernels
    (node,) = (n for n in kernel.nodes if n.op == "contract")
    assert len(node.attrs["over"]) >= 2


def test_equal_padding_is_made_once() -> None:
    """With channels first; with channels last padding is not stored at all."""
    b = Builder()
    x, v, w = b.input((1, 4, 8, 8)), b.input((3, 3, 4, 2)), b.input((3, 3, 4, 6))
    attrs = _attrs(lhs=convolution.NCHW)
    graph = b.finish(*(b.op("convolution", x, k, attrs=attrs) for k in (v, w)))
    assert sum(op.name == "pad" for op in expand_windows(graph).ops) == 1


@pytest.mark.parametrize(
    ("code", "given"),
    [
        ("NCC_EVRF010", {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2)}),
        ("NCC_EVRF011", {"lhs_dilation": (2, 1), "strides": (1, 2)}),
    ],
)
def test_refused_dilations(code: str, given: dict[str, object]) -> None:
    b = Builder()
    y = _conv(b, (1, 8, 8, 4), (3, 3, 4, 2), **given)
    with pytest.raises(CompileError) as caught:
        lower_function(b.finish(y))
    assert caught.value.code == code


def test_channels_last_are_read_once_and_padding_is_not_stored() -> None:
    """One kernel, which moves its operands and its result."""
    b = Builder()
    x, w = b.input((2, 8, 8, 64)), b.input((3, 3, 64, 32))
    program = link(b.finish(b.op("convolution", x, w, attrs=_attrs())))
    (function,) = program.functions
    assert len(function.kernels) == 1
    (segment,) = function_segments(function, load_target(TARGET))
    moved = sum(v.num_bytes for v in (x.type, w.type)) + 2 * 8 * 8 * 32 * 4
    assert segment.hbm_bytes == moved


IMAGES = {NHWC: (2, 9, 9, 40), NCHW: (2, 40, 9, 9)}


@pytest.mark.parametrize("dims", [NHWC, NCHW])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_filters_whose_rows_are_taps_are_stored_by_columns(dims: tuple[int, ...], dtype) -> None:
    """Filters as PyTorch has them: one copy turns them, and no transfer moves single taps."""
    b = Builder()
    attrs = _attrs(lhs=dims, rhs=OIHW, out=dims, dtype=dtype)
    images, filters = b.input(IMAGES[dims], dtype), b.input((48, 40, 3, 3), dtype)
    graph = b.finish(b.op("convolution", images, filters, attrs=attrs))
    (stored,) = stored_windows(expand_windows(graph))
    assert stored.type.shape[-1] == 48 and stored.type.num_elements == filters.type.num_elements
    inputs = [np.random.default_rng(0).standard_normal(v.type.shape) for v in graph.inputs]
    inputs = [x.astype(dtype.numpy) for x in inputs]
    made = run_levels(graph, inputs)
    for (have,) in made:
        assert distance(evaluate(graph, inputs)[0], have) <= (1e-6 if dtype is DType.F32 else 2**-8)


@pytest.mark.parametrize(
    ("rhs", "shape"),
    [
        (HWIO, (3, 3, 40, 48)),
        (OIHW, (48, 40, 1, 1)),
        (OIHW, (16, 40, 3, 3)),
        (IOHW, (40, 48, 3, 3)),
    ],
    ids=["columns innermost", "no taps", "few columns", "columns near each other"],
)
@pytest.mark.parametrize("dims", [NHWC, NCHW])
def test_other_filters_are_read_where_they_are(
    dims: tuple[int, ...], rhs: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    b = Builder()
    attrs = _attrs(lhs=dims, rhs=rhs, out=dims)
    if shape[-1] == 1:
        attrs = _attrs(lhs=dims, rhs=rhs, out=dims, low=(0, 0), high=(0, 0))
    graph = b.finish(b.op("convolution", b.input(IMAGES[dims]), b.input(shape), attrs=attrs))
    sizes = {v.type.num_elements for v in stored_windows(expand_windows(graph))}
    assert np.prod(shape) not in sizes
