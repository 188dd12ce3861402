"""Oracle of the cluster loop: every rank on its own, exact fractions, all rates computed anew after
every event.

Nothing is folded, banked, cached or versioned: at each event the whole cluster is looked at again.
Shares come from progressive filling instead of the loop's sorted pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shardwright.compiler.isa.program import CollectiveCall
from shardwright.sim_cluster.timing.actors import CollectiveDuration
from shardwright.sim_cluster.timing.contention import Demand, Packets
from shardwright.sim_cluster.timing.macro import MacroOp, Start, Stretch, Wait


def fill(
    demands: Sequence[Fraction], weights: Sequence[Fraction], room: Fraction
) -> list[Fraction]:
    """Raise everybody's share per weight together until room or demand ends."""
    given = [Fraction(0)] * len(demands)
    hungry = [i for i, d in enumerate(demands) if d > 0]
    while hungry and room > 0:
        level = room / sum(weights[i] for i in hungry)
        level = min(level, *((demands[i] - given[i]) / weights[i] for i in hungry))
        for i in hungry:
            given[i] += level * weights[i]
        room -= level * sum(weights[i] for i in hungry)
        hungry = [i for i in hungry if given[i] < demands[i]]
    return given


@dataclass(eq=False)
class Flight:
    """A collective: who takes part, who has come, how much is left."""

    call: CollectiveCall
    cost: CollectiveDuration
    members: frozenset[int]
    arrived: set[int] = field(default_factory=set)
    left: Fraction = Fraction(1)
    runs: bool = False


@dataclass
class Rank:
    """One core: where it is in its program."""

    macros: Sequence[MacroOp]
    slow: Fraction
    position: int = 0
    left: Fraction = Fraction(1)
    slots: dict[int, Flight] = field(default_factory=dict)
    streams: dict[int, list[Flight]] = field(default_factory=dict)
    end: Fraction = Fraction(0)

    @property
    def op(self) -> MacroOp | None:
        return self.macros[self.position] if self.position < len(self.macros) else None


