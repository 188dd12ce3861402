"""The cluster loop: replays the macro-operations of every class of ranks and integrates their
progress.

Compute runs on the core, collectives on its streams beside it; a collective starts when every class
of its group has arrived and its stream is free. Collectives in flight and compute share DMA engines
and wires (`contention.py`), so both slow down: the loop advances from event to event at the rates
that hold between them. Every picosecond of a core is charged once: compute, memory (only DMA busy),
the axis of the collective or message it waits for, bubble while another stage has not come to that,
launch, or idle at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from compiler.diagnostics import SimulationError
from compiler.isa.program import CollectiveCall
from compiler.neff.schedule import STAGE_AXIS
from sim_cluster.classes import RankClasses
from sim_cluster.contention import DEFAULT_PACKETS, Demand, Packets, core_rates
from sim_cluster.macro import MacroOp, Receive, Send, Start, Stretch, Wait


@dataclass(frozen=True, slots=True)
class CollectiveDuration:
    """What the network says of one collective alone: time, what it takes of a core, and why."""

    duration_ps: int
    demand: Demand
    algorithm: str
    why: str
    size_bytes: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one class for the trace."""

    lane: str  # core, or stream<k>
    name: str
    start_ps: int
    end_ps: int


@dataclass(slots=True)
class CollectiveUse:
    """All runs of one collective of the step, on the last-finishing core."""

    call: CollectiveCall
    cost: CollectiveDuration
    count: int = 0
    total_ps: int = 0
    exposed_ps: int = 0


@dataclass(slots=True)
class ClassResult:
    """One class: when it finished, how its time was charged, what it did."""

    end_ps: int = 0
    charged_ps: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    uses: dict[CollectiveCall, CollectiveUse] = field(default_factory=dict)

    def charge(self, category: str, ps: int) -> None:
        """Add to a category."""
        if ps:
            self.charged_ps[category] = self.charged_ps.get(category, 0) + ps

    def cover(self, span: Span) -> None:
        """Add a span, as part of the last one where it goes on."""
        last = self.spans[-1] if self.spans else None
        if last and (last.lane, last.name, last.end_ps) == (span.lane, span.name, span.start_ps):
            self.spans[-1] = Span(span.lane, span.name, last.start_ps, span.end_ps)
        else:
            self.spans.append(span)


class _Job:
    """One collective or message in flight: who takes part, who has arrived, when it ends."""

    __slots__ = (
        "arrived",
        "call",
        "cost",
        "end_ps",
        "left",
        "members",
        "queue",
        "rate",
        "since_ps",
        "start_ps",
        "version",
    )

    def __init__(
        self,
        call: CollectiveCall,
        cost: CollectiveDuration,
        members: frozenset[int],
        queue: Hashable,
    ) -> None:
        self.call = call
        self.queue = queue  # jobs of one queue of a core follow each other
        self.cost = cost
        self.members = members
        self.arrived: set[int] = set()
        self.start_ps = -1
        self.end_ps = -1
        self.left = 1.0  # of the whole, as of `since_ps`
        self.rate = 0.0
        self.since_ps = 0
        self.version = 0

    def speed(self, rate: float, now: int) -> None:
        """Go on at another rate; `end_ps` is when it ends at this one."""
        elapsed = self.rate * (now - self.since_ps)
        if self.cost.duration_ps:
            self.left = max(0.0, self.left - elapsed / self.cost.duration_ps)
        self.rate, self.since_ps = rate, now
        self.end_ps = now + round(self.left * self.cost.duration_ps / rate)
        self.version += 1


class _Actor:
    """One class of ranks on its way through its macro-operations."""

    def __init__(self, index: int, macros: Sequence[MacroOp], speed: float) -> None:
        self.index = index
        self.macros = macros
        self.speed = speed
        self.position = 0
        self.left = 0.0  # of the current stretch, as a fraction
        self.since_ps = 0  # when the current rate began
        self.began_ps = 0  # when the current stretch began
        self.active: list[_Job] = []
        self.rates: dict[_Job, float] = {}
        self.dma_share = 1.0
        self.slots: dict[int, _Job] = {}
        self.queues: dict[Hashable, list[_Job]] = {}
        self.waiting: _Job | None = None
        self.occurrences: dict[tuple[CollectiveCall, frozenset[int], bool], int] = {}
        self.version = 0
        self.result = ClassResult()

    @property
    def stretch(self) -> Stretch | None:
        if self.position < len(self.macros):
            op = self.macros[self.position]
            return op if isinstance(op, Stretch) else None
        return None

    def share(self, packets: Packets) -> None:
        """Share the core between the collectives in flight and compute."""
        jobs = [(job.cost.demand, job.call.stream) for job in self.active]
        rates, self.dma_share = core_rates(jobs, packets) if jobs else ((), 1.0)
        self.rates = dict(zip(self.active, rates, strict=True))

    def duration_ps(self, stretch: Stretch) -> float:
        return stretch.duration_ps(self.dma_share) * self.speed


