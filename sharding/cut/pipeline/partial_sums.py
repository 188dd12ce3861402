"""Partial sums over pipeline stages, and the ops that may work on their terms one by one.

A value is either *floating* (it follows from weights, the batch and constants alone and is computed
wherever it is needed), *at* stages that compute it, or *partial*: every stage of `terms` has one
term of a sum (or one candidate of a maximum). Ops that are linear in the partial operand keep it
partial; everything else first needs it whole, which `op_placement.py` decides about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.build import fresh
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF, EXTREMES
from shardwright.compiler.ir.facts import combination
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.traits import CASTS, REDUCTIONS, REDUCTIONS_OF_RANKS, VIEWS
from shardwright.compiler.ir.types import Op, Value

Stages = frozenset[int]


@dataclass(frozen=True, slots=True)
class At:
    """Computed on these stages, equal on all of them."""

    stages: Stages


@dataclass(frozen=True, slots=True)
class Partial:
    """A sum (`kind` add) or the larger or smaller of (max, min) what several stages have."""

    kind: str
    terms: Mapping[int, Value]


Placement = At | Partial | None
"""None is floating."""

JOINING = {ELEMENTWISE_OF[kind]: kind for kind in ("add", *EXTREMES)}
"""The kind of partial value that an elementwise op of two values joins."""

Emit = Callable[[Op, int], Value]
"""Adds an op on one stage and returns its result."""


class PartialSums:
    """Ops on partial values, term by term. `own` are values of which every stage has its own part
    (accumulators).
    """

    def __init__(self, emit: Emit, own: frozenset[Value] = frozenset()) -> None:
        self.emit, self.own = emit, own

    def apply(self, op: Op, placements: Sequence[Placement]) -> Partial | None:
        """The result of `op`, some operand of which is partial; None when `op` needs it whole."""
        kind = next(p.kind for p in placements if isinstance(p, Partial))
        return RULES.get(op.name, PartialSums._term_by_term)(self, op, kind, placements)

    def _joins(self, op: Op, kind: str, placements: Sequence[Placement]) -> Partial | None:
        """A sum of sums, or the larger of what is the largest."""
        return self.joined(op, kind, placements) if JOINING[op.name] == kind else None

    def _subtracts(self, op: Op, kind: str, placements: Sequence[Placement]) -> Partial | None:
        """What is whole is subtracted from one term of a sum."""
        left, right = (isinstance(p, Partial) for p in placements)
        return self.joined(op, kind, placements) if left and not right and kind == "add" else None

    def _term_by_term(self, op: Op, kind: str, placements: Sequence[Placement]) -> Partial | None:
        """An op that may work on the terms of one operand; the others are on all stages of it."""
        (one, *more) = (i for i, p in enumerate(placements) if isinstance(p, Partial))
        placement = placements[one]
        assert isinstance(placement, Partial)
        beside = [p.stages for p in placements if isinstance(p, At)]
        if more or not passes(op, op.operands[one], kind):
            return None
        if not all(placement.terms.keys() <= stages for stages in beside):
            return None
        terms = {}
        for stage, value in placement.terms.items():
            operands = [value if i == one else v for i, v in enumerate(op.operands)]
            terms[stage] = self.emit(fresh(op, operands), stage)
        return Partial(kind, terms)

    def joined(self, op: Op, kind: str, placements: Sequence[Placement]) -> Partial:
        """Terms of both operands, joined where one stage has one of each; what is whole counts
        once, on a stage that has a term of the other."""
        partial = [sorted(p.terms) for p in placements if isinstance(p, Partial)]
        at = [sorted(p.stages) for p in placements if isinstance(p, At)]
        stages = (partial or at)[0]
        pairs = zip(op.operands, placements, strict=True)
        left, right = (self._terms(value, placement, stages) for value, placement in pairs)
        terms = {}
        for stage in sorted(left.keys() | right.keys()):
            both = [side[stage] for side in (left, right) if stage in side]
            terms[stage] = self.emit(fresh(op, both), stage) if len(both) == 2 else both[0]
        return Partial(kind, terms)

    def _terms(
        self, value: Value, placement: Placement, stages: Sequence[int]
    ) -> Mapping[int, Value]:
        """One operand as terms."""
        if isinstance(placement, Partial):
            return placement.terms
        if value in self.own:
            return dict.fromkeys(stages, value)
        if placement is None:
            return {stages[0]: value}
        return {min(placement.stages & set(stages) or placement.stages): value}


Rule = Callable[[PartialSums, Op, str, Sequence[Placement]], Partial | None]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(JOINING, PartialSums._joins),
    "subtract": PartialSums._subtracts,
}
"""What becomes of partial operands; other ops may work on the terms of one."""


def passes(op: Op, value: Value, kind: str) -> bool:
    """True when `op` may work on the terms of its operand `value` one by one, the other operands
    held still: it is linear (add), or keeps the order (max, min).
    """
    rule = PASSING.get(op.name)
    return rule is not None and rule(op, value, kind)


def _moves(_op: Op, _value: Value, _kind: str) -> bool:
    return True


def _adds(_op: Op, _value: Value, kind: str) -> bool:
    return kind == "add"


def _combines(op: Op, _value: Value, kind: str) -> bool:
    return combination(op) == kind


def _stays_float(op: Op, value: Value, _kind: str) -> bool:
    return value.type.dtype.is_float and op.result.type.dtype.is_float


def _scales(op: Op, value: Value, kind: str) -> bool:
    return kind == "add" and op.operands.count(value) == 1


def _divides(op: Op, value: Value, kind: str) -> bool:
    return kind == "add" and op.operands[1] is not value


PASSING: Mapping[str, Callable[[Op, Value, str], bool]] = {
    **dict.fromkeys((*VIEWS, "all_gather", "all_slice", "all_to_all", "slice"), _moves),
    **dict.fromkeys((*REDUCTIONS, *REDUCTIONS_OF_RANKS), _combines),
    **dict.fromkeys(CASTS, _stays_float),
    "add": _adds,
    "negate": _adds,
    "multiply": _scales,
    "divide": _divides,
}


def total(
    values: Sequence[Value], emit: Callable[[Op], object], name: str = "add", loc: Loc = UNKNOWN_LOC
) -> Value:
    """The sum of values in order, or what else the op `name` joins them to."""

    def joined(left: Value, right: Value) -> Value:
        op = make_op(name, (left, right), loc=loc)
        emit(op)
        return op.result

    return reduce(joined, values)
