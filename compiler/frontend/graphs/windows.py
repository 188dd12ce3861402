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


def convolved(
    x: Any,
    weight: Any,
    strides: Sequence[int],
    pads: Pads,
    dilations: Sequence[int],
    groups: int,
    is_trained: bool,
) -> Any:
    """A convolution of x by a weight [results, C of a group, ...].

    Where a step trains the weight of one channel a group, it is a sum over taps: the gradient of
    the grouped form splits the samples of all ranks into groups, which no partitioning shares out.
    """
    if is_trained and groups > 1 and weight.shape[1] == 1:
        return _by_taps(x, weight, strides, pads, dilations)
    return jax.lax.conv_general_dilated(
        x, weight, strides, pads, rhs_dilation=dilations, feature_group_count=groups
    )


def _by_taps(
    x: Any, weight: Any, strides: Sequence[int], pads: Pads, dilations: Sequence[int]
) -> Any:
    """A convolution of each channel by itself, one product for each element of its window."""
    times, window = weight.shape[0] // x.shape[1], weight.shape[2:]
    wide = jnp.repeat(x, times, 1) if times > 1 else x
    wide = jnp.pad(wide, [(0, 0), (0, 0), *pads])
    ends = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(wide.shape[2:], window, strides, dilations, strict=True)
    ]
    total: Any = 0
    for tap in np.ndindex(*window):
        first = [t * d for t, d in zip(tap, dilations, strict=True)]
        rows = zip(first, ends, strides, strict=True)
        cut = [slice(a, a + (n - 1) * s + 1, s) for a, n, s in rows]
        own = weight[:, 0, *tap].reshape(1, -1, *[1] * len(window))
        total = total + wide[:, :, *cut] * own
    return total


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
