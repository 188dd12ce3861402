"""Which ops of a layer loop run how many iterations early or late.

What follows from weights and the counter alone can run before its layer: the gathers of weights.
What only adds to the results of the loop can run after it: the reductions of gradients, with
everything behind them. What comes from the host is always fetched a layer early, and what goes
there leaves a layer late. Every op gets a *delay* in iterations behind the earliest ones;
`pipelined.py` makes a loop of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.facts import operands_of, takes_at
from shardwright.compiler.ir.ops.host import LOAD, STORE, TRANSFERS
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value

GATHER = "all_gather"
COLLECTIVES = (GATHER, *REDUCTIONS_OF_RANKS, "all_to_all")
_TRAFFIC = (*COLLECTIVES, *TRANSFERS)
COPIES, SHARDS = "dp_replicate", "dp_shard"
_HOST_SHIFT = 1
"""Layers by which transfers are early and late: what one layer hides is all that helps, since they
follow each other on one link; each costs the memory of a layer's residuals (our choice)."""


@dataclass(frozen=True, slots=True)
class Shifts:
    """Layers by which weights are gathered early, and gradients reduced late; a sum over copies of
    what another reduction makes is one layer behind that, which its layer would else wait for.
    """

    gather: int = 0
    reduce: int = 0


@dataclass(frozen=True, slots=True)
class Delays:
    """The body of a loop, staggered.

    `delay` is that of every op that is not free; `free` are the values any iteration can compute
    for itself from invariant carries and the counter, without traffic; `middle` is the delay of
    the layer itself. `low_priority` are collectives that start behind those of the iteration they
    run beside, not all at its head.
    """

    loop: Op
    delay: Mapping[Op, int]
    free: Collection[Value]
    middle: int
    low_priority: Collection[Op]

    @property
    def distinct(self) -> list[int]:
        """All delays in order, that of the layer among them."""
        return sorted({*self.delay.values(), self.middle})

    def moves(self, names: Collection[str]) -> bool:
        """Whether ops of these names run early or late."""
        return any(op.name in names and at != self.middle for op, at in self.delay.items())


def delays(loop: Op, shifts: Shifts) -> Delays | None:
    """Delays of the ops of `loop`, which runs, None when nothing in it can move."""
    body = _Body(loop)
    gathers = body.weight_gathers() if shifts.gather else []
    most = loop.attrs.trip
    early = dict.fromkeys(gathers, min(shifts.gather, most))
    early |= dict.fromkeys(body.host_loads(), _HOST_SHIFT)
    late = body.gradient_reductions(early)
    reductions = (op for op, n in late.items() if n and op.name in REDUCTIONS_OF_RANKS)
    over_copies = [op for op in reductions if COPIES in op.attrs.axes]
    if not shifts.reduce:
        late = body.settled(over_copies)
    stored = body.host_stores()
    if not early and not late and not stored:
        return None
    middle = max(early.values(), default=0)
    behind = middle + min(max(shifts.reduce, 1), most)
    delay = {}
    for op in body.graph.ops:
        if op in late:
            delay[op] = behind + late[op]
        elif op in stored:
            delay[op] = middle + _HOST_SHIFT
        elif not all(v in body.free for v in op.results):
            delay[op] = middle - early.get(op, 0)
    return Delays(loop, delay, body.free, middle, [op for op in over_copies if op in late])


def free_values(loop: Op) -> set[Value]:
    """Values of the body that follow from what passes through it and the counter, no traffic."""
    return _Body(loop).free


