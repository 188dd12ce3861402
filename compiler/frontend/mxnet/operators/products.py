"""Products of matrices, those of attention whose projections lie interleaved among them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.table import Call
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET


@MXNET.row("FullyConnected")
def _fully_connected(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    rows = x.reshape(x.shape[0], -1) if call.flag("flatten", True) else x
    found = jnp.matmul(rows, weight.T)
    return found if bias is None or call.flag("no_bias") else found + bias


@MXNET.row("dot")
def _dot(call: Call, a: Any, b: Any) -> Any:
    """Over the last dim of a and the first of b, or, transposed, the first and the last."""
    left = 0 if call.flag("transpose_a") else a.ndim - 1
    right = b.ndim - 1 if call.flag("transpose_b") else 0
    found = jnp.tensordot(a, b, ((left,), (right,)))
    return found if found.ndim else found.reshape(1)


def _product(call: Call, a: Any, b: Any) -> Any:
    a = jnp.swapaxes(a, -1, -2) if call.flag("transpose_a") else a
    b = jnp.swapaxes(b, -1, -2) if call.flag("transpose_b") else b
    return jnp.matmul(a, b)


@MXNET.row("batch_dot")
def _batch_dot(call: Call, a: Any, b: Any) -> Any:
    return _product(call, a, b)


@MXNET.row("linalg_gemm2", "_linalg_gemm2")
def _gemm2(call: Call, a: Any, b: Any) -> Any:
    _check_rows(call)
    return call.number("alpha", 1.0) * _product(call, a, b)


@MXNET.row("linalg_gemm", "_linalg_gemm")
def _gemm(call: Call, a: Any, b: Any, c: Any) -> Any:
    _check_rows(call)
    return call.number("alpha", 1.0) * _product(call, a, b) + call.number("beta", 1.0) * c


def _check_rows(call: Call) -> None:
    if call.integer("axis", -2) != -2:
        raise NotImplementedError("an axis of rows other than -2")


def _heads(call: Call, x: Any, parts: int) -> list[Any]:
    """x [T, B, H x parts x D] as parts [B x H, T, D]."""
    heads = call.integer("heads", 1)
    if heads < 1 or x.ndim != 3 or x.shape[2] % (heads * parts):
        raise unfit(f"[T, B, {parts} x heads x D] with {heads} heads", str(list(x.shape)))
    time, batch, width = x.shape
    each = width // heads // parts
    apart = x.reshape(time, batch, heads, parts, each)
    return [
        apart[:, :, :, n].transpose(1, 2, 0, 3).reshape(batch * heads, time, each)
        for n in range(parts)
    ]


def _scores(q: Any, k: Any) -> Any:
    return jnp.matmul(q / math.sqrt(q.shape[-1]), jnp.swapaxes(k, 1, 2))


def _joined(call: Call, attention: Any, v: Any) -> Any:
    """Values by their weights, as [T, B, H x D]."""
    heads = call.integer("heads", 1)
    found = jnp.matmul(attention, v)
    rows, time, each = found.shape
    apart = found.reshape(rows // heads, heads, time, each)
    return apart.transpose(2, 0, 1, 3).reshape(time, rows // heads, heads * each)


@MXNET.row("_contrib_interleaved_matmul_selfatt_qk")
def _self_scores(call: Call, x: Any) -> Any:
    q, k, _ = _heads(call, x, 3)
    return _scores(q, k)


@MXNET.row("_contrib_interleaved_matmul_selfatt_valatt")
def _self_values(call: Call, x: Any, attention: Any) -> Any:
    return _joined(call, attention, _heads(call, x, 3)[2])


@MXNET.row("_contrib_interleaved_matmul_encdec_qk")
def _cross_scores(call: Call, queries: Any, x: Any) -> Any:
    (q,), (k, _) = _heads(call, queries, 1), _heads(call, x, 2)
    return _scores(q, k)


@MXNET.row("_contrib_interleaved_matmul_encdec_valatt")
def _cross_values(call: Call, x: Any, attention: Any) -> Any:
    return _joined(call, attention, _heads(call, x, 2)[1])
