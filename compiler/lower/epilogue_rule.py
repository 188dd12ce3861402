"""A contraction with the elementwise work on its result: still one contraction for the generator.

The elementwise ops walk the index space of the result, tile by tile, while it is in PSUM, and may
load and store other tensors of that space (a bias, a gate, an optimizer's moments). Sums over the
result would need whole rows, so they are left to reduction fusions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.compiler.ir.traits import REDUCTIONS
from shardwright.compiler.lower.rule import Rule, crowded, elsewhere, traffic
from shardwright.compiler.lower.space import Refusal, index_space
from shardwright.compiler.lower.task import CONTRACT, LOOP, Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.group import Groups, Part


class EpilogueRule(Rule):
    """Growth of one contraction by elementwise ops behind it, except tasks in `alone`."""

    phase = "epilogue"

    def may_meet(self, producer: Task, consumer: Task) -> bool:
        """A contraction meets readers of its result that are no sums."""
        if not self.joinable(producer, consumer) or self.may_not_fuse(producer, consumer):
            return False
        return producer.kind == CONTRACT and consumer.kind == LOOP

    def check(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """Everything walks the index space of the one contraction's result."""
        union = a.members | b.members
        tasks = groups.tasks(union)
        contracts = [t for t in tasks if t.kind == CONTRACT]
        if len(contracts) != 1 or contracts[0].number not in a.members:
            return Refusal("kind", "an epilogue follows one contraction")
        if any(t.op.name in REDUCTIONS for t in tasks):
            return Refusal("kind", "a sum over the result needs whole rows")
        if found := crowded(groups, tasks, self.budget):
            return found
        if traffic(groups, union) >= traffic(groups, a.members) + traffic(groups, b.members):
            return Refusal("traffic", "no byte less would move")
        (contract,), space = contracts, index_space(groups.body, tasks)
        if any(space.is_inside(v) for v in contract.data if not groups.body.is_rematerialised(v)):
            return Refusal("kind", "an operand of the contraction would be made in its kernel")
        return elsewhere(space, contract, tasks)
