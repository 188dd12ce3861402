"""Losses by name in TensorFlow: what gradients are of, in the child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.compiler.diagnostics import UsageError, did_you_mean

NAMES = ("cross_entropy", "mse")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A loss: what it makes of (results, rest of the arguments), and the shape and type of its
    target, None where it has none; of how many `classes` that is."""

    function: Callable[[Any, Sequence[Any]], Any]
    target: tuple[tuple[int, ...], Any] | None
    classes: int = 0


def _cross_entropy(result: Any, rest: Sequence[Any]) -> Any:
    scores = tf.cast(result, tf.float32)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=rest[0], logits=scores)
    )


def _mse(result: Any, rest: Sequence[Any]) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(result, tf.float32) - rest[0]))


def loss_of(name: str, structure: Any, model: str) -> Chosen:
    """The loss of that name for results of a structure. Raises UsageError where there is none."""
    flat = tf.nest.flatten(structure)
    first: Any = flat[0] if flat else tf.constant(0)
    shape = tuple(first.shape)
    if name in NAMES and shape and first.dtype.is_floating:
        if name == "mse":
            return Chosen(lambda r, rest: _mse(tf.nest.flatten(r)[0], rest), (shape, np.float32))
        return Chosen(
            lambda r, rest: _cross_entropy(tf.nest.flatten(r)[0], rest),
            (shape[:-1], np.int32),
            shape[-1],
        )
    keys = list(structure) if isinstance(structure, dict) else [f"out{n}" for n in range(len(flat))]
    numbers = [k for k, r in zip(keys, flat, strict=False) if not r.shape and r.dtype.is_floating]
    if name in numbers:
        at = keys.index(name)
        return Chosen(lambda r, rest: tf.nest.flatten(r)[at], None)
    shown = ", ".join(
        f"{k} {r.dtype.name}{list(r.shape)}" for k, r in zip(keys, flat, strict=False)
    )
    raise UsageError(
        "SW_TF_LOSS",
        f"a training step of {model} requires a loss, {', '.join(NAMES)} of its first result or a"
        f" result that is one number, got {name} and {shown}",
        hint=did_you_mean(name, (*NAMES, *numbers), "--set model.loss=cross_entropy trains it"),
    )
