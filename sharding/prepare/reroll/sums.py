"""Sums (and other reductions) over leaves that a step writes as chains of two-operand ops.

A global norm adds one number per leaf. Terms that correspond between layers become one reduction
over the pack. This adds in another order than the chain did: floating-point sums differ by rounding
alone, and no order is the right one (`docs/numerics.md` bounds both).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.prepare.reroll.batched import can_batch
from shardwright.sharding.prepare.reroll.packs import Pack, Packer, RefusedError

KINDS = {name: kind for kind, name in ELEMENTWISE_OF.items()}
"""Kind of a reduction by the op that joins two terms."""

Mark = tuple[int, int]  # number of the way a value is computed from packs, and its layer


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The value of `op`, which ends a chain, as a reduction of `terms`; packs count all members."""

    op: Op
    terms: tuple[Pack | Value, ...]

    @property
    def kind(self) -> str:
        """The kind of the reduction."""
        return KINDS[self.op.name]


@dataclass(slots=True)
class SumFinder:
    """Finds chains among the ops `outside` of sections."""

    packer: Packer
    outside: Sequence[Op]
    readers: dict[Value, int]
    _marks: dict[Value, Mark] = field(default_factory=dict)  # of what follows from one layer
    _ways: dict[Hashable, int] = field(default_factory=dict)

    def sums(self) -> Iterator[Sum]:
        """The chains that have terms of all layers, in program order of their ends."""
        self._mark_all()
        inner: set[Op] = set()
        for op in reversed(self.outside):
            if op.name not in KINDS or op in inner:
                continue
            terms = self._terms(op, inner)
            packed = self._packed(terms) if len(terms) > 2 else terms
            if len(packed) < len(terms):
                yield Sum(op, tuple(packed))

    def _terms(self, end: Op, inner: set[Op]) -> list[Value]:
        """What a chain joins, in program order; its ops are entered into `inner`."""
        terms: list[Value] = []
        todo = [*end.operands]
        while todo:
            value = todo.pop()
            op = self.packer.made.get(value)
            joins = op is not None and op.name == end.name and op not in self.packer.inside
            if op is not None and joins and self.readers.get(value, 0) == 1:
                inner.add(op)
                todo += op.operands
            else:
                terms.append(value)
        return terms[::-1]

    def _packed(self, terms: Sequence[Value]) -> list[Pack | Value]:
        """`terms`, those that correspond between layers as one pack in the place of the first."""
        groups: dict[Hashable, dict[int, Value]] = defaultdict(dict)
        seen: dict[Mark, int] = defaultdict(int)
        for value in terms:
            mark = self._marks.get(value)
            if mark is not None:
                groups[mark[0], seen[mark]][mark[1]] = value
                seen[mark] += 1
        packs = {v: pack for group in groups.values() for v, pack in self._pack(group)}
        return list(dict.fromkeys(packs.get(v, v) for v in terms)) if packs else list(terms)

    def _pack(self, group: dict[int, Value]) -> Iterator[tuple[Value, Pack]]:
        values = tuple([group[i] for i in sorted(group)])
        try:
            pack = self.packer.pack(values, copies=False) if len(values) > 2 else None
        except RefusedError:
            return
        if pack is not None:
            yield from ((v, pack) for v in values)

    def _mark_all(self) -> None:
        """Marks of all values, in program order: of what an op reads before what it makes."""
        for value, (pack, layer) in self.packer.member.items():
            self._marks[value] = self._numbered(pack), layer
        for op in self.packer.graph.ops:
            if op not in self.packer.inside and can_batch(op) and op.result not in self._marks:
                mark = self._mark(op)
                if mark is not None:
                    self._marks[op.result] = mark

    def _mark(self, op: Op) -> Mark | None:
        read = [self._marks.get(v) for v in op.operands]
        layers = {mark[1] for mark in read if mark is not None}
        if len(layers) != 1:
            return None
        shared = self.packer.shared
        parts = [
            mark[0] if mark else shared.get(v, v) for mark, v in zip(read, op.operands, strict=True)
        ]
        return self._numbered((op.name, op.attrs, *parts)), layers.pop()

    def _numbered(self, way: Hashable) -> int:
        """A number in place of a way to compute: ways would hold those of all that they read, which
        doubles wherever two values that an op reads have a common origin.
        """
        return self._ways.setdefault(way, len(self._ways))
