"""Rewrites of a region for work in row tiles.

`defer_scaling` moves a product with (or a quotient by) a value that does not span the summed atom
from in front of a contraction to behind it, where fewer elements are left: (p / l) v = (p v) / l.
The rounding of a short operand moves with it, so results differ within its unit in the last place;
types whose exponent is shorter than fp32's are left alone. `columns_first` takes a sum over rows
and columns in two steps: a row tile has all columns of its rows, but only some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from shardwright.compiler.codegen.domain import Value
from shardwright.compiler.codegen.space import Space
from shardwright.compiler.dtypes import DType

_WIDE = (DType.F32, DType.BF16)  # exponents of 8 bits: nothing overflows that did not before


Rule = Callable[[Space, int, Value], int]
"""Appends what becomes of a value (its number in the old space, the value with its inputs in the
new one) to a space, and returns its new number.
"""


def _rewritten(
    space: Space, sinks: Iterable[int], rule: Callable[[Mapping[int, int]], Rule]
) -> tuple[Space, tuple[int, ...]]:
    """(`space` with the values `sinks` need rewritten, numbers of `sinks` in it); `rule` is given
    the new numbers found so far.
    """
    wanted = tuple(sinks)
    inside = set(space.slice(wanted))
    made = replace(space, values=[])
    number: dict[int, int] = {}
    change = rule(number)
    for n, value in enumerate(space.values):
        moved = replace(value, inputs=tuple(number[i] for i in value.inputs))
        # Values of another nest of the region stay as they are.
        number[n] = change(made, n, moved) if n in inside else _append(made, moved)
    return made, tuple(number[s] for s in wanted)


def columns_first(
    space: Space, sinks: Iterable[int], row: int, inner: frozenset[int]
) -> tuple[Space, tuple[int, ...]]:
    """(space in which sums of rows over `inner` atoms and others take the inner ones first, and in
    one step each, numbers of `sinks` in it).
    """
    wanted = tuple(sinks)
    users = space.users(space.slice(wanted))

    def change(made: Space, n: int, moved: Value) -> int:
        alone = all(users[i] == [n] for i in space.values[n].inputs)
        return _in_steps(made, _merged(made, moved) if alone else moved, row, inner)

    return _rewritten(space, wanted, lambda _: change)


def _is_sum(value: Value) -> bool:
    return value.op == "reduce" and value.attrs["kind"] == "add" and value.dtype.is_float


def _merged(space: Space, value: Value) -> Value:
    """`value`, which alone reads its inputs, as one sum when it is a sum of sums."""
    while _is_sum(value):
        source = space.values[value.inputs[0]]
        if not _is_sum(source) or source.dtype is not DType.F32:
            break
        value = replace(value, inputs=source.inputs, over=value.over | source.over)
    return value


def _in_steps(made: Space, value: Value, row: int, inner: frozenset[int]) -> int:
    """Append a value, a sum over `inner` atoms and others in two steps."""
    columns, others = value.over & inner, value.over - inner
    sums = value.op == "contract" or _is_sum(value)
    spans = [made.values[i].atoms for i in value.inputs]
    if not (columns and others and sums and all(row in s for s in spans)):
        return _append(made, value)
    source = value.inputs[0]
    if value.op == "contract":
        product = Value("multiply", value.inputs, spans[0] | spans[1], DType.F32)
        source = _append(made, product)
    add = {"kind": "add"}
    atoms = made.values[source].atoms - columns
    line = _append(made, Value("reduce", (source,), atoms, DType.F32, over=columns, attrs=add))
    return _append(
        made, Value("reduce", (line,), atoms - others, value.dtype, over=others, attrs=add)
    )


def wide_products(
    space: Space, sinks: Iterable[int], row: int, atom: int
) -> tuple[Space, tuple[int, ...]]:
    """(space whose contractions of rows over `atom` have fp32 results that are rounded once,
    numbers of `sinks` in it).
    """

    def change(made: Space, n: int, moved: Value) -> int:
        mine = moved.op == "contract" and atom in moved.over and row in moved.atoms
        if not mine or moved.dtype is DType.F32:
            return _append(made, moved)
        product = _append(made, replace(moved, dtype=DType.F32))
        return _append(made, _converted(made, product, moved.dtype))

    return _rewritten(space, sinks, lambda _: change)


def defer_scaling(space: Space, sinks: Iterable[int]) -> tuple[Space, tuple[int, ...]]:
    """(rewritten space, numbers of `sinks` in it)."""
    wanted = tuple(sinks)
    users = space.users(space.slice(wanted))
    return _rewritten(space, wanted, lambda number: partial(_deferred, space, users, number))


def _deferred(
    space: Space,
    users: dict[int, list[int]],
    number: Mapping[int, int],
    made: Space,
    n: int,
    moved: Value,
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