class FluidCluster:
    """Ranks with their groups, `banks` of ranks that share HBM, each with places for `bank_cores`,
    and slow ranks."""

    def __init__(
        self,
        macros: Sequence[Sequence[MacroOp]],
        groups: Mapping[tuple[str, ...], Sequence[Sequence[int]]],
        duration: Callable[[CollectiveCall], CollectiveDuration],
        packets: Packets,
        banks: Sequence[Sequence[int]] = (),
        slow: Mapping[int, float] | None = None,
        bank_cores: int = 1,
    ) -> None:
        self.bank_cores = bank_cores
        self.ranks = [Rank(m, Fraction((slow or {}).get(r, 1.0))) for r, m in enumerate(macros)]
        self.groups = groups
        self.duration = duration
        self.packets = packets
        self.bank = {r: tuple(b) for b in banks for r in b}
        self.met: dict[tuple[CollectiveCall, frozenset[int], int], Flight] = {}
        self.counts: dict[tuple[int, CollectiveCall], int] = {}
        self.now = Fraction(0)

    def run(self) -> list[Fraction]:
        """When every rank has finished."""
        while True:
            while any([self._step(number) for number in range(len(self.ranks))]):
                pass
            speeds = self._speeds()
            if not speeds:
                break
            wait = min(thing.left / speed for thing, speed in speeds)
            self.now += wait
            for thing, speed in speeds:
                thing.left -= wait * speed
        assert all(rank.op is None for rank in self.ranks), "deadlock"
        return [rank.end for rank in self.ranks]

    def _step(self, number: int) -> bool:
        """Whatever takes no time; True when something moved."""
        rank = self.ranks[number]
        op = rank.op
        match op:
            case Stretch() if rank.left == 0:
                rank.left = Fraction(1)
            case Start():
                self._start(number, op)
            case Wait() if rank.slots[op.slot].left == 0:
                pass
            case _:
                return False
        rank.position += 1
        if rank.op is None:
            rank.end = self.now
        return True

    def _start(self, number: int, op: Start) -> None:
        rank = self.ranks[number]
        members = next(frozenset(g) for g in self.groups[op.call.axes] if number in g)
        count = self.counts[number, op.call] = self.counts.get((number, op.call), -1) + 1
        key = (op.call, members, count)
        flight = self.met.setdefault(key, Flight(op.call, self.duration(op.call), members))
        flight.arrived.add(number)
        rank.slots[op.slot] = flight
        rank.streams.setdefault(op.call.stream, []).append(flight)

    def _flights(self, number: int) -> list[Flight]:
        """What is in flight on a core: the first of every stream for which all have come."""
        heads = []
        for queue in self.ranks[number].streams.values():
            while queue and queue[0].left == 0:
                queue.pop(0)
            heads += queue[:1]
        return [f for f in heads if self._ready(f)]

    def _ready(self, flight: Flight) -> bool:
        stream = flight.call.stream
        queues = [self.ranks[m].streams.get(stream, []) for m in flight.members]
        live = [[f for f in queue if f.left > 0] for queue in queues]
        return flight.arrived == flight.members and all(q and q[0] is flight for q in live)

    def _speeds(self) -> list[tuple[Rank | Flight, Fraction]]:
        """Progress per picosecond of all that moves."""
        flights = [self._flights(number) for number in range(len(self.ranks))]
        speeds: list[tuple[Rank | Flight, Fraction]] = []
        rates: dict[Flight, Fraction] = {}
        for number, rank in enumerate(self.ranks):
            dma, hbm, own = self._shares(number, flights)
            for flight, rate in zip(flights[number], own, strict=True):
                rates[flight] = min(rates.get(flight, rate), rate)
            if isinstance(rank.op, Stretch):
                duration = Fraction(rank.op.duration_ps(float(dma), float(hbm))) * rank.slow
                if duration == 0:
                    rank.left = Fraction(0)
                speeds.append((rank, 1 / duration if duration else Fraction(1)))
        speeds += [(f, rate / max(1, f.cost.duration_ps)) for f, rate in rates.items()]
        return speeds

    def _shares(
        self, number: int, flights: Sequence[Sequence[Flight]]
    ) -> tuple[Fraction, Fraction, list[Fraction]]:
        """Of a core: share of DMA engines and HBM of its compute, and rates of its flights."""
        own, code = flights[number], self._code(number)
        weights = [Fraction(self.packets.of(f.call.stream)) for f in own]
        weights.append(Fraction(self.packets.compute_bytes))
        wanted_dma = [*(Fraction(f.cost.demand.dma) for f in own), Fraction(code.dma)]
        dma = fill(wanted_dma, weights, Fraction(1))
        even = [Fraction(1)] * len(own)
        wires = {wire for f in own for wire, _ in f.cost.demand.wires}
        crossed = []
        for wire in sorted(wires):
            wants = [Fraction(dict(f.cost.demand.wires).get(wire, 0.0)) for f in own]
            crossed.append((fill(wants, even, Fraction(1)), wants))
        part = self._part(number, flights, averages=True)
        wanted_hbm = [*(Fraction(f.cost.demand.hbm) for f in own), Fraction(code.hbm)]
        hbm = fill(wanted_hbm, weights, part)
        rates = []
        for n, flight in enumerate(own):
            wanted = flight.cost.demand
            pairs = [(dma[n], wanted.dma), (hbm[n], wanted.hbm)]
            pairs += [(got[n], float(wants[n])) for got, wants in crossed]
            rates.append(min((got / Fraction(w) for got, w in pairs if w), default=Fraction(1)))
        dma_used = [Fraction(f.cost.demand.dma) * r for f, r in zip(own, rates, strict=True)]
        hbm_used = [Fraction(f.cost.demand.hbm) * r for f, r in zip(own, rates, strict=True)]
        left = self._part(number, flights, averages=False) - sum(hbm_used)
        return 1 - sum(dma_used), max(left, hbm[-1]), rates

    def _code(self, number: int) -> Demand:
        """What the code of a core takes on average while it runs."""
        op = self.ranks[number].op
        return op.demand if isinstance(op, Stretch) else Demand(0.0)

    def _part(self, number: int, flights: Sequence[Sequence[Flight]], averages: bool) -> Fraction:
        """What a core may have of its HBM bank, in even parts, if it asks for all of it; code on
        the other cores counts with its average or, as code sees it, with all of the bank.
        """
        mates = [member for member in self.bank.get(number, ()) if member != number]
        wanted = [Fraction(self.bank_cores)]
        for member in mates:
            code = Fraction(self._code(member).hbm)
            claim = code if averages else self.bank_cores * (code > 0)
            wanted.append(sum((Fraction(f.cost.demand.hbm) for f in flights[member]), claim))
        return fill(wanted, [Fraction(1)] * len(wanted), Fraction(self.bank_cores))[0]
