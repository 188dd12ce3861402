"""What moves in the cluster loop: classes of ranks on their way through their macro-operations, and
collectives in flight.

An `Actor` and a `Job` bank the progress they made whenever their rate changes, and say when they
end at the present one; a rate that stays the same touches nothing, so that times do not depend on
who else was looked at. Results are what the actors leave behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.isa.program import CollectiveCall
from shardwright.sim_cluster.timing.contention import NO_DEMAND, Demand
from shardwright.sim_cluster.timing.macro import MacroOp, Mark, Place, Stretch


@dataclass(frozen=True, slots=True)
class CollectiveDuration:
    """What the network says of one collective alone: time, what it takes of a core, and why."""

    duration_ps: int
    demand: Demand
    algorithm: str
    why: str
    size_bytes: int
    group_size: int


@dataclass(slots=True)
class Span:
    """An interval of one class, and what of it was charged to which category."""

    lane: str  # core, program, messages, or stream<k>
    name: str
    start_ps: int
    end_ps: int
    charged_ps: dict[str, int] = field(default_factory=dict)
    call: CollectiveCall | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """One stretch as it went."""

    stretch: Stretch
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
    placed_ps: dict[Place, dict[str, int]] = field(default_factory=dict)  # the same by place
    spans: list[Span] = field(default_factory=list)
    uses: dict[CollectiveCall, CollectiveUse] = field(default_factory=dict)
    busy_ps: dict[str, int] = field(default_factory=dict)  # per engine, over physical cores
    lone_ps: int = 0  # one physical core of a logical one works, the other has no part in it
    ran: list[Ran] = field(default_factory=list)
    last: Span | None = None  # of the core

    def spend(
        self, name: str, start_ps: int, end_ps: int, charged_ps: Mapping[str, int], place: Place
    ) -> None:
        """Charge an interval of the core; it goes on with the last one of that name."""
        found = {category: ps for category, ps in charged_ps.items() if ps}
        _add(self.charged_ps, found)
        _add(self.placed_ps.setdefault(place, {}), found)
        last = self.last
        if last and (last.name, last.end_ps) == (name, start_ps):
            last.end_ps = end_ps
            _add(last.charged_ps, found)
        elif end_ps > start_ps:
            self.last = Span("core", name, start_ps, end_ps, found)
            self.spans.append(self.last)

    def run(self, stretch: Stretch, start_ps: int, end_ps: int) -> None:
        """Keep a stretch as it went, and what its engines did."""
        self.ran.append(Ran(stretch, start_ps, end_ps))
        self.lone_ps += stretch.segment.lone_ps
        _add(self.busy_ps, stretch.segment.busy_ps)


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for category, ps in more.items():
        total[category] = total.get(category, 0) + ps


@dataclass(slots=True, eq=False)
class Job:
    """One collective or message in flight: who takes part, who has arrived, when it ends."""

    call: CollectiveCall
    cost: CollectiveDuration
    members: frozenset[int]
    queue: Hashable  # jobs of one queue of a core follow each other
    arrived: set[int] = field(default_factory=set)
    start_ps: int = -1
    end_ps: int = -1
    left: float = 1.0  # of the whole, as of `since_ps`
    rate: float = 0.0
    since_ps: int = 0
    version: int = 0

    def speed(self, rate: float, now: int) -> None:
        """Go on at another rate; `end_ps` is when it ends at this one."""
        elapsed = self.rate * (now - self.since_ps)
        if self.cost.duration_ps:
            self.left = max(0.0, self.left - elapsed / self.cost.duration_ps)
        self.rate, self.since_ps = rate, now
        self.end_ps = now + round(self.left * self.cost.duration_ps / rate)
        self.version += 1

    def skip(self, later_ps: int) -> None:
        """Be as far as it is, that much later."""
        self.start_ps += later_ps
        self.since_ps += later_ps
        self.end_ps += later_ps


@dataclass(frozen=True, slots=True)
class Wants:
    """What a core wants while it does what it does: `code` of its own, `rings` of the HBM bank with
    its collectives, on average, `claim` of it as code beside it sees it (even parts)."""

    code: Demand = NO_DEMAND
    rings: float = 0.0
    claim: float = 0.0


NO_WANTS = Wants()


class Actor:
    """One class of ranks on its way through its macro-operations."""

    def __init__(self, index: int, macros: Sequence[MacroOp]) -> None:
        self.index = index
        self.members = frozenset((index,))
        self.macros = macros
        self.position = 0
        self.factor = 1.0  # how many times as long as on a healthy core the present stretch takes
        self.left = 0.0  # of the current stretch, as a fraction
        self.since_ps = 0  # when the current rate, or the current wait, began
        self.began_ps = 0  # when the current stretch began
        self.active: list[Job] = []
        self.rates: dict[Job, float] = {}
        self.dma_share = 1.0
        self.hbm_share = 1.0
        self.wants = NO_WANTS
        self.slots: dict[int, Job] = {}
        self.queues: dict[Hashable, list[Job]] = {}
        self.waiting: Job | None = None
        self.occurrences: dict[tuple[CollectiveCall, frozenset[int], bool], int] = {}
        self.version = 0
        self.entered: tuple[str, int] = ("", 0)  # the program it is in, and since when
        self.entered_at = 0  # the position of the mark of that program
        self.runs = 0  # program runs it has begun one by one
        self.result = ClassResult()

    @property
    def stretch(self) -> Stretch | None:
        """The stretch in progress, if it is not waiting or done."""
        if self.position < len(self.macros) and self.waiting is None:
            op = self.macros[self.position]
            return op if isinstance(op, Stretch) else None
        return None

    def skip(self, places: int, later_ps: int) -> None:
        """Be as many macro-operations further, that much later."""
        self.position += places
        self.entered_at += places
        self.since_ps += later_ps
        self.began_ps += later_ps
        mark = self.macros[self.entered_at]
        assert isinstance(mark, Mark)
        self.entered = mark.name, self.entered[1] + later_ps

    def now_wants(self, bank_cores: int) -> Wants:
        """What it wants of its resources from now on, on a bank of so many cores. Code in lock step
        with other code meets it at its worst, and counts as wanting all of the bank."""
        stretch = self.stretch
        code = stretch.demand if stretch else NO_DEMAND
        collectives = sum((job.cost.demand.hbm for job in self.active), 0.0)
        claim = collectives + (bank_cores if code.hbm else 0)
        return Wants(code, collectives + code.hbm, claim)

    def begin(self, factor: float, now: int) -> None:
        """Start the stretch it has come to."""
        self.factor, self.left = factor, 1.0
        self.since_ps = self.began_ps = now

    def share(self, dma_share: float, hbm_share: float, now: int) -> bool:
        """Go on with other shares of DMA engines and HBM; False when they are the same."""
        if (dma_share, hbm_share) == (self.dma_share, self.hbm_share):
            return False
        stretch = self.stretch
        if stretch is not None:
            duration = self._duration_ps(stretch)
            if duration > 0:
                self.left = max(0.0, self.left - (now - self.since_ps) / duration)
            self.since_ps = now
        self.dma_share, self.hbm_share = dma_share, hbm_share
        return stretch is not None

    @property
    def stretch_end_ps(self) -> int:
        """When the stretch in progress ends at the present shares."""
        stretch = self.stretch
        assert stretch is not None
        return self.since_ps + round(self.left * self._duration_ps(stretch))

    def _duration_ps(self, stretch: Stretch) -> float:
        return stretch.duration_ps(self.dma_share, self.hbm_share) * self.factor
