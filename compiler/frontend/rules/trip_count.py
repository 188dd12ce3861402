"""Trip counts: a StableHLO `while` whose counter, bound and step are known becomes a counted
`loop`.

The condition must compare a counter carry with a constant (in any direction, either side); the body
must add a constant to it. Constants are found through arithmetic, conversions, pass-through carries
and captured values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shardwright.compiler.frontend.rules.registry import RefusedError, Values, refuse
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.walks import answered

_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
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
    compare = parts.scalars.get(parts.cond_output)
    if compare is None or compare.name != "compare":
        raise _refused(
            "a condition that compares", compare.name if compare is not None else "a carry"
        )
    lhs, rhs = compare.operands
    carries = {value: k for k, value in enumerate(parts.cond_inputs)}
    for counter, bound, direction in (
        (lhs, rhs, compare.attrs.direction),
        (rhs, lhs, _FLIPPED[compare.attrs.direction]),
    ):
        if counter in carries and counter not in parts.outer:
            return direction, carries[counter], bound
    if lhs in carries or rhs in carries:
        raise _refused("a counter that the body changes")
    raise _refused("a condition on a counter carry")


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
    return not value.type.dtype.is_float and (op.name == "reshape" or OPS[op.name].elementwise)


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