class _Body:
    """The body of a loop, with what its values depend on."""

    def __init__(self, loop: Op) -> None:
        self.graph: Graph = loop.regions[0]
        self.users = self.graph.uses()
        walked = (*invariant_carries(loop), loop.attrs.induction)
        self.given = {self.graph.inputs[carry] for carry in walked}
        self.free = self._following(())

    def _following(self, traffic: Collection[str]) -> set[Value]:
        """What follows from what passes through and the counter, with no collectives but those of
        `traffic`."""
        found = set(self.given)
        for op in self.graph.ops:
            if not (op.regions or (op.name in _TRAFFIC and op.name not in traffic)):
                found.update(r for r in op.results if found.issuperset(operands_of(op, r)))
        return found

    def host_loads(self) -> list[Op]:
        """Transfers from stacks that the loop does not change."""
        loads = (op for op in self.graph.ops if op.name == LOAD)
        return [op for op in loads if all(v in self.free for v in op.operands)]

    def host_stores(self) -> set[Op]:
        """Transfers to stacks that nothing else in the loop reads."""
        made = self.graph.producers()
        found: set[Op] = set()
        for before, after in zip(self.graph.inputs, self.graph.outputs, strict=True):
            chain: list[Op] = []
            value = after
            while (op := made.get(value)) is not None and op.name == STORE:
                chain.append(op)
                value = op.operands[0]
            between = [op.operands[0] for op in chain]
            if value is before and all(len(self.users[v]) == 1 for v in between):
                found |= set() if after in self.users else {*chain}
        return found

    def weight_gathers(self) -> list[Op]:
        """Gathers of what is free, and what lies between two gathers of one weight."""
        weights = self._following((GATHER,))
        found: list[Op] = []
        wanted: set[Value] = set()
        for op in reversed(self.graph.ops):
            if not all(v in weights for v in op.results):
                continue
            needed = any(v in wanted for v in op.results)
            if op.name == GATHER or needed:
                wanted.update(op.operands)
                if not all(v in self.free for v in op.results):
                    found.append(op)
        return found

    def gradient_reductions(self, early: Collection[Op]) -> dict[Op, int]:
        """Reductions that only results of the loop wait for, with all that follows from them: how
        many collectives lie before each op.
        """
        heads = [
            op
            for op in self.graph.ops
            if op.name in REDUCTIONS_OF_RANKS and op not in early and op.result not in self.free
        ]
        return self.settled(heads)

    def settled(self, heads: Sequence[Op]) -> dict[Op, int]:
        """The same for those of `heads` that only results of the loop wait for."""
        while True:
            behind = self._with_reads(self._behind(heads))
            read = self._needed_early(behind)
            kept = [op for op in heads if not self._reaches(op, read)]
            if kept == heads:
                return behind
            heads = kept

    def _behind(self, heads: Collection[Op]) -> dict[Op, int]:
        """`heads` and the ops that follow from them, in order, with the collectives before each."""
        first = set(heads)
        level: dict[Value, int] = {}
        found: dict[Op, int] = {}
        for op in self.graph.ops:
            before = [level[v] for v in op.operands if v in level]
            if not before and op not in first:
                continue
            found[op] = max(before) + (op.name in COLLECTIVES) if before else 0
            level.update(dict.fromkeys(op.results, found[op]))
        return found

    def _with_reads(self, behind: Mapping[Op, int]) -> dict[Op, int]:
        """`behind` with what only it reads of carries that it makes: slices of accumulators that
        gradients are added to, and sums with such slices that are reduced in place.
        """
        made, outputs = self.graph.producers(), set(self.graph.outputs)
        makers = {
            b: made.get(a) for b, a in zip(self.graph.inputs, self.graph.outputs, strict=True)
        }
        levels = {b: behind[op] for b, op in makers.items() if op is not None and op in behind}
        slices: dict[Value, int] = {}
        following: dict[Op, int] = {}
        for op in self.graph.ops:
            read = {level[v] for level in (levels, slices) for v in op.operands if v in level}
            others = [v for v in op.operands if v not in levels and v not in self.free]
            sliced = any(v in slices for v in op.operands)
            if op in behind or len(read) != 1 or (others and not sliced):
                continue
            (following[op],) = read
            if sliced or takes_at(op):
                slices.update(dict.fromkeys(op.results, following[op]))
        found = dict(behind)
        for op, level in reversed(following.items()):
            users = {user for v in op.results for user in self.users.get(v, ())}
            if not outputs.intersection(op.results) and all(
                found.get(user) == level for user in users
            ):
                found[op] = level
        return found

    def _needed_early(self, behind: Mapping[Op, int]) -> set[Value]:
        """Outputs of the body that the next iteration reads before, or otherwise than, `behind`
        makes them.
        """
        made = self.graph.producers()
        needed: set[Value] = set()
        for before, after in zip(self.graph.inputs, self.graph.outputs, strict=True):
            maker = made.get(after)
            level = behind.get(maker, 0) if maker is not None else 0
            early = any(behind.get(op, -1) < level for op in self.users.get(before, ()))
            if early or self.graph.outputs.count(before) > (before is after):
                needed.add(after)
        return needed

    def _reaches(self, head: Op, values: Collection[Value]) -> bool:
        """True when one of `values`, or a nested loop, follows from `head`."""
        return any(
            op.regions or any(v in values for v in op.results) for op in self._behind([head])
        )
