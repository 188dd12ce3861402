"""Rewrites of a region that save passes over its rows.

`defer_scaling` moves a product with (or a quotient by) a value that does not span the summed atom
from in front of a contraction to behind it, where fewer elements are left: (p / l) v = (p v) / l.
The rounding of a short operand moves with it, so results differ within its unit in the last place;
types whose exponent is shorter than fp32's are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from compiler.codegen.space import Space, Value
from compiler.dtypes import DType

_WIDE = (DType.F32, DType.BF16)  # exponents of 8 bits: nothing overflows that did not before


def defer_scaling(space: Space, sinks: Iterable[int]) -> tuple[Space, tuple[int, ...]]:
    """(rewritten space, numbers of `sinks` in it)."""
    wanted = tuple(sinks)
    inside = space.slice(wanted)
    users = space.users(inside)
    made = replace(space, values=[])
    number: dict[int, int] = {}
    for n, value in enumerate(space.values):
        moved = replace(value, inputs=tuple(number[i] for i in value.inputs))
        if n in inside:
            number[n] = _deferred(space, made, users, n, moved, number)
        else:  # of another nest of the region
            number[n] = _append(made, moved)
    return made, tuple(number[s] for s in wanted)


def _deferred(
    space: Space,
    made: Space,
    users: dict[int, list[int]],
    n: int,
    moved: Value,
    number: dict[int, int],
) -> int:
    """Append value `n` as `moved`, or the contraction it is with its scaling behind it."""
    for side in range(2) if moved.op == "contract" else ():
        found = _scaling(space, users, n, space.values[n].inputs[side])
        if found is not None:
            source, scale, factor, dtype = found
            operand = _append(made, _converted(made, number[source], dtype))
            inputs = list(moved.inputs)
            inputs[side] = operand
            product = _append(made, replace(moved, inputs=tuple(inputs), dtype=DType.F32))
            scaled = Value(scale, (product, number[factor]), moved.atoms, DType.F32)
            return _append(made, _converted(made, _append(made, scaled), moved.dtype))
    return _append(made, moved)


def _append(space: Space, value: Value | int) -> int:
    if isinstance(value, int):
        return value
    space.values.append(value)
    return len(space.values) - 1


def _converted(space: Space, number: int, dtype: DType) -> Value | int:
    value = space.values[number]
    if value.dtype is dtype:
        return number
    return Value("convert", (number,), value.atoms, dtype)


def _scaling(
    space: Space, users: dict[int, list[int]], contract: int, operand: int
) -> tuple[int, str, int, DType] | None:
    """(source, multiply or divide, factor, element type) of an operand that only this contraction
    reads, when the factor does not span the summed atoms and less is left behind them.
    """
    over, result = space.values[contract].over, space.values[contract].atoms
    value = space.values[operand]
    dtype, reader = value.dtype, contract
    if value.op == "convert" and users[operand] == [reader]:
        operand, reader = value.inputs[0], operand
        value = space.values[operand]
    if value.op not in ("multiply", "divide") or users[operand] != [reader]:
        return None
    for source, factor in _sides(value):
        scalar = space.values[factor]
        fewer = not scalar.atoms & over and scalar.atoms and scalar.atoms <= result
        kept = space.values[source].atoms == value.atoms
        wide = dtype in _WIDE and space.values[contract].dtype in _WIDE
        if fewer and kept and wide and _left(space, result) < _left(space, value.atoms):
            return source, value.op, factor, dtype
    return None


def _sides(value: Value) -> tuple[tuple[int, int], ...]:
    a, b = value.inputs
    return ((a, b),) if value.op == "divide" else ((a, b), (b, a))


def _left(space: Space, atoms: Iterable[int]) -> int:
    elements = 1
    for atom in atoms:
        elements *= space.sizes[atom]
    return elements
