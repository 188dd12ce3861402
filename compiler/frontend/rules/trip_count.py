"""Trip counts: a StableHLO `while` whose counter, bound and step are known becomes a counted
`loop`.

The condition must compare a counter carry with a constant (in any direction, either side, also
behind reshapes, conversions, `not`, and `and` with what is always true), or be several such
conditions that all have to hold; the body must add a constant to each counter. Constants are found
through arithmetic, conversions, pass-through carries, captured values, and what counters of loops
in front have come to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.registry import RefusedError, Values, refuse
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.walks import answered

_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_NEGATED = {"LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE", "EQ": "NE", "NE": "EQ"}
_ENDLESS = 1 << 64
"""More turns than any counter counts."""
_VIEWS = ("reshape", "broadcast_in_dim")
_HINT = (
    "write the loop as lax.scan or lax.fori_loop with Python integers as bounds; a data-dependent "
    "lax.while_loop has no static schedule"
)


@dataclass(frozen=True, slots=True)
class Counter:
    """The counter of a loop: carry number, first value, step, and how often the body runs."""

    carry: int
    start: int
    step: int
    trip: int


@dataclass(slots=True)
class WhileParts:
    """A converted `while`: initial values, and condition and body over the same carries."""

    inits: Values
    cond_inputs: Values
    cond_output: Value
    body_inputs: Values
    body_outputs: Values
    scalars: Mapping[Value, Op]
    outer: dict[Value, Value]  # inside -> outside, where they are equal


def find_counter(parts: WhileParts) -> Counter:
    """The counter of a `while`: of several the one that ends it. Refuses a loop whose trip count is
    not known."""
    _link_constant_carries(parts)
    found = [_counter(parts, *condition) for condition in _comparisons(parts)]
    first = min(found, key=lambda counter: counter.trip)
    if first.trip == _ENDLESS:
        raise _refused("a counter that reaches its bound")
    last = first.start + first.trip * first.step
    if not _holds(parts.inits[first.carry], last):
        raise _refused(f"a counter within {parts.inits[first.carry].type}", last)
    return first


def known_ends(parts: WhileParts, trip: int) -> dict[int, int]:
    """Carries that are single whole numbers which a loop of `trip` turns steps through -> what they
    are after it: loops behind it may count down from there."""
    found = {}
    for carry, init in enumerate(parts.inits):
        is_number = init.type.num_elements == 1 and not init.type.dtype.is_float
        start = known_scalar(parts.scalars, init, parts.outer) if is_number else None
        step = _step_of(parts, carry) if start is not None else None
        if start is not None and step is not None and _holds(init, start + trip * step):
            found[carry] = start + trip * step
    return found


def _counter(parts: WhileParts, compare: Op, negated: bool) -> Counter:
    """The counter of one condition."""
    direction, carry, bound = _condition(parts, compare, negated)
    start = _known(parts, parts.inits[carry], "start")
    step = _step(parts, carry)
    limit = _known(parts, bound, "bound")
    return Counter(carry, start, step, _trip_count(direction, start, step, limit))


def _link_constant_carries(parts: WhileParts) -> None:
    """Carries that pass through are, inside, what they are outside."""
    rows = zip(parts.inits, parts.cond_inputs, parts.body_inputs, parts.body_outputs, strict=True)
    for init, cond_input, body_input, body_output in rows:
        if _plain(parts, body_output) is body_input:
            parts.outer |= {cond_input: init, body_input: init}


def _condition(parts: WhileParts, compare: Op, negated: bool) -> tuple[str, int, Value]:
    """(direction, counter carry, bound) with the counter on the left."""
    given = _NEGATED[compare.attrs.direction] if negated else compare.attrs.direction
    lhs, rhs = (_plain(parts, value) for value in compare.operands)
    carries = {value: k for k, value in enumerate(parts.cond_inputs)}
    for counter, bound, direction in ((lhs, rhs, given), (rhs, lhs, _FLIPPED[given])):
        if counter in carries and counter not in parts.outer:
            return direction, carries[counter], bound
    if lhs in carries or rhs in carries:
        raise _refused("a counter that the body changes")
    raise _refused("a condition on a counter carry")


def _comparisons(parts: WhileParts) -> list[tuple[Op, bool]]:
    """The comparisons that all have to hold for the loop to go on, each with whether it is its
    contrary that has to."""
    found, waiting = [], [(parts.cond_output, False)]
    while waiting:
        value, negated = waiting.pop()
        value = _plain(parts, value)
        op = parts.scalars.get(value)
        inside = None if op is None else _inside(parts, op)
        if inside is not None:
            waiting.append((inside[0], negated ^ inside[1]))
        elif op is not None and op.name == ("or" if negated else "and"):
            waiting += [(operand, negated) for operand in op.operands]
        elif op is None or op.name != "compare":
            raise _refused("a condition that compares", op.name if op is not None else "a carry")
        else:
            found.append((op, negated))
    return found


def _inside(parts: WhileParts, op: Op) -> tuple[Value, bool] | None:
    """(the truth value that `op` passes on, whether it turns it around), if it does that."""
    if op.name == "not":
        return op.operands[0], True
    if op.name == "convert":  # to a number, of what a comparison with 0 then reads
        return (op.operands[0], False) if op.operands[0].type.dtype is DType.PRED else None
    if op.name not in ("and", "or", "xor", "compare"):
        return None
    for kept, other in (op.operands, op.operands[::-1]):
        known = known_scalar(parts.scalars, other, parts.outer)
        if op.name == "compare":
            made = parts.scalars.get(_plain(parts, kept))
            is_truth = made is not None and (
                made.result.type.dtype is DType.PRED or _is_number_of_truth(made)
            )
            if is_truth and known in (0, 1) and op.attrs.direction in ("EQ", "NE"):
                return kept, (op.attrs.direction == "EQ") == (known == 0)
        elif known is not None and kept.type.dtype is DType.PRED:
            if op.name == "xor":
                return kept, bool(known)
            if bool(known) == (op.name == "and"):
                return kept, False
    return None


def _is_number_of_truth(op: Op) -> bool:
    """Whether `op` makes 0 or 1 of a truth value."""
    return op.name == "convert" and op.operands[0].type.dtype is DType.PRED


def _is_of_one(op: Op) -> bool:
    """Whether `op` reduces a single element."""
    return op.name == "reduce" and op.operands[0].type.num_elements == 1


def _plain(parts: WhileParts, value: Value) -> Value:
    """A single element without the reshapes and reductions around it."""
    op = parts.scalars.get(value)
    while op is not None and (op.name in _VIEWS or _is_of_one(op)):
        value = op.operands[0]
        op = parts.scalars.get(value)
    return value


def _step(parts: WhileParts, carry: int) -> int:
    """What the body adds to the counter. Refuses a step that is not known."""
    step = _step_of(parts, carry)
    if step is not None:
        return step
    op = parts.scalars.get(_plain(parts, parts.body_outputs[carry]))
    if op is not None and op.name in ("add", "subtract"):
        refuse("NCC_EVRF001", "while requires a step known when compiling", _HINT)
    raise _refused(
        "a counter with a constant step", op.name if op is not None else "something else"
    )


def _step_of(parts: WhileParts, carry: int) -> int | None:
    """What the body adds to a carry; None where that is not known."""
    before, after = parts.body_inputs[carry], _plain(parts, parts.body_outputs[carry])
    op = parts.scalars.get(after)
    operands = [_plain(parts, operand) for operand in op.operands] if op is not None else []
    if op is not None and op.name == "add" and before in operands:
        lhs, rhs = op.operands
        return known_scalar(parts.scalars, rhs if operands[0] is before else lhs, parts.outer)
    if op is not None and op.name == "subtract" and operands[0] is before:
        step = known_scalar(parts.scalars, op.operands[1], parts.outer)
        return None if step is None else -step
    return None


def _known(parts: WhileParts, value: Value, what: str) -> int:
    """The constant integer of `value`, else refuses."""
    number = known_scalar(parts.scalars, value, parts.outer)
    if number is None:
        refuse("NCC_EVRF001", f"while requires a {what} known when compiling", _HINT)
    return number


def _refused(required: str, given: object = "none") -> RefusedError:
    return RefusedError("NCC_EVRF001", f"while requires {required}, got {given}", _HINT)


def known_scalar(
    scalars: Mapping[Value, Op], value: Value, outer: Mapping[Value, Value] = MappingProxyType({})
) -> int | None:
    """The integer or truth value `value` always has, if that can be seen.

    `scalars` are the producers of scalars; `outer` names what a region's input is outside of it.
    """
    known: dict[Value, int | None] = {}

    def read(v: Value) -> tuple[Value, ...]:
        if v in outer:
            return (outer[v],)
        op = scalars.get(v)
        return op.operands if op is not None and _follows(op, v) else ()

    def find(v: Value) -> int | None:
        if v in outer:
            return known[outer[v]]
        op = scalars.get(v)
        return None if op is None else _scalar(op, v, [known.get(o) for o in op.operands])

    return answered(value, known, read, find)


def _follows(op: Op, value: Value) -> bool:
    """Whether a scalar is known where the operands of its op are."""
    if value.type.dtype.is_float:
        return False
    return OPS[op.name].elementwise or (op.name in _VIEWS and value.type.num_elements == 1)


def _scalar(op: Op, value: Value, known: Sequence[int | None]) -> int | None:
    """The number `value` is; `known` are those of the operands of its op."""
    if value.type.dtype.is_float:
        return None
    if op.name == "constant":
        return int(op.attrs.array().reshape(-1)[0])
    if not _follows(op, value):
        return None
    if any(k is None for k in known) or any(v.type.num_elements != 1 for v in op.operands):
        return None
    arguments = [
        np.full(v.type.shape, k, v.type.dtype.numpy)
        for v, k in zip(op.operands, known, strict=True)
    ]
    return int(OPS[op.name].reference(op, arguments)[0].item())


def _trip_count(direction: str, start: int, step: int, limit: int) -> int:
    """How often `start + i * step <direction> limit` holds, counting from i = 0; `_ENDLESS` where
    it always does."""
    limit += {"LE": 1, "GE": -1}.get(direction, 0)
    holds = {"EQ": start == limit, "NE": start != limit, "LT": start < limit, "LE": start < limit}
    if not holds.get(direction, start > limit):
        return 0
    if direction == "EQ" and step:
        return 1
    trip = -((start - limit) // step) if step else 0
    if trip < 1 or (direction == "NE" and (limit - start) % step):
        return _ENDLESS
    return trip


def _holds(counter: Value, number: int) -> bool:
    """Whether a number is one of a counter's type, which would else wrap around."""
    bits = 8 * counter.type.dtype.bytes
    signed = counter.type.dtype.value.startswith("i")
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    return low <= number < high
