"""Sums whose terms lie on different stages, and the ops that may work on the terms one by one.

A value is either *floating* (it follows from weights, the batch and constants alone and is computed
wherever it is needed), *at* stages that compute it, or *partial*: every stage of `terms` has one
term of a sum (or one candidate of a maximum). Ops that are linear in the partial operand keep it
partial; everything else first needs it whole, which `places.py` decides about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


Place = At | Partial | None
"""None is floating."""

MOVING = VIEWS | {"all_gather", "all_slice", "all_to_all", "slice"}
"""Ops that only move elements: any kind of partial value passes."""
JOINING = {ELEMENTWISE_OF[kind]: kind for kind in ("add", *EXTREMES)}
"""The kind of partial value that an elementwise op of two values joins."""

Emit = Callable[[Op, int], Value]
"""Adds an op on one stage and returns its result."""


class Terms:
    """Ops on partial values, term by term. `own` are values of which every stage has its own part
    (accumulators).
    """

    def __init__(self, emit: Emit, own: frozenset[Value] = frozenset()) -> None:
        self.emit, self.own = emit, own

    def apply(self, op: Op, places: Sequence[Place]) -> Partial | None:
        """The result of `op`, one operand of which is partial; None when `op` needs it whole."""
        kind = next(p.kind for p in places if isinstance(p, Partial))
        if len(op.operands) == 1:
            (place,) = places
            assert isinstance(place, Partial)
            return self._each(op, place) if _passes(op, kind) else None
        if JOINING.get(op.name) == kind:
            return self._join(op, kind, places)
        if op.name == "subtract" and kind == "add" and isinstance(places[0], Partial):
            return self._join(op, kind, places) if not isinstance(places[1], Partial) else None
        if op.name in ("multiply", "divide") and kind == "add":
            return self._scaled(op, places)
        return None

    def joined(self, op: Op, kind: str, places: Sequence[Place]) -> Partial:
        """What `op` joins when its operands lie on different stages."""
        return self._join(op, kind, places)

    def _each(self, op: Op, place: Partial) -> Partial:
        """A unary op on every term."""
        terms = {s: self._copy(op, (value,), s) for s, value in place.terms.items()}
        return Partial(place.kind, terms)

    def _copy(self, op: Op, operands: Sequence[Value], stage: int) -> Value:
        """`op` on one stage with other operands of the same types."""
        results = tuple(Value(v.type) for v in op.results)
        return self.emit(Op(op.name, tuple(operands), results, op.attrs, (), op.loc), stage)

    def _join(self, op: Op, kind: str, places: Sequence[Place]) -> Partial:
        """Terms of both operands, joined where one stage has one of each."""
        left, right = self._sides(op, places)
        if op.name == "subtract":
            assert len(right) == 1  # counted on one stage, which has a term
        terms = {}
        for stage in sorted(left.keys() | right.keys()):
            both = [side[stage] for side in (left, right) if stage in side]
            terms[stage] = self._copy(op, both, stage) if len(both) == 2 else both[0]
        return Partial(kind, terms)

    def _sides(
        self, op: Op, places: Sequence[Place]
    ) -> tuple[Mapping[int, Value], Mapping[int, Value]]:
        """The terms of both operands; what is whole counts once, on a stage that has a term."""
        partial = [sorted(p.terms) for p in places if isinstance(p, Partial)]
        at = [sorted(p.stages) for p in places if isinstance(p, At)]
        stages = partial[0] if partial else at[0]
        first, second = (
            self._terms(value, place, stages)
            for value, place in zip(op.operands, places, strict=True)
        )
        return first, second

    def _terms(self, value: Value, place: Place, stages: Sequence[int]) -> Mapping[int, Value]:
        """One operand as terms."""
        if isinstance(place, Partial):
            return place.terms
        if value in self.own:
            return dict.fromkeys(stages, value)
        if place is None:
            return {stages[0]: value}
        return {min(place.stages & set(stages) or place.stages): value}

    def _scaled(self, op: Op, places: Sequence[Place]) -> Partial | None:
        """A product with, or a quotient by, what every stage with a term has."""
        partial = next(i for i, p in enumerate(places) if isinstance(p, Partial))
        scale = places[1 - partial]
        place = places[partial]
        assert isinstance(place, Partial)
        if isinstance(scale, Partial) or (op.name == "divide" and partial == 1):
            return None
        if scale is not None and not place.terms.keys() <= scale.stages:
            return None
        terms = {}
        for stage, value in place.terms.items():
            operands = [value if i == partial else v for i, v in enumerate(op.operands)]
            terms[stage] = self._copy(op, operands, stage)
        return Partial(place.kind, terms)


def _passes(op: Op, kind: str) -> bool:
    """True for unary ops that are linear (add), or keep the order (max, min)."""
    if op.name in MOVING:
        return True
    if op.name in REDUCTIONS or op.name in REDUCTIONS_OF_RANKS:
        return combination(op) == kind
    if op.name in CASTS:
        return op.operands[0].type.dtype.is_float and op.result.type.dtype.is_float
    return op.name == "negate" and kind == "add"


def is_linear(op: Op, value: Value) -> bool:
    """True when sums over stages may pass `op` in place of its operand `value`."""
    if len(op.operands) == 1:
        return _passes(op, "add")
    if op.name == "multiply":
        return op.operands[0] is not op.operands[1]
    return op.name == "add" or (op.name == "divide" and op.operands[1] is not value)


def total(value: Sequence[Value], emit: Callable[[Op], Value]) -> Value:
    """The sum of values in order."""
    result = value[0]
    for other in value[1:]:
        op = make_op("add", (result, other))
        emit(op)
        result = op.result
    return result
