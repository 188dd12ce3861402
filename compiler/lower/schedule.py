"""Order of kernels: as in the program, except that collectives start early and are awaited late.

A collective starts as soon as its source is stored and is awaited right before the first kernel
that needs its result or the memory it uses; in between, other kernels run. What only stores its
result for other functions comes behind what computes with it. Those over pipeline stages start in
program order, which all stages share. Where it is known how long everything takes, other orders are
offered in which code waits less (`latency.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.topological import topological
from shardwright.compiler.lower.group import Groups
from shardwright.compiler.lower.latency import Hiding, queue_of
from shardwright.compiler.lower.order import inverted
from shardwright.compiler.lower.task import COLLECTIVE, CONTRACT, WRITE, Task
from shardwright.compiler.lower.tokens import DependencyTokens
from shardwright.compiler.support.walks import reached

Rank = tuple[bool, bool, float]
Tasks = Mapping[int, Sequence[Task]]
"""The tasks of each kernel, in a runnable order."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A step of the function: run `kernel`, or wait for the collective that it is."""

    kernel: int
    wait: bool = False


class Orders:
    """Orders of kernels; collectives are alone in theirs."""

    def __init__(self, groups: Groups) -> None:
        tasks = {kernel: groups.tasks(part.members) for kernel, part in groups.parts.items()}
        before = _with_late_stores(_kernels(groups.order.before, tasks), tasks)
        self._finished = _kernels(groups.order.finished, tasks)
        self._queues = {k: queue_of(own[0].op) for k, own in tasks.items() if _flies(own)}
        self._ranked, self._given = _in_program_order(before, tasks)

    def in_program(self) -> list[Slot]:
        """Steps in the order of the program."""
        return _slots(self._given, self._finished, self._queues)

    @property
    def idle(self) -> Collection[int]:
        """Collectives for other layers (`_idle`), which a second stream would serve."""
        return self._ranked.idle & self._queues.keys()

    def hiding(self, times: Mapping[int, float]) -> Iterator[list[Slot]]:
        """Steps in other orders, in which code that takes so long runs beside collectives for which
        it would have to wait.
        """
        if not self._queues:
            return
        hiding = Hiding(self._ranked.before, self._finished, times, self._queues)
        in_program = {kernel: at for at, kernel in enumerate(self._given)}
        critical = {kernel: -tail for kernel, tail in hiding.tails(self._given).items()}
        found = [self._given]
        for place in (in_program, critical):
            order = hiding.order(self._ranked.rank(place))
            if order not in found:
                found.append(order)
                yield _slots(order, self._finished, self._queues)


def _slots(
    order: Sequence[int], finished: Mapping[int, set[int]], flying: Collection[int]
) -> list[Slot]:
    """Kernels in order, each behind the waits for collectives that it needs."""
    slots: list[Slot] = []
    in_flight: list[int] = []
    for kernel in order:
        for waited in [c for c in in_flight if c in finished[kernel]]:
            slots.append(Slot(waited, wait=True))
            in_flight.remove(waited)
        slots.append(Slot(kernel))
        if kernel in flying:
            in_flight.append(kernel)
    return slots + [Slot(c, wait=True) for c in in_flight]


def _kernels(earlier: Callable[[Task], set[int]], tasks: Tasks) -> dict[int, set[int]]:
    """Per kernel, the other kernels with tasks that are `earlier` than one of its own."""
    kernel_of = {task.number: k for k, own in tasks.items() for task in own}
    return {
        k: {kernel_of[n] for task in own for n in earlier(task)} - {k} for k, own in tasks.items()
    }


