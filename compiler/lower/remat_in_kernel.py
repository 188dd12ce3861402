"""Values made of constants, counts and registers alone, rematerialised in every kernel that uses
them.

A mask or a table of positions never crosses HBM. The value is built top down for the indexing map
of its use: a count becomes one iota node per iter dim of its dim, a slice shifts the count, a
broadcast drops iter dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import dim_map, stored
from shardwright.compiler.ir.traits import ALIASING, IDENTITIES, LITERALS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.lower.indexing_map import IndexExpr, IndexingMap, leaves, regroup
from shardwright.compiler.lower.task import NeedsCopyError
from shardwright.compiler.support.intervals import within
from shardwright.compiler.support.walks import answered

if TYPE_CHECKING:
    from shardwright.compiler.lower.emit import Emitter

ZERO = Affine()
Origin = tuple[tuple[Affine, int], ...]  # per dim: first position and step
Occurrence = tuple[Value, IndexingMap, Origin]
_STILL: tuple[IndexExpr, tuple[Affine, int]] = ((), (ZERO, 1))


def rematerialise(emitter: Emitter, value: Value, indexing: IndexingMap) -> int:
    """The node of a rematerialised `value`. Raises NeedsCopyError when sizes do not divide."""
    emitter.rematerialised.clear()
    return _rematerialise(emitter, (value, indexing, ((ZERO, 1),) * len(indexing)))


def _rematerialise(emitter: Emitter, place: Occurrence) -> int:
    """The node of a place, made once: a cipher of constants reads its words many times."""
    behind: dict[Occurrence, list[Occurrence]] = {}

    def read(one: Occurrence) -> list[Occurrence]:
        behind[one] = _read(emitter, one)
        return behind[one]

    return answered(
        place, emitter.rematerialised, read, lambda one: _make(emitter, one, behind[one])
    )


def _read(emitter: Emitter, place: Occurrence) -> list[Occurrence]:
    """The places that one is made from."""
    value, indexing, origin = place
    op = emitter.body.made.get(value)
    if emitter.body.known.get(value) is not None or op is None or op.name in LITERALS:
        return []
    if op.name in ALIASING:
        return [_behind(emitter, op, indexing, origin)]
    rank = len(indexing)
    return [
        (v, indexing if v.type.rank == rank else (), origin if v.type.rank else ())
        for v in op.operands
    ]


def _make(emitter: Emitter, place: Occurrence, read: Sequence[Occurrence]) -> int:
    value, indexing, origin = place
    body = emitter.body
    known = body.known.get(value)
    if known is not None and not known.is_constant:
        attrs = {"value": known.value, "low": known.low, "high": known.high}
        return emitter.node("register", (), (), value.type.dtype, attrs)
    if known is not None:
        return _constant(emitter, value.type.dtype, known.low)
    op = body.made[value]
    if (held := stored(op)) is not None:
        return _constant(emitter, value.type.dtype, held.array().reshape(-1)[0])
    if op.name in LITERALS:
        return _count(emitter, value, indexing, origin)
    inputs = [emitter.rematerialised[one] for one in read]
    return inputs[0] if op.name in ALIASING else emitter.elementwise(op, inputs)


def _constant(emitter: Emitter, dtype: DType, number: Any) -> int:
    """A splat; floats travel as Python floats, which hold every narrower value exactly."""
    kind = bool if dtype is DType.PRED else float if dtype.is_float else int
    return emitter.constant(kind(number), dtype)


def _count(emitter: Emitter, value: Value, indexing: IndexingMap, origin: Origin) -> int:
    """start + step * position along the dim of an iota."""
    dim = emitter.body.made[value].attrs.dim
    start, step = origin[dim]
    size = value.type.shape[dim]
    return count(emitter, indexing[dim], value.type.dtype, start, step, size)


def count(
    emitter: Emitter,
    expr: IndexExpr,
    dtype: DType,
    start: Affine = ZERO,
    step: int = 1,
    size: int = 0,
) -> int:
    """The node of start + step * position along the dim that `expr` indexes; a start that registers
    move is told to stay in `size` positions.
    """
    parts: list[int] = []
    told = within((0, size - 1), dtype) if start.terms and size and dtype.is_integer else None
    known = {} if told is None else {"low": told[0], "high": told[1]}
    for iter_dim in reversed(leaves(expr)):
        (number,) = emitter.numbers((iter_dim,))
        attrs = {"atom": number, "start": start, "step": step, **known}
        parts.append(emitter.node("iota", (), (iter_dim,), dtype, attrs))
        start, step, known = ZERO, step * iter_dim.size, {}
    if not parts:
        return emitter.node("register", (), (), dtype, {"value": start, **known})
    return reduce(lambda total, part: emitter.pointwise("add", (total, part), dtype), parts)


def _behind(emitter: Emitter, op: Op, indexing: IndexingMap, origin: Origin) -> Occurrence:
    """Where a view looks in its operand; new and stretched dims do not move it."""
    source = op.operands[0]
    if op.name in IDENTITIES:
        return source, indexing, origin
    if (walked := dim_map(op)) is None:
        return _BEHIND[op.name](emitter, op, indexing, origin)
    shape = source.type.shape
    place = {own: d for d, own in enumerate(walked) if own is not None and shape[own] != 1}
    inner = [
        (indexing[place[d]], origin[place[d]]) if d in place else _STILL for d in range(len(shape))
    ]
    return source, tuple(expr for expr, _ in inner), tuple(o for _, o in inner)


def _reshape(emitter: Emitter, op: Op, indexing: IndexingMap, origin: Origin) -> Occurrence:
    """Indices are split or merged; where they cannot be, the result gets memory, and where that
    copy is what cannot be mapped (a transpose inside), the operand does.
    """
    source = op.operands[0]
    inner = regroup(indexing, source.type.shape)
    if inner is None or any(o != (ZERO, 1) for o in origin):
        copied = emitter.body.now(op.result) is not op.result
        raise NeedsCopyError(source if copied else op.result)
    return source, inner, ((ZERO, 1),) * source.type.rank


def _slice(emitter: Emitter, op: Op, indexing: IndexingMap, origin: Origin) -> Occurrence:
    cuts = zip(op.attrs.start, op.attrs.stride, origin, strict=True)
    shifted = tuple((begin * step + start, step * stride) for start, step, (begin, stride) in cuts)
    return op.operands[0], indexing, shifted


def _reverse(emitter: Emitter, op: Op, indexing: IndexingMap, origin: Origin) -> Occurrence:
    """From the last position backwards."""
    shape = op.result.type.shape
    flipped = [
        (begin * -1 + (shape[d] - 1), -step) if d in op.attrs.dims else (begin, step)
        for d, (begin, step) in enumerate(origin)
    ]
    return op.operands[0], indexing, tuple(flipped)


def _dynamic_slice(emitter: Emitter, op: Op, indexing: IndexingMap, origin: Origin) -> Occurrence:
    source, *starts = op.operands
    at = emitter.body.starts(op, source, op.attrs.sizes, starts)
    shifted = tuple(
        (begin + start, stride) for start, (begin, stride) in zip(at, origin, strict=True)
    )
    return source, indexing, shifted


_BEHIND = {
    "reshape": _reshape,
    "slice": _slice,
    "reverse": _reverse,
    "dynamic_slice": _dynamic_slice,
}
