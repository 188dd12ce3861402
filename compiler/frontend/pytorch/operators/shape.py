"""Shapes: views, concatenation, padding, and tensors made of a shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place
from shardwright.compiler.frontend.pytorch.types import scalar


@ATEN.row("view", "reshape", "_unsafe_view", "view_as", "_reshape_copy", placed=True)
@ATEN.row("unflatten.int", "flatten.using_ints", placed=True)
@ATEN.row("squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", placed=True)
def reshaped(place: Place, x: Any, *_: Any, **__: Any) -> Any:
    """x in the shape of the result, elements in order."""
    return x.reshape(place.shape)


@ATEN.row("expand", "expand_as", placed=True)
def expand(place: Place, x: Any, *_: Any, **__: Any) -> Any:
    """x repeated along dims of size 1, and new ones in front."""
    return jnp.broadcast_to(x, place.shape)


@ATEN.row("transpose.int")
def transpose(x: Any, a: int, b: int) -> Any:
    """x with two dims exchanged."""
    return jnp.swapaxes(x, a, b) if x.ndim else x


@ATEN.row("t", "numpy_T")
def transposed(x: Any) -> Any:
    """A matrix, transposed."""
    return x.T


@ATEN.row("permute")
def permute(x: Any, dims: Sequence[int]) -> Any:
    """x with its dims in another order."""
    return jnp.transpose(x, dims)


@ATEN.row("movedim.intlist", "movedim.int")
def movedim(x: Any, source: Any, destination: Any) -> Any:
    """x with some dims elsewhere."""
    return jnp.moveaxis(x, source, destination)


@ATEN.row("cat", "concat", placed=True)
def cat(place: Place, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Tensors one behind the other along a dim; empty 1-d ones are left out, as torch does."""
    parts = [x.astype(place.dtype) for x in tensors if x.shape != (0,) or place.shape == (0,)]
    return jnp.concatenate(parts, dim)


