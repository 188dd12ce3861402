"""Which tasks may be one loop fusion, or a contraction with the conversions and writes of its
result.

A loop fusion walks one set of parallel indices and keeps everything else of a row on chip. Its
rows must be many enough for the partitions, and the values alive at a time must fit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shardwright.compiler.ir.traits import REDUCTIONS
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.indexing_map import IndexingMap, IterDim, all_leaves, extent
from shardwright.compiler.lower.rule import Rule, crowded, elsewhere, most_alive
from shardwright.compiler.lower.space import Refusal, Space, index_space
from shardwright.compiler.lower.task import CONTRACT, COPY, LOOP, WRITE, Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.group import Groups, Part

EPILOGUE = frozenset(("convert", COPY, WRITE))
MIN_ROWS = 32  # fewer rows would leave most of the 128 partitions idle (our choice)
MAX_SPREAD = 4  # points of a kernel over those of its largest value (our choice)
SMALL_POINTS = 1 << 14  # one tile of 128 rows: below that a longer walk costs nothing
_ROW_BYTES = 4  # values are held as fp32 on chip


class LoopRule(Rule):
    """Growth without contractions."""

    phase = "loop"

    def may_meet(self, producer: Task, consumer: Task) -> bool:
        """Loop fusions meet each other; a contraction meets what converts or writes its result."""
        if not self.joinable(producer, consumer):
            return False
        if producer.kind == CONTRACT:
            return consumer.op.name in EPILOGUE
        if self.may_not_fuse(producer, consumer):
            return False
        return producer.kind == consumer.kind == LOOP

    def check(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """A contraction takes conversions and writes of its result; rows have to fit."""
        tasks = groups.tasks(a.members | b.members)
        contracts = [t for t in tasks if t.kind == CONTRACT]
        if contracts and (len(contracts) > 1 or any(t.op.name not in EPILOGUE for t in tasks[1:])):
            return Refusal("kind", "a contraction meets more than conversions and writes")
        if not contracts and (found := crowded(groups, tasks, self.budget)):
            return found
        space = index_space(groups.body, tasks)
        if contracts:
            return elsewhere(space, contracts[0], tasks)
        return self._unfit(groups, space, tasks)

    def _unfit(self, groups: Groups, space: Space, tasks: Sequence[Task]) -> Refusal | None:
        """Refuse when there are too few parallel indices, or what is not parallel does not fit."""
        members = {t.number for t in tasks}
        inner = {t.number for t in tasks if t.op.name in REDUCTIONS and groups.is_used(t, members)}
        parallel = _parallel(space, tasks, inner)
        if _wanders(space, tasks):
            return Refusal("space", "values walk indices that no value of the kernel joins")
        if parallel and not inner:
            return None
        biggest = max(
            (extent(all_leaves(indexing)) for indexing in space.results.values()), default=1
        )
        if not parallel:
            whole = any(
                t.number in inner and extent(all_leaves(space.operand(t, 0))) > 1 for t in tasks
            )
            small = biggest == 1 and not whole
            return None if small else Refusal("rows", "no index is shared by all values")
        rows = extent(parallel)
        if rows < MIN_ROWS and biggest > MIN_ROWS * rows:
            return Refusal("rows", f"{rows} rows of {biggest // rows} elements are too few")
        need, limit = _peak_bytes(space, tasks, parallel), self.budget.loop_bytes
        if need <= limit:
            return None
        return Refusal("budget", f"a row takes {need} bytes on chip, the limit is {limit}")


def _wanders(space: Space, tasks: Sequence[Task]) -> bool:
    """Whether the indices of a kernel are many times those of any value: tiles would walk the
    product of spaces that have nothing to do with each other.
    """
    walked = [set(all_leaves(space.results[t.result])) for t in tasks]
    walked += [set(all_leaves(space.operand(t, k))) for t in tasks for k in range(len(t.data))]
    most = max(extent(iter_dims) for iter_dims in walked)
    whole = extent(set().union(*walked))
    return whole > MAX_SPREAD * max(most, SMALL_POINTS)


def _parallel(space: Space, tasks: Sequence[Task], inner: Collection[int]) -> set[IterDim]:
    """Iter dims that all walk, or that only reductions whose result leaves the kernel remove."""
    walked = []
    for task in tasks:
        span = set(all_leaves(space.results[task.result]))
        if task.op.name in REDUCTIONS and task.number not in inner:
            span |= set(all_leaves(space.operand(task, 0)))
        walked.append(span)
    return set.intersection(*walked)


def _peak_bytes(space: Space, tasks: Sequence[Task], parallel: Collection[IterDim]) -> int:
    """Largest sum of live row bytes per partition, loads included, while the tasks run in order."""
    body = space.body
    last: dict[Value, int] = {}
    need: dict[Value, int] = {}
    steps = []
    for at, task in enumerate(tasks):
        for k, value in enumerate(task.data):
            base = body.base(value)
            last[base] = at
            if base not in need and not body.is_rematerialised(value):
                need[base] = _row_bytes(space.operand(task, k), parallel)
        need[task.result] = _row_bytes(space.results[task.result], parallel)
        steps.append({v: need.get(v, 0) for v in (*map(body.base, task.data), task.result)})
    return most_alive(steps, last)


def _row_bytes(indexing: IndexingMap, parallel: Collection[IterDim]) -> int:
    return _ROW_BYTES * extent(a for a in all_leaves(indexing) if a not in parallel)
