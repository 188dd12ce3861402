"""In how many passes over its blocks the reductions along an index can be taken.

A reduction whose operand needs another one first (a softmax needs the row maximum and the row sum)
waits for a later pass, unless algebra makes it wait for less: what only scales a row comes out of a
sum, and a sum of exponentials follows a shift that is still moving, since
exp(x - c) = exp(x - c') exp(c' - c). `loops.py` builds the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.ir.facts import behind, combination, is_sum, operands_of, stored
from shardwright.compiler.ir.ops import BroadcastInDimAttrs
from shardwright.compiler.ir.traits import CASTS, REDUCTIONS, VIEWS
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.cut.ring.index import MOVING, Index, is_cheap
from shardwright.sharding.indices.dims import factors

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A value that is the same all along the index: `source` dim i lies along dim j of what reads
    it, for (i, j) in `dims`; other dims of `source` have size 1.
    """

    source: Value
    dims: Pairs


@dataclass(frozen=True, slots=True)
class Applied:
    """A row that multiplies, or is added to what an exponential reads; `inverse`: that divides, or
    is subtracted.
    """

    row: Row
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class Term:
    """How a value depends on reductions that are not finished: not at all, as a `row`, by factors
    (`scales`), or through exponentials of a shift (`inside` one that is not taken yet).
    """

    row: Row | None = None
    scales: tuple[Applied, ...] = ()
    shift: Applied | None = None
    inside: bool = False

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every row in it."""
        shift = () if self.shift is None else (self.shift.row,)
        own = () if self.row is None else (self.row,)
        return (*(s.row for s in self.scales), *shift, *own)


FREE = Term()


@dataclass(slots=True)
class Pass:
    """Reductions that one pass over the blocks takes: what each is left to be scaled by and the
    shift it follows, with the ops that make that shift from a maximum of the same pass. `rows`
    are the values that scale or shift and are not known yet.
    """

    folds: dict[Op, Term] = field(default_factory=dict)
    collected: list[Value] = field(default_factory=list)
    bridges: dict[Value, Sequence[Op]] = field(default_factory=dict)
    rows: set[Value] = field(default_factory=set)


def passes(index: Index) -> list[Pass]:
    """All reductions along the index, in as few passes as the algebra above allows."""
    folds = [op for op in index.level.graph.ops if index.ends(op)]
    waiting = {op.result: op for op in folds}
    collected = index.escapes()
    found: list[Pass] = []
    while waiting or collected:
        step = _Terms(index, waiting, collected).next_pass()
        assert step.folds or step.collected, "the first reduction of an index waits for no other"
        found.append(step)
        for op in step.folds:
            del waiting[op.result]
        collected = [v for v in collected if v not in step.collected]
    return found


class _Terms:
    """Terms of all values while the results of `waiting` are not known, nor `collected` values as
    a whole.
    """

    def __init__(
        self, index: Index, waiting: Mapping[Value, Op], collected: Collection[Value]
    ) -> None:
        self.index = index
        self.waiting = waiting
        self.collected = collected
        self.pending: set[Value] = set()
        self.terms: dict[Value, Term | None] = {}
        for op in index.level.graph.ops:
            self._visit(op)

    def _visit(self, op: Op) -> None:
        """Terms of the results of `op`."""
        for value in op.results:
            read = operands_of(op, value)
            inside = value in self.index.derived
            unknown = any(v in self.pending or (v in self.collected and not inside) for v in read)
            if value in self.waiting or unknown:
                self.pending.add(value)
            if inside or (value in self.index.dims and is_cheap(op)):
                known = op in self.index.entries or not unknown
                self.terms[value] = FREE if known else self._term(op, read)

    def term(self, value: Value) -> Term | None:
        """The term of an operand along the index or beside it; None for what must wait."""
        if value in self.terms:
            return self.terms[value]
        return None if value in self.pending else FREE

    def _term(self, op: Op, read: Sequence[Value]) -> Term | None:
        """The term of a result along the index that reads what is not known."""
        if isinstance(op.attrs, BroadcastInDimAttrs) and op.operands[0] not in self.index.dims:
            return Term(row=_row(op.operands[0], op.attrs.dims))
        terms = self._known(read)
        rule = RULES.get(op.name)
        return None if terms is None or rule is None else rule(self, op, read, terms)

    def _known(self, read: Sequence[Value]) -> list[Term] | None:
        """The terms of what an op reads; None where one of it must wait."""
        terms = [self.term(v) for v in read]
        known = [t for t in terms if t is not None]
        return known if len(known) == len(terms) else None

    def linear(self, op: Op, read: Sequence[Value], terms: Sequence[Term]) -> Term | None:
        """The one term that is not free, its rows following the dims of the result."""
        bound = [(v, t) for v, t in zip(read, terms, strict=True) if t != FREE]
        if len(bound) != 1 or (op.name in REDUCTIONS and not is_sum(op)):
            return None
        value, term = bound[0]
        if (term.inside or term.row is not None) and not (op.name in MOVING or op.name in CASTS):
            return None
        moves = {
            d: e
            for factor in factors(op)
            for v, d in factor
            if v is value
            for w, e in factor
            if w in op.results and v.type.shape[d] == w.type.shape[e]
        }
        return _moved(term, moves)

    def is_zero(self, value: Value) -> bool:
        """True for a constant of zeros."""
        made = self.index.level.made
        held = stored(made.get(behind(value, made, lambda op: op.name in VIEWS | CASTS)))
        return held is not None and not any(held.data)

    def next_pass(self) -> Pass:
        """What can be reduced before anything in `waiting` is known."""
        step = Pass(rows={v for v, t in self.terms.items() if t is not None and t.row})
        for op in self.waiting.values():
            term = self._fold_term(op)
            if term == FREE or (term is not None and self._bridge(term, step)):
                step.folds[op] = term
        step.collected = [v for v in self.collected if self.terms[v] == FREE]
        return step

    def _fold_term(self, op: Op) -> Term | None:
        """What the result of a reduction is left to be multiplied by."""
        known = self._known(op.operands)
        return FREE if known and all(t == FREE for t in known) else self._term(op, op.operands)

    def _bridge(self, term: Term, step: Pass) -> bool:
        """Note how the shift of `term` follows from one maximum of the same pass; False when it
        does not.
        """
        if term.inside or term.row is not None:
            return False
        if term.shift is None:
            return True
        source = term.shift.row.source
        if source not in step.bridges:
            found = self._ops_between(source, step)
            if found is None:
                return False
            step.bridges[source] = found
        return True

    def _ops_between(self, source: Value, step: Pass) -> list[Op] | None:
        """The ops from a maximum of `step` to `source`; None when anything else is in between."""
        ops: dict[Op, None] = {}
        roots: set[Value] = set()
        seen: set[Value] = set()
        todo = [source]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.waiting:
                roots.add(value)
                continue
            op = self.index.level.made[value]
            if not is_cheap(op):
                return None
            ops[op] = None
            todo += [v for v in operands_of(op, value) if v in self.pending]
        makers = [self.waiting[v] for v in roots]
        if len(makers) != 1 or makers[0].name not in REDUCTIONS or combination(makers[0]) != "max":
            return None
        if step.folds.get(makers[0]) != FREE:
            return None
        order = {op: i for i, op in enumerate(self.index.level.graph.ops)}
        return sorted(ops, key=order.__getitem__)


def _row(source: Value, dims: Sequence[int]) -> Row:
    """What a broadcast to `dims` repeats along the index."""
    sizes = source.type.shape
    return Row(source, tuple((i, d) for i, d in enumerate(dims) if sizes[i] > 1))


def _moved(term: Term, moves: Mapping[int, int]) -> Term | None:
    """`term` with its rows along other dims; None when a dim of a row is gone."""
    if any(d not in moves for row in term.rows for _, d in row.dims):
        return None

    def row(old: Row) -> Row:
        return Row(old.source, tuple((i, moves[d]) for i, d in old.dims))

    def applied(old: Applied) -> Applied:
        return replace(old, row=row(old.row))

    return Term(
        row=term.row and row(term.row),
        scales=tuple(map(applied, term.scales)),
        shift=term.shift and applied(term.shift),
        inside=term.inside,
    )


def _add(known: Sequence[Term], subtracts: bool) -> Term | None:
    """A row beside a free value shifts it; two values of one term keep it."""
    left, right = known
    if left == FREE and right.row is not None:
        return Term(shift=Applied(right.row, subtracts), inside=True)
    if right == FREE and left.row is not None and not subtracts:
        return Term(shift=Applied(left.row), inside=True)
    return left if left == right and not left.inside and left.row is None else None


def _scale(known: Sequence[Term], divides: bool) -> Term | None:
    """A row is a factor; of two other values one is free."""
    left, right = known
    if left.inside or right.inside:
        return None
    if right.row is not None and left.row is None:
        return replace(left, scales=(*left.scales, Applied(right.row, divides)))
    if left.row is not None and right.row is None and not divides:
        return replace(right, scales=(*right.scales, Applied(left.row)))
    if right == FREE:
        return left
    return right if left == FREE and not divides else None


def _exponential(known: Sequence[Term]) -> Term | None:
    """The exponential of a shifted value follows the shift."""
    (term,) = known
    return replace(term, inside=False) if term.inside else None


def _select(terms: _Terms, read: Sequence[Value], known: Sequence[Term]) -> Term | None:
    """A choice between two values of one term, or zero."""
    which, left, right = known
    if which != FREE or left.inside or right.inside:
        return None
    if left == right or (right == FREE and terms.is_zero(read[2])):
        return left if left.row is None else None
    return right if left == FREE and terms.is_zero(read[1]) and right.row is None else None


Rule = Callable[[_Terms, Op, Sequence[Value], Sequence[Term]], Term | None]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys((*MOVING, *CASTS, *REDUCTIONS, "dot_general", "negate"), _Terms.linear),
    "add": lambda terms, op, read, known: _add(known, subtracts=False),
    "subtract": lambda terms, op, read, known: _add(known, subtracts=True),
    "multiply": lambda terms, op, read, known: _scale(known, divides=False),
    "divide": lambda terms, op, read, known: _scale(known, divides=True),
    "exponential": lambda terms, op, read, known: _exponential(known),
    "select": lambda terms, op, read, known: _select(terms, read, known),
}
"""The term of the result of an op that reads values with terms; other ops have to wait."""
