"""Time of a chosen algorithm, in integer picoseconds, without contention from anything but itself.

time = launch + longest chain of hops + per phase the slowest of: the rank's own copy or reduce
path, its part of HBM, the busiest link, the busiest EFA device (formula inferred from the intra-
and inter-node collectives pages: steps x hop + bytes / bandwidth). Counts come from `loads.py`,
either link by link or in closed form; both give the same picoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.costs import CollectiveCosts
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.timing.loads import Loads, PhaseLoad, closed_loads, schedule_loads

PS_PER_S = 10**12
COPY_TOUCHES, REDUCE_TOUCHES = 2, 3  # inferred: read + write; two reads + write
LoadsOf = Callable[[Choice, CollectiveCosts], Loads]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """The time of one collective over all its groups, and what it used.

    Units: `total_ps = launch_ps + latency_ps + transfer_ps`. `touch_bytes_per_rank` is what the DMA
    of the busiest rank reads and writes. `phases_ps` sum to `transfer_ps`.
    `bound` names what limits the longest phase: rank, hbm, link or efa.
    """

    total_ps: int
    launch_ps: int
    latency_ps: int
    transfer_ps: int
    algorithm: str
    why: str
    bound: str
    touch_bytes_per_rank: int
    phases_ps: tuple[int, ...] = ()


_NOTHING = CollectiveTime(
    total_ps=0,
    launch_ps=0,
    latency_ps=0,
    transfer_ps=0,
    algorithm="none",
    why="a group of one rank moves nothing",
    bound="none",
    touch_bytes_per_rank=0,
)


def in_step(times: Sequence[CollectiveTime]) -> CollectiveTime:
    """One algorithm on instances that are not alike: every phase takes as long as on the slowest of
    them. `times` are what each would take if all were like it; the rest is that of the slowest."""
    phases = tuple(map(max, zip(*(time.phases_ps for time in times), strict=True)))
    slowest = max(times, key=lambda time: time.total_ps)
    latency, transfer = max(time.latency_ps for time in times), sum(phases)
    return replace(
        slowest,
        total_ps=slowest.launch_ps + latency + transfer,
        latency_ps=latency,
        transfer_ps=transfer,
        phases_ps=phases,
    )


@lru_cache(maxsize=1024)
def loads_of(choice: Choice, costs: CollectiveCosts) -> Loads:
    """Counts in closed form; permutes, which have none, link by link."""
    permutes = choice.kind is CollectiveKind.COLLECTIVE_PERMUTE
    return (schedule_loads if permutes else closed_loads)(choice, costs)


def closed_time(
    choice: Choice,
    size_bytes: int,
    element_bytes: int,
    costs: CollectiveCosts,
    counted: LoadsOf = loads_of,
) -> CollectiveTime:
    """Loads times chunk bytes, phase after phase; loads in closed form unless `counted` otherwise.

    Raises CollectiveError for sizes below one element.
    """
    if element_bytes < 1 or size_bytes < element_bytes:
        raise CollectiveError(
            f"a collective requires at least one element of {element_bytes} B, got {size_bytes} B"
        )
    if choice.layout.group_size == 1:
        return _NOTHING
    loads = counted(choice, costs)
    chunk = _chunk_bytes(loads, size_bytes, element_bytes)
    busy = [_busy_ps(phase, chunk, costs) for phase in loads.phases]
    slowest = [max((ps, name) for name, ps in phase.items()) for phase in busy]
    transfer = sum(ps for ps, _ in slowest)
    return CollectiveTime(
        total_ps=costs.launch_ps + loads.latency_ps + transfer,
        launch_ps=costs.launch_ps,
        latency_ps=loads.latency_ps,
        transfer_ps=transfer,
        algorithm=choice.algorithm,
        why=choice.why,
        bound=max(slowest, default=(0, "none"))[1],
        touch_bytes_per_rank=sum(map(_touches, loads.phases)) * chunk,
        phases_ps=tuple(ps for ps, _ in slowest),
    )


def bus_bytes_per_s(kind: CollectiveKind, num_ranks: int, size_bytes: int, time_ps: int) -> float:
    """Bus bandwidth as the published tables print it.

    Source: documented: factor 2(r-1)/r for all_reduce, 1 for permutes, else (r-1)/r (nccom-test
    page).
    """
    factor = (num_ranks - 1) / num_ranks
    if kind is CollectiveKind.ALL_REDUCE:
        factor *= 2
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        factor = 1.0
    return size_bytes * factor * PS_PER_S / time_ps


def wires_ps(
    choice: Choice,
    size_bytes: int,
    element_bytes: int,
    costs: CollectiveCosts,
    counted: LoadsOf = loads_of,
) -> tuple[tuple[int, int], ...]:
    """How long the collective keeps every link and EFA device of an instance busy, as (number,
    picoseconds), where it is busiest; what other collectives on the same wires have to share."""
    if choice.layout.group_size == 1:
        return ()
    topology, loads = choice.layout.topology, counted(choice, costs)
    chunk = _chunk_bytes(loads, size_bytes, element_bytes)
    share = np.where(topology.is_efa, costs.efa_efficiency, 1.0)
    rates = (topology.bytes_per_s * share).astype(np.int64).tolist()
    busy: dict[int, int] = {}
    for number, chunks in (wire for phase in loads.phases for wire in phase.wires):
        busy[number] = busy.get(number, 0) + _ps(chunks * chunk, rates[number])
    return tuple(sorted(busy.items()))


def _chunk_bytes(loads: Loads, size_bytes: int, element_bytes: int) -> int:
    elements = -(-size_bytes // element_bytes)
    return -(-elements // loads.chunks_per_buffer) * element_bytes


def _touches(phase: PhaseLoad) -> int:
    """How many chunks the busiest rank reads and writes."""
    return max(COPY_TOUCHES * c + REDUCE_TOUCHES * r + e for c, r, _, e in phase.ranks)


def _busy_ps(phase: PhaseLoad, chunk: int, costs: CollectiveCosts) -> dict[str, int]:
    """How long a phase keeps the busiest rank, its part of HBM, link and EFA device busy."""
    copy, reduce = costs.rank_copy_bytes_per_s, costs.rank_reduce_bytes_per_s
    rank = max(
        max(
            _ps(c * chunk, copy) + _ps(r * chunk, reduce) + _ps(e * chunk, COPY_TOUCHES * copy),
            _ps(s * chunk, copy),
        )
        for c, r, s, e in phase.ranks
    )
    link = max((_ps(n * chunk, rate) for rate, n in phase.links), default=0)
    efa = max(
        (_ps(n * chunk, int(rate * costs.efa_efficiency)) for rate, n in phase.efa), default=0
    )
    hbm = _ps(_touches(phase) * chunk, costs.rank_hbm_bytes_per_s)
    return {"efa": efa, "hbm": hbm, "link": link, "rank": rank}


def _ps(num_bytes: int, bytes_per_s: int) -> int:
    """Picoseconds, rounded up."""
    return -(-num_bytes * PS_PER_S // bytes_per_s)
