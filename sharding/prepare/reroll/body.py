"""The loop of a section: one iteration as a body over carries and stacks.

A body reads one layer of a pack by a slice at the layer's number and writes results that others
want into stacks, as a scanned model does. Constants and other light code that the iterations
repeated is repeated in the body, rather than kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import stored
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import LoopAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.walks import answered
from shardwright.sharding.prepare.reroll.packs import Pack, Packer, Results
from shardwright.sharding.prepare.reroll.sections import Before, Own, Place, Section, Source

MAX_CONSTANT_BYTES = 1 << 12
"""Larger literal constants stay outside of bodies (our choice)."""

Key = Place | Results
Read = Callable[[Value | Pack], Value]


@dataclass(slots=True)
class Body:
    """The body of `section` under construction; `read` finds values of the level around it, which
    is `outer`.
    """

    packer: Packer
    section: Section
    read: Read
    outer: Builder
    level: Builder = field(default_factory=lambda: Builder("body"))
    first: list[Value] = field(default_factory=list)  # of every carry but the counter
    after: list[Value] = field(default_factory=list)
    keys: list[Key | None] = field(default_factory=list)
    _packs: dict[Pack, Value] = field(default_factory=dict)
    _carried: dict[Place, Value] = field(default_factory=dict)
    _made: dict[Value, Value] = field(default_factory=dict)
    _rows: dict[Pack, Value] = field(default_factory=dict)
    _layer: Value | None = None

    @staticmethod
    def outside(packer: Packer, value: Value) -> Iterator[Value]:
        """What a body reads of the level around it for a value that all layers share."""
        seen = set()
        todo = [value]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            op = packer.made.get(value)
            if op is None or not _is_repeated(packer, op):
                yield value
            else:
                todo += [packer.shared.get(v, v) for v in reversed(op.operands)]

    @staticmethod
    def kept(pack: Pack) -> Pack:
        """The pack whose stack a body reads for `pack`."""
        while isinstance(pack, Results) and (found := pack.section.repeated(pack)):
            pack = found[1]
        return pack

    def write(self, wanted: Mapping[Results, None]) -> None:
        """All ops of an iteration, and a stack for each result of `wanted`."""
        counter = self.level.input((), DType.I32)
        for place, start in self.section.carries.items():
            self._carried[place] = self._carry(self.read(start), place)
        stacks = [(pack, self._new_stack(pack)) for pack in wanted]
        for op, sources in zip(self.section.rows[0], self.section.sources, strict=True):
            self.level.loc = op.loc
            operands = tuple([self._operand(source, counter) for source in sources])
            results = tuple(Value(v.type) for v in op.results)
            self.level.append(Op(op.name, operands, results, op.attrs, op.regions, op.loc))
            self._made.update(zip(op.results, results, strict=True))
        for place, value in self._carried.items():
            self.after[self.level.inputs.index(value) - 1] = self._own(place)
        for pack, stack in stacks:
            value = self._carried[pack.place] if pack.before else self._own(pack.place)
            self.after[self.level.inputs.index(stack) - 1] = self._written(stack, value, counter)

    def loop(self) -> dict[Key, Value]:
        """Append the loop to the level around it; its results by carry and by stack."""
        level = self.outer
        counter = self.level.inputs[0]
        following = self.level.add(counter, self.level.constant(1, DType.I32))
        region = self.level.finish(following, *self.after)
        start = level.constant(0, DType.I32)
        attrs = LoopAttrs(self.section.count, 0)
        loop = make_op("loop", (start, *self.first), attrs, (region,), level.loc)
        results = level.append(loop)[1:]
        pairs = zip(self.keys, results, strict=True)
        return {key: value for key, value in pairs if key is not None}

    def _carry(self, outer: Value, key: Key | None = None) -> Value:
        """A new carry that starts as `outer`; it passes through unless `after` is changed."""
        inner = self.level.input(outer.type.shape, outer.type.dtype)
        self.first.append(outer)
        self.after.append(inner)
        self.keys.append(key)
        return inner

    def _new_stack(self, pack: Results) -> Value:
        """A carry for a stack that the body writes."""
        shape = (self.section.count, *pack.type.shape)
        return self._carry(self.outer.full(shape, 0, pack.type.dtype), pack)

    def _operand(self, source: Source, counter: Value) -> Value:
        match source:
            case Own(place):
                return self._own(place)
            case Before(place):
                return self._carried[place]
            case Pack():
                return self._row(source, counter)
            case Value():
                return self._shared(source)
        raise AssertionError(source)

    def _own(self, place: Place) -> Value:
        return self._made[self.section.rows[0][place[0]].results[place[1]]]

    def _shared(self, value: Value) -> Value:
        """A value that all layers share: repeated in the body if it is light, else a carry."""
        return answered(value, self._made, self._repeats, self._copied)

    def _repeats(self, value: Value) -> list[Value]:
        """What the op of a light value reads; nothing for values that bodies do not repeat."""
        op = self.packer.made.get(value)
        if op is None or not _is_repeated(self.packer, op):
            return []
        return [self.packer.shared.get(v, v) for v in op.operands]

    def _copied(self, value: Value) -> Value:
        op = self.packer.made.get(value)
        if op is None or not _is_repeated(self.packer, op):
            return self._carry(self.read(value))
        operands = [self._made[v] for v in self._repeats(value)]
        return self.level.append(make_op(op.name, operands, op.attrs, (), op.loc))[0]

    def _row(self, pack: Pack, counter: Value) -> Value:
        """The layer's own value of a pack."""
        if pack in self._rows:
            return self._rows[pack]
        found = pack.section.repeated(pack) if isinstance(pack, Results) else None
        if found is not None:
            op, source = found
            row = self._row(source, counter)
            self._rows[pack] = self.level.op(op.name, row, attrs=op.attrs)
        else:
            stack = self._packs.get(pack)
            if stack is None:
                stack = self._packs[pack] = self._carry(self.read(pack))
            shape = pack.type.shape
            row = self.level.dynamic_slice(stack, self._starts(shape, counter), (1, *shape))
            self._rows[pack] = self.level.reshape(row, shape)
        return self._rows[pack]

    def _written(self, stack: Value, value: Value, counter: Value) -> Value:
        shape = value.type.shape
        row = self.level.reshape(value, (1, *shape))
        return self.level.dynamic_update_slice(stack, row, self._starts(shape, counter))

    def _starts(self, shape: tuple[int, ...], counter: Value) -> list[Value]:
        """Where the layer of an iteration, of such a shape, begins in a stack."""
        zero = self.level.constant(0, DType.I32)
        return [self._number(counter), *(zero for _ in shape)]

    def _number(self, counter: Value) -> Value:
        """The layer of an iteration."""
        if self._layer is None:
            self._layer = counter
            if self.section.is_reversed:
                last = self.level.constant(self.section.count - 1, DType.I32)
                self._layer = self.level.op("subtract", last, counter)
        return self._layer


def _is_repeated(packer: Packer, op: Op) -> bool:
    """True for light code between the ops of a section, and for small constants."""
    if (held := stored(op)) is not None:
        return len(held.data) <= MAX_CONSTANT_BYTES
    return op in packer.repeated
