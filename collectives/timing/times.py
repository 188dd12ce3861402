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


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """The time of one collective over all its groups, and what it used.

    Units: `total_ps = launch_ps + latency_ps + transfer_ps`. `bytes_per_rank` is the payload the
    busiest rank receives, `touch_bytes_per_rank` what its DMA reads and writes for it; `link_bytes`
    crosses the busiest directed NeuronLink, `efa_bytes` the busiest EFA device in one direction.
    `phases_ps` sum to `transfer_ps`.
    `bound` names what limits the longest phase: rank, hbm, link or efa.
    """

    total_ps: int
    launch_ps: int
    latency_ps: int
    transfer_ps: int
    algorithm: str
    why: str
    bound: str
    bytes_per_rank: int
    touch_bytes_per_rank: int
    link_bytes: int
    efa_bytes: int
    uses_efa: bool
    phases_ps: tuple[int, ...] = ()


def in_step(times: Sequence[CollectiveTime]) -> CollectiveTime:
    """One algorithm on instances that are not alike: every phase takes as long as on the slowest of
    them. `times` are what each would take if all were like it; the rest is that of the slowest.
    """
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


def closed_time(
    choice: Choice, size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> CollectiveTime:
    """Time in closed form; permutes, which have none, are counted link by link.

    Raises CollectiveError for sizes below one element.
    """
    return _timed(choice, size_bytes, element_bytes, costs, _loads_of)


def schedule_time(
    choice: Choice, size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> CollectiveTime:
    """Time of the schedules of `choice`, link by link; the oracle of `closed_time`.

    Raises CollectiveError for sizes below one element.
    """
    return _timed(choice, size_bytes, element_bytes, costs, _schedule_loads)


def _timed(
    choice: Choice,
    size_bytes: int,
    element_bytes: int,
    costs: CollectiveCosts,
    loads_of: Callable[[Choice, CollectiveCosts], Loads],
) -> CollectiveTime:
    _check_size(size_bytes, element_bytes)
    if choice.layout.group_size == 1:
        return _nothing()
    return _time(choice, loads_of(choice, costs), size_bytes, element_bytes, costs)


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
    choice: Choice, size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> tuple[tuple[int, int], ...]:
    """How long the collective keeps every link and EFA device of an instance busy, as (number,
    picoseconds), where it is busiest; what other collectives on the same wires have to share.
    """
    if choice.layout.group_size == 1:
        return ()
    return _wires(choice, _loads_of(choice, costs), size_bytes, element_bytes, costs)


def schedule_wires_ps(
    choice: Choice, size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> tuple[tuple[int, int], ...]:
    """The same, counted along the schedules; the oracle of `wires_ps`."""
    if choice.layout.group_size == 1:
        return ()
    return _wires(choice, _schedule_loads(choice, costs), size_bytes, element_bytes, costs)


def _wires(
    choice: Choice, loads: Loads, size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> tuple[tuple[int, int], ...]:
    topology = choice.layout.topology
    chunk = _chunk_bytes(loads, size_bytes, element_bytes)
    share = np.where(topology.is_efa, costs.efa_efficiency, 1.0)
    rates = (topology.bytes_per_s * share).astype(np.int64).tolist()
    busy: dict[int, int] = {}
    for number, chunks in (wire for phase in loads.phases for wire in phase.wires):
        busy[number] = busy.get(number, 0) + _ps(chunks * chunk, rates[number])
    return tuple(sorted(busy.items()))


def _loads_of(choice: Choice, costs: CollectiveCosts) -> Loads:
    """Counts in closed form; permutes, which have none, link by link."""
    permutes = choice.kind is CollectiveKind.COLLECTIVE_PERMUTE
    return (_schedule_loads if permutes else _closed_loads)(choice, costs)


def _chunk_bytes(loads: Loads, size_bytes: int, element_bytes: int) -> int:
    elements = -(-size_bytes // element_bytes)
    return -(-elements // loads.chunks_per_buffer) * element_bytes


@lru_cache(maxsize=1024)
def _closed_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    return closed_loads(choice, costs)


@lru_cache(maxsize=64)
def _schedule_loads(choice: Choice, costs: CollectiveCosts) -> Loads:
    return schedule_loads(choice, costs)


def _check_size(size_bytes: int, element_bytes: int) -> None:
    if element_bytes < 1 or size_bytes < element_bytes:
        raise CollectiveError(
            f"a collective requires at least one element of {element_bytes} B, got {size_bytes} B"
        )


def _time(
    choice: Choice, loads: Loads, size_bytes: int, element_bytes: int, costs: CollectiveCosts
) -> CollectiveTime:
    """Loads times chunk bytes, phase after phase."""
    chunk = _chunk_bytes(loads, size_bytes, element_bytes)
    busy = [_busy_ps(phase, chunk, costs) for phase in loads.phases]
    slowest = [max((ps, name) for name, ps in phase.items()) for phase in busy]
    transfer = sum(ps for ps, _ in slowest)
    copied = sum(max(c for c, _, _, _ in p.ranks) for p in loads.phases)
    reduced = sum(max(r for _, r, _, _ in p.ranks) for p in loads.phases)
    efa = sum(max((n for _, n in p.efa), default=0) for p in loads.phases)
    return CollectiveTime(
        total_ps=costs.launch_ps + loads.latency_ps + transfer,
        launch_ps=costs.launch_ps,
        latency_ps=loads.latency_ps,
        transfer_ps=transfer,
        algorithm=choice.algorithm,
        why=choice.why,
        bound=max(slowest, default=(0, "none"))[1],
        bytes_per_rank=(copied + reduced) * chunk,
        touch_bytes_per_rank=sum(map(_touches, loads.phases)) * chunk,
        link_bytes=sum(max((n for _, n in p.links), default=0) for p in loads.phases) * chunk,
        efa_bytes=efa * chunk,
        uses_efa=efa > 0,
        phases_ps=tuple(ps for ps, _ in slowest),
    )


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


def _nothing() -> CollectiveTime:
    """A group of one rank communicates nothing."""
    return CollectiveTime(
        total_ps=0,
        launch_ps=0,
        latency_ps=0,
        transfer_ps=0,
        algorithm="none",
        why="a group of one rank moves nothing",
        bound="none",
        bytes_per_rank=0,
        touch_bytes_per_rank=0,
        link_bytes=0,
        efa_bytes=0,
        uses_efa=False,
    )