@ATEN.row("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Tensors along a new dim."""
    return jnp.stack(tensors, dim)


@ATEN.row("split.Tensor")
def split(x: Any, size: int, dim: int = 0) -> Any:
    """Pieces of one size, the last one of what is left."""
    count = x.shape[dim]
    if not count:
        return [x]
    return [
        jax.lax.slice_in_dim(x, n, min(n + size, count), axis=dim) for n in range(0, count, size)
    ]


@ATEN.row("split_with_sizes", "split.sizes")
def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    """Pieces of given sizes."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [
        jax.lax.slice_in_dim(x, end - size, end, axis=dim)
        for size, end in zip(sizes, ends, strict=True)
    ]


@ATEN.row("chunk")
def chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    """At most so many pieces of one size."""
    return split(x, max(1, -(-x.shape[dim] // chunks)), dim)


@ATEN.row("unbind.int")
def unbind(x: Any, dim: int = 0) -> Any:
    """The slices along a dim."""
    return [jax.lax.index_in_dim(x, n, dim, keepdims=False) for n in range(x.shape[dim])]


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice as torch has them: negative from the end, cut to the size."""
    start, end = start or 0, size if end is None else end
    start, end = (n + size if n < 0 else n for n in (start, end))
    start = min(max(start, 0), size)
    return start, max(start, min(end, size))


@ATEN.row("slice.Tensor")
def sliced(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """A slice along a dim."""
    if (start or 0) == 0 and step == 1 and (end is None or end >= x.shape[dim]):
        return x
    first, last = bounds(x.shape[dim], start, end)
    return jax.lax.slice_in_dim(x, first, last, step, dim)


@ATEN.row("narrow")
def narrow(x: Any, dim: int, start: int, length: int) -> Any:
    """`length` elements along a dim."""
    start = start + x.shape[dim] if start < 0 else start
    return sliced(x, dim, start, start + length)


@ATEN.row("select.int")
def select(x: Any, dim: int, index: int) -> Any:
    """One element along a dim, which goes."""
    return jax.lax.index_in_dim(x, index, dim, keepdims=False)


@ATEN.row("slice_scatter")
def slice_scatter(
    x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """x with a slice replaced."""
    first, last = bounds(x.shape[dim], start, end)
    where = [slice(None)] * x.ndim
    where[dim] = slice(first, last, step)
    return x.at[tuple(where)].set(source.astype(x.dtype))


@ATEN.row("select_scatter")
def select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    """x with one element along a dim replaced."""
    index = index % x.shape[dim]
    return slice_scatter(x, jnp.expand_dims(source, dim), dim, index, index + 1)


@ATEN.row("constant_pad_nd")
def constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """x with a value around it; pairs from the last dim on, negative ones cut."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in widths])


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@ATEN.row("pad")
def pad(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """x with something around it."""
    if mode == "constant":
        return constant_pad(x, pad, value or 0)
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    wide = jnp.pad(x, [(max(0, low), max(0, high)) for low, high in widths], mode=_MODES[mode])
    cut = (
        slice(max(0, -low), n - max(0, -high))
        for (low, high), n in zip(widths, wide.shape, strict=True)
    )
    return wide[tuple(cut)]  # where a width is negative


@ATEN.row("repeat")
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    """x so often along each dim."""
    return jnp.tile(x, repeats)


@ATEN.row("repeat_interleave.self_int")
def repeat_interleave(x: Any, repeats: int, dim: int | None = None, **_: Any) -> Any:
    """Each element so often."""
    return jnp.repeat(x, repeats, dim)


@ATEN.row("flip")
def flip(x: Any, dims: Sequence[int]) -> Any:
    """x in reverse order along dims."""
    return jnp.flip(x, tuple(dims))


@ATEN.row("roll")
def roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    """x shifted around."""
    return jnp.roll(x, tuple(shifts), tuple(dims) or None)


@ATEN.row("tril")
def tril(x: Any, diagonal: int = 0) -> Any:
    """The lower triangle."""
    return jnp.tril(x, diagonal)


@ATEN.row("triu")
def triu(x: Any, diagonal: int = 0) -> Any:
    """The upper triangle."""
    return jnp.triu(x, diagonal)


@ATEN.row("arange", "arange.start", "arange.start_step", placed=True)
def arange(place: Place, start: Any, end: Any = None, step: Any = 1, **_: Any) -> Any:
    """Numbers one step apart."""
    if end is None:
        start, end = 0, start
    return jnp.arange(start, end, step, place.dtype)


@ATEN.row("linspace", placed=True)
def linspace(place: Place, start: Any, end: Any, steps: int, **_: Any) -> Any:
    """Numbers equally far apart, both ends among them."""
    return jnp.linspace(start, end, steps, dtype=place.dtype)


@ATEN.row("full", "full_like", "new_full", placed=True)
def full(place: Place, *shape_and_value: Any, **_: Any) -> Any:
    """One value everywhere; the shape, and what else it is taken from, stand before the value."""
    return jnp.full(place.shape, scalar(shape_and_value[-1]), place.dtype)


_EMPTY = ("zeros", "zeros_like", "new_zeros", "empty.memory_format", "empty_like", "new_empty")


@ATEN.row(*_EMPTY, "empty_strided", "new_empty_strided", "empty_permuted", placed=True)
def zeros(place: Place, *_: Any, **__: Any) -> Any:
    """Zeros; what torch leaves without values has them too."""
    return jnp.zeros(place.shape, place.dtype)


@ATEN.row("ones", "ones_like", "new_ones", placed=True)
def ones(place: Place, *_: Any, **__: Any) -> Any:
    """Ones."""
    return jnp.ones(place.shape, place.dtype)


@ATEN.row("scalar_tensor", placed=True)
def scalar_tensor(place: Place, value: Any, **_: Any) -> Any:
    """One number."""
    return jnp.asarray(scalar(value), place.dtype)


@ATEN.row("eye", "eye.m", placed=True)
def eye(place: Place, *_: Any, **__: Any) -> Any:
    """Ones on the diagonal."""
    rows, columns = place.shape
    return jnp.eye(rows, columns, dtype=place.dtype)


@ATEN.row("diagonal")
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """The diagonal of two dims, as the last one."""
    return jnp.diagonal(x, offset, dim1, dim2)


@ATEN.row("as_strided", "as_strided_copy", placed=True)
def as_strided(
    place: Place, x: Any, size: Sequence[int], stride: Sequence[int], offset: Any = None
) -> Any:
    """Elements of x, as they lie in memory, at steps of the dims of the result."""
    if not place.is_in_order:
        raise UsageError(
            "SW_TORCH_OPERATOR",
            "as_strided requires a tensor whose elements lie in order, got a view of one",
            hint="call contiguous() before it, or write it with unfold, slices and permute",
        )
    places = np.full((), offset or 0)
    for count, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(count) * step
    is_all = places.size == x.size and (places.reshape(-1) == np.arange(x.size)).all()
    if is_all:
        return x.reshape(tuple(size))
    return jnp.take(x.reshape(-1), places, mode="clip")


@ATEN.row("unfold")
def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dim, their elements as the last dim: one strided slice for each element."""
    if not x.ndim:
        return jnp.broadcast_to(x, (size,))
    count = (x.shape[dim] - size) // step + 1
    parts = [jax.lax.slice_in_dim(x, n, n + (count - 1) * step + 1, step, dim) for n in range(size)]
    return jnp.stack(parts, -1) if parts else jnp.zeros((*x.shape[:dim], count, 0), x.dtype)


def _patches(
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    size: Sequence[int],
) -> tuple[list[int], Any]:
    """(patches along height and width, the taps of a patch as slices of the padded image)."""
    options = list(zip(kernel, dilation, padding, stride, size, strict=True))
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for k, d, p, s, n in options]
    taps = [
        tuple(
            slice(t * d, t * d + (count - 1) * s + 1, s)
            for t, (_, d, _, s, _), count in zip(tap, options, counts, strict=True)
        )
        for tap in np.ndindex(*kernel)
    ]
    return counts, taps


@ATEN.row("im2col")
def im2col(
    x: Any,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Patches of x [..., C, H, W] as columns [..., C k k, L]: a strided slice for each tap."""
    counts, taps = _patches(kernel, dilation, padding, stride, x.shape[-2:])
    edges = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    padded = jnp.pad(x, edges)
    parts = jnp.stack([padded[(..., *tap)] for tap in taps], -3)
    return parts.reshape(*x.shape[:-3], x.shape[-3] * len(taps), counts[0] * counts[1])


@ATEN.row("col2im")
def col2im(
    x: Any,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Columns [..., C k k, L] added up where they lie in an image [..., C, H, W]."""
    counts, taps = _patches(kernel, dilation, padding, stride, size)
    lead, channels = x.shape[:-2], x.shape[-2] // len(taps)
    parts = x.reshape(*lead, channels, len(taps), *counts)
    height, width = (n + 2 * p for n, p in zip(size, padding, strict=True))
    total = jnp.zeros((*lead, channels, height, width), x.dtype)
    for n, tap in enumerate(taps):
        edges = [(0, 0, 0)] * (len(lead) + 1)
        for part, full in zip(tap, (height, width), strict=True):
            edges.append((part.start, full - part.stop, part.step - 1))
        total = total + jax.lax.pad(parts[..., n, :, :], jnp.zeros((), x.dtype), edges)
    (top, left), (rows, columns) = padding, size
    return total[..., top : top + rows, left : left + columns]


@ATEN.row("diag_embed")
def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """The last dim as a diagonal of two dims."""
    size = x.shape[-1] + abs(offset)
    rows, columns = np.ogrid[:size, :size]
    by_row = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(max(0, -offset), max(0, offset))])
    found = jnp.where(columns - rows == offset, by_row[..., :, None], 0)
    return jnp.moveaxis(found, (-2, -1), (dim1, dim2))


@ATEN.row("diagonal_scatter")
def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """x with the diagonal of two dims replaced."""
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = last.shape[-2:]
    low, high = max(0, -offset), max(0, offset)
    count = source.shape[-1]
    by_row = jnp.pad(source, [(0, 0)] * (source.ndim - 1) + [(low, rows - low - count)])
    is_diagonal = np.arange(columns) - np.arange(rows)[:, None] == high - low
    found = jnp.where(is_diagonal, by_row[..., :, None], last)
    return jnp.moveaxis(found, (-2, -1), (dim1, dim2))


@ATEN.row("pixel_unshuffle")
def pixel_unshuffle(x: Any, factor: int) -> Any:
    """[..., C, H r, W r] -> [..., C r r, H, W]."""
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*lead, channels * factor**2, height // factor, width // factor)


@ATEN.row("channel_shuffle")
def channel_shuffle(x: Any, groups: int) -> Any:
    """Channels of groups, dealt out in turn."""
    n, channels, *rest = x.shape
    x = x.reshape(n, groups, channels // groups, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(n, channels, *rest)


@ATEN.row("pixel_shuffle")
def pixel_shuffle(x: Any, factor: int) -> Any:
    """[..., C r r, H, W] -> [..., C, H r, W r]."""
    *lead, channels, height, width = x.shape
    c = channels // factor**2
    x = x.reshape(*lead, c, factor, factor, height, width)
    n = len(lead)
    x = jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*lead, c, height * factor, width * factor)


@ATEN.row("sym_size.int")
def size(x: Any, dim: int) -> Any:
    """The size of a dim."""
    return x.shape[dim]
