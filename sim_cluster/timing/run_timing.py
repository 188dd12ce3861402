"""The cluster loop: replays the macro-operations of every class of ranks and integrates their
progress.

Compute runs on the core, collectives on its streams beside it; a collective starts when every class
of its group has arrived and its stream is free. Collectives in flight and compute share DMA
engines, wires, and with the other cores of the chip HBM (`contention.py`), so all slow down: the
loop advances from event to event at the rates that hold between them. Every picosecond of a core is
charged once: compute, memory (only DMA busy), the axis of the collective or message it waits for,
bubble while another stage has not come to that, launch, or idle at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.neff.schedule import STAGE_AXIS
from shardwright.sim_cluster.timing.actors import (
    Actor,
    ClassResult,
    CollectiveDuration,
    CollectiveUse,
    Job,
    Span,
)
from shardwright.sim_cluster.timing.classes import RankClasses
from shardwright.sim_cluster.timing.contention import (
    DEFAULT_PACKETS,
    EVEN_PART,
    Bank,
    Packets,
    bank_beside,
    core_rates,
)
from shardwright.sim_cluster.timing.faults import HEALTHY, Health, hanging
from shardwright.sim_cluster.timing.macro import (
    NOWHERE,
    MacroOp,
    Mark,
    Receive,
    Send,
    Start,
    Stretch,
    Wait,
)
from shardwright.sim_cluster.timing.steady import Event, Repeats, Steady

__all__ = ["ClassResult", "ClusterLoop", "CollectiveDuration", "CollectiveUse", "axis_category"]


def axis_category(call: CollectiveCall, whole_axes: Mapping[str, str]) -> str:
    """The breakdown category of a collective: its axes by the names the user knows them by, `host`
    for a transfer over its link."""
    if call.is_transfer:
        return "collective_host"
    return "_".join(("collective", *dict.fromkeys(whole_axes.get(a, a) for a in call.axes)))


def call_label(call: CollectiveCall) -> str:
    """What a trace calls a collective or a message."""
    return call.name or f"{call.kind} {'_'.join(call.axes)}".rstrip()


class ClusterLoop:
    """Replays all classes; `duration` prices a collective alone, for the classes of its group;
    `health` says which classes are slow or dead. Ranks of neighbouring stages of a pipeline are
    `stage_stride` apart. `whole_axes` names, per part of a mesh axis, the axis."""

    def __init__(
        self,
        classes: RankClasses,
        macros: Sequence[Sequence[MacroOp]],
        duration: Callable[[CollectiveCall, frozenset[int]], CollectiveDuration],
        health: Health = HEALTHY,
        stage_stride: int = 0,
        packets: Packets = DEFAULT_PACKETS,
        whole_axes: Mapping[str, str] | None = None,
        bank_cores: int = 1,
        repeats: Repeats | None = None,
    ) -> None:
        self.bank_cores = bank_cores
        self.stale: dict[Actor, None] = {}  # whose wants or collectives are new at this instant
        self.stage_stride = stage_stride
        self.whole_axes = whole_axes or {}
        self.classes = classes
        self.packets = packets
        self.duration = duration
        self.actors = [Actor(i, health.macros(i, m)) for i, m in enumerate(macros)]
        self.health = health
        self.delays = health.delays(classes)
        self.events: list[Event] = []
        self.sequence = 0
        self.steady = Steady(repeats, classes, self.actors) if repeats else None
        self.jobs: dict[tuple[CollectiveCall, frozenset[int], int], Job] = {}
        self.costs: dict[tuple[CollectiveCall, frozenset[int]], CollectiveDuration] = {}

    def run(self) -> list[ClassResult]:
        """Results per class.

        Raises SimulationError: SW_DEAD_CORE when ranks wait for a dead core, SW_HARDWARE_FAULT when
        one fails, SW_TIME_DEADLOCK when
        a collective is never joined by all, or a message never sent.
        """
        for actor in self.actors:
            self._proceed(actor, 0)
        self._share_rates(0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                self._take(heapq.heappop(self.events))
            self._share_rates(now)
        stuck = [a.index for a in self.actors if a.position < len(a.macros)]
        if self.health.dead or self.health.failing:
            raise hanging(self.classes, self.health, self._stuck(stuck))
        if stuck:
            raise SimulationError(
                "SW_TIME_DEADLOCK",
                f"classes {stuck} wait for a collective that not every rank of its group starts,"
                " or for a message that nobody sends",
            )
        return [a.result for a in self.actors]

    def _take(self, event: Event) -> None:
        """What happens at an event that still holds."""
        now, _, mover, version = event
        if mover.version == version:
            if isinstance(mover, Job):
                self._finished(mover, now)
            else:
                self._stretch_done(mover, now)

    def _stuck(self, stuck: Sequence[int]) -> dict[int, tuple[str, int]]:
        """What stuck classes wait for, and since when."""
        waits = {}
        for actor in (self.actors[index] for index in stuck):
            assert actor.waiting is not None
            call = actor.waiting.call
            what = f"{call.kind} over {' and '.join(call.axes)} ({call_label(call)})"
            waits[actor.index] = what, actor.since_ps
        return waits

    def _post(self, when: int, mover: Actor | Job) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (when, self.sequence, mover, mover.version))

    def _proceed(self, actor: Actor, now: int) -> None:
        """Take macro-operations until one needs time."""
        while actor.position < len(actor.macros):
            op = actor.macros[actor.position]
            if isinstance(op, Stretch):
                actor.begin(self.delays[actor.index].factor(), now)
                self._announce(actor)
                self.stale[actor] = None
                return
            if isinstance(op, Start):
                self._start(actor, op, now)
            elif isinstance(op, Send):
                self._send(actor, op, now)
            elif isinstance(op, Mark):
                _enter(actor, op, now)
                if self.steady and op.name:
                    self.steady.begin(actor)
            elif not self._passed(actor, self._awaited(actor, op), now):
                return
            actor.position += 1
        self.stale[actor] = None
        actor.result.end_ps = max(actor.result.end_ps, now)

    def _awaited(self, actor: Actor, op: Wait | Receive) -> Job:
        """What an actor waits for."""
        if isinstance(op, Wait):
            return actor.slots[op.slot]
        ((source, target),) = op.call.pairs
        sender = self.classes.peer(actor.index, source - target, self.stage_stride)
        ends = sender, actor.index
        return self._job(actor, op.call, frozenset(ends), ends)

    def _passed(self, actor: Actor, job: Job, now: int) -> bool:
        """True when a job has finished; otherwise the actor blocks."""
        if 0 <= job.end_ps <= now:
            return True
        actor.waiting = job
        actor.since_ps = now
        self.stale[actor] = None
        return False

    def _start(self, actor: Actor, op: Start, now: int) -> None:
        members = self.classes.groups[op.call.axes][actor.index]
        job = self._job(actor, op.call, members, op.call.queue)
        job.arrived.add(actor.index)
        actor.slots[op.slot] = job
        actor.queues.setdefault(job.queue, []).append(job)
        self._try_begin(job, now)

    def _send(self, actor: Actor, op: Send, now: int) -> None:
        """Hand a message to the link to its receiver, which takes them one by one; go on."""
        ((source, target),) = op.call.pairs
        receiver = self.classes.peer(actor.index, target - source, self.stage_stride)
        ends = actor.index, receiver
        job = self._job(actor, op.call, frozenset(ends), ends, sends=True)
        job.arrived |= job.members
        for member in self._members(job):
            member.queues.setdefault(job.queue, []).append(job)
        self._try_begin(job, now)

    def _job(
        self,
        actor: Actor,
        call: CollectiveCall,
        members: frozenset[int],
        queue: Hashable,
        sends: bool = False,
    ) -> Job:
        """The next job of a call that `actor` takes part in, or message that it `sends` or
        receives; shared with the other members."""
        # Messages are told apart by their buffer's name; a collective is numbered per program.
        met = call.met if STAGE_AXIS in call.axes and not call.pairs else call
        number = actor.occurrences.get((met, members, sends), 0)
        actor.occurrences[met, members, sends] = number + 1
        key = (met, members, number)
        if key not in self.jobs:
            priced = (call, members)
            if priced not in self.costs:
                self.costs[priced] = self.duration(call, members)
            self.jobs[key] = Job(call, self.costs[priced], members, queue)
        return self.jobs[key]

    def _try_begin(self, job: Job, now: int) -> None:
        """Begin when all classes have arrived and it heads the stream of each."""
        if job.start_ps >= 0 or job.arrived != job.members:
            return
        actors = self._members(job)
        if any(a.queues[job.queue][0] is not job for a in actors):
            return
        job.start_ps = job.since_ps = now
        for actor in actors:
            actor.active.append(job)
            self.stale[actor] = None

    def _members(self, job: Job) -> list[Actor]:
        return [self.actors[member] for member in sorted(job.members)]

    def _share_rates(self, now: int) -> None:
        """Share again, once all has happened that happens at this instant, where anything is new
        and where the part of an HBM bank changes with it; a collective is as fast as its slowest
        member."""
        touched = dict.fromkeys(self._with_mates(self.stale))
        self.stale = {}
        for actor in touched:
            jobs = tuple((job.cost.demand, job.call.stream) for job in actor.active)
            code, bank = actor.wants.code, self._bank(actor)
            rates, dma, hbm = core_rates(jobs, self.packets, code, bank)
            actor.rates = dict(zip(actor.active, rates, strict=True))
            if actor.share(dma, hbm, now):
                self._announce(actor)
        for job in dict.fromkeys(job for actor in touched for job in actor.active):
            rate = min(self.actors[m].rates[job] for m in job.members)
            if rate != job.rate:
                job.speed(rate, now)
                self._post(job.end_ps, job)
        if self.steady:
            self.steady.instant_over(self.events, now)

    def _with_mates(self, actors: Iterable[Actor]) -> Iterable[Actor]:
        """Actors, and those on the HBM banks of which they want more or less than before."""
        for actor in actors:
            yield actor
            wants = actor.now_wants(self.bank_cores)
            known, actor.wants = actor.wants, wants
            if (wants.rings, wants.claim) != (known.rings, known.claim):
                yield from (self.actors[mate] for mate in self.classes.mates(actor.index))

    def _bank(self, actor: Actor) -> Bank:
        """What a core may have of its bank, in even parts."""
        if self.bank_cores == 1:
            return EVEN_PART
        mates = (self.actors[mate].wants for mate in self.classes.mates(actor.index))
        return bank_beside(self.bank_cores, tuple((w.rings, w.claim) for w in mates))

    def _finished(self, job: Job, now: int) -> None:
        actors = self._members(job)
        for actor in actors:
            actor.active.remove(job)
            self.stale[actor] = None
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
            if queue:
                self._try_begin(queue[0], now)

    def _charge_wait(self, actor: Actor, job: Job, now: int) -> None:
        late = 0
        if STAGE_AXIS in job.call.axes:  # until the other stages come to it
            late = max(0, job.start_ps - actor.since_ps)
        exposed = now - actor.since_ps - late
        charged = {"bubble": late, axis_category(job.call, self.whole_axes): exposed}
        op = actor.macros[actor.position]
        place = op.place if isinstance(op, Wait) else NOWHERE
        actor.result.spend(f"wait {call_label(job.call)}", actor.since_ps, now, charged, place)
        actor.result.uses[job.call].exposed_ps += exposed

    def _announce(self, actor: Actor) -> None:
        """Say when the current stretch ends at the current rate."""
        actor.version += 1
        self._post(actor.stretch_end_ps, actor)

    def _stretch_done(self, actor: Actor, now: int) -> None:
        stretch = actor.stretch
        assert stretch is not None
        elapsed = now - actor.began_ps
        charged = {stretch.charge: elapsed}
        if not stretch.charge:
            compute = min(elapsed, round(stretch.compute_ps * actor.factor))
            charged = {"compute": compute, "memory": elapsed - compute}
        actor.result.spend(stretch.label, actor.began_ps, now, charged, stretch.place)
        actor.result.run(stretch, actor.began_ps, now)
        actor.position += 1
        self._proceed(actor, now)


def _enter(actor: Actor, mark: Mark, now: int) -> None:
    """Note the run of a program that begins, or the one that ends."""
    if not mark.name:
        name, since = actor.entered
        actor.result.spans.append(Span("program", name, since, now))
    else:
        actor.runs += 1
        actor.entered_at = actor.position
    actor.entered = (mark.name, now)


def _record(actor: Actor, job: Job) -> None:
    use = actor.result.uses.setdefault(job.call, CollectiveUse(job.call, job.cost))
    use.count += 1
    use.total_ps += job.end_ps - job.start_ps
    lane = "messages"
    if job.queue == job.call.queue:
        lane = job.call.kind if job.call.is_transfer else f"stream{job.call.stream}"
    span = Span(lane, call_label(job.call), job.start_ps, job.end_ps, call=job.call)
    actor.result.spans.append(span)
    actor.result.end_ps = max(actor.result.end_ps, job.end_ps)
