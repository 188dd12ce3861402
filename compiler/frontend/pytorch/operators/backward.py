"""Operators of torch's own backward passes, in joint graphs: the derivative of the forward row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from shardwright.compiler.frontend.pytorch.operators.convolution import convolution
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN


@ATEN.row("convolution_backward")
def convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Gradients of x, weight and bias; None of one that `output_mask` does not ask for."""

    def forward(x: Any, weight: Any) -> Any:
        sizes = stride, padding, dilation
        return convolution(x, weight, None, *sizes, transposed, output_padding, groups)

    _, pulled = jax.vjp(forward, x, weight)
    channel = gradient.ndim - (weight.ndim - 1)  # 0 of an x without a dim of samples
    others = tuple(dim for dim in range(gradient.ndim) if dim != channel)
    found = (*pulled(gradient), gradient.sum(others))
    return tuple(each if wanted else None for each, wanted in zip(found, output_mask, strict=True))


@ATEN.row("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    """Gradients of query, key and value of an attention without dropout, which that of the CPU does
    not have."""
    row = ATEN["scaled_dot_product_attention"]

    def forward(*operands: Any) -> Any:
        return row(None, *operands, attn_mask, 0.0, is_causal, scale)

    _, pulled = jax.vjp(forward, query, key, value)
    return pulled(gradient)
