"""Harness rows of `convolution`: every attribute, in the forms JAX writes for gradients too."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ConvolutionAttrs
from tests.harnesses.case import BF16_ULP, FLOAT_ULPS, OpCase

F32, BF16 = DType.F32, DType.BF16
Dims = tuple[int, ...]

NHWC, HWIO = (0, 3, 1, 2), (3, 2, 0, 1)
NCHW, OIHW = (0, 1, 2, 3), (0, 1, 2, 3)


def _row(
    lhs: Dims,
    rhs: Dims,
    note: str,
    *,
    dims: tuple[Dims, Dims, Dims] = (NHWC, HWIO, NHWC),
    strides: Dims = (1, 1),
    low: Dims = (0, 0),
    high: Dims = (0, 0),
    lhs_dilation: Dims = (1, 1),
    rhs_dilation: Dims = (1, 1),
    groups: int = 1,
    batch_groups: int = 1,
    dtype: DType = F32,
    out: DType | None = None,
) -> OpCase:
    windows = (strides, low, high, lhs_dilation, rhs_dilation)
    attrs = ConvolutionAttrs(*dims, *windows, groups, batch_groups, out or dtype)
    rtol = BF16_ULP if attrs.dtype is BF16 else FLOAT_ULPS
    return OpCase("convolution", ((lhs, dtype), (rhs, dtype)), attrs, (), rtol, note)


def _line(
    note: str, *, strides: int = 1, pad: tuple[int, int] = (0, 0), **dilations: int
) -> OpCase:
    """1-D, channels in the middle."""
    return _row(
        (2, 5, 11),
        (3, 5, 4),
        note,
        dims=((0, 1, 2), (2, 1, 0), (0, 1, 2)),
        strides=(strides,),
        low=pad[:1],
        high=pad[1:],
        lhs_dilation=(dilations.get("lhs", 1),),
        rhs_dilation=(dilations.get("rhs", 1),),
    )


SAME = {"low": (1, 1), "high": (1, 1)}
GRADIENT = ((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))  # of the filter: batch and features swap
CUBE = ((0, 4, 1, 2, 3), (4, 3, 0, 1, 2), (0, 4, 1, 2, 3))

CASES: tuple[OpCase, ...] = (
    _row((2, 7, 9, 5), (3, 3, 5, 4), "plain"),
    _row((2, 7, 9, 5), (3, 3, 5, 4), "same", **SAME),
    _row((2, 7, 9, 5), (3, 3, 5, 4), "bf16", dtype=BF16, **SAME),
    _row((2, 7, 9, 5), (3, 3, 5, 4), "bf16_to_f32", dtype=BF16, out=F32, **SAME),
    _row((2, 5, 7, 9), (4, 5, 3, 2), "nchw", dims=(NCHW, OIHW, NCHW), **SAME),
    _row((2, 7, 9, 5), (1, 1, 5, 6), "pointwise"),
    _row((2, 8, 8, 3), (4, 4, 3, 6), "patches", strides=(4, 4)),
    _row((2, 9, 9, 5), (3, 3, 5, 4), "strided", strides=(2, 3), low=(1, 0), high=(0, 2)),
    _row((2, 9, 9, 40), (3, 3, 40, 4), "deep", strides=(2, 1), **SAME),
    _row((2, 9, 9, 5), (3, 3, 5, 4), "rhs_dilated", rhs_dilation=(2, 3), low=(2, 3), high=(2, 1)),
    _row((2, 4, 5, 5), (3, 3, 5, 4), "lhs_dilated", lhs_dilation=(2, 3), low=(1, 2), high=(2, 0)),
    _row((2, 4, 5, 5), (2, 2, 5, 4), "holes", lhs_dilation=(3, 3), low=(1, 1), high=(2, 1)),
    _row((2, 4, 5, 5), (3, 3, 5, 4), "lhs_cropped", lhs_dilation=(2, 2), low=(-1, 1), high=(1, -2)),
    _row((2, 9, 9, 5), (3, 3, 5, 4), "cropped", low=(-2, 1), high=(1, -3)),
    _row((2, 7, 9, 6), (3, 3, 3, 8), "groups", groups=2, **SAME),
    _row((2, 7, 9, 40), (3, 3, 1, 40), "depthwise", groups=40, **SAME),
    _row((2, 7, 9, 40), (3, 3, 1, 80), "multiplier", groups=40, strides=(2, 2), **SAME),
    _row((6, 7, 9, 5), (3, 3, 5, 4), "batch_groups", batch_groups=2, **SAME),
    _row((3, 9, 9, 8), (9, 9, 3, 8), "depthwise_filter_gradient", batch_groups=8,
         dims=((3, 0, 1, 2), (3, 2, 0, 1), (2, 3, 0, 1)), **SAME),
    _row((2, 9, 9, 3), (2, 5, 5, 4), "filter_gradient", dims=GRADIENT, rhs_dilation=(2, 2), **SAME),
    _row((2, 9, 40, 3), (2, 9, 40, 4), "wide_filter_gradient", dims=GRADIENT, **SAME),
    _row((2, 5, 5, 4), (3, 3, 6, 4), "input_gradient", lhs_dilation=(2, 2), low=(1, 1), high=(2, 2),
         dims=(NHWC, (2, 3, 0, 1), NHWC)),
    _line("line"),
    _line("line_strided", strides=3, pad=(1, 2)),
    _line("line_dilated", pad=(2, 2), rhs=2),
    _line("line_transposed", pad=(1, 3), lhs=2),
    _row((2, 4, 5, 6, 3), (2, 3, 2, 3, 4), "cube", dims=CUBE, strides=(1, 2, 1), low=(1, 0, 0),
         high=(0, 1, 1), lhs_dilation=(1, 1, 1), rhs_dilation=(1, 1, 2)),
    _row((5, 7), (6, 7), "no_space", dims=((0, 1), (0, 1), (0, 1)), strides=(), low=(), high=(),
         lhs_dilation=(), rhs_dilation=()),
)  # fmt: skip
