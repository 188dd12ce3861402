"""Regions: tasks that share one index space, grown greedily from producer to consumer.

A strip region holds whatever can walk one set of parallel indices with everything else of a row on
chip; a contract region holds one contraction and the conversions and writes of its result. A merge
must keep the graph of regions free of cycles, must label (`space.py`), and must fit the on-chip
budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from compiler.ir.types import Value
from compiler.lower.body import LABEL_VIEWS, Body
from compiler.lower.labels import Atom, Labels, all_leaves
from compiler.lower.order import Order
from compiler.lower.space import RefusedError, Space, label
from compiler.lower.task import CONTRACT, COPY, STRIP, WRITE, Task

EPILOGUE = frozenset(("convert", COPY, WRITE))


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a strip region. `strip_bytes` is what the values of 128 rows may take per
    partition.
    """

    strip_bytes: int
    max_tasks: int = 200
    max_streams: int = (
        32  # loads and stores; keeps the DMA queues of a tile loop in proportion (assumption)
    )


class Groups:
    """The partition of a body's tasks into regions, in a runnable order."""

    def __init__(
        self,
        body: Body,
        order: Order,
        budget: Budget,
        outside: Collection[Value],
        apart: Collection[tuple[int, int]] = (),
    ) -> None:
        self.body = body
        self.budget = budget
        self.members: dict[int, list[int]] = {t.number: [t.number] for t in body.tasks}
        self._outside = outside
        self._apart = apart
        self._region = {t.number: t.number for t in body.tasks}
        self._rank = {n: i for i, n in enumerate(order.sorted())}
        self._before = {t.number: set(order.before(t)) for t in body.tasks}
        self._after: dict[int, set[int]] = {t.number: set() for t in body.tasks}
        for number, earlier in self._before.items():
            for other in earlier:
                self._after[other].add(number)
        self._reach = self._reachable()
        self._tried: set[frozenset[int]] = set()
        self._users = self._data_users()
        self._grow()

    def _reachable(self) -> dict[int, int]:
        """Bit set of the regions reachable from each region."""
        reach: dict[int, int] = {}
        for number in sorted(self._rank, key=lambda n: -self._rank[n]):
            reach[number] = 0
            for later in self._after[number]:
                reach[number] |= reach[later] | 1 << later
        return reach

    def _data_users(self) -> dict[Value, set[int]]:
        """Tasks that read each base value through views that keep its index space."""
        users: dict[Value, set[int]] = {}
        for task in self.body.tasks:
            for value in task.data:
                users.setdefault(self.body.base(value)[0], set()).add(task.number)
        return users

    def _grow(self) -> None:
        """Merge along producer-consumer edges, largest value first, until nothing changes."""
        edges = self._edges()
        changed = True
        while changed:
            changed = False
            for producer, consumer in edges:
                a, b = self._region[producer], self._region[consumer]
                if a != b and self._merge(a, b):
                    changed = True

    def _edges(self) -> list[tuple[int, int]]:
        """(producer, consumer) pairs that could share a region, by bytes saved."""
        found: list[tuple[int, int, int]] = []
        for task in self.body.tasks:
            for value in task.data:
                base, chain = self.body.base(value)
                producer = self.body.producer.get(base)
                if producer is None or any(
                    self.body.views[v].name not in LABEL_VIEWS for v in chain
                ):
                    continue
                if self._may_join(producer, task):
                    found.append((-base.type.num_bytes, producer.number, task.number))
        return [(p, c) for _, p, c in sorted(set(found))]

    def _may_join(self, producer: Task, consumer: Task) -> bool:
        if not (producer.fusable and consumer.fusable) or producer.op.name == WRITE:
            return False
        if producer.kind == CONTRACT:
            return consumer.op.name in EPILOGUE
        return producer.kind == consumer.kind == STRIP

    def _merge(self, a: int, b: int) -> bool:
        """Merge the region of a producer with that of a consumer if that is legal."""
        union = frozenset(self.members[a] + self.members[b])
        if union in self._tried or not self._acyclic(a, b):
            return False
        if any(x in union and y in union for x, y in self._apart):
            return False
        tasks = self.sorted(union)
        if not self._legal(tasks):
            self._tried.add(union)
            return False
        self._join(a, b)
        return True

    def sorted(self, numbers: Collection[int]) -> list[Task]:
        """Tasks in dependency order."""
        return [self.body.tasks[n] for n in sorted(numbers, key=self._rank.__getitem__)]

    def _acyclic(self, a: int, b: int) -> bool:
        """True when no path leaves `a`, passes another region and enters `b`."""
        bit = 1 << b
        return not any(self._reach[later] & bit for later in self._after[a] if later != b)

    def _join(self, a: int, b: int) -> None:
        """Make region `b` a part of region `a`."""
        for number in self.members[b]:
            self._region[number] = a
        self.members[a] += self.members.pop(b)
        for side in (self._before, self._after):
            for other in side.pop(b):
                opposite = self._after if side is self._before else self._before
                opposite[other].discard(b)
                if other != a:
                    side[a].add(other)
                    opposite[other].add(a)
            side[a].discard(b)
        reach = (self._reach[a] | self._reach.pop(b)) & ~(1 << a | 1 << b)
        self._reach[a] = reach
        for other, mask in self._reach.items():
            if other != a and mask & (1 << a | 1 << b):
                self._reach[other] = (mask | reach | 1 << a) & ~(1 << b)

    def _legal(self, tasks: Sequence[Task]) -> bool:
        if len(tasks) > self.budget.max_tasks:
            return False
        contracts = [t for t in tasks if t.kind == CONTRACT]
        if contracts and (len(contracts) > 1 or any(t.op.name not in EPILOGUE for t in tasks[1:])):
            return False
        try:
            space = label(self.body, tasks)
        except RefusedError:
            return False
        if contracts:
            return True
        return self._streams(tasks) <= self.budget.max_streams and self._fits(space, tasks)

    def _streams(self, tasks: Sequence[Task]) -> int:
        """Tensors read and written by a region."""
        inside = {t.result for t in tasks}
        bases = {self.body.base(v)[0] for t in tasks for v in t.data if not self.body.is_free(v)}
        stores = sum(self.is_stored(t, {u.number for u in tasks}) for t in tasks)
        return len(bases - inside) + stores

    def is_stored(self, task: Task, members: Collection[int]) -> bool:
        """True when the result of `task` is needed outside of its region."""
        if task.result in self._outside or task.target is not None:
            return True
        return any(user not in members for user in self._users.get(task.result, ()))

    def _fits(self, space: Space, tasks: Sequence[Task]) -> bool:
        """True when there are parallel indices, and what is not parallel fits on chip."""
        members = {t.number for t in tasks}
        inner = [
            t for t in tasks if t.op.name == "reduce" and self._users.get(t.result, set()) & members
        ]
        parallel = _parallel(space, tasks, {t.number for t in inner})
        biggest = max((_points(labels) for labels in space.results.values()), default=1)
        if not parallel:
            return biggest == 1 and not any(_points(space.operand(t, 0)) > 1 for t in inner)
        if not inner:
            return True
        rows = math.prod(a.size for a in parallel)
        if rows < MIN_ROWS and biggest > MIN_ROWS * rows:
            return False
        return _peak_bytes(space, tasks, parallel) <= self.budget.strip_bytes


