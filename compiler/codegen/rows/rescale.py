"""Code of running maxima: what was added up before is multiplied when the column it follows moves.

A pass with something running begins with maxima of the lowest number and sums of 0, and with the
columns that follow from them, so that the first segment is like every other: exp(c - c before) is
then 0, or what it multiplies is. Next: `group.py` calls it for the stage that makes the columns.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.compiler.codegen.builder import Held, Scope, by_numbers
from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.rows.online import Running
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import LARGEST, DType
from shardwright.compiler.isa.program import Engine

_SIGN = {"max": -1.0, "min": 1.0}


def start_of(value: Value) -> float:
    """What a fold of a running pass begins with: a finite number, so that a segment in which all of
    a row is -inf adds exp(-inf) and not exp(-inf + inf).
    """
    return _SIGN.get(value.attrs.get("kind", "add"), 0.0) * LARGEST[value.dtype]


def copied(frame: Frame, running: Running, held: Held, scope: Scope) -> Held:
    """The running column as it is."""
    copy = frame.scratch(frame.space[running.column], scope, DType.F32)
    frame.copy(scope, Engine.VECTOR, copy, held)
    return copy


def rescale(
    frame: Frame,
    running: Running,
    moved: tuple[Held, Held],
    carried: Iterable[tuple[Held, int]],
    scope: Scope,
) -> None:
    """Multiply what is `carried` (where, columns) as its column `moved` (before, now)."""
    rows, (before, now) = frame.rows(scope), moved
    factor = frame.scratch(frame.space[running.column], scope, DType.F32)
    frame.apply(scope, "tensor_tensor", Engine.VECTOR, factor, (now, before), op="subtract")
    power = {"func": "exponential", "scale": running.sign, "bias": 0.0}
    frame.apply(scope, "activation", Engine.SCALAR, factor, (factor,), **power)
    # What is carried at first is 0, and so it stays where the factor is beyond all numbers.
    most = by_numbers(("minimum", LARGEST[DType.F32]))
    frame.apply(scope, "tensor_scalar", Engine.VECTOR, factor, (factor,), **most)
    by = scope.flat(factor, rows, 1)
    product = by_numbers(("multiply", None))
    for held, width in carried:
        out = scope.flat(held, rows, width)
        scope.add("tensor_scalar", Engine.VECTOR, out, (out, by), **product)
    scope.release(before)
    scope.release(factor)
