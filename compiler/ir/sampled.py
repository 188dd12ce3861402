"""A graph run with its roundings drawn: `reference.py` with every float result moved at random, by
as much as rounding may move it (`compiler/support/rounding.py`).

What amplifies rounding in the user's step (a gradient that cancels to nothing, an optimizer that
divides by its size) amplifies it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import combination
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import SelectAndScatterAttrs
from shardwright.compiler.ir.reference import Arrays, evaluate
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.support.rounding import EXACT, Draws

_NOT_DRAWN = EXACT | {"loop"}


@dataclass(frozen=True, slots=True)
class Casts:
    """What a compiler rounds to `dtype` that the graph does not say: fp32 operands of some ops, and
    fp32 results of some of those."""

    dtype: DType
    operands_of: frozenset[str]
    results_of: frozenset[str] = frozenset()


def sample(graph: Graph, inputs: Arrays, seed: int, casts: Casts | None = None) -> list[np.ndarray]:
    """The outputs of `graph` with one draw of its roundings, as `evaluate` gives them."""
    draws = Draws(seed)

    def drawn(op: Op, args: Arrays) -> Arrays:
        return _drawn(op, args, draws, casts)

    return evaluate(graph, inputs, {name: drawn for name in OPS if name not in _NOT_DRAWN})


def _drawn(op: Op, args: Arrays, draws: Draws, casts: Casts | None) -> Arrays:
    """The results of one op, each element moved within its rounding."""
    short = casts if casts is not None and op.name in casts.operands_of else None
    if short is not None:
        args = [draws.rounded(a, short.dtype) for a in args]
    results = OPS[op.name].reference(op, args)
    if not _rounds(op):
        return results
    terms: Sequence[np.ndarray | None] = _terms(op, args) or [None] * len(results)
    of_integers = op.name == "convert" and not op.operands[0].type.dtype.is_float
    moved = [
        draws.moved(op.name, result, value.type.dtype, sizes, of_integers)
        for value, result, sizes in zip(op.results, results, terms, strict=True)
    ]
    if short is not None and op.name in short.results_of:
        moved = [draws.rounded(result, short.dtype) for result in moved]
    return moved


def _rounds(op: Op) -> bool:
    """False for what gives its operand's elements back, as other kinds of the same op do not."""
    if op.name == "convert":
        given, wanted = op.operands[0].type.dtype, op.result.type.dtype
        return not (given.is_float and wanted.is_float and given.bytes < wanted.bytes)
    return combination(op) in ("", "add", "multiply")


def _terms(op: Op, args: Arrays) -> Arrays | None:
    """Of an op that adds up, the sums of the magnitudes of its terms."""
    chosen_by = int(isinstance(op.attrs, SelectAndScatterAttrs))  # operand 0 picks the terms
    if not chosen_by and combination(op) != "add":
        return None
    sizes = [np.abs(a) if _is_float(a) else a for a in args[chosen_by:]]
    return OPS[op.name].reference(op, [*args[:chosen_by], *sizes])


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind in "fV"
