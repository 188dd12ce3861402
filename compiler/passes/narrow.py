"""Values that lose nothing in a short type are kept in it: stacks and carries of loops first.

Two reasons allow it: every element is a short float already (what was rounded, and what only moves
that), or every reader rounds before it computes. Both are fixed points over the whole graph, loops
included, from the assumption that all values qualify. No bit of any other value changes, since
moving data and rounding commute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import defining
from shardwright.compiler.ir.facts import splat, stored
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import ConstantAttrs, ConvertAttrs
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.traits import CASTS, IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.passes.dce import dce

_MOVED = {name: op.passes for name, op in OPS.items() if op.passes and op.kind is not Kind.SORT}
"""Ops whose results have only elements of these operands; what is sorted is left as it is."""


def narrow(graph: Graph, dtype: DType, among: Collection[Value]) -> Graph:
    """`graph` with those values of `among` in the short `dtype` that lose nothing in it; inputs and
    outputs keep their types.
    """
    kept = _Exact(graph, dtype).values() | _Rounded(graph, dtype).values()
    chosen = {v for v in kept if v in among}.difference(graph.inputs)
    loops = (op for op in graph.walk() if op.regions)
    for op in loops:  # a carry is one value with four names
        for names in _carries(op):
            if not chosen.issuperset(names[1:]):
                chosen.difference_update(names[1:])
    return dce(_Level(dtype, chosen).run(graph)) if chosen else graph


def _carries(loop: Op) -> Iterator[tuple[Value, Value, Value]]:
    """(next value in the body, value in the body, result) of every carry."""
    body = loop.regions[0]
    yield from zip(body.outputs, body.inputs, loop.results, strict=True)


def _is_wide(value: Value, dtype: DType) -> bool:
    return value.type.dtype.is_float and value.type.dtype.bytes > dtype.bytes


def _is_rounding(op: Op, dtype: DType) -> bool:
    """True for conversions to `dtype`."""
    return op.name in CASTS and op.result.type.dtype is dtype


def _moved(op: Op, number: int) -> tuple[Value, ...]:
    """The operands whose elements result `number` has."""
    operands = op.operands[_MOVED[op.name]]
    return operands[number : number + 1] if op.name in IDENTITIES else operands


def _until_stable(found: set[Value], sweep: Callable[[], None]) -> None:
    """Sweep until `found` stays as it is."""
    before = -1
    while before != len(found):
        before = len(found)
        sweep()


class _Exact:
    """Values whose every element is a float of `dtype`."""

    def __init__(self, graph: Graph, dtype: DType) -> None:
        self.graph, self.dtype = graph, dtype
        wide = (v for op in graph.walk() for v in op.results)
        inside = (v for op in graph.walk() for region in op.regions for v in region.inputs)
        self.found = {v for v in (*wide, *inside) if _is_wide(v, dtype)}

    def values(self) -> set[Value]:
        """The largest set that contradicts no op."""
        _until_stable(self.found, lambda: self._sweep(self.graph))
        return self.found

    def _sweep(self, graph: Graph) -> None:
        for op in graph.ops:
            if op.regions:
                for operand, names in zip(op.operands, _carries(op), strict=True):
                    if not self.found.issuperset((operand, *names)):
                        self.found.difference_update(names[1:])
                self._sweep(op.regions[0])
                continue
            for number, result in enumerate(op.results):
                if result in self.found and not self._is_exact(op, number):
                    self.found.remove(result)

    def _is_exact(self, op: Op, number: int) -> bool:
        if (held := stored(op)) is not None:
            return _fits(held, self.dtype)
        if op.name in CASTS:
            return op.operands[0].type.dtype is self.dtype
        return op.name in _MOVED and self.found.issuperset(_moved(op, number))


def _fits(attrs: ConstantAttrs, dtype: DType) -> bool:
    """True for a splat that `dtype` holds; other constants are not looked at."""
    if not attrs.is_splat:
        return False
    element = np.asarray(attrs.element)
    rounded = element.astype(dtype.numpy).astype(element.dtype)
    return bool(np.array_equal(rounded, element, equal_nan=True))


class _Rounded:
    """Values whose every reader rounds them to `dtype`, or moves them to such readers."""

    def __init__(self, graph: Graph, dtype: DType) -> None:
        self.graph, self.dtype = graph, dtype
        self.read_wide: set[Value] = set(graph.outputs)
        self.read: set[Value] = set()

    def values(self) -> set[Value]:
        """The largest set that contradicts no reader."""
        _until_stable(self.read_wide, lambda: self._sweep(self.graph))
        return {v for v in self.read if _is_wide(v, self.dtype) and v not in self.read_wide}

    def _sweep(self, graph: Graph) -> None:
        for op in reversed(graph.ops):
            self.read.update(op.operands)
            if op.regions:
                self._loop(op)
            elif op.name in _MOVED:
                for number, result in enumerate(op.results):
                    if result in self.read_wide:
                        self.read_wide.update(_moved(op, number))
            elif not _is_rounding(op, self.dtype):
                self.read_wide.update(op.operands)

    def _loop(self, loop: Op) -> None:
        self.read.update(loop.regions[0].outputs)
        self._sweep(loop.regions[0])
        for operand, names in zip(loop.operands, _carries(loop), strict=True):
            if not self.read_wide.isdisjoint(names[1:]):
                self.read_wide.update((operand, *names))


@dataclass(slots=True)
class _Level:
    """One level under reconstruction: `short` stands for values of `narrow`, the others and what
    is read in its own type keep their names.
    """

    dtype: DType
    narrow: Collection[Value]
    ops: list[Op] = field(default_factory=list)
    short: dict[Value, Value] = field(default_factory=dict)
    now: dict[Value, Value] = field(default_factory=dict)  # roundings of what is short already
    made: dict[Value, Op] = field(default_factory=dict)
    there: set[Value] = field(default_factory=set)

    def run(self, graph: Graph) -> Graph:
        """The level of a graph whose inputs keep their types."""
        self._add_all(graph.ops)
        outputs = tuple(map(self._as_it_was, graph.outputs))
        return with_ops(graph, self.ops, outputs)

    def _add_all(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.made.update(dict.fromkeys(op.results, op))
            if op.regions:
                self._loop(op)
            elif op.name in _MOVED and any(v in self.narrow for v in op.results):
                self._move(op)
            elif _is_rounding(op, self.dtype) and op.operands[0] in self.narrow:
                self.now[op.result] = self._rounded(op.operands[0])
            else:
                self._keep(op)

    def _keep(self, op: Op) -> None:
        """`op` in its own types."""
        given = {v.type.dtype for v in op.operands}
        if op.name in CASTS and op.result in self.narrow and self.dtype in given:
            self._rounded(op.result)
            return
        operands = tuple(map(self._as_it_was, op.operands))
        self.ops.append(with_operands(op, operands))
        self.there.update(op.results)

    def _move(self, op: Op) -> None:
        """`op` on short elements, result by result."""
        if op.name in IDENTITIES:
            self._barrier(op)
            return
        moved = _moved(op, 0)
        operands = [self._rounded(v) if v in moved else self._as_it_was(v) for v in op.operands]
        self.short[op.result] = self._added(make_op(op.name, operands, op.attrs, loc=op.loc))

    def _barrier(self, op: Op) -> None:
        pairs = list(zip(op.operands, op.results, strict=True))
        read = (self._rounded(v) if r in self.narrow else self._as_it_was(v) for v, r in pairs)
        barrier = with_operands(op, tuple(read))
        results = (self._new(r) if r in self.narrow else r for _, r in pairs)
        self.ops.append(defining(barrier, tuple(results)))

    def _loop(self, op: Op) -> None:
        """A loop whose narrow carries are short, in and out."""
        body = op.regions[0]
        picked = [v in self.narrow for v in op.results]
        pairs = list(zip(op.operands, picked, strict=True))
        operands = tuple(self._rounded(v) if p else self._as_it_was(v) for v, p in pairs)
        inner = _Level(self.dtype, self.narrow)
        inputs = tuple(inner._new(v) if v in self.narrow else v for v in body.inputs)
        inner._add_all(body.ops)
        ends = zip(body.outputs, picked, strict=True)
        outputs = tuple(inner._rounded(v) if p else inner._as_it_was(v) for v, p in ends)
        region = with_ops(body, inner.ops, outputs, inputs)
        results = tuple(self._new(v) if v in self.narrow else v for v in op.results)
        self.ops.append(Op("loop", operands, results, op.attrs, (region,), op.loc))

    def _new(self, value: Value) -> Value:
        """What stands for a narrow value."""
        self.short[value] = Value(self._short(value.type))
        return self.short[value]

    def _short(self, type: TensorType) -> TensorType:
        return tensor_type(type.shape, self.dtype)

    def _rounded(self, value: Value) -> Value:
        """`value` in the short type."""
        if value not in self.short:
            self.short[value] = self._rounding(value)
        return self.short[value]

    def _rounding(self, value: Value) -> Value:
        maker = self.made.get(value)
        if maker is not None and maker.name in CASTS:
            source = self.now.get(maker.operands[0], maker.operands[0])
            if source.type.dtype is self.dtype:
                return source
        loc = self._loc(value)
        if (held := splat(maker)) is not None:
            attrs = ConstantAttrs.full(held.element, self._short(held.type))
            return self._added(make_op("constant", (), attrs, loc=loc))
        source = self._as_it_was(value)
        return self._added(make_op("convert", (source,), ConvertAttrs(self.dtype), loc=loc))

    def _loc(self, value: Value) -> Loc:
        """Where a value of this level is made; inputs have no place."""
        maker = self.made.get(value)
        return maker.loc if maker else UNKNOWN_LOC

    def _added(self, op: Op) -> Value:
        self.ops.append(op)
        return op.result

    def _as_it_was(self, value: Value) -> Value:
        """`value` in its own type."""
        if value in self.short and value in self.narrow and value not in self.there:
            attrs, loc = ConvertAttrs(value.type.dtype), self._loc(value)
            self.ops.append(Op("convert", (self.short[value],), (value,), attrs, (), loc))
            self.there.add(value)
        return self.now.get(value, value)
