"""Trip counts: a StableHLO `while` whose counter, bound and step are known becomes a counted
`loop`.

The condition must compare a counter carry with a constant (in any direction, either side, also
behind reshapes, conversions, `not`, and `and` with what is always true); the body must add a
constant to it. Constants are found through arithmetic, conversions, pass-through carries
and captured values.
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
    """The counter of a `while`. Refuses a loop whose trip count is not known."""
    _link_constant_carries(parts)
    direction, carry, bound = _condition(parts)
    start = _known(parts, parts.inits[carry], "start")
    step = _step(parts, carry)
    limit = _known(parts, bound, "bound")
    trip = _trip_count(direction, start, step, limit)
    _check_range(parts.inits[carry], start + trip * step)
    return Counter(carry, start, step, trip)


def _link_constant_carries(parts: WhileParts) -> None:
    """Carries that pass through are, inside, what they are outside."""
    rows = zip(parts.inits, parts.cond_inputs, parts.body_inputs, parts.body_outputs, strict=True)
    for init, cond_input, body_input, body_output in rows:
        if body_output is body_input:
            parts.outer |= {cond_input: init, body_input: init}


def _condition(parts: WhileParts) -> tuple[str, int, Value]:
    """(direction, counter carry, bound) with the counter on the left."""
    compare, negated = _comparison(parts)
    given = _NEGATED[compare.attrs.direction] if negated else compare.attrs.direction
    lhs, rhs = (_plain(parts, value) for value in compare.operands)
    carries = {value: k for k, value in enumerate(parts.cond_inputs)}
    for counter, bound, direction in ((lhs, rhs, given), (rhs, lhs, _FLIPPED[given])):
        if counter in carries and counter not in parts.outer:
            return direction, carries[counter], bound
    if lhs in carries or rhs in carries:
        raise _refused("a counter that the body changes")
    raise _refused("a condition on a counter carry")


def _comparison(parts: WhileParts) -> tuple[Op, bool]:
    """The comparison behind the condition, and whether the loop runs while it is false."""
    value, negated = parts.cond_output, False
    while True:
        value = _plain(parts, value)
        op = parts.scalars.get(value)
        inside = None if op is None else _inside(parts, op)
        if inside is None:
            break
        value, turned = inside
        negated ^= turned
    if op is None or op.name != "compare":
        raise _refused("a condition that compares", op.name if op is not None else "a carry")
    return op, negated


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
    """What the body adds to the counter."""
    before, after = parts.body_inputs[carry], parts.body_outputs[carry]
    op = parts.scalars.get(after)
    if op is not None and op.name == "add" and before in op.operands:
        lhs, rhs = op.operands
        return _known(parts, rhs if lhs is before else lhs, "step")
    if op is not None and op.name == "subtract" and op.operands[0] is before:
        return -_known(parts, op.operands[1], "step")
    raise _refused(
        "a counter with a constant step", op.name if op is not None else "something else"
    )


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
    """How often `start + i * step <direction> limit` holds, counting from i = 0."""
    limit += {"LE": 1, "GE": -1}.get(direction, 0)
    holds = {"EQ": start == limit, "NE": start != limit, "LT": start < limit, "LE": start < limit}
    if not holds.get(direction, start > limit):
        return 0
    if direction == "EQ" and step:
        return 1
    trip = -((start - limit) // step) if step else 0
    if trip < 1 or (direction == "NE" and (limit - start) % step):
        raise _refused("a counter that reaches its bound")
    return trip


def _check_range(counter: Value, last: int) -> None:
    """Refuse a counter that would wrap around before it reaches its bound."""
    bits = 8 * counter.type.dtype.bytes
    signed = counter.type.dtype.value.startswith("i")
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    if not low <= last < high:
        raise _refused(f"a counter within {counter.type}", last)
