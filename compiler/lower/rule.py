"""What a phase of growth asks before two regions become one, and how a refusal is said.

A refusal names the first rule that failed; `explain.py` shows it to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from compiler.ir.types import Value
from compiler.lower.task import Task

if TYPE_CHECKING:
    from compiler.lower.group import Groups


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why tasks may not be one region.

    `rule` is one of: cycle, kind, label, duplicated atom, rows, order, budget, streams, size,
    code, slower.
    """

    rule: str
    detail: str


class Rule(Protocol):
    """One phase of growth."""

    @property
    def phase(self) -> str:
        """Name of the phase."""

    def may_meet(self, producer: Task, consumer: Task) -> bool:
        """Whether an edge between these tasks may become internal, whatever else is there."""

    def refusal(self, groups: Groups, tasks: Sequence[Task]) -> Refusal | None:
        """Why `tasks` (dependency order) may not be one region; None when they may."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of regions.

    `strip_bytes`: what the values of 128 rows of a strip region may take per partition;
    `row_bytes`: the same for a region with contractions, panels and accumulators included.
    """

    strip_bytes: int
    row_bytes: int
    max_tasks: int = 200
    max_streams: int = 32
    """Loads and stores; keeps the DMA queues of a tile loop in proportion (assumption)."""


def count_streams(groups: Groups, tasks: Sequence[Task]) -> int:
    """Tensors read and written by a region."""
    numbers = {t.number for t in tasks}
    stores = sum(groups.is_stored(t, numbers) for t in tasks)
    return len(loaded_bases(groups, tasks)) + stores


def loaded_bases(groups: Groups, tasks: Sequence[Task]) -> set[Value]:
    """Values in memory that a region reads."""
    body, inside = groups.body, {t.result for t in tasks}
    return {body.base(v)[0] for t in tasks for v in t.data if not body.is_free(v)} - inside


def crowded(groups: Groups, tasks: Sequence[Task], budget: Budget) -> Refusal | None:
    """The refusal of a region with too many tasks or streams."""
    if len(tasks) > budget.max_tasks:
        return Refusal("size", f"{len(tasks)} operations, the limit is {budget.max_tasks}")
    streams = count_streams(groups, tasks)
    if streams > budget.max_streams:
        return Refusal("streams", f"{streams} tensors, the limit is {budget.max_streams}")
    return None
