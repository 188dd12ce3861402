"""What decides how a cluster loop goes on, without absolute time: two equal states have equal
futures, as far as the macro-operations ahead are the same.

Times are relative to the instant of the state, positions to the program run a class is in. What a
class is done with (finished collectives, charges, progress of earlier stretches) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.sim_cluster.timing.actors import Actor, Job


def loop_state(
    actors: Sequence[Actor],
    pending: Iterable[tuple[int, Actor | Job]],
    now: int,
    runs: int,
) -> object:
    """The state of `actors` at `now`, when all of them have begun `runs` program runs; `pending`
    are their events in order: when, and of which class or job."""
    seen = _Jobs(now)
    states = tuple(_actor(actor, seen, now, runs) for actor in actors)
    events = [
        (when - now, seen.number(mover) if isinstance(mover, Job) else -1 - mover.index)
        for when, mover in pending
    ]
    return states, seen.states, events


class _Jobs:
    """Jobs by number, in the order in which they are met."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.numbers: dict[Job, int] = {}
        self.states: list[object] = []

    def number(self, job: Job) -> int:
        """The number of a job."""
        if job not in self.numbers:
            self.numbers[job] = len(self.numbers)
            self.states.append(self._state(job))
        return self.numbers[job]

    def _state(self, job: Job) -> object:
        begun = (job.start_ps - self.now, job.since_ps - self.now, job.end_ps - self.now)
        moving = (*begun, job.left, job.rate) if job.start_ps >= 0 else None
        return job.call, job.members, frozenset(job.arrived), moving


def _actor(actor: Actor, seen: _Jobs, now: int, runs: int) -> object:
    """The state of one class."""
    in_flight = set(actor.active)
    slots = {
        slot: seen.number(job)
        for slot, job in actor.slots.items()
        if job.start_ps < 0 or job in in_flight  # any other is done: a wait for it passes
    }
    stretch = (actor.left, actor.factor, actor.began_ps - now) if actor.stretch else None
    return (
        (actor.runs - runs, actor.position - actor.entered_at, stretch, actor.since_ps - now),
        (actor.dma_share, actor.hbm_share, actor.wants),
        actor.waiting and seen.number(actor.waiting),
        slots,
        {queue: [seen.number(job) for job in jobs] for queue, jobs in actor.queues.items() if jobs},
        [(seen.number(job), actor.rates[job]) for job in actor.active],
    )