def _with_late_stores(before: Mapping[int, set[int]], tasks: Tasks) -> dict[int, set[int]]:
    """`before`, with stores of what a collective makes for other functions behind all that computes
    with it: code would else wait for the collective only to copy its result.
    """
    after = inverted(before)
    stores = {
        k for k, own in tasks.items() if not after[k] and all(t.op.name == WRITE for t in own)
    }
    late = {k: set(earlier) for k, earlier in before.items()}
    for kernel in stores:
        for made in before[kernel]:
            if _flies(tasks[made]):
                late[kernel] |= set(after[made]) - stores
    return late


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Kernels, those each waits for, and what makes one the next among the ready: collectives and
    what feeds them (`urgent`) first, those that no contraction waits for (`idle`) last of these.
    """

    before: Mapping[int, set[int]]
    urgent: set[int]
    idle: set[int]

    def rank(self, place: Mapping[int, float]) -> dict[int, Rank]:
        """The rank of every kernel, of which the lowest comes first; `place` tells those apart that
        are of a kind.
        """
        return {k: (k not in self.urgent, k in self.idle, place[k]) for k in self.before}

    def listed(self, place: Mapping[int, float]) -> list[int]:
        """Kernels in dependency order by rank alone."""
        rank = self.rank(place)
        found = topological(self.before, lambda k: (*rank[k], k))
        assert len(found) == len(self.before), "kernels wait for each other"
        return found


def _in_program_order(before: Mapping[int, set[int]], tasks: Tasks) -> tuple[_Ranked, list[int]]:
    """Kernels in dependency order: ready collectives (and what feeds them) first, in the order
    their results are needed, else the one that comes first in the program. Collectives that give
    way are behind the tokens they wait for.
    """
    after = inverted(before)
    urgent, idle = _urgent(after, tasks), _idle(after, tasks)
    idle |= {k for k in urgent if idle.issuperset(after[k])}
    ranked = _Ranked(before, urgent, idle)
    place = {k: max(task.number for task in own) for k, own in tasks.items()}
    order = ranked.listed(place)
    at = {kernel: number for number, kernel in enumerate(order)}
    needed = {k: min((at[x] for x in after[k]), default=len(order)) for k in order}
    for kernel in reversed(order):
        if kernel in urgent:
            needed[kernel] = min(
                (needed[x] for x in after[kernel] if x in urgent), default=needed[kernel]
            )
            place[kernel] = needed[kernel]
    order = ranked.listed(place)
    tokens = DependencyTokens(tasks, order, before, idle).tokens()
    if not tokens:
        return ranked, order
    behind = {k: {*earlier, tokens[k]} if k in tokens else earlier for k, earlier in before.items()}
    ranked = replace(ranked, before=behind)
    return ranked, ranked.listed(place)


def _idle(after: Mapping[int, Sequence[int]], tasks: Tasks) -> set[int]:
    """Collectives that no contraction waits for (late gradients, gathers for another layer), and
    what follows from them: streams and engines take it up last.
    """
    found: set[int] = set()
    for kernel in tasks:
        if _flies(tasks[kernel]) and kernel not in found:
            behind = reached((kernel,), after.__getitem__)
            if not any(task.kind == CONTRACT for k in behind for task in tasks[k]):
                found |= behind
    return found


def _urgent(after: Mapping[int, Sequence[int]], tasks: Tasks) -> set[int]:
    """Collectives, and single light ops that only bring a source into place for them; where a
    source is put together, all writes of its parts.
    """
    found = {k for k, own in tasks.items() if _flies(own)}
    light = {k for k, own in tasks.items() if after[k] and _is_light(own)}
    sources = {k for k in light if found.issuperset(after[k])}
    while sources:
        found |= sources
        parts = (k for k in light - found if any(t.op.name == WRITE for t in tasks[k]))
        sources = {k for k in parts if found.issuperset(after[k])}
    return found


def _flies(tasks: Sequence[Task]) -> bool:
    """Whether a kernel is a collective."""
    return tasks[0].kind == COLLECTIVE


def _is_light(tasks: Sequence[Task]) -> bool:
    """True for a single op that does not contract, and where it writes."""
    return sum(t.op.name != WRITE for t in tasks) <= 1 and all(t.kind != CONTRACT for t in tasks)
