"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.pytorch.operators.reduction import norm
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN

ATEN.rows(
    {"mm": jnp.matmul, "bmm": jnp.matmul, "matmul": jnp.matmul, "mv": jnp.matmul, "dot": jnp.dot}
)
ATEN.row("outer")(jnp.outer)


@ATEN.row("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x [..., I] times weight [O, I], transposed, plus bias [O]."""
    y = jnp.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


@ATEN.row("addmm", "baddbmm")
def addmm(x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta x + alpha a b."""
    y = jnp.matmul(a, b)
    if beta == 0:  # then x may be NaN
        return alpha * y
    return (x if beta == 1 else beta * x) + (y if alpha == 1 else alpha * y)


@ATEN.row("addmv")
def addmv(x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta x + alpha a b, b a vector."""
    return addmm(x, a, b, beta, alpha)


@ATEN.row("addbmm")
def addbmm(x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta x + alpha times the sum of the products of a batch."""
    return addmm(x, jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1), _rows(b), beta, alpha)


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


@ATEN.row("addr")
def addr(x: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta x + alpha times the outer product of two vectors."""
    return addmm(x, a[:, None], b[None, :], beta, alpha)


@ATEN.row("_grouped_mm", "transformers.grouped_mm_fallback.default")
def grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Products of groups: rows of a [M, K], in groups that end at `offs` [G], each with its matrix
    of b [G, K, N]; or groups of columns of a [M, K] and of rows of b [K, N], to [G, M, N]."""
    if a.ndim == 3 and b.ndim == 3:
        return jnp.matmul(a, b)
    sizes = jnp.diff(offs, prepend=0)
    if b.ndim == 3 and a.ndim == 2:
        return jax.lax.ragged_dot(a, b, sizes)
    ends = jnp.arange(a.shape[-1])[None, :]
    is_mine = (ends < offs[:, None]) & (ends >= (offs - sizes)[:, None])  # [G, K]
    if a.ndim == 2:
        return jnp.einsum("mk,gk,kn->gmn", a, is_mine.astype(a.dtype), b)
    is_mine = jnp.arange(b.shape[-1])[None, :] < offs[:, None]
    is_mine &= jnp.arange(b.shape[-1])[None, :] >= (offs - sizes)[:, None]  # [G, N]
    return jnp.einsum("gmk,gn,kn->mn", a, is_mine.astype(a.dtype), b)


@ATEN.row("_cdist_forward")
def distances(a: Any, b: Any, order: float, mode: int | None = None) -> Any:
    """Norms of the differences of rows of a [..., P, K] and b [..., R, K]: [..., P, R]."""
    return norm(a[..., :, None, :] - b[..., None, :, :], order, -1)


@ATEN.row("_pdist_forward")
def own_distances(x: Any, order: float = 2.0) -> Any:
    """Norms of the differences of each two rows of x [N, K]."""
    first, second = np.triu_indices(x.shape[0], 1)
    return norm(x[first] - x[second], order, -1)


@ATEN.row("einsum")
def einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
    """Einstein's sum."""
    return jnp.einsum(equation, *tensors)


@ATEN.row("bilinear")
def bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    """a [..., I] and b [..., J] through weight [O, I, J]."""
    y = jnp.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias
