"""The index space of one kernel: indexing maps of its operands and results.

Operands that come from memory share iter dims when they are views of one tensor, so that a row read
twice is one row; if that merges independent indices, every use gets iter dims of its own. Values of
the kernel pass through reshapes, transposes and broadcasts; a slice of one is a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardwright.compiler.ir.traits import IDENTITIES, VIEWS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.lower import registry
from shardwright.compiler.lower.body import Body
from shardwright.compiler.lower.indexing_map import IndexingMap, behind, distinct, fresh
from shardwright.compiler.lower.task import WRITE, Task


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why tasks may not be one kernel.

    `rule` is one of: cycle, kind, indexing map, duplicated iteration dim, rows, order, budget,
    streams, size, traffic, intensity, code, slower.
    """

    rule: str
    detail: str


class RefusedError(Exception):
    """These tasks have no common index space."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class Space:
    """Indexing maps of `tasks` (topological order). Raises RefusedError."""

    def __init__(self, body: Body, tasks: Sequence[Task], share: bool) -> None:
        self.body = body
        self.tasks = tasks
        self.results: dict[Value, IndexingMap] = {}
        self._operands: dict[tuple[int, int], IndexingMap] = {}
        self._loads: dict[Value, IndexingMap] = {}
        self._share = share
        self._inside = {t.result for t in tasks}
        for task in tasks:
            self.results[task.result] = registry.lowering_of(task.op.name).indexing(self, task)
        if not all(distinct(v) for v in (*self.results.values(), *self._operands.values())):
            self.refuse("two dims of a value would walk one index", "duplicated iteration dim")

    def refuse(self, why: str, rule: str = "indexing map") -> NoReturn:
        """Give up on this set of tasks."""
        raise RefusedError(Refusal(rule, why))

    def operand(self, task: Task, k: int) -> IndexingMap:
        """The map of operand `k`; the same object on every call."""
        key = (task.number, k)
        if key not in self._operands:
            self._operands[key] = self._value(task.data[k])
        return self._operands[key]

    def set_operand(self, task: Task, k: int, indexing: IndexingMap) -> None:
        """Give a value that is rematerialised inside the kernel the map of its use."""
        self._operands[(task.number, k)] = indexing

    def is_inside(self, value: Value) -> bool:
        """True when `value` is seen from a result of this kernel, not loaded."""
        return self.body.base(value) in self._inside

    def _value(self, value: Value) -> IndexingMap:
        base, chain = self.body.path(value)
        if base in self._inside:
            return self._internal(base, chain)
        if not self._share or self.body.is_rematerialised(value):
            return fresh(value.type.shape)
        return self._shared(base, chain)

    def _internal(self, base: Value, chain: Sequence[Value]) -> IndexingMap:
        if self.body.producer[base].op.name == WRITE:
            self.refuse("a value assembled in memory is read in the same kernel")
        indexing = self.results[base]
        for view in chain:
            below = self._through(self.body.views[view], indexing)
            if below is None:
                self.refuse("a part of a value is read in the kernel that makes it")
            indexing = below
        return indexing

    def _shared(self, base: Value, chain: Sequence[Value]) -> IndexingMap:
        """The map of a load: every view is mapped once, as it is seen through those before it."""
        indexing = self._loads[base] = self._loads.get(base) or fresh(base.type.shape)
        for view in chain:
            if view not in self._loads:
                below = self._through(self.body.views[view], indexing)
                self._loads[view] = fresh(view.type.shape) if below is None else below
            indexing = self._loads[view]
        return indexing

    def _through(self, op: Op, indexing: IndexingMap) -> IndexingMap | None:
        """The map behind one view op; None when the view selects a part."""
        if op.name in IDENTITIES:
            return indexing
        return behind(op, indexing) if op.name in VIEWS else None


def index_space(body: Body, tasks: Sequence[Task]) -> Space:
    """The index space of `tasks`, views of one tensor linked if possible. Raises RefusedError."""
    try:
        return Space(body, tasks, share=True)
    except RefusedError:
        return Space(body, tasks, share=False)
