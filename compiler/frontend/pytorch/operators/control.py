"""Branches and loops, whose bodies are graphs, and what is asserted."""

from __future__ import annotations

from typing import Any

import jax

from shardwright.compiler.frontend.pytorch.operators.registry import HIGHER_ORDER


@HIGHER_ORDER.row("cond")
def cond(predicate: Any, true: Any, false: Any, operands: Any = ()) -> Any:
    """One of two bodies."""
    return jax.lax.cond(predicate.reshape(()), lambda: true(*operands), lambda: false(*operands))


@HIGHER_ORDER.row("while_loop")
def while_loop(condition: Any, body: Any, carried: Any, extra: Any = ()) -> Any:
    """A body as long as a condition holds."""
    return jax.lax.while_loop(
        lambda c: condition(*c, *extra)[0].reshape(()),
        lambda c: tuple(body(*c, *extra)),
        tuple(carried),
    )
