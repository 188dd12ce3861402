"""Which tasks may be one row region: contractions together with what stands between them.

A row region walks 128 rows of one index (the row index) at a time. Every value of it has one of
four roles: a row value walks the rows; a sum adds the rows up and leaves the region, at most
converted; a panel does not know the rows and stays on chip while they pass. A contraction takes
rows and a panel to rows, or two row values to a sum. Nothing here knows what attention is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.ir.opdef import OPS
from compiler.ir.types import Value
from compiler.lower.labels import Atom, all_leaves
from compiler.lower.rule import Budget, Refusal, crowded, traffic
from compiler.lower.space import RefusedError, Space, label
from compiler.lower.strip_rule import EPILOGUE
from compiler.lower.task import CONTRACT, STRIP, WRITE, Task

if TYPE_CHECKING:
    from compiler.lower.group import Groups, Part

MIN_ROWS = 64  # with fewer rows the stationary side of the tensor engine is half idle (our choice)
PARTITIONS = 128  # documented: SBUF partitions of a NeuronCore
BLOCK = 512  # documented: columns of one moving operand of the tensor engine
ACCUMULATOR_BYTES = 4  # sums over the rows are fp32

ROW, SUM, PANEL = "row", "sum", "panel"


@dataclass(frozen=True, slots=True)
class Spans:
    """Atoms that the result and the operands of a task walk."""

    task: Task
    result: frozenset[Atom]
    operands: tuple[frozenset[Atom], ...]

    @property
    def all(self) -> frozenset[Atom]:
        """Atoms of the result and the operands."""
        return self.result.union(*self.operands)


class RowRule:
    """Growth of regions that hold contractions."""

    phase = "row"

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def may_meet(self, producer: Task, consumer: Task) -> bool:
        """Contractions, elementwise ops and reductions meet each other."""
        if not (producer.fusable and consumer.fusable) or producer.op.name == WRITE:
            return False
        return {producer.kind, consumer.kind} <= {STRIP, CONTRACT}

    def refusal(self, groups: Groups, a: Part, b: Part) -> Refusal | None:
        """Why two regions may not be one; None when they may."""
        tasks = groups.tasks(a.members | b.members)
        if not any(t.kind == CONTRACT for t in tasks):
            return Refusal("kind", "no contraction among them")
        if found := crowded(groups, tasks, self.budget) or self._too_intense(groups, a, b):
            return found
        try:
            space = label(groups.body, tasks)
        except RefusedError as error:
            return Refusal(error.rule, str(error))
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
        flops = sum(_flops(groups.body.tasks[n]) for p in (a, b) if p.phase != self.phase
                    for n in p.members)  # fmt: skip
        ratio, limit = flops / saved, self.budget.intensity
        if ratio <= limit:
            return None
        return Refusal("intensity", f"{ratio:.0f} flop per byte kept, limit {limit}")

    def _with_rows(
        self, groups: Groups, space: Space, spans: Sequence[Spans], rows: Atom
    ) -> Refusal | None:
        """Why the region cannot walk `rows`."""
        roles = {s.task.result: _role(s, rows) for s in spans}
        members = {s.task.number for s in spans}
        for one in spans:
            after = roles.get(space.body.base(one.task.data[0])[0]) == SUM
            if one.task.op.name in EPILOGUE and after:
                roles[one.task.result] = SUM
                continue
            why = _misfit(groups, members, one, roles[one.task.result], rows)
            if why is not None:
                return Refusal("rows", f"{one.task.op.name}: {why}")
        need = _Memory(groups, space, spans, roles, rows).peak()
        if need <= self.budget.row_bytes:
            return None
        limit = self.budget.row_bytes
        return Refusal("budget", f"{rows.size} rows take {need} bytes on chip, limit {limit}")


def _saved(groups: Groups, a: Part, b: Part) -> float:
    """HBM bytes that one region moves less than two. The write of a value that still has readers
    elsewhere counts by the share of readers that are now inside: the others may follow.
    """
    union = a.members | b.members
    saved: float = traffic(groups, a.members) + traffic(groups, b.members)
    saved -= traffic(groups, union)
    for number in a.members:
        task = groups.body.tasks[number]
        users = groups.users(task)
        if groups.is_stored(task, union) and not groups.is_kept(task):
            inside = sum(u in b.members for u in users)
            saved += task.result.type.num_bytes * inside / len(users)
    return saved


def _flops(task: Task) -> int:
    return OPS[task.op.name].flops(task.op) if task.kind == CONTRACT else 0


def _spans(space: Space, task: Task) -> Spans:
    operands = tuple(frozenset(all_leaves(space.operand(task, k))) for k in range(len(task.data)))
    return Spans(task, frozenset(all_leaves(space.results[task.result])), operands)


def _candidates(spans: Sequence[Spans]) -> list[Atom]:
    """Large atoms that all contractions walk, the largest first."""
    shared: frozenset[Atom] | None = None
    for one in spans:
        if one.task.kind == CONTRACT:
            shared = one.all if shared is None else shared & one.all
    return sorted((a for a in shared or () if a.size >= MIN_ROWS), key=lambda a: -a.size)


def _role(one: Spans, rows: Atom) -> str:
    if rows in one.result:
        return ROW
    return SUM if any(rows in operand for operand in one.operands) else PANEL


def _misfit(
    groups: Groups, members: Collection[int], one: Spans, role: str, rows: Atom
) -> str | None:
    """Why a task cannot play its role."""
    task = one.task
    if role == ROW:
        both = all(rows in operand for operand in one.operands)
        return "both operands walk the rows" if task.kind == CONTRACT and both else None
    if role == PANEL:
        if task.kind == CONTRACT or task.op.name == "reduce":
            return "does not walk the rows"
        stored = groups.is_stored(task, members)
        return "does not walk the rows and is needed elsewhere" if stored else None
    if task.kind != CONTRACT and task.op.attrs.kind != "add":
        return "combines the rows by something else than a sum"
    used = [u for u in groups.users(task) if u in members]
    plain = all(groups.body.tasks[u].op.name in EPILOGUE for u in used)
    return None if plain else "adds up all rows before they are used again"


def _columns(one: Spans, rows: Atom) -> frozenset[Atom]:
    """Atoms of a contraction that its moving side walks: free in the panel of a row contraction, or
    in one operand of a sum. They are never looped one by one.
    """
    if one.task.kind != CONTRACT:
        return frozenset()
    lhs, rhs = one.operands
    if rows in one.result:
        panel, other = (rhs, lhs) if rows in lhs else (lhs, rhs)
        return (panel - other) & one.result
    return (lhs ^ rhs) & one.result


class _Memory:
    """Bytes per partition of a row region, by the lowering study's model: panels and accumulators
    stay; a row value lives as a block of columns, or whole when a sum over its columns comes
    between its making and its use.
    """

    def __init__(
        self,
        groups: Groups,
        space: Space,
        spans: Sequence[Spans],
        roles: dict[Value, str],
        rows: Atom,
    ) -> None:
        self.body, self.space, self.spans, self.roles, self.rows = (
            groups.body, space, spans, roles, rows,
        )  # fmt: skip
        members = {s.task.number for s in spans}
        self.used = {s.task.result: groups.is_used(s.task, members) for s in spans}
        walking = [s.all if roles[s.task.result] == SUM else s.result for s in spans]
        columns = frozenset[Atom]().union(*(_columns(s, rows) for s in spans))
        self.parallel = frozenset.intersection(*[w for w in walking if rows in w]) - columns

    def peak(self) -> int:
        """Resident bytes and the largest sum of live rows."""
        made = self._made()
        last: dict[Value, int] = {}
        for i, one in enumerate(self.spans):
            last.update({self.body.base(v)[0]: i for v in one.task.data})
        live: dict[Value, int] = {}
        resident: dict[Value, int] = {}
        highest = 0
        for i, one in enumerate(self.spans):
            self._take_in(one, made, live, resident)
            highest = max(highest, sum(live.values()))
            live = {v: n for v, n in live.items() if last.get(v, -1) > i}
        return highest + sum(resident.values())

    def _take_in(
        self,
        one: Spans,
        made: dict[Value, tuple[int, int]],
        live: dict[Value, int],
        resident: dict[Value, int],
    ) -> None:
        """Add what a task reads and makes."""
        task = one.task
        for value, atoms in [*zip(task.data, one.operands, strict=True), (task.result, one.result)]:
            base = self.body.base(value)[0]
            if self.body.is_free(value):
                continue
            size = value.type.dtype.bytes
            if self.rows in atoms:
                live[base] = self._row_bytes(atoms, size, *made.get(base, (0, 0)))
            elif self.roles.get(base) == SUM:
                resident[base] = self._spread_bytes(atoms, ACCUMULATOR_BYTES)
            else:
                resident[base] = self._spread_bytes(atoms, size)

    def _made(self) -> dict[Value, tuple[int, int]]:
        """Per value, after how many inner sums it is made and last used."""
        phase: dict[Value, int] = {}
        latest: dict[Value, int] = {}
        for one in self.spans:
            bases = [self.body.base(v)[0] for v in one.task.data]
            now = max((phase.get(b, 0) for b in bases), default=0)
            for base in bases:
                latest[base] = max(latest.get(base, 0), now)
            result = one.task.result
            sums = one.task.kind == CONTRACT or one.task.op.name == "reduce"
            phase[result] = now + (sums and self.used[result])
        return {v: (phase.get(v, 0), latest.get(v, 0)) for v in (*phase, *latest)}

    def _row_bytes(self, atoms: Collection[Atom], size: int, made: int, used: int) -> int:
        whole = size * self._points(atoms)
        return whole if used > made else min(whole, size * BLOCK)

    def _spread_bytes(self, atoms: Collection[Atom], size: int) -> int:
        """A value without rows, spread over the partitions by its largest index."""
        widest = max((a.size for a in atoms if a not in self.parallel), default=1)
        return -(-size * self._points(atoms) // min(PARTITIONS, widest))

    def _points(self, atoms: Collection[Atom]) -> int:
        return math.prod(a.size for a in atoms if a not in self.parallel)
