"""Which task must run before which, and who reads what: the dependency graph of a body.

Static edges (data, targets, registers) are worked out once per task; `Task.after` holds the edges
that sharing memory adds later. Collectives over stages start in program order (`cross_stage.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.topological import topological
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.body import Body
from shardwright.compiler.lower.task import Task
from shardwright.compiler.support.walks import reached


def inverted(before: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
    """Per key, the keys that it comes before."""
    after: dict[int, list[int]] = {key: [] for key in before}
    for key, earlier in before.items():
        for other in earlier:
            after[other].append(key)
    return after


class Order:
    """Dependencies of the tasks of `body`, which may still grow."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._static: list[set[int]] = []
        self._readers: dict[Value, set[int]] = {}
        self._queued: dict[int, int] = {}
        self._last_cross_stage: int | None = None

    def before(self, task: Task) -> set[int]:
        """Tasks that must run, or for a collective over stages start, before `task`."""
        found = self.finished(task)
        if task.number in self._queued:
            found.add(self._queued[task.number])
        return found

    def finished(self, task: Task) -> set[int]:
        """Numbers of the tasks that must have finished before `task` starts."""
        self._extend()
        return self._static[task.number] | task.after

    def readers(self, base: Value) -> set[int]:
        """Numbers of the tasks that read `base` or a view of it."""
        self._extend()
        return self._readers.get(base, set())

    def following(self, task: Task) -> set[int]:
        """Numbers of the tasks that cannot run before `task`."""
        after = inverted({other.number: self.before(other) for other in self.body.tasks})
        return reached(after[task.number], after.__getitem__)

    def sorted(self) -> list[int]:
        """All task numbers in an order that respects dependencies, the lowest ready one first."""
        tasks = self.body.tasks
        found = topological({t.number: self.before(t) for t in tasks}, lambda number: number)
        assert len(found) == len(tasks), "tasks wait for each other"
        return found

    def _extend(self) -> None:
        """Take in tasks that were added since the last question."""
        for task in self.body.tasks[len(self._static) :]:
            self._static.append(self._of(task))
            if is_cross_stage(task.op):
                if self._last_cross_stage is not None:
                    self._queued[task.number] = self._last_cross_stage
                self._last_cross_stage = task.number

    def _of(self, task: Task) -> set[int]:
        body, found, registers = self.body, set(), set(task.registers)
        for value in task.data:
            base, chain = body.path(value)
            registers |= body.registers_of(value)
            self._readers.setdefault(base, set()).add(task.number)
            if base in body.producer:
                found.add(body.producer[base].number)
            for view in chain:
                if view in body.windows:
                    registers |= body.windows[view].registers
        if task.target is not None and task.target in body.producer:
            found.add(body.producer[task.target].number)
        return found | {body.register_task[r].number for r in registers if r in body.register_task}
