"""Stage assignment of ops: the part of a pipeline that runs each op of forward and backward.

Forward, an op runs with the last of the parts it reads from; a weight that one part uses pulls the
first op that reads it. Backward, it runs with the first part it reads from, where a weight or a
saved value counts for the part that used it in forward. What follows from weights and the batch
alone has no placement and is computed wherever it is needed. `update.py` places the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from shardwright.compiler.ir.rewrite import with_operands
from shardwright.compiler.ir.traits import CHEAP, REDUCTIONS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.gradients import depends_on
from shardwright.sharding.cut.pipeline.partial_sums import (
    JOINING,
    At,
    Partial,
    PartialSums,
    Placement,
    Stages,
    passes,
    total,
)

Code = tuple[Op, Stages | None]
"""An op and the parts that run it; None: whichever needs it."""


@dataclass(slots=True)
class PlacedProgram:
    """One program by parts: its code, the placement of every value that has one, and what stands
    for values that were made anew.
    """

    code: list[Code] = field(default_factory=list)
    of: dict[Value, Placement] = field(default_factory=dict)
    now: dict[Value, Value] = field(default_factory=dict)

    def emit(self, op: Op, stage: int) -> Value:
        """Add an op of one part."""
        self.code.append((op, frozenset((stage,))))
        self.of.update(dict.fromkeys(op.results, At(frozenset((stage,)))))
        return op.results[0]

    def put(self, op: Op, stages: Stages | None) -> None:
        """Add an op of some parts, or of whichever needs it."""
        self.code.append((self.current(op), stages))
        if stages is not None:
            self.of.update(dict.fromkeys(op.results, At(stages)))

    def current(self, op: Op) -> Op:
        """`op` on the values that stand for its operands now."""
        return with_operands(op, tuple(self.now.get(v, v) for v in op.operands))

    def placement(self, value: Value) -> Placement:
        """Where a value is; None: anywhere."""
        return self.of.get(self.now.get(value, value))

    def home(self, value: Value) -> int | None:
        """The first part that computes a value."""
        placement = self.placement(value)
        return min(placement.stages) if isinstance(placement, At) else None


@dataclass(slots=True)
class Forward:
    """The forward program by parts.

    `near` has, for every value that is computed by a part or made from weights, the parts that have
    it: its own and those that read it.
    """

    placed: PlacedProgram
    near: Mapping[Value, set[int]]
    computed: set[Value]


def place_forward(
    graph: Graph,
    weights: Iterable[Value],
    batch: Iterable[Value],
    homes: Mapping[Value, int],
) -> Forward:
    """Place the ops of the forward program; `homes` has the part that uses a weight, where it is
    only one.
    """
    placed = PlacedProgram()
    pull = dict(homes)
    on_batch = depends_on(graph, batch)
    for op in graph.ops:
        read = [h for v in op.operands if (h := placed.home(v)) is not None]
        pulled = [pull[v] for v in op.operands if v in pull]
        if read or (pulled and any(v in on_batch for v in op.results)):
            placed.put(op, frozenset((max(read + pulled),)))
            continue
        placed.put(op, None)
        if pulled:
            pull.update(dict.fromkeys(op.results, max(pulled)))
    from_weights = depends_on(graph, weights)
    near: dict[Value, set[int]] = {}
    for op, stages in reversed(placed.code):
        users = stages or {s for v in op.results for s in near.get(v, ())}
        for value in op.operands:
            near.setdefault(value, set()).update(users)
        for value in op.results:
            near.setdefault(value, set()).update(stages or ())
    for value in list(near):
        if value not in from_weights and placed.home(value) is None:
            del near[value]
    return Forward(placed, near, {v for op in graph.ops for v in op.results})


@dataclass(slots=True)
class Backward:
    """Places the ops of the backward program one after the other."""

    graph: Graph
    forward: Forward
    gradients: frozenset[Value]  # outputs that may stay partial
    accumulators: frozenset[Value]
    placed: PlacedProgram = field(default_factory=PlacedProgram)
    near: dict[Value, set[int]] = field(default_factory=dict)

    def run(self) -> PlacedProgram:
        """All ops."""
        self.near = {v: set(parts) for v, parts in self.forward.near.items() if parts}
        sums = _linear_to(self.graph, self.gradients)
        partial_sums = PartialSums(self.placed.emit, self.accumulators)
        for op in self.graph.ops:
            if op.results and op.results[0] in self.forward.computed:
                self.placed.put(op, None)
            elif not self._sum(op, sums, partial_sums):
                self._whole(op)
                self._place(op)
        return self.placed

    def _sum(self, op: Op, sums: set[Value], partial_sums: PartialSums) -> bool:
        """Keep a sum over parts in terms where all that follows is linear."""
        if not sums.issuperset(op.results):
            return False
        placements = [self.placed.placement(v) for v in op.operands]
        at = [p.stages for p in placements if isinstance(p, At)]
        found = None
        if any(isinstance(p, Partial) for p in placements):
            found = partial_sums.apply(op, placements)
        elif JOINING.get(op.name) == "add" and len(at) == 2 and not at[0] & at[1]:
            found = partial_sums.joined(op, "add", placements)
        if found is None:
            return False
        self.placed.of[op.result] = found
        return True

    def _whole(self, op: Op) -> None:
        """Bring the terms of partial operands together on the first part that has one."""
        for value in op.operands:
            placement = self.placed.placement(value)
            if isinstance(placement, Partial):
                first = min(placement.terms)
                own = [placement.terms[s] for s in sorted(placement.terms)]
                self.placed.now[value] = total(own, partial(self.placed.emit, stage=first))

    def _place(self, op: Op) -> None:
        """Put `op` on the first part it reads from."""
        read = [h for v in op.operands if (h := self.placed.home(v)) is not None]
        near = [self.near[v] for v in op.operands if v in self.near]
        if not read and (_is_cheap(op) or not near):
            self.placed.put(op, None)
            common = _common(near)
            if common:
                self.near.update(dict.fromkeys(op.results, common))
            return
        if read:
            latest = min(read)
            reachable = ([p for p in parts if p <= latest] for parts in near)
            part = min([latest, *(max(parts) for parts in reachable if parts)])
        else:
            part = max(_common(near))
        self.placed.put(op, frozenset((part,)))


def _common(near: list[set[int]]) -> set[int]:
    """The parts all operands have, else the last that one needs."""
    if not near:
        return set()
    return set.intersection(*near) or {max(max(parts) for parts in near)}


def _is_cheap(op: Op) -> bool:
    """Ops that may be repeated wherever their result is needed."""
    return op.name in CHEAP or op.name in REDUCTIONS


def _linear_to(graph: Graph, targets: frozenset[Value]) -> set[Value]:
    """Values all of whose readers are linear in them, down to `targets`."""
    spoiled = set(graph.outputs) - targets
    reaching = set(targets)
    for op in reversed(graph.ops):
        good = len(op.results) == 1 and op.result in reaching and op.result not in spoiled
        for value in op.operands:
            if good and passes(op, value, "add"):
                reaching.add(value)
            else:
                spoiled.add(value)
    return reaching - spoiled
