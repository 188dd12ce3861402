"""Which tasks may be one reduction fusion: contractions together with what stands between them.

A reduction fusion walks 128 rows of one index (the row index) at a time. Every value of it has one
of three roles: a row value walks the rows; a sum adds up the rows, or loops around them, and leaves
the kernel, at most converted; a packed tile does not know the rows and stays on chip while they
pass. A contraction takes rows and a packed tile to rows, or two row values to a sum. Nothing here
knows what attention is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.compiler.ir.facts import is_sum
from shardwright.compiler.ir.traits import REDUCTIONS
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.indexing_map import IterDim, all_leaves
from shardwright.compiler.lower.loop_rule import EPILOGUE
from shardwright.compiler.lower.rule import Rule, crowded, most_alive, traffic
from shardwright.compiler.lower.space import Refusal, Space, index_space
from shardwright.compiler.lower.task import CONTRACT, LOOP, PARTITIONS, Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.group import Groups, Part

MIN_ROWS = 64  # with fewer rows the stationary side of the tensor engine is half idle (our choice)
BLOCK = 512  # documented: columns of one moving operand of the tensor engine
ACCUMULATOR_BYTES = 4  # sums over the rows are fp32
# The smallest part of a blocked row that is on chip at a time, and the row tiles that share it
# (our choice: the leanest form of `codegen/rows/plan.py`).
COLUMN_TILE, ROW_PANEL = 512, 4

ROW, SUM, PACKED = "row", "sum", "packed"


@dataclass(frozen=True, slots=True)
class Spans:
    """Iter dims that the result and the operands of a task walk."""

    task: Task
    result: frozenset[IterDim]
    operands: tuple[frozenset[IterDim], ...]

    @property
    def all(self) -> frozenset[IterDim]:
        """Iter dims of the result and the operands."""
        return self.result.union(*self.operands)

    @property
    def summed(self) -> frozenset[IterDim]:
        """Iter dims of the operands that the result does not walk."""
        return self.all - self.result


class ReductionRule(Rule):
    """Growth of kernels that hold contractions."""

    phase = "reduction"

    def may_meet(self, producer: Task, consumer: Task) -> bool:
        """Contractions, elementwise ops and reductions meet each other."""
        kinds = {producer.kind, consumer.kind}
        return self.joinable(producer, consumer) and kinds <= {LOOP, CONTRACT}

    def check(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """Some index of all contractions has to serve as the rows."""
        tasks = groups.tasks(a.members | b.members)
        if not any(t.kind == CONTRACT for t in tasks):
            return Refusal("kind", "no contraction among them")
        if found := crowded(groups, tasks, self.budget) or self._too_intense(groups, a, b):
            return found
        space = index_space(groups.body, tasks)
        spans = [_spans(space, task) for task in tasks]
        first: Refusal | None = None
        for rows in _candidates(spans):
            why = self._with_rows(groups, space, spans, rows)
            if why is None:
                return None
            first = first or why
        return first or Refusal("rows", f"no index of at least {MIN_ROWS} rows is contracted")

    def _too_intense(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """Refuse when the contractions that would give up tiles of their own compute so much per
        byte kept on chip that the transfers hide behind them anyway.
        """
        saved = _saved(groups, a, b)
        if saved <= 0:
            return Refusal("traffic", "no byte less would move")
        grown = [p for p in (a, b) if p.phase != self.phase]
        flops = sum(groups.body.tasks[n].flops for part in grown for n in part.members)
        ratio, limit = flops / saved, self.budget.intensity
        if ratio <= limit:
            return None
        return Refusal("intensity", f"{ratio:.0f} flop per byte kept, limit {limit}")

    def _with_rows(
        self, groups: Groups, space: Space, spans: Sequence[Spans], rows: IterDim
    ) -> Refusal | None:
        """Why the kernel cannot walk `rows`."""
        inner = frozenset[IterDim]().union(*(_contracted(s, rows) for s in spans))
        looped = _looped(spans, inner, rows)
        roles = {s.task.result: _role(s, rows, looped) for s in spans}
        members = {s.task.number for s in spans}
        for one in spans:
            after = roles.get(space.body.base(one.task.data[0])) == SUM
            if _may_follow(one.task) and after:
                roles[one.task.result] = SUM
                continue
            why = _misfit(groups, members, one, roles[one.task.result], rows)
            if why is not None:
                return Refusal("rows", f"{one.task.op.name}: {why}")
        memory = _Memory(space.body, spans, roles, rows)
        need = memory.peak()
        if need > self.budget.row_bytes and inner:
            need = memory.blocked(max(inner, key=lambda a: a.size))
        if need <= self.budget.row_bytes:
            return None
        limit = self.budget.row_bytes
        return Refusal("budget", f"{rows.size} rows take {need} bytes on chip, limit {limit}")


def _saved(groups: Groups, a: Part, b: Part) -> float:
    """HBM bytes that one kernel moves less than two. The write of a value that still has readers
    elsewhere counts by the share of readers that are now inside: the others may follow.
    """
    union = a.members | b.members
    saved: float = traffic(groups, a.members) + traffic(groups, b.members)
    saved -= traffic(groups, union)
    for number in a.members:
        task = groups.body.tasks[number]
        users = groups.users(task)
        if groups.is_stored(task, union) and not groups.is_live_out(task):
            inside = sum(u in b.members for u in users)
            saved += task.result.type.num_bytes * inside / len(users)
    return saved


def _spans(space: Space, task: Task) -> Spans:
    operands = tuple(frozenset(all_leaves(space.operand(task, k))) for k in range(len(task.data)))
    return Spans(task, frozenset(all_leaves(space.results[task.result])), operands)


def _candidates(spans: Sequence[Spans]) -> list[IterDim]:
    """Large iter dims that all contractions walk, the largest first."""
    shared = frozenset.intersection(*(one.all for one in spans if one.task.kind == CONTRACT))
    return sorted((a for a in shared if a.size >= MIN_ROWS), key=lambda a: -a.size)


def _contracted(one: Spans, rows: IterDim) -> frozenset[IterDim]:
    """Iter dims of a contraction along the row: its columns, and what it sums but the rows."""
    if one.task.kind != CONTRACT:
        return frozenset()
    return _columns(one, rows) | (one.summed if rows in one.result else frozenset())


def _looped(spans: Sequence[Spans], inner: frozenset[IterDim], rows: IterDim) -> frozenset[IterDim]:
    """Iter dims that meet one of `inner` in a row value: they are loops around the rows."""
    walking = [s.result for s in spans if rows in s.result and s.result & inner]
    return frozenset[IterDim]().union(*walking) - inner - {rows}


def _may_follow(task: Task) -> bool:
    """Whether a task may work on a finished sum: conversions and writes, and sums of it."""
    return task.op.name in EPILOGUE or is_sum(task.op)


def _role(one: Spans, rows: IterDim, looped: frozenset[IterDim]) -> str:
    if rows in one.result:
        return SUM if is_sum(one.task.op) and one.summed & looped else ROW
    return SUM if any(rows in operand for operand in one.operands) else PACKED


def _misfit(
    groups: Groups, members: Collection[int], one: Spans, role: str, rows: IterDim
) -> str | None:
    """Why a task cannot play its role."""
    task = one.task
    if role == ROW:
        both = all(rows in operand for operand in one.operands)
        return "both operands walk the rows" if task.kind == CONTRACT and both else None
    if role == PACKED:
        if task.kind == CONTRACT or task.op.name in REDUCTIONS:
            return "does not walk the rows"
        stored = groups.is_stored(task, members)
        return "does not walk the rows and is needed elsewhere" if stored else None
    if task.kind != CONTRACT and task.op.attrs.kind != "add":
        return "combines the rows by something else than a sum"
    used = [u for u in groups.users(task) if u in members]
    plain = all(_may_follow(groups.body.tasks[u]) for u in used)
    return None if plain else "adds up all rows before they are used again"


def _columns(one: Spans, rows: IterDim) -> frozenset[IterDim]:
    """Iter dims of a contraction that its moving side walks: free in the packed tile of a row
    contraction, or in one operand of a sum. They are never looped one by one.
    """
    if one.task.kind != CONTRACT:
        return frozenset()
    lhs, rhs = one.operands
    if rows in one.result:
        packed, other = (rhs, lhs) if rows in lhs else (lhs, rhs)
        return (packed - other) & one.result
    return (lhs ^ rhs) & one.result


class _Memory:
    """Bytes per partition of a reduction fusion, as its leanest code needs them: packed tiles, sums
    and transposed rows once, everything else of a row as blocks of columns. Of a `long` index only
    a column tile is on chip at a time.
    """

    long: IterDim | None = None

    def __init__(
        self, body: Body, spans: Sequence[Spans], roles: dict[Value, str], rows: IterDim
    ) -> None:
        self.body, self.spans, self.roles, self.rows = body, spans, roles, rows
        walking = [s.all if roles[s.task.result] == SUM else s.result for s in spans]
        columns = frozenset[IterDim]().union(*(_columns(s, rows) for s in spans))
        self.parallel = frozenset.intersection(*[w for w in walking if rows in w]) - columns

    def peak(self) -> int:
        """What stays on chip, and the largest sum of live blocks."""
        kept: dict[object, int] = {}
        for one in self.spans:
            kept |= self._kept(one)
        return sum(kept.values()) + self._blocks()

    def blocked(self, iter_dim: IterDim) -> int:
        """The same when `iter_dim` is blocked: what comes with a column tile is held twice, for the
        next one, and a row panel keeps what it carries from column tile to column tile.
        """
        self.long = iter_dim
        return self.peak()

    def _kept(self, one: Spans) -> dict[object, int]:
        """What a task needs for all columns or all rows."""
        task, role, found = one.task, self.roles[one.task.result], dict[object, int]()
        if role == SUM:
            points = self._points(one.result, whole=True)
            flat = is_sum(task.op) and self.rows not in one.result
            need = ACCUMULATOR_BYTES * points
            found[task.result] = need if flat else self._spread(one.result, need)
        if role != ROW:
            return found
        summed = frozenset.intersection(*one.operands) - one.result
        if task.kind == CONTRACT and self.long in summed:
            found["carried", task.result] = ROW_PANEL * ACCUMULATOR_BYTES * self._points(one.result)
        for value, iter_dims in zip(task.data, one.operands, strict=True):
            base, size = self.body.base(value), value.type.dtype.bytes * self._places(iter_dims)
            if self.body.is_rematerialised(value):
                continue
            if task.kind == CONTRACT and self.rows in iter_dims:
                found["transposed", base] = size * self._points(iter_dims)
            elif task.kind == CONTRACT:
                found[base, summed] = self._spread(iter_dims, size * self._points(iter_dims))
            elif self.rows not in iter_dims:
                found[base] = size * self._points(iter_dims)
        return found

    def _blocks(self) -> int:
        """Blocks of row values alive at a time, each in two places."""
        last = {self.body.base(v): i for i, s in enumerate(self.spans) for v in s.task.data}
        steps = []
        for one in self.spans:
            made = zip((*one.task.data, one.task.result), (*one.operands, one.result), strict=True)
            steps.append(
                {
                    self.body.base(value): 2
                    * value.type.dtype.bytes
                    * min(BLOCK, self._points(iter_dims))
                    for value, iter_dims in made
                    if self.rows in iter_dims and not self.body.is_rematerialised(value)
                }
            )
        return most_alive(steps, last)

    def _places(self, iter_dims: Collection[IterDim]) -> int:
        """How often an operand is held."""
        if self.long is None:
            return 1
        return 2 if self.long in iter_dims else ROW_PANEL if self.rows in iter_dims else 1

    def _spread(self, iter_dims: Collection[IterDim], num_bytes: int) -> int:
        """A value without rows, spread over the partitions by its largest index."""
        widest = max((a.size for a in iter_dims if a not in self.parallel), default=1)
        return -(-num_bytes // min(PARTITIONS, widest))

    def _points(self, iter_dims: Collection[IterDim], whole: bool = False) -> int:
        """Points on chip of the indices along a row."""
        mine = [a for a in iter_dims if a not in self.parallel and a is not self.rows]
        long = None if whole else self.long
        return math.prod(min(COLUMN_TILE, a.size) if a is long else a.size for a in mine)