MIN_ROWS = 32  # fewer rows would leave most of the 128 partitions idle (our choice)
_ROW_BYTES = 4  # values are held as fp32 on chip


def _points(labels: Labels) -> int:
    return math.prod(a.size for a in all_leaves(labels))


def _parallel(space: Space, tasks: Sequence[Task], inner: Collection[int]) -> set[Atom]:
    """Atoms every value walks, or that only reductions whose result leaves the region remove."""
    shared: set[Atom] | None = None
    for task in tasks:
        span = set(all_leaves(space.results[task.result]))
        if task.op.name == "reduce" and task.number not in inner:
            span |= set(all_leaves(space.operand(task, 0)))
        shared = span if shared is None else shared & span
    return shared or set()


def _peak_bytes(space: Space, tasks: Sequence[Task], parallel: Collection[Atom]) -> int:
    """Largest sum of live row bytes per partition, loads included, while the tasks run in order."""
    last: dict[Value, int] = {}
    need: dict[Value, int] = {}
    for i, task in enumerate(tasks):
        for k, value in enumerate(task.data):
            base = space.body.base(value)[0]
            last[base] = i
            if base not in need and not space.body.is_free(value):
                need[base] = _row_bytes(space.operand(task, k), parallel)
        need[task.result] = _row_bytes(space.results[task.result], parallel)
        last.setdefault(task.result, i)
    live: dict[Value, int] = {}
    peak = 0
    for i, task in enumerate(tasks):
        for value in (*task.data, task.result):
            base = space.body.base(value)[0]
            live[base] = need.get(base, 0)
        peak = max(peak, sum(live.values()))
        live = {v: n for v, n in live.items() if last[v] > i}
    return peak


def _row_bytes(labels: Labels, parallel: Collection[Atom]) -> int:
    return _ROW_BYTES * math.prod(a.size for a in all_leaves(labels) if a not in parallel)