def axis_category(call: CollectiveCall, whole_axes: Mapping[str, str]) -> str:
    """The breakdown category of a collective: its axes by the names the user knows them by."""
    return "_".join(("collective", *dict.fromkeys(whole_axes.get(a, a) for a in call.axes)))


class ClusterLoop:
    """Replays all classes; `duration` prices a collective alone, `speeds` slows classes down; ranks
    of neighbouring stages of a pipeline are `stage_stride` apart. `whole_axes` names, per part of a
    mesh axis, the axis.
    """

    def __init__(
        self,
        classes: RankClasses,
        macros: Sequence[Sequence[MacroOp]],
        duration: Callable[[CollectiveCall], CollectiveDuration],
        speeds: Mapping[int, float] | None = None,
        stage_stride: int = 0,
        packets: Packets = DEFAULT_PACKETS,
        whole_axes: Mapping[str, str] | None = None,
    ) -> None:
        self.stage_stride = stage_stride
        self.whole_axes = whole_axes or {}
        self.classes = classes
        self.packets = packets
        self.duration = duration
        speeds = speeds or {}
        self.actors = [_Actor(i, m, speeds.get(i, 1.0)) for i, m in enumerate(macros)]
        self.events: list[tuple[int, int, int, int, _Job | None]] = []
        self.sequence = 0
        self.jobs: dict[tuple[CollectiveCall, frozenset[int], int], _Job] = {}
        self.costs: dict[CollectiveCall, CollectiveDuration] = {}

    def run(self) -> list[ClassResult]:
        """Results per class.

        Raises SimulationError (SW_TIME_DEADLOCK) when a collective is never joined by all, or a
        message never sent.
        """
        for actor in self.actors:
            self._proceed(actor, 0)
        while self.events:
            now, _, index, version, job = heapq.heappop(self.events)
            if job is not None:
                if job.version == version:
                    self._finished(job, now)
            elif self.actors[index].version == version:
                self._stretch_done(self.actors[index], now)
        stuck = [a.index for a in self.actors if a.position < len(a.macros)]
        if stuck:
            raise SimulationError(
                "SW_TIME_DEADLOCK",
                f"classes {stuck} wait for a collective that not every rank of its group starts,"
                " or for a message that nobody sends",
            )
        return [a.result for a in self.actors]

    def _post(self, when: int, actor: _Actor | None, job: _Job | None) -> None:
        self.sequence += 1
        index = actor.index if actor else -1
        version = actor.version if actor else job.version if job else -1
        heapq.heappush(self.events, (when, self.sequence, index, version, job))

    def _proceed(self, actor: _Actor, now: int) -> None:
        """Take macro-operations until one needs time."""
        while actor.position < len(actor.macros):
            op = actor.macros[actor.position]
            if isinstance(op, Stretch):
                actor.left, actor.since_ps, actor.began_ps = 1.0, now, now
                self._repost(actor, now)
                return
            if isinstance(op, Start):
                self._start(actor, op, now)
            elif isinstance(op, Send):
                self._send(actor, op, now)
            elif not self._passed(actor, self._awaited(actor, op), now):
                return
            actor.position += 1
        actor.result.end_ps = max(actor.result.end_ps, now)

    def _awaited(self, actor: _Actor, op: Wait | Receive) -> _Job:
        """What an actor waits for."""
        if isinstance(op, Wait):
            return actor.slots[op.slot]
        ((source, target),) = op.call.pairs
        sender = self.classes.peer(actor.index, source - target, self.stage_stride)
        return self._message(actor, op.call, (sender, actor.index), False)

    def _passed(self, actor: _Actor, job: _Job, now: int) -> bool:
        """True when a job has finished; otherwise the actor blocks."""
        if 0 <= job.end_ps <= now:
            return True
        actor.waiting = job
        actor.since_ps = now
        return False

    def _start(self, actor: _Actor, op: Start, now: int) -> None:
        members = self.classes.groups[op.call.axes][actor.index]
        job = self._job(actor, op.call, members, op.call.stream)
        job.arrived.add(actor.index)
        actor.slots[op.slot] = job
        actor.queues.setdefault(job.queue, []).append(job)
        self._try_begin(job, now)

    def _send(self, actor: _Actor, op: Send, now: int) -> None:
        """Hand a message to the link to its receiver, which takes them one by one; go on."""
        ((source, target),) = op.call.pairs
        receiver = self.classes.peer(actor.index, target - source, self.stage_stride)
        job = self._message(actor, op.call, (actor.index, receiver), True)
        job.arrived |= job.members
        for member in job.members:
            self.actors[member].queues.setdefault(job.queue, []).append(job)
        self._try_begin(job, now)

    def _message(
        self, actor: _Actor, call: CollectiveCall, ends: tuple[int, int], sends: bool
    ) -> _Job:
        """The next message of a call between two classes, as its sender or receiver sees it."""
        return self._job(actor, call, frozenset(ends), ends, sends)

    def _job(
        self,
        actor: _Actor,
        call: CollectiveCall,
        members: frozenset[int],
        queue: Hashable,
        sends: bool = False,
    ) -> _Job:
        """The next job of a call that `actor` takes part in; shared with the other members."""
        # Messages are told apart by their buffer's name; a collective is numbered per program.
        met = call.met if STAGE_AXIS in call.axes and not call.pairs else call
        number = actor.occurrences.get((met, members, sends), 0)
        actor.occurrences[met, members, sends] = number + 1
        if call not in self.costs:
            self.costs[call] = self.duration(call)
        key = (met, members, number)
        return self.jobs.setdefault(key, _Job(call, self.costs[call], members, queue))

    def _try_begin(self, job: _Job, now: int) -> None:
        """Begin when all classes have arrived and it heads the stream of each."""
        if job.start_ps >= 0 or job.arrived != job.members:
            return
        actors = [self.actors[m] for m in sorted(job.members)]
        if any(a.queues[job.queue][0] is not job for a in actors):
            return
        job.start_ps = job.since_ps = now
        for actor in actors:
            self._rate_change(actor, now)
            actor.active.append(job)
        self._share(actors, now)
        for actor in actors:
            self._repost(actor, now)

    def _share(self, actors: Sequence[_Actor], now: int) -> None:
        """Rates of all that is in flight on these cores: a collective is as fast as its slowest
        member.
        """
        for actor in actors:
            actor.share(self.packets)
        for job in dict.fromkeys(job for actor in actors for job in actor.active):
            rate = min(self.actors[m].rates[job] for m in job.members)
            if rate != job.rate:
                job.speed(rate, now)
                self._post(job.end_ps, None, job)

    def _finished(self, job: _Job, now: int) -> None:
        actors = [self.actors[m] for m in sorted(job.members)]
        job.version += 1
        for actor in actors:
            self._rate_change(actor, now)
            actor.active.remove(job)
        self._share(actors, now)
        for actor in actors:
            queue = actor.queues[job.queue]
            queue.pop(0)
            _record(actor, job)
            if actor.waiting is job:
                actor.waiting = None
                self._charge_wait(actor, job, now)
                actor.position += 1
                self._proceed(actor, now)
            elif actor.waiting in queue:  # it waited for this one to make room
                self._charge_wait(actor, job, now)
                actor.since_ps = now
            else:
                self._repost(actor, now)
            if queue:
                self._try_begin(queue[0], now)

    def _charge_wait(self, actor: _Actor, job: _Job, now: int) -> None:
        late = 0
        if STAGE_AXIS in job.call.axes:  # until the other stages come to it
            late = max(0, job.start_ps - actor.since_ps)
            actor.result.charge("bubble", late)
        exposed = now - actor.since_ps - late
        actor.result.charge(axis_category(job.call, self.whole_axes), exposed)
        actor.result.uses[job.call].exposed_ps += exposed

    def _rate_change(self, actor: _Actor, now: int) -> None:
        """Bank the progress made at the old rate."""
        stretch = actor.stretch
        if stretch is None or actor.waiting is not None:
            return
        duration = actor.duration_ps(stretch)
        if duration > 0:
            actor.left = max(0.0, actor.left - (now - actor.since_ps) / duration)
        actor.since_ps = now

    def _repost(self, actor: _Actor, now: int) -> None:
        """Announce the end of the current stretch at the current rate."""
        stretch = actor.stretch
        if stretch is None or actor.waiting is not None:
            return
        actor.version += 1
        self._post(now + round(actor.left * actor.duration_ps(stretch)), actor, None)

    def _stretch_done(self, actor: _Actor, now: int) -> None:
        stretch = actor.stretch
        assert stretch is not None
        elapsed = now - actor.began_ps
        compute = min(elapsed, round(stretch.compute_ps * actor.speed))
        actor.result.charge(stretch.charge or "compute", elapsed if stretch.charge else compute)
        actor.result.charge("memory", 0 if stretch.charge else elapsed - compute)
        actor.result.cover(Span("core", stretch.label, actor.began_ps, now))
        actor.position += 1
        self._proceed(actor, now)


def _record(actor: _Actor, job: _Job) -> None:
    use = actor.result.uses.setdefault(job.call, CollectiveUse(job.call, job.cost))
    use.count += 1
    use.total_ps += job.end_ps - job.start_ps
    name = job.call.name or f"{job.call.kind} {'_'.join(job.call.axes)}"
    lane = f"stream{job.call.stream}" if job.queue == job.call.stream else "messages"
    actor.result.spans.append(Span(lane, name, job.start_ps, job.end_ps))
    actor.result.end_ps = max(actor.result.end_ps, job.end_ps)
