"""Packs: values of all layers that correspond, in layer order, and how to compute them at once.

`Packer.pack` is asked for the values some reader wants, one per layer, and follows them back: to
leaves of the state, to results of a loop, or through ops that are the same in every layer. Nothing
is guessed: each step is checked for every layer, and what does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.compiler.ir.types import Graph, Op, TensorType, Value
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.prepare.reroll.batched import can_batch, fits
from shardwright.sharding.prepare.reroll.periods import look

if TYPE_CHECKING:
    from shardwright.sharding.prepare.reroll.sections import Section

MAX_GATHERED_BYTES = 1 << 6
"""Values up to this size per layer, such as keys and rates, may be copied side by side (our
choice)."""
MAX_CONSTANT_BYTES = 1 << 16
"""The same for what belongs to no layer, such as constants (our choice)."""
MAX_DEPTH = 200
"""Ops between a reader and a loop or leaf (our choice): more are layers that were not found."""

Values = tuple[Value, ...]


class RefusedError(Exception):
    """Some values of a repeat do not correspond; the text says which."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One value per layer, in layer order."""

    members: Values

    @property
    def type(self) -> TensorType:
        """The type of a member."""
        return self.members[0].type


class Leaves(Pack):
    """Leaves of the state."""

    __slots__ = ()


class Gathered(Pack):
    """Small values that are made one by one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Results(Pack):
    """A value of every iteration of a section: result `place[1]` of its op `place[0]`; with
    `before`, the carry of that name at the begin of every iteration.
    """

    section: Section
    place: tuple[int, int]
    before: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Mapped(Pack):
    """The same op on every layer; what it reads is a pack, or one value that all layers share."""

    op: Op
    result: int
    operands: tuple[Pack | Value, ...]


Steps = Generator[Values, Pack, Pack]
"""Work on one pack: asks for the packs of operands, ends with its own."""


@dataclass(slots=True)
class Packer:
    """The packs of a step. `shared` are values that belong to no layer (see `periods.py`)."""

    graph: Graph
    slots: Mapping[Value, Slot]
    shared: Mapping[Value, Value]
    made: Mapping[Value, Op]
    inside: dict[Op, Section] = field(default_factory=dict)
    member: dict[Value, tuple[Pack, int]] = field(default_factory=dict)
    packs: dict[Values, Pack] = field(default_factory=dict)
    repeated: frozenset[Op] = frozenset()  # light code that bodies have of their own

    def snapshot(self) -> Packer:
        """A copy that further packing leaves as it is."""
        kept = (self.graph, self.slots, self.shared, self.made)
        return Packer(*kept, dict(self.inside), dict(self.member), dict(self.packs))

    def add(self, pack: Pack) -> Pack:
        """Enter a pack whose members belong to no other."""
        self.packs[pack.members] = pack
        for i, value in enumerate(pack.members):
            self.member[value] = (pack, i)
        return pack

    def same(self, values: Sequence[Value]) -> Value | None:
        """The one value that all of `values` are."""
        first = self.shared.get(values[0], values[0])
        equal = all(self.shared.get(v, v) is first for v in values)
        return first if equal else None

    def pack(self, values: Values, *, copies: bool = True) -> Pack:
        """The pack of `values`, which are not all the same; small ones that do not correspond are
        copied side by side, if `copies` are allowed. Raises RefusedError.
        """
        depths = [self._steps(values, 0, copies)]  # no recursion: updates may be long chains of ops
        answer: Pack | None = None
        refused: RefusedError | None = None
        while depths:
            steps = depths[-1]
            try:
                if refused is not None:
                    wanted = steps.throw(refused)
                else:
                    wanted = next(steps) if answer is None else steps.send(answer)
            except StopIteration as done:
                answer, refused = done.value, None
                depths.pop()
            except RefusedError as error:
                answer, refused = None, error
                depths.pop()
            else:
                answer, refused = None, None
                depths.append(self._steps(wanted, len(depths), copies=True))
        if answer is None:
            raise refused or AssertionError(values)
        return answer

    def _steps(self, values: Values, depth: int, copies: bool) -> Steps:
        found = self.packs.get(values)
        if found is not None:
            return found
        before = len(self.packs), len(self.member)
        try:
            return (yield from self._followed(values, depth))
        except RefusedError:
            self._forget(*before)
            if not copies or not self._may_gather(values):
                raise
        self.packs[values] = Gathered(values)
        return self.packs[values]

    def _forget(self, packs: int, members: int) -> None:
        """Drop all but the first `packs` and `members`: what was refused has asked for the others.
        Copies stay: they claim no member, and nothing writes those that nothing reads.
        """
        late = [self.packs.popitem() for _ in range(len(self.packs) - packs)]
        self.packs.update((v, p) for v, p in late[::-1] if isinstance(p, Gathered))
        for _ in range(len(self.member) - members):
            self.member.popitem()

    def _may_gather(self, values: Values) -> bool:
        """True for small values that ops make; what the state has small stays refused."""
        fixed = all(v in self.shared for v in values)
        limit = MAX_CONSTANT_BYTES if fixed else MAX_GATHERED_BYTES
        made = all(v in self.made and v.type is values[0].type for v in values)
        return made and values[0].type.num_bytes <= limit

    def _followed(self, values: Values, depth: int) -> Steps:
        """The pack of `values` that nothing is copied for. Raises RefusedError."""
        known = [self.member.get(v) for v in values]
        if any(known):
            return self._shifted(values, known)
        if len({v.type for v in values}) > 1 or len(set(values)) < len(values):
            raise RefusedError(f"a {values[0].type} has no counterpart in every layer")
        if all(v not in self.made for v in values):
            return self._leaves(values)
        ops = [self.made[v] for v in values if v in self.made]
        return (yield from self._mapped(values, ops, depth))

    def _shifted(self, values: Values, known: Sequence[tuple[Pack, int] | None]) -> Pack:
        """Carries at the begin of every iteration: a loop's results, one iteration late."""
        for place in (known[0], known[-1]):
            other = place[0] if place else None
            if isinstance(other, Results) and not other.before:
                late = other.section.late(other)
                if late is not None and late.members == values:
                    self.packs[values] = late
                    return late
        raise RefusedError(f"a {values[0].type} is read in another order than it is made")

    def _leaves(self, values: Values) -> Pack:
        roles = {self.slots[v].role for v in values}
        if len(roles) > 1 or roles & {"batch", "rng"}:
            raise RefusedError("layers read different kinds of inputs")
        return self.add(Leaves(values))

    def _mapped(self, values: Values, ops: Sequence[Op], depth: int) -> Steps:
        first = ops[0]
        if depth > MAX_DEPTH or len(ops) < len(values):
            raise RefusedError(f"a {values[0].type} has no counterpart in every layer")
        if not can_batch(first) or any(look(op) != look(first) for op in ops):
            raise RefusedError(f"{first.name} differs between layers or works on one layer only")
        if any(op in self.inside for op in ops):
            raise RefusedError(f"{first.name} belongs to a loop in some layers only")
        operands: list[Pack | Value] = []
        for column in zip(*(op.operands for op in ops), strict=True):
            one = self.same(column)
            operands.append((yield column) if one is None else one)
        if not fits(first, [isinstance(one, Pack) for one in operands]):
            raise RefusedError(f"{first.name} cannot work on all layers at once")
        result = first.results.index(values[0])
        return self.add(Mapped(values, first, result, tuple(operands)))
