"""Stage assignment of the optimizer: the stages that run each op of the update program.

Optimizer leaves follow the gradient they are combined with, and everything elementwise follows the
weight. What sums over stages (global norm, statistics of a leaf whose layers lie on several stages)
stays partial as long as ops are linear and is then reduced over `pp`. A gradient made on other
stages than its weight lies on is exchanged before the program runs, so that all copies add the same
terms in the same order. Anything else that needs two stages at once is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import AllReduceAttrs, ConstantAttrs
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.neff.schedule import STAGE_AXIS
from shardwright.sharding.cut.pipeline.op_placement import PlacedProgram
from shardwright.sharding.cut.pipeline.partial_sums import (
    JOINING,
    At,
    Partial,
    PartialSums,
    Placement,
    Stages,
    total,
)


@dataclass(slots=True)
class Update:
    """Places the ops of the update program one after the other.

    `made` has the stages that made each gradient input (several: each has a term), `wanted` those
    of its weight. `terms` are, per gradient input, the values that stand for the term of each
    stage; they are exchanged where `at` a stage needs one it has not made.
    """

    graph: Graph
    num_stages: int
    state: Mapping[Value, Stages]
    made: Mapping[Value, Stages]
    wanted: Mapping[Value, Stages]
    placed: PlacedProgram = field(default_factory=PlacedProgram)
    terms: dict[Value, dict[int, Value]] = field(default_factory=dict)

    def run(self) -> None:
        """All ops."""
        self.placed.of.update({v: At(stages) for v, stages in self.state.items() if stages})
        for value, stages in self.made.items():
            self._gradient(value, stages, self.wanted.get(value) or stages)
        for op in self.graph.ops:
            self._op(op)

    def _gradient(self, value: Value, made: Stages, wanted: Stages) -> None:
        """A gradient as the sum of the terms of all stages that made one, where it is wanted."""
        own = {stage: Value(value.type) for stage in sorted(made)}
        self.terms[value] = own
        result = total(list(own.values()), partial(self.placed.put, stages=wanted))
        self.placed.now[value] = result
        self.placed.of[result] = At(wanted)

    def _op(self, op: Op) -> None:
        """Place one op."""
        placements = [self.placed.placement(v) for v in op.operands]
        if any(isinstance(p, Partial) for p in placements):
            current = self.placed.current(op)
            found = PartialSums(self.placed.emit).apply(current, placements)
            if found is not None:
                self.placed.of[op.result] = found
                return
            placements = [self.whole(v) for v in op.operands]
        at = [p.stages for p in placements if isinstance(p, At)]
        common = frozenset.intersection(*at) if at else None
        if common is None or common:
            self.placed.put(op, common)
        elif op.name in JOINING and len(op.operands) == 2:
            joined = PartialSums(self.placed.emit).joined(
                self.placed.current(op), JOINING[op.name], placements
            )
            self.placed.of[op.result] = joined
        else:
            self._spread_scalars(op, placements)

    def _spread_scalars(self, op: Op, placements: Sequence[Placement]) -> None:
        """Give scalars (a loss, a norm of one stage) to all stages, for an op that has tensors
        elsewhere; refuse what is no sum.
        """
        pairs = list(zip(op.operands, placements, strict=True))
        tensors = [p.stages for v, p in pairs if isinstance(p, At) and v.type.num_elements > 1]
        common = frozenset.intersection(*tensors) if tensors else frozenset()
        if not common:
            raise _no_sum(op)
        for value, placement in pairs:
            if isinstance(placement, At) and value.type.num_elements == 1:
                self.everywhere(value)
        self.placed.put(op, common)

    def whole(self, value: Value) -> Placement:
        """The placement of a value once it is no longer partial."""
        placement = self.placed.placement(value)
        if isinstance(placement, Partial):
            self._reduce(value, placement)
        return self.placed.placement(value)

    def everywhere(self, value: Value) -> None:
        """Make a value of some stages known to all: a sum with one term."""
        placement = self.placed.placement(value)
        if isinstance(placement, At) and len(placement.stages) < self.num_stages:
            current = self.placed.now.get(value, value)
            self._reduce(value, Partial("add", {min(placement.stages): current}))

    def _reduce(self, value: Value, partial: Partial) -> None:
        """One all_reduce over stages; those without a term give the identity."""
        result = Value(value.type)
        attrs = AllReduceAttrs((STAGE_AXIS,), partial.kind, self.num_stages)
        for stage in range(self.num_stages):
            term = partial.terms.get(stage)
            if term is None:
                start = identity(partial.kind, value.type.dtype)[()]
                data = ConstantAttrs.full(start, value.type)
                term = self.placed.emit(make_op("constant", (), data), stage)
            self.placed.emit(Op("all_reduce", (term,), (result,), attrs), stage)
        self.placed.now[value] = result
        self.placed.of[result] = At(frozenset(range(self.num_stages)))


def _no_sum(op: Op) -> ShardingError:
    """An op that joins two stages otherwise than by a sum, a maximum or a minimum."""
    return ShardingError(
        "SW_PIPELINE_CUT",
        f"what joins several stages requires to be a sum, a maximum or a minimum, got {op.name} of"
        f" {op.operands[0].type} from different stages",
        op.loc,
        "use pp = 1, or reduce over all weights by a sum",
    )
