"""Windows over images [N, C, ...]: what rows of convolutions and pooling are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Pads = list[tuple[int, int]]


def pooled(x: Any, start: Any, join: Any, settings: Sequence[Sequence[int]], pads: Pads) -> Any:
    """Windows of x joined, by (window, strides, dilations) of its spatial dims; `start` is known to
    JAX, which has no gradient otherwise."""
    window, strides, dilations = ((1, 1, *each) for each in settings)
    start = np.asarray(start, x.dtype)[()]
    edges = [(0, 0), (0, 0), *pads]
    return jax.lax.reduce_window(x, start, join, window, strides, edges, None, dilations)


def convolved_back(
    x: Any,
    weight: Any,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Pads,
    groups: int,
) -> Any:
    """The convolution whose gradient with respect to its input this is, turned around; `weight` is
    [C, results of a group, ...], `pads` are of what x becomes with its strides as gaps."""
    inputs, outputs, *window = weight.shape
    count = len(window)
    turned = weight.reshape(groups, inputs // groups, outputs, *window)
    turned = jnp.swapaxes(turned, 1, 2).reshape(groups * outputs, inputs // groups, *window)
    return jax.lax.conv_general_dilated(
        x,
        jnp.flip(turned, tuple(range(2, count + 2))),
        (1,) * count,
        pads,
        lhs_dilation=strides,
        rhs_dilation=dilations,
        feature_group_count=groups,
    )
