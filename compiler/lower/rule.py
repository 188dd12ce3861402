"""What a phase of growth asks before two kernels become one, and how a refusal is said.

A refusal names the first rule that failed; `explain.py` shows it to the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.indexing_map import all_leaves
from shardwright.compiler.lower.space import Refusal, RefusedError, Space
from shardwright.compiler.lower.task import WRITE, Task
from shardwright.compiler.machine.target import Target
from shardwright.compiler.model_types import MODEL_TYPES
from shardwright.compiler.options import CompileOptions

if TYPE_CHECKING:
    from shardwright.compiler.lower.group import Groups, Part


_ROW_SHARE = 91 / 96
"""Of an SBUF partition, what reduction fusions may take (182 of 192 KiB): the tile planner leaves
5 % to what allocation rounds up. The code generator says whether a kernel fits."""

_LOOP_SHARES = {False: 1 / 2, True: 25 / 32}
"""Of an SBUF partition, what a loop fusion may take: half, the rest is left to double buffering
(our choice); with `wide_norms` what single buffers leave (150 KiB of 192: lowering study,
assumption).
"""

_BALANCE_SHARE = 6 / 7  # of the balance of a core, flop per byte of HBM (our choice)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of kernels.

    `loop_bytes`: what the values of a partition's worth of rows of a loop fusion may take per
    partition; `row_bytes`: the same for a kernel with contractions, packed tiles and accumulators
    included; `intensity`: flop of a contraction per HBM byte saved above which it keeps tiles of
    its own.
    """

    loop_bytes: int
    row_bytes: int
    intensity: int
    max_tasks: int = 200
    max_streams: int = 32
    """Loads and stores; keeps the DMA queues of a tile loop in proportion (assumption)."""


def budget_of(machine: Target, options: CompileOptions) -> Budget:
    """The limits of kernels on a physical core of `machine`, from the facts of its file."""
    core, sbuf = machine.core, machine.core.limits.sbuf_bytes
    balance = core.peak_bf16_flops_per_s / machine.hbm_bytes_per_s_per_core
    return Budget(
        loop_bytes=int(_LOOP_SHARES[MODEL_TYPES[options.model_type].wide_norms] * sbuf),
        row_bytes=int(_ROW_SHARE * sbuf),
        intensity=round(_BALANCE_SHARE * balance),
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """A phase of growth; `alone` are tasks that share a kernel with nothing."""

    budget: Budget
    alone: Collection[int] = ()
    phase: ClassVar[str]

    def may_meet(self, producer: Task, consumer: Task) -> bool:
        """Whether an edge between these tasks may become internal, whatever else is there."""
        raise NotImplementedError

    def joinable(self, producer: Task, consumer: Task) -> bool:
        """Whether any phase may make the edge between two tasks internal."""
        return producer.fusable and consumer.fusable and producer.op.name != WRITE

    def may_not_fuse(self, producer: Task, consumer: Task) -> bool:
        """Whether one of two tasks shares a kernel with nothing."""
        return producer.number in self.alone or consumer.number in self.alone

    def refusal(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """Why two kernels may not be one; None when they may."""
        try:
            return self.check(groups, a, b)
        except RefusedError as error:
            return error.refusal

    def check(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """`refusal`, or RefusedError where the tasks have no common index space."""
        raise NotImplementedError


def crowded(groups: Groups, tasks: Sequence[Task], budget: Budget) -> Refusal | None:
    """The refusal of a kernel with too many tasks or streams."""
    if len(tasks) > budget.max_tasks:
        return Refusal("size", f"{len(tasks)} operations, the limit is {budget.max_tasks}")
    members = {t.number for t in tasks}
    streams = len(loads(groups, members)) + len(stores(groups, members))
    if streams > budget.max_streams:
        return Refusal("streams", f"{streams} tensors, the limit is {budget.max_streams}")
    return None


def most_alive(steps: Sequence[Mapping[Value, int]], last: Mapping[Value, int]) -> int:
    """Largest sum of what is alive at a step: each value from the first step that has it, with its
    size there, to step `last`, or its own.
    """
    live: dict[Value, int] = {}
    most = 0
    for at, sizes in enumerate(steps):
        live |= sizes
        most = max(most, sum(live.values()))
        live = {v: n for v, n in live.items() if last.get(v, -1) > at}
    return most


def loads(groups: Groups, members: Collection[int]) -> dict[Value, int]:
    """Values in memory that a kernel reads, with the bytes it needs of them."""
    body, tasks = groups.body, [groups.body.tasks[n] for n in members]
    inside = {t.result for t in tasks}
    found: dict[Value, int] = {}
    for task in tasks:
        for value in task.data:
            base = body.base(value)
            if not body.is_rematerialised(value) and base not in inside:
                part = min(base.type.num_bytes, value.type.num_bytes)
                found[base] = max(part, found.get(base, 0))
    return found


def stores(groups: Groups, members: Collection[int]) -> dict[Value, int]:
    """Values that a kernel writes to memory, with their bytes."""
    tasks = [groups.body.tasks[n] for n in members]
    return {
        t.result: (t.data[0] if t.op.name == WRITE else t.result).type.num_bytes
        for t in tasks
        if groups.is_stored(t, members)
    }


def traffic(groups: Groups, members: Collection[int]) -> int:
    """HBM bytes of a kernel that reads each input once and writes each output once."""
    return sum(loads(groups, members).values()) + sum(stores(groups, members).values())


def elsewhere(space: Space, contract: Task, tasks: Sequence[Task]) -> Refusal | None:
    """Refuse when a value of the kernel walks other indices than the contraction's result."""
    walked = set(all_leaves(space.results[contract.result]))
    if any(set(all_leaves(space.results[t.result])) != walked for t in tasks):
        return Refusal("indexing map", "a value walks other indices than the contraction's result")
    return None
