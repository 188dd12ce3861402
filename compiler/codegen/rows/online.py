"""Which loops over a blocked row can be one: sums that follow from a running maximum.

A maximum over the blocked iter dim is complete after its loop. Where all that a later loop adds up
is a product with exp(c), c a column that follows from the maximum, the two loops are one: every
column tile works with the columns of the maximum so far, and what was added up before is multiplied
by exp(c - c before). Online softmax is one case of it. Nothing here depends on how a softmax is
spelled: a value has a form (`_Form`) that follows from the forms of what it reads. What the maximum
is of decides whether early products are within bounds (`bounds.py`). What was added up
before is multiplied when the column it follows moves. A loop with something running begins with
maxima of the lowest number and sums of 0, and with the columns that follow from them, so that the
first column tile is like every other: exp(c - c before) is then 0, or what it multiplies is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.compiler.codegen.builder import Held, Scope, by_numbers
from shardwright.compiler.codegen.domain import SCALED, Numbers, Value
from shardwright.compiler.codegen.rows.bounds import is_bounded, reference
from shardwright.compiler.codegen.rows.float_intervals import LOW_LIMIT
from shardwright.compiler.codegen.rows.interval_analysis import Fact, Given, facts, is_low
from shardwright.compiler.codegen.rows.roles import RefusedError, inner_of, require
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.dtypes import LARGEST, DType
from shardwright.compiler.isa.attributes import NodeKind, nodes_of
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.isa.program import Engine

if TYPE_CHECKING:
    from shardwright.compiler.codegen.rows.passes import PassSchedule

EXTREMES = ("max", "min")
# exp(-104) is the first fp32 zero.
_NEVER = -104.0
# What columns may be made of: nothing that takes a finite number to an infinity, as the lowest
# number that a maximum begins with would then be none.
_STEADY = nodes_of(NodeKind.STEADY)


@dataclass(frozen=True, slots=True)
class Running:
    """`folds` of a loop are multiplied by exp(sign * (column - column before))."""

    column: int
    sign: float
    folds: Numbers


@dataclass(frozen=True, slots=True)
class _Form:
    """A value as its dependence on a running column c: scale * x + sign * c, or where it is a
    `factor`, y * exp(sign * c); x (None: 0) and y do not depend on c. Elements of a sum may be at
    most `low` instead.
    """

    column: int
    sign: float
    factor: bool = False
    x: int | None = None
    scale: float = 1.0
    low: float = -math.inf


_Forms = list[_Form | None]


def merged(
    schedule: PassSchedule, loops: Mapping[int, int]
) -> tuple[dict[int, int], tuple[Running, ...]]:
    """(loop of every value, pairs of loops being one where they can, what is rescaled)."""
    found, running, first = dict(loops), list[Running](), 1
    while first + 2 <= max(found.values(), default=0):
        try:
            here = _Pair(schedule, found, first).running()
        except RefusedError:
            first += 2
            continue
        running += here
        found = _joined(schedule, found, first)
    return found, tuple(running)


def _joined(schedule: PassSchedule, loops: Mapping[int, int], first: int) -> dict[int, int]:
    """Loop `first` + 2 in loop `first`, with the columns it reads; all else moves up by a pair."""
    second = [n for n, at in loops.items() if at == first + 2]
    wanted = set(schedule.domain.slice(second))
    found = {n: at - 2 if at > first + 1 else at for n, at in loops.items()}
    return found | {n: first for n, at in loops.items() if at == first + 1 and n in wanted}


class _Pair:
    """Two neighbouring loops over the blocked iter dim, and what stands between them."""

    def __init__(self, schedule: PassSchedule, loops: Mapping[int, int], first: int) -> None:
        self.schedule, self.domain, self.roles = schedule, schedule.domain, schedule.roles
        self.second = [n for n in sorted(loops) if loops[n] == first + 2]
        begun = [n for n in sorted(loops) if loops[n] == first]
        self.extremes = {n for n in begun if schedule.is_carried(n)}
        needed = set(self.domain.slice(self.second))
        between = [n for n in sorted(loops) if loops[n] == first + 1]
        self.columns = {n for n in between if n in needed}
        self.known = facts(self.domain, range(len(self.domain.values)), {})

    def running(self) -> list[Running]:
        """What is rescaled when both are one loop. Raises RefusedError when they cannot be."""
        require(bool(self.second) and all(map(self._is_extreme, self.extremes)))
        require(all(map(self._is_column, self.columns)))
        forms: dict[int, _Form] = {}
        for n in self.second:
            form = self._form(n, self.domain[n], forms)
            if form is not None:
                forms[n] = form
        found: dict[tuple[int, float], list[int]] = {}
        for n in self.second:
            if n in forms and self.schedule.is_carried(n):
                found.setdefault((forms[n].column, forms[n].sign), []).append(n)
        return [Running(c, sign, tuple(folds)) for (c, sign), folds in found.items()]

    def _is_extreme(self, number: int) -> bool:
        value = self.domain[number]
        plain = value.op == "reduce" and value.attrs["kind"] in EXTREMES
        return plain and value.dtype.is_float

    def _is_column(self, number: int) -> bool:
        value = self.domain[number]
        widens = value.op == "convert" and value.dtype is DType.F32
        return inner_of(self.roles, value) is None and (widens or value.op in _STEADY)

    def _form(self, number: int, value: Value, forms: Mapping[int, _Form]) -> _Form | None:
        """How `value` depends on a running column; None when it does not."""
        if not any(i in forms or self._runs(i) for i in value.inputs):
            plain = self._is_summed(value) or self._is_extreme(number)
            require(not self.schedule.is_carried(number) or plain)
            return None
        given = [forms.get(i) or self._column_form(i) for i in value.inputs]
        if self.schedule.is_carried(number):
            form = _product("multiply", [*given, None][:2])
            require(self._is_summed(value) and form is not None)
            return form
        require(number not in self.roles.sums and value.op not in STORES)
        found = _follow(value, given, [self.known.get(i) for i in value.inputs])
        require(found is not None)
        assert found is not None
        if not found.factor or any(map(_is_factor, given)):
            return found
        require(self._is_bounded(found))
        return _Form(found.column, found.sign, factor=True)

    def _is_bounded(self, form: _Form) -> bool:
        """Whether an exponential is no larger with the maximum so far than it may be in the end."""
        to = reference(self.domain, form.column, self.extremes)
        if to is None or form.x is None or form.low > _NEVER:
            return False
        return is_bounded(self.domain, (form.x, form.scale), to, form.sign)

    def _runs(self, number: int) -> bool:
        return number in self.columns or number in self.extremes

    def _column_form(self, number: int) -> _Form | None:
        return _Form(number, 1.0) if self._runs(number) else None

    def _is_summed(self, value: Value) -> bool:
        added = value.op == "reduce" and value.attrs["kind"] == "add"
        return value.dtype.is_float and (added or value.op == "contract")


def _follow(value: Value, given: _Forms, known: Given) -> _Form | None:
    """The form of an elementwise value; None where it has none."""
    if value.op in ("convert", "negate"):
        return _scaled_form(
            given[0], 1.0 if value.op == "convert" or _is_factor(given[0]) else -1.0
        )
    if value.op in ("add", "subtract"):
        return _sum(value.inputs, given, -1.0 if value.op == "subtract" else 1.0)
    if value.op in ("multiply", "divide"):
        return _product(value.op, given)
    if value.op == "exponential":
        return _exponential(given[0])
    if value.op == "select":
        return _select(given, known)
    return _affine(value, given) if value.op == SCALED else None


def _is_factor(form: _Form | None) -> bool:
    return form is not None and form.factor


def _scaled_form(form: _Form | None, scale: float) -> _Form | None:
    """A form times a number; a factor stays one."""
    if form is None or form.factor:
        return form
    # A negative scale turns what is low around; where nothing is, nothing turns.
    turned = form.low * scale if scale > 0 else math.inf
    low = turned if form.low > -math.inf else -math.inf
    return replace(form, sign=form.sign * scale, scale=form.scale * scale, low=low)


def _sum(inputs: Numbers, given: _Forms, sign: float) -> _Form | None:
    """a + sign * b, one of which depends on the column."""
    a, b = given
    if _is_factor(a) or _is_factor(b) or (a is not None and b is not None):
        return None
    if b is None:
        return _with_term(a, inputs[1], sign)
    return _with_term(_scaled_form(b, sign), inputs[0], 1.0)


def _with_term(form: _Form | None, x: int, scale: float) -> _Form | None:
    """form + scale * x; nothing bounds a sum of several terms."""
    return None if form is None or form.x is not None else replace(form, x=x, scale=scale)


def _product(op: str, given: _Forms) -> _Form | None:
    """Products of a factor with what does not depend on the column."""
    a, b = given
    if a is not None and b is not None:
        return None
    form = a if a is not None or op == "divide" else b
    return form if _is_factor(form) else None


def _exponential(form: _Form | None) -> _Form | None:
    return None if form is None or form.factor else replace(form, factor=True)


def _select(given: _Forms, known: Given) -> _Form | None:
    """A choice between a form and a constant that is 0, or whose exponential is."""
    pred, a, b = given
    form, instead = (a, known[2]) if b is None else (b, known[1])
    if pred is not None or form is None or (a is not None and b is not None and a != b):
        return None
    if a is not None and b is not None:
        return form
    if form.factor:
        return form if instead is Fact.ZERO else None
    # A column alone has yet to meet its x, which could make up for what is low.
    lowers = is_low(instead) and form.x is not None
    return replace(form, low=max(form.low, LOW_LIMIT)) if lowers else None


def _affine(value: Value, given: _Forms) -> _Form | None:
    """func(x * scale + bias), where terms that are None are columns."""
    func, scale, bias = (value.attrs[k] for k in ("func", "scale", "bias"))
    columns = iter(given[1:])
    by = next(columns) if scale is None else None
    add = next(columns) if bias is None else None
    if by is not None or func not in ("identity", "exponential"):
        return None
    if _is_factor(given[0]):
        return given[0] if func == "identity" and bias == 0.0 else None
    if scale is None or (given[0] is not None and bias != 0.0):
        return None
    if given[0] is None:
        form = _with_term(add, value.inputs[0], float(scale))
    else:
        form = _scaled_form(given[0], float(scale))
    return _exponential(form) if func == "exponential" else form


_SIGN = {"max": -1.0, "min": 1.0}


def start_of(value: Value) -> float:
    """What a fold begins with: finite, so that a row of -inf adds exp(-inf), not a NaN."""
    return _SIGN.get(value.attrs.get("kind", "add"), 0.0) * LARGEST[value.dtype]


def copied(frame: Frame, running: Running, held: Held, scope: Scope) -> Held:
    """The running column as it is."""
    copy = frame.scratch(frame.domain[running.column], scope, DType.F32)
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
    factor = frame.scratch(frame.domain[running.column], scope, DType.F32)
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
