"""Which engine does what of a row, and which values stay in PSUM for Vector.

Work moves from the busiest engine while that helps: reductions can go from Vector to GpSimd, copies
with a scale from Scalar to Vector, copies out of PSUM either way. What a row tile costs is counted
over all its columns; instructions of GpSimd have a high price of their own.

Vector reads two operands at a time where one is in PSUM and one in SBUF, and at half the rate where
both are in SBUF. So what follows from a product alone takes over its bank where Vector combines it
with a value in SBUF.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from shardwright.compiler.codegen import fusion
from shardwright.compiler.codegen.domain import BINARY, FROM_PSUM, MASK, SCALED, Domain, Value
from shardwright.compiler.codegen.planning import MIN_CYCLES, Room
from shardwright.compiler.codegen.rows.roles import Roles, inner_of
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.attributes import NodeKind, nodes_of
from shardwright.compiler.isa.program import Engine

# unknown: no rule is printed for GpSimd; the default of `isa/costs.py` (150 + N cycles).
_GPSIMD_CYCLES = 150
_ENGINES = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


@dataclass(frozen=True, slots=True)
class Copy:
    """What leaves PSUM for SBUF: product `number`, or with `transposed` a transposed value."""

    number: int
    transposed: bool = False


Task = int | Copy


@dataclass(frozen=True, slots=True)
class EngineAssignment:
    """Reductions for GpSimd, sums that Scalar makes in passing, copies for Vector, not Scalar."""

    gpsimd: frozenset[int]
    by_product: frozenset[int]
    vector_copies: frozenset[Copy]


@dataclass
class Work:
    """Nanoseconds of every engine for one row tile, and what may move."""

    domain: Domain
    roles: Roles
    run: Mapping[int, int]  # what is computed, and in which pass (`passes.py`)
    transposed: Collection[int]
    pairs: Collection[int]
    in_flight: int  # row tiles that take turns in a block
    room: Room

    def __post_init__(self) -> None:
        domain, roles = self.domain, self.roles
        self.chosen: dict[Task, Engine] = {n: self._engine(n) for n in self.run if self._counts(n)}
        self.chosen |= {Copy(n): Engine.SCALAR for n in roles.packed if self._is_copied(n)}
        self.chosen |= {Copy(n, transposed=True): Engine.VECTOR for n in self.transposed}
        self.busy = dict.fromkeys(_ENGINES, 0.0)
        self._costs: dict[tuple[Task, Engine], dict[Engine, float]] = {}
        for work, engine in self.chosen.items():
            self._add(self.busy, work, engine, 1)
        for n in roles.sums:  # products of the row tiles in flight are added up in SBUF
            added = domain.points(domain[n].iter_dims & roles.inner)
            cycles = added / self.room.limits.partitions / self.in_flight
            self.busy[Engine.VECTOR] += self._ns(Engine.VECTOR, cycles)

    def assigned(self) -> EngineAssignment:
        """Who does what; the engines of copies with a scale are set in `domain`."""
        while self.improve():
            pass
        values, chosen = self.domain.values, self.chosen.items()
        for n, engine in chosen:
            if isinstance(n, int) and values[n].op == SCALED:
                values[n] = replace(values[n], attrs={**values[n].attrs, "engine": engine.value})
        return EngineAssignment(
            frozenset(n for n, e in chosen if isinstance(n, int) and e is Engine.GPSIMD),
            frozenset(n for n, e in chosen if self.is_reduction(n) and e is Engine.SCALAR),
            frozenset(n for n, e in chosen if isinstance(n, Copy) and e is Engine.VECTOR),
        )

    def _is_copied(self, number: int) -> bool:
        """Whether a product surely leaves PSUM: it is rounded, or a single column."""
        value = self.domain[number]
        return value.dtype is not DType.F32 or self._points(value) == 1

    def improve(self) -> bool:
        """Make the one move that helps most; False when none does."""
        before = max(self.busy.values())
        best: tuple[float, int, Task, Engine] | None = None
        for n, engine in self.chosen.items():
            for target in self._targets(n, engine):
                after = dict(self.busy)
                self._add(after, n, engine, -1)
                self._add(after, n, target, 1)
                # Of equals the later one: what follows a maximum waits for it.
                number = n.number if isinstance(n, Copy) else n
                option = (max(after.values()), -number, n, target)
                if option[0] < before and (best is None or option[:2] < best[:2]):
                    best = option
        if best is None:
            return False
        _, _, n, target = best
        self._add(self.busy, n, self.chosen[n], -1)
        self._add(self.busy, n, target, 1)
        self.chosen[n] = target
        return True

    def is_reduction(self, n: Task) -> TypeGuard[int]:
        """Whether a row is reduced, not added to other rows."""
        if isinstance(n, Copy) or n in self.roles.sums:
            return False
        return self.domain[n].op == "reduce"

    def _targets(self, n: Task, engine: Engine) -> tuple[Engine, ...]:
        """Where else a work can go."""
        if isinstance(n, Copy):
            return (Engine.VECTOR if engine is Engine.SCALAR else Engine.SCALAR,)
        value = self.domain[n]
        if self.is_reduction(n):
            reads_psum = value.inputs[0] in self.roles.packed
            limits = self.room.limits
            others = () if reads_psum else (Engine.GPSIMD,)
            found = [Engine.VECTOR, *(e for e in others if e.value in limits.engines)]
            found += [Engine.SCALAR] if self._is_by_product(value) else []
            return tuple(e for e in found if e is not engine)
        movable = value.op == SCALED and value.attrs["func"] == "identity"
        return (Engine.VECTOR,) if movable and engine is Engine.SCALAR else ()

    def _add(self, busy: dict[Engine, float], n: Task, engine: Engine, sign: int) -> None:
        """Count work, or with a `sign` of -1 no longer."""
        if (n, engine) not in self._costs:
            self._costs[n, engine] = self._cost(n, engine)
        for one, ns in self._costs[n, engine].items():
            busy[one] += sign * ns

    def _cost(self, n: Task, engine: Engine) -> dict[Engine, float]:
        """Nanoseconds of the engines that a work takes: a by-product takes Vector a column."""
        if self.is_reduction(n) and engine is Engine.SCALAR:
            read = max(self._points(self.domain[i]) for i in self.domain[n].inputs)
            cycles = MIN_CYCLES * -(-read // self.room.limits.moving_max)
            return {one: self._ns(one, cycles) for one in (Engine.SCALAR, Engine.VECTOR)}
        return {engine: self._time(n, engine)}

    def _counts(self, n: int) -> bool:
        """Selects and predicates are left out: most are decided by where the tile lies."""
        value = self.domain[n]
        mine = value.op not in ("select", "compare", "contract", "load", "store")
        return mine and value.dtype.is_float and self._points(value) + len(value.over) > 1

    def _engine(self, n: int) -> Engine:
        value = self.domain[n]
        by_product = self.is_reduction(n) and self._is_by_product(value)
        return Engine.SCALAR if by_product else fusion.engine_of(value)

    def _is_by_product(self, value: Value) -> bool:
        return self.room.passing and fusion.is_by_product(self.domain, value)

    def _points(self, value: Value) -> int:
        return self.domain.points(value.iter_dims & self.roles.inner)

    def _time(self, n: Task, engine: Engine) -> float:
        if isinstance(n, Copy):
            return self._ns(engine, self._points(self.domain[n.number]))
        value = self.domain[n]
        cycles = fusion.cycles(self.domain, value, self._points)
        if n in self.pairs:
            cycles = self._points(value)  # one of the two is in PSUM
        if value.op == "divide" and self._points(self.domain[value.inputs[1]]) == 1:
            cycles = self._points(value)  # a product with the reciprocal of a single column
        if engine is Engine.GPSIMD:
            read = max(self._points(self.domain[i]) for i in value.inputs)
            cycles += _GPSIMD_CYCLES * -(-read // self.room.limits.moving_max)
        return self._ns(engine, cycles)

    def _ns(self, engine: Engine, cycles: float) -> float:
        return self.room.rates.engine_ns(engine, cycles)


READ_PSUM = FROM_PSUM | nodes_of(NodeKind.CHOICE, NodeKind.REDUCTION)
"""Nodes of rows whose code reads PSUM."""
# Pairs that take as long as one operand where one of them is in PSUM (isa/costs.py).
_PAIRS = BINARY - nodes_of(NodeKind.LONG)


@dataclass(frozen=True, slots=True)
class BankReuse:
    """The product whose bank a value takes over, and pairs that are read at the full rate so."""

    bank_of: Mapping[int, int]
    pairs: frozenset[int]


class Banks:
    """What may lie in banks of products; `kept` values have tiles beyond their block."""

    def __init__(
        self, domain: Domain, roles: Roles, run: Mapping[int, int], kept: Collection[int]
    ) -> None:
        self.domain, self.roles, self.run, self.kept = domain, roles, run, kept
        self.users = domain.users((*roles.rows, *roles.sums))

    def reused(self) -> BankReuse:
        """Banks that are reused in place."""
        bank_of: dict[int, int] = {}
        pairs: set[int] = set()
        for pair in sorted(n for n in self.run if self.domain[n].op in _PAIRS):
            inputs = self.domain[pair].inputs
            for n, other in (inputs[::-1], inputs):  # what is made last waits least for its reader
                product = self.product_of(n)
                in_sbuf = other not in (n, *self.roles.packed, *bank_of)
                if product is not None and in_sbuf and self.is_block(other, product):
                    bank_of[n] = product
                    pairs.add(pair)
                    break
        return BankReuse(bank_of, frozenset(pairs))

    def product_of(self, number: int) -> int | None:
        """The product that a value alone follows from, if its bank may hold both."""
        value, values = self.domain[number], self.domain.values
        if any(values[i].op == MASK for i in value.inputs):
            return None  # GpSimd applies it
        wide = [i for i in value.inputs if values[i].iter_dims == value.iter_dims]
        products = [i for i in wide if i in self.roles.packed and self.users[i] == [number]]
        if wide != products or len(products) != 1 or inner_of(self.roles, value) is None:
            return None
        (product,) = products
        mine = self.is_block(number, product) and self.is_block(product, product)
        return product if mine and self._reach_psum([number, *self.users[number]]) else None

    def is_block(self, number: int, product: int) -> bool:
        """Whether a value is fp32 and made block by block in the pass of a product."""
        value, source = self.domain[number], self.domain[product]
        beside = value.iter_dims == source.iter_dims and self.run.get(number) == self.run[product]
        return beside and value.dtype is DType.F32 and number not in self.kept

    def _reach_psum(self, numbers: Iterable[int]) -> bool:
        ops = {n: self.domain[n].op for n in numbers}
        return all(op in READ_PSUM and n not in self.roles.sums for n, op in ops.items())
