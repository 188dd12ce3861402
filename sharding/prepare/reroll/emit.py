"""The re-rolled graph: loops in place of sections, one op in place of a pack, the rest as it was.

Only what outputs need is written. Everything keeps its place in program order: a loop and a pack
stand where their last op stood, because lifetimes follow from the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ReduceAttrs
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.prepare.reroll.batched import batched, stacked_type
from shardwright.sharding.prepare.reroll.body import Body
from shardwright.sharding.prepare.reroll.packs import (
    Leaves,
    Mapped,
    Pack,
    Packer,
    RefusedError,
    Results,
)
from shardwright.sharding.prepare.reroll.sections import Section
from shardwright.sharding.prepare.reroll.sums import Sum

Node = Op | Section | Pack | Sum


@dataclass(slots=True)
class Emitter:
    """Writes one graph. `sums` are the chains to write otherwise, by their value."""

    packer: Packer
    sections: Sequence[Section]
    sums: Mapping[Value, Sum]
    level: Builder = field(default_factory=Builder)
    now: dict[Value, Value] = field(default_factory=dict)
    stacks: dict[Pack, Value] = field(default_factory=dict)
    wanted: dict[Section, dict[Results, None]] = field(default_factory=dict)
    _number: dict[Op, int] = field(default_factory=dict)
    _ends: dict[Value, Section] = field(default_factory=dict)

    def graph(self, outputs: Sequence[Value | Pack]) -> Graph:
        """The new graph; inputs are the stacks of leaves and what is no leaf of a stack, in the
        order in which they (or their first members) were inputs.

        Raises RefusedError when parts of layers wait for each other.
        """
        graph = self.packer.graph
        self._number.update((op, i) for i, op in enumerate(graph.ops))
        for section in self.sections:
            self._ends.update((section.values(p)[-1], section) for p in section.carries)
        for value in graph.inputs:
            self._input(value)
        needed = self._needed(outputs)
        order = topological(needed, self._place)
        if len(order) < len(needed):
            raise RefusedError("what layers read in between depends on other layers")
        for node in order:
            self._write(node)
        results = tuple([self._read(o) for o in outputs])
        return with_ops(graph, self.level.ops, results, tuple(self.level.inputs))

    def _input(self, value: Value) -> None:
        pack, at = self.packer.member.get(value, (None, 0))
        if pack is None:
            self.level.inputs.append(value)
            self.now[value] = value
        elif at == 0:
            self.stacks[pack] = Value(stacked_type(value.type, len(pack.members)))
            self.level.inputs.append(self.stacks[pack])

    def _needed(self, outputs: Sequence[Value | Pack]) -> dict[Node, list[Node]]:
        """Every node that outputs depend on, with the nodes it depends on itself."""
        sources: dict[Node, list[Node]] = {}
        todo = list(self._nodes(outputs))
        while todo:
            node = todo.pop()
            if node in sources:
                continue
            sources[node] = list(dict.fromkeys(self._nodes(self._reads(node))))
            todo += sources[node]
        return sources

    def _nodes(self, read: Sequence[Value | Pack]) -> Iterator[Node]:
        """The nodes that make what is read."""
        for one in read:
            node = one if isinstance(one, Pack) else self._home(one)
            if isinstance(node, Results):
                self.wanted.setdefault(node.section, {})[node] = None
                yield node.section
            elif node is not None and not isinstance(node, Leaves):
                yield node

    def _home(self, value: Value) -> Node | None:
        """The node that makes a value; None for inputs that stay."""
        value = self.packer.shared.get(value, value)
        if value in self._ends:
            return self._ends[value]
        if value in self.packer.member:
            return self.packer.member[value][0]
        return self.sums.get(value) or self.packer.made.get(value)

    def _reads(self, node: Node) -> Sequence[Value | Pack]:
        match node:
            case Op():
                return node.operands
            case Section():
                return [*self._outer(node), *node.carries.values()]
            case Mapped():
                return node.operands
            case Sum():
                return node.terms
            case _:
                return node.members

    def _outer(self, section: Section) -> Iterator[Value | Pack]:
        """What a body reads from outside."""
        for sources in section.sources:
            for source in sources:
                if isinstance(source, Pack):
                    yield Body.kept(source)
                elif isinstance(source, Value):
                    yield from Body.outside(self.packer, source)

    def _place(self, node: Node) -> int:
        """Where a node stood: its last op."""
        match node:
            case Op():
                return self._number[node]
            case Section():
                return self._number[node.rows[-1][-1]]
            case Sum():
                return self._number[node.op]
            case _:
                return max(self._number[self.packer.made[v]] for v in node.members)

    def _write(self, node: Node) -> None:
        match node:
            case Op():
                read = tuple([self._read(v) for v in node.operands])
                self.level.append(with_operands(node, read))
                self.now.update((v, v) for v in node.results)
            case Section():
                self._write_loop(node)
            case Mapped():
                self._write_mapped(node)
            case Sum():
                self.now[node.op.result] = self._reduced(node)
            case _:
                self.stacks[node] = self._gathered(node)

    def _write_mapped(self, pack: Mapped) -> None:
        read = [self._read(one) for one in pack.operands]
        stacked = [isinstance(one, Pack) for one in pack.operands]
        self.level.loc = pack.op.loc
        try:
            self.stacks[pack] = batched(self.level, pack.op, read, stacked, len(pack.members))
        except ValueError as error:  # the op has a form that its rule does not know
            raise RefusedError(f"{pack.op.name} cannot work on all layers at once") from error

    def _gathered(self, pack: Pack) -> Value:
        """Values side by side; a constant where all of them are known."""
        known = [known_elements(self.packer.made, v) for v in pack.members]
        arrays = [a for a in known if a is not None]
        if len(arrays) == len(known):
            return self.level.constant(np.stack(arrays), pack.type.dtype)
        rows = [self.level.reshape(self._read(v), (1, *v.type.shape)) for v in pack.members]
        return self.level.concatenate(rows, 0)

    def _reduced(self, node: Sum) -> Value:
        """A chain, with packs reduced first."""
        self.level.loc = node.op.loc
        parts = [self._one(node, term) for term in node.terms]
        total = parts[0]
        for part in parts[1:]:
            total = self.level.op(node.op.name, total, part)
        return total

    def _one(self, node: Sum, term: Value | Pack) -> Value:
        if isinstance(term, Value):
            return self._read(term)
        match term:  # one reduction, as a scanned model has it
            case Mapped(op=Op(attrs=ReduceAttrs(kind=node.kind, dims=inner))):
                dims = (0, *(d + 1 for d in inner))
                return self.level.reduce(self._read(term.operands[0]), node.kind, dims)
        return self.level.reduce(self._read(term), node.kind, (0,))

    def _read(self, one: Value | Pack) -> Value:
        """A value of the new graph: a stack, or what `one` has become."""
        if isinstance(one, Pack):
            return self.stacks[one]
        value = self.packer.shared.get(one, one)
        if value not in self.now:
            pack, at = self.packer.member[value]
            self.now[value] = self._row(self.stacks[pack], at)
        return self.now[value]

    def _row(self, stack: Value, at: int) -> Value:
        """One layer of a stack."""
        inner = stack.type.shape[1:]
        start = (at, *(0 for _ in inner))
        return self.level.reshape(self.level.slice(stack, start, (at + 1, *inner)), inner)

    def _write_loop(self, section: Section) -> None:
        self.level.loc = section.rows[0][0].loc
        body = Body(self.packer, section, self._read, self.level)
        body.write(self.wanted.get(section, {}))
        found = body.loop()
        for place in section.carries:
            self.now[section.values(place)[-1]] = found[place]
        for pack in self.wanted.get(section, {}):
            self.stacks[pack] = found[pack]
