"""Elementwise chains that one instruction computes: `func(x * scale + bias)` on Scalar or Vector.

A product or sum with a number, or with one value per partition, is free in front of an activation,
and a conversion is free behind it. `fuse` rewrites a domain for one choice of tiles; every step
rounds to fp32 as the separate instructions would, so no value changes. `rows/engines.py` then puts
what both engines can do where less work waits. Next: `values.py` emits the op `scaled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.codegen.domain import (
    ACTIVATIONS,
    CODELESS,
    MASK,
    PARTS,
    SCALED,
    SPLATS,
    Domain,
    OfRoots,
    Rewriting,
    Value,
)
from shardwright.compiler.codegen.planning import MIN_CYCLES, Rates
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.attributes import NodeKind, nodes_of
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.isa.program import Engine

# Below this many elements per partition the extra instructions on [P, 1] operands are not paid back
# (the shortest instruction takes 64 cycles: hardware.json instruction costs).
_MIN_ELEMENTS = 256
# Arithmetic whose result Vector or Scalar rounds as it leaves the engine.
_ROUNDED = nodes_of(NodeKind.LINEAR) | {SCALED}
# Arithmetic that reads any float.
_WIDENING = _ROUNDED | nodes_of(NodeKind.EXTREME, NodeKind.REDUCTION, NodeKind.CURVED)
# documented: instruction costs of nki/api/nki/isa/__init__.py, reciprocal; divide is inferred
_DIVIDE_CYCLES = 8.0

# A divisor with as many times fewer points than its quotient is inverted first (inferred: 8 cycles
# per inverse and 2 per product are then fewer than 8 per quotient).
_FEW = 2
# So many times longer may Vector take that Scalar can begin the next tile early (our choice, by
# time of softmax forward and backward at 512 to 4096 columns).
_WAITING = 1.25
# What Scalar and Vector round alike as they write it.
_ANY_ENGINE = (DType.F32, DType.BF16, DType.F16)

Points = Callable[[Value], int]


class _Fuser(Rewriting):
    """One rewriting of a domain; `points` counts elements per partition of a value in a tile."""

    def __init__(self, domain: Domain, wanted: Iterable[int], points: Points) -> None:
        super().__init__(domain)
        self.points = points
        self.users = domain.users(wanted)
        self.wanted = set(wanted)

    def made(self, n: int, value: Value) -> int:
        """The value as it is fused with those before it."""
        return self.add(self._fused(n, value))

    def _fused(self, n: int, value: Value) -> Value:
        if n not in self.wanted or not value.dtype.is_float:
            return value
        value = self._narrow_reads(value)
        if self._is_rounding(n, value):
            return replace(self.values[value.inputs[0]], dtype=value.dtype)
        if self.points(value) < _MIN_ELEMENTS:
            return value
        if value.op == "multiply" and len({*value.inputs}) == 1 and value.dtype is DType.F32:
            attrs = {"func": "square", "scale": 1.0, "bias": 0.0}
            return replace(value, op=SCALED, inputs=value.inputs[:1], attrs=attrs)
        if value.op in ("multiply", "add", "subtract", "divide"):
            return self._affine(n, self._by_inverse(value))
        if value.op in ACTIVATIONS:
            return self._function(n, value)
        if value.op == "convert":
            return self._converted(value)
        return value

    def _narrow_reads(self, value: Value) -> Value:
        """`value` reading short floats where it read them widened: engines widen what they read."""
        if value.op not in _WIDENING or value.dtype is not DType.F32:
            return value
        return replace(value, inputs=tuple(self._widened_from(i) for i in value.inputs))

    def _widened_from(self, number: int) -> int:
        value = self.values[number]
        plain = value.op == "convert" or (is_product(value) and value.attrs["scale"] == 1.0)
        if not plain or value.dtype is not DType.F32 or not value.inputs:
            return number
        source = self.values[value.inputs[0]]
        short = source.dtype in (DType.BF16, DType.F16) and source.op not in SPLATS
        return value.inputs[0] if short else number

    def _scaled(self, x: int, like: Value, scale: int | None, bias: int | None) -> Value:
        """identity(x * scale + bias); numbers become immediates."""
        attrs: dict[str, object] = {"func": "identity"}
        inputs = [x]
        for name, term, empty in (("scale", scale, 1.0), ("bias", bias, 0.0)):
            given = None if term is None else self.values[term]
            if given is None:
                attrs[name] = empty
            elif given.op == "constant":
                attrs[name] = float(given.attrs["value"])
            else:
                attrs[name] = None
                assert term is not None
                inputs.append(term)
        return replace(like, op=SCALED, inputs=tuple(inputs), attrs=attrs)

    def _by_inverse(self, value: Value) -> Value:
        """A quotient by a value of fewer points as a product with its inverse, which is cheaper."""
        x, divisor = value.inputs
        few = 1 < _FEW * self.points(self.values[divisor]) <= self.points(value)
        if value.op != "divide" or not few or self._is_row(divisor):
            return value
        return replace(value, op="multiply", inputs=(x, self._row("reciprocal", divisor)))

    def _affine(self, n: int, value: Value) -> Value:
        if value.dtype not in _ANY_ENGINE:
            return value
        x, row = value.inputs
        if value.op == "subtract" and self._is_row(x) and self._is_tensor(row):
            turned = self._scaled(row, value, None, x)
            return replace(turned, attrs={**turned.attrs, "scale": -1.0})
        if value.op in ("multiply", "add") and self._is_row(x) and not self._is_row(row):
            x, row = row, x
        if self._is_row(x) or not self._is_row(row) or not self._is_tensor(x):
            return value
        if value.op in ("multiply", "divide"):
            scale = row if value.op == "multiply" else self._row("reciprocal", row)
            return self._scaled(x, value, scale, None)
        bias = row if value.op == "add" else self._row("negate", row)
        source = self.values[x]
        if self._is_only_reader(n, x) and source.op == SCALED and is_product(source):
            extra = self._scaled(x, value, None, bias)
            attrs = {**source.attrs, "bias": extra.attrs["bias"]}
            return replace(extra, inputs=(*source.inputs, *extra.inputs[1:]), attrs=attrs)
        return self._scaled(x, value, None, bias)

    def _row(self, op: str, number: int) -> int:
        """`op` of one value per partition (or of a number)."""
        value = self.values[number]
        if value.op == "constant":
            given = float(value.attrs["value"])
            inverse = math.inf if given == 0 else 1 / given
            result = -given if op == "negate" else inverse
            return self.add(replace(value, dtype=DType.F32, attrs={"value": result}))
        return self.add(Value(op, (number,), value.iter_dims, DType.F32))

    def _function(self, n: int, value: Value) -> Value:
        source = self.values[value.inputs[0]]
        if self._is_only_reader(n, value.inputs[0]) and _is_identity(source):
            attrs = {**source.attrs, "func": value.op}
            return replace(value, op=SCALED, inputs=source.inputs, attrs=attrs)
        return value

    def _is_rounding(self, n: int, value: Value) -> bool:
        """Whether `n` converts what nothing else reads: its maker rounds when it writes."""
        if value.op != "convert" or not self._is_only_reader(n, value.inputs[0]):
            return False
        source = self.values[value.inputs[0]]
        return source.op in _ROUNDED and source.dtype is DType.F32

    def _converted(self, value: Value) -> Value:
        source = self.values[value.inputs[0]]
        if source.dtype.is_float:
            return self._scaled(value.inputs[0], value, None, None)
        return value

    def _is_only_reader(self, n: int, x: int) -> bool:
        """Whether `n` alone reads what became value `x`."""
        readers = {u for i, made in self.number.items() if made == x for u in self.users.get(i, ())}
        return readers == {n}

    def _is_row(self, number: int) -> bool:
        value = self.values[number]
        return value.dtype.is_float and value.op != "register" and self.points(value) == 1

    def _is_tensor(self, number: int) -> bool:
        value = self.values[number]
        return value.dtype.is_float and value.op not in SPLATS


def _is_identity(value: Value) -> bool:
    return value.op == SCALED and value.attrs["func"] == "identity" and value.dtype is DType.F32


def is_product(value: Value) -> bool:
    """Whether a value is x * scale and nothing else."""
    return _is_identity(value) and value.attrs["bias"] == 0.0


def fuse(domain: Domain, wanted: Sequence[int], points: Points, rates: Rates) -> OfRoots:
    """(domain, values to compute), chains fused and placed; `points` per partition of a tile."""
    fused, _, values = _fused(domain, wanted, points)
    _balance(fused, values, points, rates)
    return fused, tuple(values)


def fuse_behind(
    domain: Domain, wanted: Sequence[int], points: Points, rates: Rates
) -> tuple[Domain, Mapping[int, int]]:
    """(domain, new number of every value) with chains of `wanted`, behind a contraction, fused."""
    fused, number, values = _fused(domain, wanted, points)
    contracts = [n for n, v in enumerate(fused.values) if v.op == "contract"]
    before = set(fused.slice(contracts))
    _balance(fused, [n for n in values if n not in before], points, rates)
    return fused, number


def _fused(
    domain: Domain, wanted: Sequence[int], points: Points
) -> tuple[Domain, Mapping[int, int], list[int]]:
    """(domain, chains of `wanted` fused; new number of every value; what its stores need)"""
    fuser = _Fuser(domain, wanted, points)
    fused = fuser.run()
    roots = [fuser.number[n] for n in wanted if domain[n].op in STORES]
    return fused, fuser.number, fused.slice(roots)


def _balance(domain: Domain, values: Sequence[int], points: Points, rates: Rates) -> None:
    """Every `scaled` identity or square to the engine with less to do; large ones choose first."""
    busy = {Engine.SCALAR: 0.0, Engine.VECTOR: 0.0}

    def taken(n: int, engine: Engine) -> float:
        placed = _placed(domain[n], engine)
        least = is_by_product(domain, placed)
        return rates.engine_ns(engine, MIN_CYCLES if least else cycles(domain, placed, points))

    free = [n for n in values if _has_choice(domain[n])]
    for n in values:
        if n not in free:
            engine = engine_of(domain[n])
            busy[engine] += taken(n, engine)
    ends = _ends(domain, values) if _leads(domain, values) else set()
    for n in sorted(free, key=lambda n: (n in ends, -taken(n, Engine.VECTOR), -n)):
        after = {e: busy[e] + taken(n, e) for e in busy}
        if n in ends:  # unless that makes Vector what all waits for
            after[Engine.SCALAR] *= _WAITING
        engine = min(after, key=after.__getitem__)
        busy[engine] += taken(n, engine)
        domain.values[n] = _placed(domain[n], engine)


def _has_choice(value: Value) -> bool:
    return value.op == SCALED and value.attrs["func"] in ("identity", "square")


def _placed(value: Value, engine: Engine) -> Value:
    if not _has_choice(value):
        return value
    return replace(value, attrs={**value.attrs, "engine": engine.value})


def _leads(domain: Domain, values: Sequence[int]) -> bool:
    """Whether an activation makes a tile wait for Scalar between two steps of Vector: then Scalar
    must be free to begin the next tile while Vector ends this one.
    """
    own = [n for n in values if domain[n].op in (*ACTIVATIONS, SCALED)]
    sums = set(domain.slice([n for n in values if domain[n].op == "reduce"]))
    return any(n in sums for n in own)


def _ends(domain: Domain, values: Sequence[int]) -> set[int]:
    """Values that only stores read."""
    stored = {i for n in values for i in domain[n].inputs if domain[n].op == "store"}
    users = domain.users(values)
    return {n for n in stored if all(domain[u].op == "store" for u in users[n])}


def engine_of(value: Value) -> Engine:
    """Who computes a value: Vector or Scalar."""
    if value.op == SCALED:
        return Engine(value.attrs.get("engine", Engine.SCALAR.value))
    return Engine.SCALAR if value.op in (*ACTIVATIONS, "convert") else Engine.VECTOR


def is_by_product(domain: Domain, value: Value) -> bool:
    """Whether a value is a sum that Scalar can make as it makes what is summed."""
    if value.op != "reduce" or value.attrs["kind"] != "add" or value.dtype is not DType.F32:
        return False
    source = domain[value.inputs[0]]
    activated = source.op in (SCALED, *ACTIVATIONS) and source.dtype is DType.F32
    return activated and engine_of(source) is Engine.SCALAR


def is_pair(value: Value) -> bool:
    """A square on Vector is a product of two tensors."""
    square = value.op == SCALED and value.attrs["func"] == "square"
    return square and engine_of(value) is Engine.VECTOR


def cycles(domain: Domain, value: Value, points: Points) -> float:
    """Cycles of a value over one tile; what GpSimd does, integers and masks, counts as nothing."""
    if value.op in (*CODELESS, *PARTS, "load", "store", "iota") or value.dtype.is_integer:
        return 0.0
    if value.op == "select" and domain[value.inputs[0]].op == MASK:
        return 0.0
    given = [points(domain[i]) for i in value.inputs]
    most = max([points(value), *given])
    pair = sum(1 for n in given if n > 1) > 1 if value.op != SCALED else is_pair(value)
    factor = 2.0 if value.op == "select" or pair else 1.0
    slow = value.op in ("divide", "reciprocal")
    return max(MIN_CYCLES, most * (_DIVIDE_CYCLES if slow else factor))
