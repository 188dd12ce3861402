"""Ranges of integers: what is known of every element without running the graph.

Intervals go from constants, counts, narrow types and loop counters through arithmetic; whatever is
not listed, or leaves its type, has no known range. `integers.py` asks which 64-bit values surely
fit the machine's 32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.intervals import Interval as Range
from shardwright.compiler.support.intervals import corners, limits, within

Operands = list[Range]
Rule = Callable[[Op, Operands], Range]

_WORD_BYTES = 4  # what the engines compute with (documented: int64 as int32 on NeuronCore-v2)


def integer_ranges(graph: Graph, known: Mapping[Value, Range] | None = None) -> dict[Value, Range]:
    """(least, largest) of every integer value of `graph` and its regions that is bounded; those of
    up to 32 bits always are. `known` holds ranges of inputs.
    """
    found: dict[Value, Range] = {}
    for value in graph.inputs:
        _note(found, value, (known or {}).get(value))
    for op in graph.ops:
        if op.regions:
            _loop(found, op)
            continue
        if op.name in _SIDE_BY_SIDE:
            for operand, result in zip(op.operands, op.results, strict=True):
                _note(found, result, found.get(operand))
            continue
        if not any(result.type.dtype.is_integer for result in op.results):
            continue
        rule = _RULES.get(op.name)
        operands = [found[v] for v in op.operands if v in found]
        complete = len(operands) == sum(v.type.dtype.is_integer for v in op.operands)
        for result in op.results:
            _note(found, result, rule(op, operands) if rule and complete else None)
    return found


def _note(found: dict[Value, Range], value: Value, range: Range | None) -> None:
    """Remember `range`; one that leaves the type wraps, so that only the type bounds it."""
    dtype = value.type.dtype
    if not dtype.is_integer:
        return
    kept = within(range, dtype)
    if kept is not None:
        found[value] = kept
    elif dtype.bytes <= _WORD_BYTES:
        found[value] = limits(dtype)


def _loop(found: dict[Value, Range], op: Op) -> None:
    """Ranges of a loop: its counter, and carries that the body passes through."""
    (body,) = op.regions
    known = {}
    for i, (inner, outer) in enumerate(zip(body.inputs, op.operands, strict=True)):
        if i == op.attrs.induction:
            known[inner] = (0, max(op.attrs.trip - 1, 0))
        elif body.outputs[i] is inner and outer in found:
            known[inner] = found[outer]
    found |= integer_ranges(body, known)
    for i, result in enumerate(op.results):
        counter = (op.attrs.trip, op.attrs.trip) if i == op.attrs.induction else None
        _note(found, result, counter or known.get(body.inputs[i]))


def _hull(op: Op, operands: Operands) -> Range:
    return min(low for low, _ in operands), max(high for _, high in operands)


def _corners(fn: Callable[[int, int], int]) -> Rule:
    """A function of two numbers that is monotone in each: its extremes are at the corners."""
    return lambda op, operands: corners(fn, *operands)


def _constant(op: Op, operands: Operands) -> Range:
    values = op.attrs.array()
    return (int(values.min()), int(values.max())) if values.size else (0, 0)


def _iota(op: Op, operands: Operands) -> Range:
    return 0, max(op.result.type.shape[op.attrs.dim] - 1, 0)


def _convert(op: Op, operands: Operands) -> Range:
    """The operand's range; a float could be anything the type holds."""
    if op.operands[0].type.dtype is DType.PRED:
        return 0, 1
    if operands:
        return operands[0]
    return limits(op.result.type.dtype) if op.result.type.dtype.is_integer else (0, 0)


def _remainder(op: Op, operands: Operands) -> Range:
    """The sign of the dividend, less than the largest divisor (0 gives the dividend)."""
    (low, high), (least, most) = operands
    below = max(abs(least), abs(most), 1) - 1
    if least <= 0 <= most:
        below = max(abs(low), abs(high))
    return -min(below, max(-low, 0)), min(below, max(high, 0))


def _abs(op: Op, operands: Operands) -> Range:
    ((low, high),) = operands
    return max(low, -high, 0), max(abs(low), abs(high))


def _reduce(op: Op, operands: Operands) -> Range:
    ((low, high),) = operands
    terms = op.operands[0].type.num_elements // max(op.result.type.num_elements, 1)
    if op.attrs.kind == "add":
        return low * terms, high * terms
    return (low, high) if op.attrs.kind in ("max", "min") else limits(op.result.type.dtype)


def _gather(op: Op, operands: Operands) -> Range:
    """Elements of the operand, or zero."""
    low, high = operands[0]
    return min(low, 0), max(high, 0)


def _and(op: Op, operands: Operands) -> Range:
    """No bit that one of them lacks: what is not negative bounds it."""
    positive = [high for low, high in operands if low >= 0]
    return (0, min(positive)) if positive else limits(op.result.type.dtype)


def _or(op: Op, operands: Operands) -> Range:
    """The bits of both, also where they cancel (`xor`)."""
    if any(low < 0 for low, _ in operands):
        return limits(op.result.type.dtype)
    return 0, (1 << max(high for _, high in operands).bit_length()) - 1


def _shift_left(op: Op, operands: Operands) -> Range:
    """Times a power of two; by as many bits as there are, nothing is left."""
    least, most = operands[1]
    if least < 0 or most >= 8 * op.result.type.dtype.bytes:
        return limits(op.result.type.dtype)
    return corners(operator.lshift, *operands)


def _shift_right(op: Op, operands: Operands) -> Range:
    """Through a power of two, of what is not negative; of others the sign is a bit, too."""
    if any(low < 0 for low, _ in operands):
        return limits(op.result.type.dtype)
    return corners(operator.rshift, *operands)


_SIDE_BY_SIDE = of(Kind.IDENTITY, Kind.SORT)  # result i has the elements of operand i
_MOVES = of(Kind.COLLECTIVE, combines=False) | {
    name for name, op in OPS.items() if op.passes == slice(0, 1) or name == "all_slice"
}

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, lambda op, operands: operands[0]),
    "abs": _abs,
    "add": _corners(operator.add),
    "and": _and,
    "clamp": _hull,
    "concatenate": _hull,
    "constant": _constant,
    "convert": _convert,
    "dynamic_update_slice": lambda op, operands: _hull(op, operands[:2]),
    "gather": _gather,
    "iota": _iota,
    "maximum": _corners(max),
    "minimum": _corners(min),
    "multiply": _corners(operator.mul),
    "negate": lambda op, operands: (-operands[0][1], -operands[0][0]),
    "or": _or,
    "pad": _hull,
    "reduce": _reduce,
    "remainder": _remainder,
    "select": _hull,
    "shift_left": _shift_left,
    "shift_right_logical": _shift_right,
    "sign": lambda op, operands: (-1, 1),
    "subtract": _corners(operator.sub),
    "unfold": _gather,
    "xor": _or,
}
