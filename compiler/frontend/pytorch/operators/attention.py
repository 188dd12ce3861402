"""Attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.pytorch.operators.random import dropped
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, Place


@ATEN.row("scaled_dot_product_attention", placed=True)
def attention(
    place: Place,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(query key^T scale + mask) value, of [..., heads, positions, width].

    The scores are kept in fp32, as torch's fused kernels do. With `enable_gqa`, query heads in
    groups share one head of keys and values. A query whose keys are all masked gives zeros.
    """
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        count = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(x, count, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=jnp.float32)
    scores = scores * scale
    if is_causal:
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], n) for n in (0, 1))
        scores = jnp.where(rows >= columns, scores, -jnp.inf)
    elif attn_mask is not None and attn_mask.dtype == bool:
        scores = jnp.where(attn_mask, scores, _LEAST)
    elif attn_mask is not None:
        scores = scores + jnp.maximum(attn_mask.astype(jnp.float32), _LEAST)
    weights = jax.nn.softmax(scores, -1)
    if dropout_p:
        weights = dropped(weights, dropout_p, place.key)
    result = jnp.einsum("...qk,...kd->...qd", weights.astype(value.dtype), value)
    if is_causal or attn_mask is None:
        return result
    is_seen = attn_mask if attn_mask.dtype == bool else ~jnp.isneginf(attn_mask)
    return jnp.where(jnp.any(is_seen, -1, keepdims=True), result, 0)


_LEAST = float(np.finfo(np.float32).min)
"""A score that no softmax lets through, and that makes no NaN of a row of such."""
