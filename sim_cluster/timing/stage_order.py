"""The stages of a pipeline, each following its own schedule, as far as what it waits for allows.

A stage runs its programs in order. Before a run it receives what other stages sent for it, after a
run it sends; sending never blocks. A collective over stages runs when all stages have come to one.
When nothing moves any more the step is a deadlock, and every stage says what it waits for. What a
run, a message and a collective do, the caller decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.neff.schedule import (
    Schedule,
    Transfer,
    counted_as,
    counted_runs,
    flat,
    run_counts,
)

Message = tuple[str, int, int]  # buffer as received, stage that receives, number of the run


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program on a stage."""

    program: str
    number: int  # among the runs that are counted as one
    label: str  # with its number where the program runs several times
    received: Sequence[Transfer]  # before it
    sent: Sequence[Transfer]  # after it


def runs_of(
    schedule: Schedule, transfers: Sequence[Transfer] = (), stage: int = 0
) -> Iterator[Run]:
    """The runs of a stage in order."""
    times, runs, done = run_counts(schedule), counted_runs(schedule), Counter[str]()
    for program in flat(schedule):
        counted = counted_as(program)
        number = done[counted]
        done[counted] += 1
        is_last = done[counted] == runs[counted]
        received = [t for t in transfers if (t.target, t.reader) == (stage, counted)]
        sent = [t for t in transfers if (t.source, t.writer) == (stage, counted)]
        yield Run(
            program,
            number,
            f"{program} {number}" if times[program] > 1 else program,
            [t for t in received if not (t.once and number)],
            [t for t in sent if is_last or not t.once],
        )


class Machine(Protocol):
    """What the stages run on."""

    def run(self, stage: int, program: str, number: int) -> Iterator[Any]:
        """Run a program for micro-batch `number`; yields its part of every collective over
        stages."""

    def join(self, parts: Sequence[Any]) -> None:
        """The collective all stages came to, with the part of each."""

    def read(self, transfer: Transfer, number: int) -> Any:
        """What a transfer sends."""

    def write(self, transfer: Transfer, number: int, data: Any) -> None:
        """Put what was received where its reader finds it."""


@dataclass(frozen=True, slots=True)
class _Receive:
    """A stage waits for a message."""

    transfer: Transfer
    message: Message

    def __str__(self) -> str:
        t = self.transfer
        before = f"run {self.message[2]} of {t.reader}"
        return f"waits for {t.received} from stage {t.source} before {before}"


@dataclass(frozen=True, slots=True)
class _Join:
    """A stage waits for the others at a collective over stages."""

    program: str
    part: Any

    def __str__(self) -> str:
        return f"waits for a collective over stages in {self.program}"


@dataclass(slots=True)
class StageOrder:
    """One step of all stages."""

    schedules: Sequence[Schedule]
    transfers: Sequence[Transfer]
    machine: Machine
    sent: dict[Message, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Run the step. Raises SimulationError (SW_SIM_DEADLOCK) when no stage can go on."""
        stages = [self._stage(number) for number in range(len(self.schedules))]
        waiting = [next(stage, None) for stage in stages]
        while any(waiting):
            moved = False
            for number, stage in enumerate(stages):
                while (w := waiting[number]) and isinstance(w, _Receive) and w.message in self.sent:
                    waiting[number] = next(stage, None)
                    moved = True
            joins = [w for w in waiting if isinstance(w, _Join)]
            if len(joins) == len(stages):
                self.machine.join([w.part for w in joins])
                waiting = [next(stage, None) for stage in stages]
            elif not moved:
                raise self._deadlock(waiting)

    def _deadlock(self, waiting: Sequence[_Receive | _Join | None]) -> SimulationError:
        who = (f"stage {n} {w or 'has ended'}" for n, w in enumerate(waiting))
        return SimulationError(
            "SW_SIM_DEADLOCK",
            f"no stage of the step can go on: {'; '.join(who)}",
            None,
            "a send was lost, or the schedules of the stages do not fit together",
        )

    def _stage(self, stage: int) -> Iterator[_Receive | _Join]:
        """The schedule of one stage, stopping wherever it may have to wait."""
        for run in runs_of(self.schedules[stage], self.transfers, stage):
            for transfer in run.received:
                message = (transfer.received, stage, run.number)
                yield _Receive(transfer, message)
                self.machine.write(transfer, run.number, self.sent.pop(message))
            for part in self.machine.run(stage, run.program, run.number):
                yield _Join(run.program, part)
            for transfer in run.sent:
                message = (transfer.received, transfer.target, 0 if transfer.once else run.number)
                self.sent[message] = self.machine.read(transfer, run.number)
