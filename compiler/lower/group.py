"""Kernels: tasks that share one index space, grown greedily from producer to consumer.

Growth has phases, each with a rule that says which tasks may meet and whether a set of them may be
one kernel (`loop_rule.py`, `reduction_rule.py`). Every merge is remembered, so that a kernel that
turns out too large or too slow can be split again where it was merged (`accept.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwright.compiler.ir.traits import RESHAPING
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.kernel_graph import KernelGraph
from shardwright.compiler.lower.rule import Rule
from shardwright.compiler.lower.storage import Storage
from shardwright.compiler.lower.task import Task


@dataclass(frozen=True, slots=True)
class Part:
    """A set of tasks that is or was a kernel: its name, its tasks, and the two parts it was merged
    from in phase `phase` (none for a single task).
    """

    kernel: int
    members: frozenset[int]
    phase: str = ""
    halves: tuple[Part, ...] = ()


class Groups:
    """The partition of a body's tasks into kernels.

    `never_fused` are pairs of tasks that may not share a kernel,
    `early` results whose tasks join the producer of their operand before all others. `arrivals` say
    when the last collective is over that a task waits for; tasks of which one would wait more than
    `patience_ps` longer than without the other share no kernel.
    """

    def __init__(
        self,
        storage: Storage,
        never_fused: Collection[tuple[int, int]],
        early: Collection[Value],
        arrivals: Mapping[int, float],
        patience_ps: float,
    ) -> None:
        self.storage, self.body, self.order = storage, storage.body, storage.order
        self._never_fused = never_fused
        self._early = early
        self._arrivals = arrivals
        self._patience_ps = patience_ps
        self._rank = {n: i for i, n in enumerate(self.order.sorted())}
        self._users = {v: {t.number for t in tasks} for v, tasks in self.body.readers.items()}
        self.parts = {t.number: Part(t.number, frozenset((t.number,))) for t in self.body.tasks}

    @property
    def kernel_of(self) -> dict[int, int]:
        """The kernel of every task."""
        return {n: kernel for kernel, part in self.parts.items() for n in part.members}

    def tasks(self, numbers: Collection[int]) -> list[Task]:
        """Tasks in dependency order."""
        return [self.body.tasks[n] for n in sorted(numbers, key=self._rank.__getitem__)]

    def is_stored(self, task: Task, members: Collection[int]) -> bool:
        """True when the result of `task` is needed outside of the kernel `members`."""
        if self.is_live_out(task):
            return True
        return any(user not in members for user in self.users(task))

    def is_live_out(self, task: Task) -> bool:
        """True when the result of `task` is stored whoever reads it."""
        return task.result in self.storage.must_store or task.target is not None

    def users(self, task: Task) -> Collection[int]:
        """Numbers of the tasks that read the result of `task`, or a view of it."""
        return self._users.get(task.result, ())

    def is_used(self, task: Task, members: Collection[int]) -> bool:
        """True when a task of `members` reads the result of `task`."""
        return any(user in members for user in self.users(task))

    def graph(self) -> KernelGraph:
        """Dependencies of the kernels as they are now."""
        return KernelGraph(self.order, {k: part.members for k, part in self.parts.items()})

    def may_not_fuse(self, members: Collection[int]) -> bool:
        """True when two of the tasks may not share a kernel."""
        if self.delay_ps(members) > self._patience_ps:
            return True
        return any(x in members and y in members for x, y in self._never_fused)

    def delay_ps(self, members: Collection[int]) -> float:
        """How much longer than alone the first task of a kernel waits for collectives."""
        arrivals = [self._arrivals.get(number, 0.0) for number in members]
        return max(arrivals) - min(arrivals)

    def edges(self) -> list[tuple[int, int, Value]]:
        """(producer, consumer, value) of data that keeps its index space on the way, early ones and
        then the largest value first.
        """
        found: dict[tuple[bool, int, int, int], Value] = {}
        for task in self.body.tasks:
            for value in task.data:
                base, chain = self.body.path(value)
                producer = self.body.producer.get(base)
                if producer is None or any(self.body.views[v].name not in RESHAPING for v in chain):
                    continue
                late = task.result not in self._early
                found[(late, -base.type.num_bytes, producer.number, task.number)] = base
        return [(key[2], key[3], found[key]) for key in sorted(found)]

    def grow(self, rule: Rule) -> None:
        """Merge along producer-consumer edges, largest value first, until nothing changes."""
        tasks, graph = self.body.tasks, self.graph()
        edges = [(p, c) for p, c, _ in self.edges() if rule.may_meet(tasks[p], tasks[c])]
        refused: set[frozenset[int]] = set()
        changed = True
        while changed:
            changed = False
            for producer, consumer in edges:
                a, b = graph.kernel[producer], graph.kernel[consumer]
                if a == b or not graph.acyclic(a, b):
                    continue
                first, second = self.parts[a], self.parts[b]
                union = first.members | second.members
                if union in refused:
                    continue
                if self.may_not_fuse(union) or rule.refusal(self, first, second):
                    refused.add(union)
                    continue
                graph.join(a, b)
                del self.parts[b]
                self.parts[a] = Part(a, union, rule.phase, (first, second))
                changed = True

    def replace(self, kernel: int, parts: Collection[Part]) -> None:
        """Split a kernel."""
        del self.parts[kernel]
        self.parts.update({part.kernel: part for part in parts})
