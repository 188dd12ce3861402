"""Convolutions and pooling; images are [N, C, ...]."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.pytorch.operators.registry import ATEN

Sizes = Sequence[int] | int


def spread(value: Sizes, count: int) -> tuple[int, ...]:
    """A setting for each of `count` spatial dims; one number stands for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


@ATEN.row("convolution")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Any:
    """Convolution of x [N, C, ...] with weight [O, C / groups, ...], or its transpose with
    [C, O / groups, ...]."""
    n = weight.ndim - 2
    single = x.ndim == n + 1
    x = x[None] if single else x
    stride, padding, dilation, extra = (
        spread(v, n) for v in (stride, padding, dilation, output_padding)
    )
    pads = [(p, p) for p in padding]
    y = (
        _transposed(x, weight, stride, padding, dilation, extra, groups)
        if transposed
        else jax.lax.conv_general_dilated(
            x, weight, stride, pads, rhs_dilation=dilation, feature_group_count=groups
        )
    )
    y = y if bias is None else y + bias.reshape(1, -1, *[1] * n)
    return y[0] if single else y


def _transposed(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> Any:
    """The convolution whose gradient with respect to its input this is, turned around."""
    inputs, outputs, *window = weight.shape
    n = len(window)
    weight = weight.reshape(groups, inputs // groups, outputs, *window)
    weight = jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *window)
    weight = jnp.flip(weight, tuple(range(2, n + 2)))
    reach = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    return jax.lax.conv_general_dilated(
        x,
        weight,
        (1,) * n,
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )


def _convolution_of(n: int) -> Any:
    def row(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Sizes = 1,
        padding: Any = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Any:
        if isinstance(padding, str):
            return _named_padding(x, weight, bias, stride, padding, dilation, groups)
        return convolution(x, weight, bias, stride, padding, dilation, False, 0, groups)

    for name in (f"conv{n}d", f"conv{n}d.padding"):
        ATEN.add(name, row)
    return row


def _named_padding(
    x: Any, weight: Any, bias: Any, stride: Sizes, padding: str, dilation: Sizes, groups: int
) -> Any:
    """Padding "valid" is none, "same" keeps the size."""
    n = weight.ndim - 2
    if x.ndim == n + 1:
        return _named_padding(x[None], weight, bias, stride, padding, dilation, groups)[0]
    stride, dilation = spread(stride, n), spread(dilation, n)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
    y = jax.lax.conv_general_dilated(
        x, weight, stride, pads, rhs_dilation=dilation, feature_group_count=groups
    )
    return y if bias is None else y + bias.reshape(1, -1, *[1] * n)


for _n in (1, 2, 3):
    _convolution_of(_n)


def _transposed_of(n: int) -> None:
    @ATEN.row(f"conv_transpose{n}d" if n == 1 else f"conv_transpose{n}d.input")
    def row(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Any:
        return convolution(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


for _n in (1, 2, 3):
    _transposed_of(_n)


def _pads(
    x: Any, window: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> list[tuple[int, int]]:
    """Padding of the spatial dims; with `ceil` as much more at the end as a last window needs that
    begins inside of the input or the padding before it."""
    pads = []
    for size, k, s, p in zip(x.shape[-len(window) :], window, stride, padding, strict=True):
        more = 0
        if ceil:
            count = -(-(size + 2 * p - k) // s) + 1
            count -= (count - 1) * s >= size + p
            more = max(0, (count - 1) * s + k - size - 2 * p)
        pads.append((p, p + more))
    return pads


def _windows(
    x: Any,
    first: Any,
    step: Any,
    window: Sequence[int],
    stride: Sequence[int],
    pads: list[tuple[int, int]],
) -> Any:
    lead = x.ndim - len(window)
    return jax.lax.reduce_window(
        x,
        first,
        step,
        (1,) * lead + tuple(window),
        (1,) * lead + tuple(stride),
        [(0, 0)] * lead + pads,
    )


def _max_pool(n: int) -> None:
    @ATEN.row(f"max_pool{n}d")
    def row(
        x: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Any:
        window, steps, dilations, pads = _pooled(
            x, n, kernel_size, stride, padding, dilation, ceil_mode
        )
        if set(dilations) != {1}:  # JAX has no gradient of windows with gaps
            return _largest_of(x, window, steps, dilations, pads)[0]
        return _windows(x, _least(x), jax.lax.max, window, steps, pads)

    @ATEN.row(f"max_pool{n}d_with_indices")
    def with_indices(
        x: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Any:
        return _largest_of(x, *_pooled(x, n, kernel_size, stride, padding, dilation, ceil_mode))


def _least(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return -jnp.inf if is_float else jnp.iinfo(x.dtype).min


def _pooled(
    x: Any,
    n: int,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> Any:
    """(window, strides, dilations, padding) of a pooling."""
    window = spread(kernel_size, n)
    steps = spread(stride or window, n)
    dilations = spread(dilation, n)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, window, strict=True)]
    return window, steps, dilations, _pads(x, reach, steps, spread(padding, n), ceil_mode)


def _taps(
    x: Any,
    window: Sequence[int],
    steps: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
    value: Any,
) -> Iterator[Any]:
    """What each element of a window sees of x, padded with a value: one strided slice each."""
    lead = x.ndim - len(window)
    padded = jax.lax.pad(
        x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * lead + [(low, high, 0) for low, high in pads]
    )
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, window, strict=True)]
    spans = [
        (size - r) // s * s + 1
        for size, r, s in zip(padded.shape[lead:], reach, steps, strict=True)
    ]
    for tap in np.ndindex(*window):
        starts = [0] * lead + [t * d for t, d in zip(tap, dilations, strict=True)]
        ends = [start + span for start, span in zip(starts[lead:], spans, strict=True)]
        yield jax.lax.slice(padded, starts, [*x.shape[:lead], *ends], [1] * lead + list(steps))


def _largest_of(
    x: Any,
    window: Sequence[int],
    steps: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> tuple[Any, Any]:
    """(the largest of each window, its place among the elements of an image): the first of
    several, to which the gradient goes; a NaN is larger than all."""
    places = jnp.arange(math.prod(x.shape[-len(window) :]), dtype=jnp.int32)
    places = places.reshape(x.shape[-len(window) :])
    seen = _taps(x, window, steps, dilations, pads, _least(x))
    where = _taps(places, window, steps, dilations, pads, -1)
    best, index = next(seen), next(where)
    index = jnp.broadcast_to(index, best.shape)
    for value, place in zip(seen, where, strict=True):
        is_more = (value > best) | jnp.isnan(value) | ((index < 0) & (place >= 0))
        best, index = jnp.where(is_more, value, best), jnp.where(is_more, place, index)
    return best, index


def _avg_pool(n: int) -> None:
    @ATEN.row(f"avg_pool{n}d")
    def row(
        x: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        window = spread(kernel_size, n)
        steps, padding = spread(stride or window, n), spread(padding, n)
        pads = _pads(x, window, steps, padding, ceil_mode)
        total = _windows(x, 0.0, jax.lax.add, window, steps, pads)
        if divisor_override:
            return total / divisor_override
        counted = jnp.ones(x.shape[-n:], x.dtype)
        if count_include_pad:  # of the padding that was asked for, not of what `ceil_mode` adds
            counted = jnp.pad(counted, [(p, p) for p in padding], constant_values=1)
            pads = [(0, high - p) for (_, high), p in zip(pads, padding, strict=True)]
        return total / _windows(counted, 0.0, jax.lax.add, window, steps, pads)


for _n in (1, 2, 3):
    _max_pool(_n)
    _avg_pool(_n)


def _adaptive(n: int) -> None:
    @ATEN.row(f"adaptive_avg_pool{n}d", *([f"_adaptive_avg_pool{n}d"] if n > 1 else []))
    def row(x: Any, output_size: Sizes) -> Any:
        for dim, count in zip(range(-n, 0), spread(output_size, n), strict=True):
            x = _averaged(x, dim, count)
        return x


def _averaged(x: Any, dim: int, count: int) -> Any:
    """Means of `count` equal pieces of a dim, which overlap where it does not divide."""
    size = x.shape[dim]
    dim = dim % x.ndim
    if size % count == 0:
        shape = (*x.shape[:dim], count, size // count, *x.shape[dim + 1 :])
        return jnp.mean(x.reshape(shape), dim + 1)
    ends = [(n * size // count, -(-(n + 1) * size // count)) for n in range(count)]
    parts = [
        jnp.mean(jax.lax.slice_in_dim(x, low, high, axis=dim), dim, keepdims=True)
        for low, high in ends
    ]
    return jnp.concatenate(parts, dim)


for _n in (1, 2, 3):
    _adaptive(_n)


def _adaptive_max(n: int) -> None:
    @ATEN.row(f"adaptive_max_pool{n}d")
    def row(x: Any, output_size: Sizes) -> Any:
        sizes, counts = x.shape[-n:], spread(output_size, n)
        if all(size % count == 0 for size, count in zip(sizes, counts, strict=True)):
            window = [size // count for size, count in zip(sizes, counts, strict=True)]
            return _largest_of(x, window, window, (1,) * n, [(0, 0)] * n)
        return _largest_of_pieces(x, counts)


def _largest_of_pieces(x: Any, counts: Sequence[int]) -> tuple[Any, Any]:
    """(the largest, its place) of pieces that do not divide a dim, and overlap."""
    n = len(counts)
    lead, sizes = x.shape[: x.ndim - n], x.shape[x.ndim - n :]
    places = jnp.arange(math.prod(sizes)).reshape(sizes)
    values, index = [], []
    for piece in np.ndindex(*counts):
        ends = [
            (p * size // c, -(-(p + 1) * size // c))
            for p, size, c in zip(piece, sizes, counts, strict=True)
        ]
        cut = tuple(slice(low, high) for low, high in ends)
        part = x[(..., *cut)].reshape(*lead, -1)
        best = jnp.argmax(part, -1, keepdims=True)
        values.append(jnp.take_along_axis(part, best, -1))
        index.append(places[cut].reshape(-1)[best])
    return tuple(jnp.concatenate(p, -1).reshape(*lead, *counts) for p in (values, index))


for _n in (1, 2, 3):
    _adaptive_max(_n)
