"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

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
    return (x if beta == 1 else beta * x) + (y if alpha == 1 else alpha * y)


@ATEN.row("einsum")
def einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
    """Einstein's sum."""
    return jnp.einsum(equation, *tensors)


@ATEN.row("bilinear")
def bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    """a [..., I] and b [..., J] through weight [O, I, J]."""
    y = jnp.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias
