"""Small image models as Flax users write them: residual network, one with convolutions in groups,
U-Net, vision transformer.

Each is a `VisionModel`: a training task with random images for batches, and a forward function for
inference. Nothing in them knows this compiler. Convolutions in front of a norm have no bias, since
its gradient is zero and its computed value only noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.compiler.frontend.task import TrainTask

CLASSES = 10


@dataclass(frozen=True)
class VisionModel:
    """`forward(variables(state), images)` is inference; `state` is what `task.init` draws.

    `images(n)` is the abstract array of `n` images.
    """

    task: TrainTask
    forward: Callable[[Any, jax.Array], jax.Array]
    variables: Callable[[tuple[Any, ...]], Any]
    images: Callable[[int], jax.ShapeDtypeStruct]


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm; a strided 1 x 1 one where the shape changes."""

    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        steps = (self.stride, self.stride)

        def norm(y: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(y)

        y = nn.Conv(self.width, (3, 3), steps, use_bias=False, dtype=self.dtype)(x)
        y = nn.relu(norm(y))
        y = norm(nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(y))
        if x.shape != y.shape:
            x = norm(nn.Conv(self.width, (1, 1), steps, use_bias=False, dtype=self.dtype)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stem with a strided convolution and max pooling, residual blocks, global average, classes."""

    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.widths[0], (5, 5), (2, 2), use_bias=False, dtype=self.dtype)(images)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
        for i, width in enumerate(self.widths):
            x = Residual(width, 1 if i == 0 else 2, self.dtype)(x, train)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)


class GroupedNet(nn.Module):
    """Blocks of three kinds, each beside a skip: expanded, depthwise and projected (MobileNet),
    depthwise in front of an MLP (ConvNeXt), and in four groups of several channels (ResNeXt).
    """

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        wide = 2 * self.width
        x = nn.Conv(self.width, (3, 3), (2, 2), dtype=self.dtype)(images)
        y = nn.relu(nn.Conv(wide, (1, 1), dtype=self.dtype)(x))
        y = nn.Conv(wide, (3, 3), feature_group_count=wide, use_bias=False, dtype=self.dtype)(y)
        x = x + nn.Conv(self.width, (1, 1), dtype=self.dtype)(nn.relu(y))
        y = nn.Conv(self.width, (5, 5), feature_group_count=self.width, dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(wide, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(y)))
        x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        y = nn.Conv(wide, (3, 3), (2, 2), feature_group_count=4, dtype=self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.relu(y).mean((1, 2))).astype(jnp.float32)


class GroupBlock(nn.Module):
    """Group norm, SiLU, convolution, twice, around a projection of the input and of the time."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(x))
        y = nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(y)
        y = y + nn.Dense(self.width, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(y))
        y = nn.Conv(self.width, (3, 3), dtype=self.dtype)(y)
        same = x.shape == y.shape
        return y + (x if same else nn.Conv(self.width, (1, 1), dtype=self.dtype)(x))


class UNet(nn.Module):
    """Blocks on the way down, each kept for the way up: strided convolution down, resize up."""

    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, time: jax.Array) -> jax.Array:
        rates = jnp.exp(-jnp.arange(8) / 2.0)
        angles = time[:, None] / 100 * rates
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(self.dtype)
        t = nn.Dense(16, dtype=self.dtype)(waves)
        x = nn.Conv(self.widths[0], (3, 3), dtype=self.dtype)(images)
        kept = []
        for width in self.widths:
            x = GroupBlock(width, self.dtype)(x, t)
            kept.append(x)
            x = nn.Conv(width, (3, 3), (2, 2), dtype=self.dtype)(x)
        x = GroupBlock(self.widths[-1], self.dtype)(x, t)
        for width, skip in zip(reversed(self.widths), reversed(kept), strict=True):
            x = jax.image.resize(x, skip.shape[:-1] + x.shape[-1:], "nearest")
            x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
            x = GroupBlock(width, self.dtype)(jnp.concatenate([x, skip], -1), t)
        x = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(x))
        return nn.Conv(images.shape[-1], (3, 3), dtype=self.dtype)(x).astype(jnp.float32)


class EncoderBlock(nn.Module):
    """Pre-norm attention and MLP."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, use_bias=False)(y, y)
        x = x + y
        y = nn.Dense(2 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(nn.gelu(y))


class VisionTransformer(nn.Module):
    """Patches by a strided convolution, a class token, learned positions, encoder blocks."""

    patch: int
    width: int
    layers: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, "VALID", dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("cls", nn.initializers.normal(0.5), (1, 1, self.width))
        first = jnp.broadcast_to(first, (x.shape[0], 1, self.width)).astype(self.dtype)
        x = jnp.concatenate([first, x], 1)
        places = self.param("pos", nn.initializers.normal(0.5), (1, *x.shape[1:]))
        x = x + places.astype(self.dtype)
        for _ in range(self.layers):
            x = EncoderBlock(2, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x[:, 0])
        return nn.Dense(CLASSES, dtype=self.dtype)(x).astype(jnp.float32)


def resnet(
    dtype: Any = jnp.float32, size: int = 16, widths: tuple[int, ...] = (8, 16)
) -> VisionModel:
    """Batch norm with statistics of the whole batch in training, running ones in inference."""
    model, shape = ResNet(widths, dtype), (size, size, 3)
    chain = optax.sgd(0.05, momentum=0.9)

    def init(key: jax.Array) -> tuple[Any, ...]:
        variables = draw(key, model, jnp.zeros((1, *shape)), train=True)
        params = variables["params"]
        return params, chain.init(params), variables["batch_stats"]

    def loss_of(params: Any, stats: Any, batch: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        logits, moved = model.apply(variables, batch["images"], train=True, mutable=["batch_stats"])
        return _cross_entropy(logits, batch["labels"]), moved["batch_stats"]

    def step(params: Any, opt_state: Any, stats: Any, batch: Any) -> Any:
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, stats), grads = gradient(params, stats, batch)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    names = ("params", "opt_state", "batch_stats")
    return VisionModel(
        _task("resnet", step, init, shape, {"labels": CLASSES}, names),
        lambda variables, images: model.apply(variables, images, train=False),
        lambda state: {"params": state[0], "batch_stats": state[2]},
        lambda n: jax.ShapeDtypeStruct((n, *shape), jnp.float32),
    )


def unet(dtype: Any = jnp.float32, size: int = 8, widths: tuple[int, ...] = (8, 16)) -> VisionModel:
    """A denoising step of a diffusion model: the loss is the distance from the noise."""
    model, shape = UNet(widths, dtype), (size, size, 3)

    def init_params(key: jax.Array) -> Any:
        return draw(key, model, jnp.zeros((1, *shape)), jnp.zeros((1,)))["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        share = batch["time"][:, None, None, None] / 1000
        noisy = jnp.sqrt(1 - share) * batch["images"] + jnp.sqrt(share) * batch["noise"]
        guess = model.apply({"params": params}, noisy.astype(dtype), batch["time"])
        return jnp.mean(jnp.square(guess - batch["noise"]))

    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))
    step, init = _plain(loss, init_params, chain)
    return VisionModel(
        _task("unet", step, init, shape, {"time": 1000, "noise": 0}),
        lambda variables, images: model.apply(variables, images, jnp.full(images.shape[:1], 250.0)),
        lambda state: {"params": state[0]},
        lambda n: jax.ShapeDtypeStruct((n, *shape), jnp.float32),
    )


def vit(dtype: Any = jnp.float32, size: int = 16, patch: int = 4, width: int = 16) -> VisionModel:
    """Classification by the class token."""
    return _classifier("vit", VisionTransformer(patch, width, 2, dtype), size)


def grouped(dtype: Any = jnp.float32, size: int = 8, width: int = 8) -> VisionModel:
    """Classification by a network with depthwise and grouped convolutions."""
    return _classifier("grouped", GroupedNet(width, dtype), size)


def _classifier(name: str, model: nn.Module, size: int) -> VisionModel:
    """Plain training of classes, with momentum."""
    shape = (size, size, 3)

    def init_params(key: jax.Array) -> Any:
        return draw(key, model, jnp.zeros((1, *shape)))["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        return _cross_entropy(model.apply({"params": params}, batch["images"]), batch["labels"])

    step, init = _plain(loss, init_params, optax.sgd(0.05, momentum=0.9))
    return VisionModel(
        _task(name, step, init, shape, {"labels": CLASSES}),
        model.apply,
        lambda state: {"params": state[0]},
        lambda n: jax.ShapeDtypeStruct((n, *shape), jnp.float32),
    )


MODELS: dict[str, Callable[..., VisionModel]] = {"resnet": resnet, "unet": unet, "vit": vit}


def draw(key: jax.Array, model: nn.Module, *args: Any, **given: Any) -> Any:
    """Variables of `model` from one draw: compiling Flax's own initialisers takes longer than
    everything else in these tests.
    """
    key_of = jax.random.key(0)
    abstract = jax.eval_shape(lambda: model.init(key_of, *args, **given))
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract)
    pool = jax.random.normal(key, (sum(leaf.size for _, leaf in paths),))
    leaves, at = [], 0
    for path, leaf in paths:
        name = path[-1].key
        if name in ("kernel", "cls", "pos"):
            fan_in = leaf.size // leaf.shape[-1] if name == "kernel" else 4
            part = pool[at : at + leaf.size].reshape(leaf.shape) / fan_in**0.5
        else:
            part = jnp.full(leaf.shape, float(name in ("scale", "var")))
        leaves.append(part.astype(leaf.dtype))
        at += leaf.size
    return jax.tree_util.tree_unflatten(tree, leaves)


def _plain(loss: Any, init_params: Any, chain: optax.GradientTransformation) -> Any:
    """(step, init) of a model whose state is parameters and optimizer."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = init_params(key)
        return params, chain.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, init


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _task(
    name: str,
    step: Any,
    init: Any,
    shape: tuple[int, ...],
    others: dict[str, int],
    names: tuple[str, ...] = ("params", "opt_state"),
) -> TrainTask:
    """A task over images; `others` are more leaves: integers below a bound, 0: noise of the image's
    shape, `time`: floats below the bound.
    """
    kinds = {
        leaf: (shape, jnp.float32) if not bound else ((), _scalar_type(leaf))
        for leaf, bound in ({"images": 0} | others).items()
    }

    def batch(n: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {k: jax.ShapeDtypeStruct((n, *s), t) for k, (s, t) in kinds.items()}

    def batches(seed: int, n: int, data: str | None) -> Iterator[dict[str, np.ndarray]]:
        del data
        rng = np.random.default_rng(seed)
        while True:
            drawn = {k: _draw(rng, (n, *s), others.get(k, 0)) for k, (s, _) in kinds.items()}
            yield {k: drawn[k].astype(kinds[k][1]) for k in drawn}

    return TrainTask(
        step=step, init=init, batch=batch, batches=batches, state_names=names, name=name
    )


def _scalar_type(leaf: str) -> Any:
    return jnp.float32 if leaf == "time" else jnp.int32


def _draw(rng: np.random.Generator, shape: tuple[int, ...], bound: int) -> np.ndarray:
    return rng.integers(0, bound, shape) if bound else rng.standard_normal(shape)
