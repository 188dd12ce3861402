"""Scalar integers known at compile time up to registers: the addresses of views.

Every one-element integer is tracked as an affine expression of loop counters with its range, so
that the code JAX writes around an index (`select(i < 0, i + n, i)`, clamps of starts) folds away. A
scalar that is not known here becomes data, and a `register_load` when it is used as an address.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import chooses, counted_dim, stored, takes_at
from shardwright.compiler.ir.ops import SliceAttrs
from shardwright.compiler.ir.traits import IDENTITIES, LITERALS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.support.intervals import within


@dataclass(frozen=True, slots=True)
class Known:
    """A scalar: affine in registers, and the inclusive range it stays in. An i1 is 0 or 1 and
    always constant.
    """

    value: Affine
    low: int
    high: int

    @property
    def is_constant(self) -> bool:
        """True when it is one number."""
        return not self.value.terms


def constant(number: int) -> Known:
    """A known number."""
    return Known(Affine(number), number, number)


def parameter(register: int, low: int, high: int) -> Known:
    """A register whose value stays in low .. high."""
    return Known(Affine(0, ((register, 1),)), low, high)


Rule = Callable[[Op, Sequence[Known]], Known | None]


def known_scalars(graph: Graph, parameters: Mapping[Value, Known]) -> dict[Value, Known]:
    """The known one-element integer and i1 values of `graph`; `parameters` are its counters."""
    known = dict(parameters)
    iotas = {op.result for op in graph.ops if counted_dim(op) is not None}
    for op in graph.ops:
        if len(op.results) != 1 or not _may_be_known(op.result):
            continue
        found = _evaluate(op, known, iotas)
        if found is not None and within((found.low, found.high), op.result.type.dtype):
            known[op.result] = found
    return known


def _may_be_known(value: Value) -> bool:
    return value.type.num_elements == 1 and not value.type.dtype.is_float


def _evaluate(op: Op, known: Mapping[Value, Known], iotas: set[Value]) -> Known | None:
    if (held := stored(op)) is not None:
        return constant(int(held.array().reshape(-1)[0]))
    if op.name in LITERALS:
        return constant(0)
    if takes_at(op):
        return _slice_of_iota(op, known, iotas)
    if chooses(op):
        return _select(op, known)
    if op.name in IDENTITIES | VIEWS or isinstance(op.attrs, SliceAttrs):
        return known.get(op.operands[0])
    rule = _RULES.get(op.name)
    operands = [known[v] for v in op.operands if v in known]
    return rule(op, operands) if rule is not None and len(operands) == len(op.operands) else None


def _slice_of_iota(op: Op, known: Mapping[Value, Known], iotas: set[Value]) -> Known | None:
    """One element of a rank-1 count is its start."""
    source, *starts = op.operands
    if source not in iotas or len(starts) != 1 or starts[0] not in known:
        return None
    start = known[starts[0]]
    return start if start.low >= 0 and start.high < source.type.shape[0] else None


def _select(op: Op, known: Mapping[Value, Known]) -> Known | None:
    """The chosen side, when the predicate is decided."""
    pred = known.get(op.operands[0])
    return None if pred is None else known.get(op.operands[1 if pred.low else 2])


def _add(op: Op, k: Sequence[Known]) -> Known:
    a, b = k
    if op.result.type.dtype is DType.PRED:
        return constant(int(bool(a.low or b.low)))
    return Known(a.value + b.value, a.low + b.low, a.high + b.high)


def _multiply(op: Op, k: Sequence[Known]) -> Known | None:
    a, b = k if k[1].is_constant else (k[1], k[0])
    if not b.is_constant:
        return None
    ends = (a.low * b.low, a.high * b.low)
    return Known(a.value * b.low, min(ends), max(ends))


def _negate(op: Op, k: Sequence[Known]) -> Known:
    return Known(k[0].value * -1, -k[0].high, -k[0].low)


def _subtract(op: Op, k: Sequence[Known]) -> Known:
    return _add(op, (k[0], _negate(op, k[1:])))


def _larger(a: Known, b: Known) -> Known | None:
    if a.low >= b.high:
        return a
    return b if b.low >= a.high else None


def _smaller(a: Known, b: Known) -> Known | None:
    if a.high <= b.low:
        return a
    return b if b.high <= a.low else None


def _clamp(op: Op, k: Sequence[Known]) -> Known | None:
    raised = _larger(*k[:2])
    return _smaller(raised, k[2]) if raised else None


def _divided(a: Known, b: Known) -> tuple[Known, Known] | None:
    """(a // b, a % b) of numbers that are not negative, where registers decide neither."""
    if not b.is_constant or b.low <= 0 or a.low < 0:
        return None
    if a.is_constant:
        return constant(a.low // b.low), constant(a.low % b.low)
    return (constant(0), a) if a.high < b.low else None


def _divide(op: Op, k: Sequence[Known]) -> Known | None:
    found = _divided(*k)
    return found and found[0]


def _remainder(op: Op, k: Sequence[Known]) -> Known | None:
    found = _divided(*k)
    return found and found[1]


def _compare(op: Op, k: Sequence[Known]) -> Known | None:
    """Decided when it is the same at both ends of what the difference may be, and at 0 if that lies
    between.
    """
    a, b = k
    difference = a.value + b.value * -1
    low, high = a.low - b.high, a.high - b.low
    if not difference.terms:
        low = high = difference.const
    holds = getattr(operator, op.attrs.direction.lower())
    found = {bool(holds(number, 0)) for number in (low, min(max(0, low), high), high)}
    return constant(int(found.pop())) if len(found) == 1 else None


def _convert(op: Op, k: Sequence[Known]) -> Known | None:
    if op.result.type.dtype is not DType.PRED:
        return k[0]
    if k[0].low > 0 or k[0].high < 0:
        return constant(1)
    return constant(0) if k[0].low == k[0].high == 0 else None


def _logic(op: Op, k: Sequence[Known]) -> Known | None:
    if op.result.type.dtype is not DType.PRED:
        return None
    a, b = k[0].low, k[1].low
    return constant({"and": a & b, "or": a | b, "xor": a ^ b}[op.name])


def _not(op: Op, k: Sequence[Known]) -> Known | None:
    return constant(1 - k[0].low) if op.result.type.dtype is DType.PRED else None


_RULES: dict[str, Rule] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "negate": _negate,
    "maximum": lambda op, k: _larger(*k),
    "minimum": lambda op, k: _smaller(*k),
    "clamp": _clamp,
    "divide": _divide,
    "remainder": _remainder,
    "compare": _compare,
    "convert": _convert,
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _not,
}
