"""`convolution`: dimension numbers and windows one to one; a reversed window is a reversed rhs.

Two combinations of dilations are refused, because neuronx-cc refuses them: JAX writes them for
gradients of strided convolutions that are dilated themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.compiler.frontend.rules.registry import Site, Values, imports, refuse
from shardwright.compiler.ir.ops import ConvolutionAttrs

_Dims = tuple[int, ...]


@imports("stablehlo.convolution")
def convolution(site: Site) -> Values:
    """All of StableHLO's convolution but the refused dilations."""
    lhs, rhs = site.operands
    count = lhs.type.rank - 2
    attrs = ConvolutionAttrs(
        **site.decode("dimension_numbers", _dimension_numbers),
        strides=ints_or_ones(site, "window_strides", count),
        **paddings(site, count),
        lhs_dilation=ints_or_ones(site, "lhs_dilation", count),
        rhs_dilation=ints_or_ones(site, "rhs_dilation", count),
        feature_groups=site.int("feature_group_count"),
        batch_groups=site.int("batch_group_count"),
        dtype=site.result_type().dtype,
    )
    _check_dilations(attrs)
    reversal = site.ints("window_reversal") if site.optional("window_reversal") else ()
    dims = tuple(d for d, flag in zip(attrs.rhs[2:], reversal, strict=False) if flag)
    if dims:
        rhs = site.make.reverse(rhs, dims)
    return site.emit("convolution", (lhs, rhs), attrs).results


def _check_dilations(attrs: ConvolutionAttrs) -> None:
    """Refuse what the real compiler refuses."""
    if max(attrs.lhs_dilation, default=1) == 1:
        return
    given = f"lhs dilation {attrs.lhs_dilation}"
    if max(attrs.rhs_dilation) > 1:
        refuse(
            "NCC_EVRF010",
            f"convolution requires dilation of one operand, got {given} and rhs dilation"
            f" {attrs.rhs_dilation}",
            "dilate one operand by hand (pad with interior padding), or drop the stride or the"
            " dilation of the forward convolution",
        )
    if max(attrs.strides) > 1:
        refuse(
            "NCC_EVRF011",
            f"convolution requires stride 1 beside an lhs dilation, got {given} and strides"
            f" {attrs.strides}",
            "do upsampling and downsampling in two convolutions",
        )


def ints_or_ones(site: Site, name: str, count: int) -> _Dims:
    """An optional integer array that is all ones when it is absent."""
    return site.ints(name) if site.optional(name) is not None else (1,) * count


def paddings(site: Site, count: int) -> dict[str, _Dims]:
    """`low` and `high` of the optional `padding` attribute."""
    if site.optional("padding") is None:
        return dict.fromkeys(("low", "high"), (0,) * count)
    found: dict[str, _Dims] = site.decode("padding", _pairs)
    return found


def _pairs(attribute: Any) -> dict[str, _Dims]:
    sides = np.array(attribute).reshape(-1, 2).T.tolist()
    return {name: tuple(side) for name, side in zip(("low", "high"), sides, strict=True)}


def _dimension_numbers(attribute: Any) -> dict[str, _Dims]:
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.ConvDimensionNumbers(attribute)
    return {
        "lhs": (
            dims.input_batch_dimension,
            dims.input_feature_dimension,
            *dims.input_spatial_dimensions,
        ),
        "rhs": (
            dims.kernel_output_feature_dimension,
            dims.kernel_input_feature_dimension,
            *dims.kernel_spatial_dimensions,
        ),
        "out": (
            dims.output_batch_dimension,
            dims.output_feature_dimension,
            *dims.output_spatial_dimensions,
        ),
    }
