"""The U-Net of a diffusion model: which noise is in an image (Ho et al. 2020, "Denoising Diffusion
Probabilistic Models", arXiv 2006.11239, appendix B).

Levels of half the rows and columns each, all of residual blocks that hear the time, with attention
between all pixels at one resolution; what the way down leaves is read on the way up. Images are
[B, rows, columns, channels], parameters fp32, norms and loss fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import blocks
from shardwright.orchestrator.models.blocks import Samples, TaskOptions
from shardwright.orchestrator.models.layers import How, Params, recomputed

_GROUPS = 32  # of a norm
_EPS = 1e-6
_STEPS = 1000
_BETAS = 1e-4, 0.02  # of the first and last step of noise, linear between them
_COLOURS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet:
    """Sizes: rows and columns of an image, channels of the first level and multiples of them,
    residual blocks of a level on the way down, and the rows where pixels attend to each other."""

    image: int
    width: int
    multiples: tuple[int, ...]
    blocks: int = 2
    attended: int = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the way through the net: a residual block, `down`, or `up`."""

    kind: str
    name: str
    given: int
    made: int
    attends: bool = False
    skipped: int = 0
    """Channels read from the way down besides."""


def parts(net: UNet) -> Iterator[Part]:
    """All parts between the first and the last convolution, in order."""
    kept, width, rows = [net.width], net.width, net.image
    last = len(net.multiples) - 1
    for level, multiple in enumerate(net.multiples):
        made = net.width * multiple
        for number in range(net.blocks):
            yield Part("block", f"down{level}_{number}", width, made, rows == net.attended)
            width = made
            kept.append(width)
        if level < last:
            yield Part("down", f"down{level}", width, width)
            rows //= 2
            kept.append(width)
    yield Part("block", "middle0", width, width, attends=True)
    yield Part("block", "middle1", width, width)
    for level, multiple in reversed(list(enumerate(net.multiples))):
        made = net.width * multiple
        for number in range(net.blocks + 1):
            attends, skipped = rows == net.attended, kept.pop()
            yield Part("block", f"up{level}_{number}", width, made, attends, skipped)
            width = made
        if level:
            yield Part("up", f"up{level}", width, width)
            rows *= 2


def shapes(net: UNet) -> dict[str, Any]:
    """The shape of every parameter, as a tree."""
    time = 4 * net.width
    found: dict[str, Any] = {
        "time": _dense("in", net.width, time) | _dense("out", time, time),
        "first": _convolved("in", _COLOURS, net.width),
    }
    width = net.width
    for part in parts(net):
        found[part.name] = _part_shapes(part, time)
        width = part.made
    return found | {"last": _norm("norm", width) | _convolved("out", width, _COLOURS)}


def _part_shapes(part: Part, time: int) -> dict[str, tuple[int, ...]]:
    given, made = part.given + part.skipped, part.made
    if part.kind != "block":
        return _convolved("in", given, made)
    found = _norm("norm_in", given) | _convolved("in", given, made) | _dense("time", time, made)
    found |= _norm("norm_out", made) | _convolved("out", made, made)
    if given != made:
        found |= _dense("beside", given, made)
    if part.attends:
        found |= _norm("norm_attended", made)
        for name in ("q", "k", "v", "o"):
            found |= _dense(name, made, made)
    return found


def _dense(name: str, given: int, made: int) -> dict[str, tuple[int, ...]]:
    return {f"w_{name}": (given, made), f"b_{name}": (made,)}


