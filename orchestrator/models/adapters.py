"""Low-rank adapters (LoRA) of any model here: what is frozen, what is trained, and the product of
both.

A matrix W [in, out] stays as it is stored, and A [in, r] and B [r, out] beside it are trained: the
product is x W + (alpha / r) (x A) B, so that the first step computes what the model did. Names of
settings and targets are those of PEFT (`LoraConfig`). Source: Hu et al. 2021, "LoRA" (arXiv
2106.09685); A is drawn as PEFT's `init_lora_weights="gaussian"` does, B is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.models.layers import Params

TARGETS: Mapping[str, str] = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w_gate",
    "up_proj": "w_up",
    "down_proj": "w_down",
}
"""Projections of a layer, as `target_modules` of PEFT names them -> the leaf that holds each."""
ALL_LINEAR = "all-linear"
_SCALE, _WEIGHT = "scale", "weight"
_MOST_INT8 = 127
_STACKED = "layers"
"""The part of the parameters whose leaves are stacked over layers on dim 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of rank `r`; `base` is how what is frozen is stored: int8 are the matrices of layers
    with a scale per column, all else then is bfloat16."""

    r: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    base: str = "bfloat16"

    @property
    def scale(self) -> float:
        """What the product with A and B is multiplied with."""
        return self.alpha / self.r

    def leaves(self) -> tuple[str, ...]:
        """The leaves that get an adapter. Raises UsageError for an unknown target."""
        unknown = [name for name in self.targets if name not in (*TARGETS, ALL_LINEAR)]
        if unknown:
            raise _refused(unknown, (*TARGETS, ALL_LINEAR))
        if ALL_LINEAR in self.targets:
            return tuple(TARGETS.values())
        return tuple(TARGETS[name] for name in self.targets)


def _refused(names: list[str], known: tuple[str, ...]) -> UsageError:
    return UsageError(
        "SW_LORA_TARGET",
        f"model.lora_targets requires projections of this model, {', '.join(known)}, got"
        f" {', '.join(names)}",
        hint=f'take some of these, or "{ALL_LINEAR}" for all of them',
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Adapted:
    """A frozen matrix with its adapter."""

    matrix: Any
    a: jax.Array
    b: jax.Array
    scale: float = field(metadata={"static": True})


def product(x: jax.Array, matrix: Any) -> jax.Array:
    """`x` times a matrix [in, out]: one with an adapter, one in int8 (`stored`), or a plain one."""
    if isinstance(matrix, Adapted):
        low = x @ matrix.a.astype(x.dtype)
        return product(x, matrix.matrix) + (low @ matrix.b.astype(x.dtype)) * matrix.scale
    if isinstance(matrix, Mapping):  # integers are exact in either type, and so are their products
        whole = x @ matrix[_WEIGHT].astype(x.dtype)
        return (whole.astype(jnp.float32) * matrix[_SCALE]).astype(x.dtype)
    made: jax.Array = x @ matrix.astype(x.dtype)
    return made


def stored(lora: Lora, params: Params) -> Params:
    """The parameters of a model as they are frozen."""
    dtype = jnp.float32 if lora.base == "float32" else jnp.bfloat16

    def kept(name: str, leaf: jax.Array, is_stacked: bool) -> Any:
        is_matrix = name in TARGETS.values() and leaf.ndim - is_stacked == 2
        return quantised(leaf) if lora.base == "int8" and is_matrix else leaf.astype(dtype)

    return _mapped(params, kept)


def quantised(matrix: jax.Array) -> dict[str, jax.Array]:
    """A matrix [..., in, out] as integers of 8 bits and a scale per column, the largest of which is
    127 (absolute maximum)."""
    scale = jnp.max(jnp.abs(matrix), axis=-2, keepdims=True) / _MOST_INT8
    scale = jnp.where(scale == 0, 1.0, scale)
    return {_WEIGHT: jnp.round(matrix / scale).astype(jnp.int8), _SCALE: scale}


def adapters(lora: Lora, params: Params, key: jax.Array) -> Params:
    """Fresh adapters of a model's parameters, as a tree of their names, fp32.

    Raises: UsageError for a target that the model does not have as a matrix.
    """
    wanted, found = lora.leaves(), dict[tuple[str, ...], tuple[int, ...]]()
    for path, leaf, is_stacked in _leaves(params):
        if path[-1] in wanted and leaf.ndim - is_stacked == 2:
            found[path] = leaf.shape
    there = {path[-1] for path in found}
    absent = [name for name in lora.targets if name in TARGETS and TARGETS[name] not in there]
    if absent or not found:
        known = tuple(name for name, leaf in TARGETS.items() if leaf in _matrices(params))
        raise _refused(absent or list(lora.targets), known or ("none",))
    made: Params = {}
    keys = jax.random.split(key, len(found))
    for (path, (*layers, rows, columns)), own in zip(found.items(), keys, strict=True):
        *outer, name = path
        node = made
        for part in outer:
            node = node.setdefault(part, {})
        node[name] = {
            "a": jax.random.normal(own, (*layers, rows, lora.r), jnp.float32) / lora.r,
            "b": jnp.zeros((*layers, lora.r, columns), jnp.float32),
        }
    return made


def adapted(lora: Lora, frozen: Params, own: Params) -> Params:
    """The parameters a model computes with: frozen ones, some of them with an adapter."""
    found: Params = {}
    for name, leaf in frozen.items():
        adapter = own.get(name)
        if adapter is None:
            found[name] = leaf
        elif name in TARGETS.values():
            found[name] = Adapted(leaf, adapter["a"], adapter["b"], lora.scale)
        else:
            found[name] = adapted(lora, leaf, adapter)
    return found


def _matrices(params: Params) -> set[str]:
    return {path[-1] for path, leaf, is_stacked in _leaves(params) if leaf.ndim - is_stacked == 2}


def _leaves(
    params: Params, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """Every leaf with its path, and whether it is stacked over layers."""
    for name, node in params.items():
        if isinstance(node, dict):
            yield from _leaves(node, (*path, name))
        else:
            yield (*path, name), node, _STACKED in path


def _mapped(
    params: Params, change: Callable[[str, Any, bool], Any], path: tuple[str, ...] = ()
) -> Params:
    """The same tree with every leaf changed."""
    return {
        name: _mapped(node, change, (*path, name))
        if isinstance(node, dict)
        else change(name, node, _STACKED in path)
        for name, node in params.items()
    }