def _convolved(name: str, given: int, made: int) -> dict[str, tuple[int, ...]]:
    return {f"w_{name}": (3, 3, given, made), f"b_{name}": (made,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}_scale": (width,), f"{name}_shift": (width,)}


def init_params(net: UNet, key: jax.Array) -> Params:
    """Fresh parameters, fp32: normal matrices of the variance that keeps that of their input, unit
    norms, biases of zero."""
    tree = shapes(net)
    keys = iter(jax.random.split(key, len(jax.tree.leaves(tree, is_leaf=_is_shape))))

    def made(path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
        own, name = next(keys), path[-1].key
        if len(shape) == 1:
            return jnp.full(shape, float(name.endswith("scale")), jnp.float32)
        drawn = jax.random.normal(own, shape, jnp.float32)
        return drawn / math.sqrt(math.prod(shape[:-1]))

    params: Params = jax.tree.map_with_path(made, tree, is_leaf=_is_shape)
    return params


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def denoised(net: UNet, params: Params, images: jax.Array, time: jax.Array, how: How) -> jax.Array:
    """The noise in images [B, R, C, 3] at the steps `time` [B], fp32."""
    dtype = how.precision.dtype
    heard = jax.nn.silu(_linear(params["time"], "in", _waves(time, net.width).astype(dtype)))
    heard = jax.nn.silu(_linear(params["time"], "out", heard))
    x = _convolve(params["first"], "in", images.astype(dtype))
    kept = [x]
    for part in parts(net):
        if part.skipped:
            x = jnp.concatenate([x, kept.pop()], axis=-1)
        x = recomputed(partial(_run, part), how)(params[part.name], x, heard)
        if part.name.startswith("down"):
            kept.append(x)
    x = jax.nn.silu(_normed(params["last"], "norm", x))
    return _convolve(params["last"], "out", x).astype(jnp.float32)


def _run(part: Part, held: Params, x: jax.Array, heard: jax.Array) -> jax.Array:
    """One part."""
    if part.kind == "down":
        return _convolve(held, "in", x, stride=2)
    if part.kind == "up":
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return _convolve(held, "in", x)
    made = _convolve(held, "in", jax.nn.silu(_normed(held, "norm_in", x)))
    made = made + _linear(held, "time", heard)[:, None, None, :]
    made = _convolve(held, "out", jax.nn.silu(_normed(held, "norm_out", made)))
    x = made + (_linear(held, "beside", x) if "w_beside" in held else x)
    return _attended(held, x) if part.attends else x


def _attended(held: Params, x: jax.Array) -> jax.Array:
    """Attention of all pixels to each other, of one head."""
    shape, rows = x.shape, x.reshape(len(x), -1, x.shape[-1])
    read = _normed(held, "norm_attended", rows)
    q, k, v = (_linear(held, name, read) for name in ("q", "k", "v"))
    scores = jnp.einsum("btc,bsc->bts", q, k).astype(jnp.float32) * shape[-1] ** -0.5
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    made = _linear(held, "o", jnp.einsum("bts,bsc->btc", shares, v))
    return (rows + made).reshape(shape)


def _waves(time: jax.Array, width: int) -> jax.Array:
    """Sines and cosines [B, width] of steps."""
    half = width // 2
    rates = jnp.exp(-math.log(10000) / (half - 1) * jnp.arange(half, dtype=jnp.float32))
    angles = time.astype(jnp.float32)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _linear(held: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ held[f"w_{name}"].astype(x.dtype) + held[f"b_{name}"].astype(x.dtype)


def _convolve(held: Params, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of three rows and columns; with a stride behind one row and column of zeros at
    the end, as the paper's own code pads."""
    padding = ((1, 1), (1, 1)) if stride == 1 else ((0, 1), (0, 1))
    made = jax.lax.conv_general_dilated(
        x,
        held[f"w_{name}"].astype(x.dtype),
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return made + held[f"b_{name}"].astype(x.dtype)


def _normed(held: Params, name: str, x: jax.Array) -> jax.Array:
    """A norm over groups of channels and all pixels, computed in fp32."""
    wide = x.astype(jnp.float32).reshape(len(x), -1, _GROUPS, x.shape[-1] // _GROUPS)
    centred = wide - jnp.mean(wide, axis=(1, 3), keepdims=True)
    variance = jnp.mean(centred * centred, axis=(1, 3), keepdims=True)
    normed = (centred * jax.lax.rsqrt(variance + _EPS)).reshape(x.shape)
    return (normed * held[f"{name}_scale"] + held[f"{name}_shift"]).astype(x.dtype)


def train_task(net: UNet, options: TaskOptions) -> TrainTask:
    """The training step: the distance from the noise that was added to images (equation 14)."""
    if options.seq_len != 1:
        raise UsageError(
            "SW_SEQ_LEN",
            f"seq_len requires none of a model of images, got {options.seq_len}",
            hint="leave --seq-len out",
        )

    def loss(params: Params, batch: dict[str, jax.Array], how: How) -> jax.Array:
        kept = jnp.cumprod(1 - jnp.linspace(*_BETAS, _STEPS))[batch["time"]][:, None, None, None]
        noisy = jnp.sqrt(kept) * batch["images"] + jnp.sqrt(1 - kept) * batch["noise"]
        return jnp.mean(
            jnp.square(denoised(net, params, noisy, batch["time"], how) - batch["noise"])
        )

    def batch(n: int) -> dict[str, Any]:
        images = jax.ShapeDtypeStruct((n, net.image, net.image, _COLOURS), np.float32)
        time = jax.ShapeDtypeStruct((n,), np.int32)
        return {"images": images, "noise": images, "time": time}

    def batches(seed: int, count: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
        rng, shape = np.random.default_rng(seed), (count, net.image, net.image, _COLOURS)
        while True:
            images, noise = rng.standard_normal((2, *shape), np.float32)
            yield {
                "images": images,
                "noise": noise,
                "time": rng.integers(0, _STEPS, count).astype(np.int32),
            }

    samples = Samples(batch, batches, 1)
    return blocks.sample_task(partial(init_params, net), loss, samples, options)
