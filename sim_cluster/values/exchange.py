"""Collectives of a lock-step run: the requests of ranks in, every rank's result delivered.

Groups follow from the call's mesh axes; the chunks move as the schedule of a group says. Which
schedule that is, the caller may decide; a ring in rank order is the default. Where ranks live on
several hosts, each host is sent what the results of its own ranks depend on, and computes them as
one host of all would.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from shardwright.collectives.algorithms.recipe import Recipe, build
from shardwright.collectives.algorithms.ring import RING
from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.schedule import Schedule
from shardwright.collectives.values.buckets import execute_parts
from shardwright.collectives.values.execute import SPLITTING, Shape, pieces_of
from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.sim_cluster.values.functions import CollectiveRequest

# (call, ranks per group) -> schedule of one group
Schedules = Callable[[CollectiveCall, int], Schedule]
Requests = Mapping[int, CollectiveRequest]  # by rank
Payload = Sequence[np.ndarray | None]
"""What the ranks of one host send those of another, in the order of groups and their members."""


def ring_schedules(call: CollectiveCall, size: int) -> Schedule:
    """The default: a ring in rank order, direct for all_to_all and permutes."""
    kind = CollectiveKind(call.kind)
    return build(Recipe(kind, RING.name, (size,), (RING.name,), pairs=call.pairs))


def exchange(
    requests: Sequence[CollectiveRequest],
    mesh: Mapping[str, int],
    schedules: Schedules = ring_schedules,
) -> None:
    """Run the collective all ranks of `mesh` wait for, and deliver.

    Raises SimulationError when ranks wait for different collectives, or the collective cannot be.
    """
    ranks = range(len(requests))
    host = Exchange([ranks], 0, schedules)
    host.finish(dict(enumerate(requests)), ranks, mesh, [None])


class Exchange:
    """One host's part in collectives. `spans` are the ranks of every host, in order, `number` is
    which of them this is."""

    def __init__(self, spans: Sequence[range], number: int, schedules: Schedules) -> None:
        self.spans, self.number, self.schedules = spans, number, schedules
        self._starts = [span.start for span in spans]

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return bisect_right(self._starts, rank) - 1

    def sent(
        self, requests: Requests, ranks: Sequence[int], mesh: Mapping[str, int]
    ) -> list[Payload]:
        """For every host, what its ranks need of the requests here, when all of `ranks` wait for
        the same collective over axes of `mesh`."""
        sent: list[list[np.ndarray | None]] = [[] for _ in self.spans]
        call = _same_call(requests)
        for members in _members(call, ranks, mesh):
            for host, wanted in self._by_host(members):
                if host != self.number:
                    own = [(n, r) for n, r in enumerate(members) if r in requests]
                    sent[host] += [
                        _needed(call, len(members), n, requests[r].source, wanted) for n, r in own
                    ]
        return list(sent)

    def finish(
        self,
        requests: Requests,
        ranks: Sequence[int],
        mesh: Mapping[str, int],
        incoming: Sequence[Payload | None],
    ) -> None:
        """Compute what the ranks here receive, from their requests and what other hosts sent, and
        deliver it. Raises as `exchange`."""
        call = _same_call(requests)
        received = [iter(payload or ()) for payload in incoming]
        try:
            for members in _members(call, ranks, mesh):
                self._finish_group(call, members, requests, received)
        except CollectiveError as error:
            raise SimulationError(
                "SW_SIM_COLLECTIVE", f"{call.kind} {call.name} over {call.axes}: {error}"
            ) from error

    def _by_host(self, members: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The hosts of a group, each with the positions in it of its ranks."""
        found: dict[int, list[int]] = {}
        for position, rank in enumerate(members):
            found.setdefault(self.host_of(rank), []).append(position)
        yield from found.items()

    def _finish_group(
        self,
        call: CollectiveCall,
        members: Sequence[int],
        requests: Requests,
        received: Sequence[Iterator[np.ndarray | None]],
    ) -> None:
        wanted = [n for n, rank in enumerate(members) if rank in requests]
        if not wanted:
            return
        if len(members) == 1:
            requests[members[0]].deliver(requests[members[0]].source)
            return
        own = requests[members[wanted[0]]].source
        nothing = np.broadcast_to(np.zeros((), own.dtype), own.size)  # takes no memory
        sources = []
        for n, rank in enumerate(members):
            if rank in requests:
                given = _needed(call, len(members), n, requests[rank].source, wanted)
            else:
                given = next(received[self.host_of(rank)])
            sources.append(given)
        results = execute_parts(
            self.schedules(call, len(members)),
            [nothing if source is None else source for source in sources],
            _parts(call, len(members), wanted),
            reduction=call.reduction or "add",
            wanted=wanted,
        )
        for n, result in zip(wanted, results, strict=True):
            requests[members[n]].deliver(result)


def _same_call(requests: Requests) -> CollectiveCall:
    """The call of all requests. Raises SimulationError when there are several."""
    first = min(requests)
    call = requests[first].call
    for rank, request in requests.items():
        if request.call is not call and request.call.met != call.met:
            raise not_in_step(first, call, rank, request.call)
    return call


def not_in_step(
    first: int, call: CollectiveCall, rank: int, other: CollectiveCall
) -> SimulationError:
    """Two ranks wait for different collectives."""
    return SimulationError(
        "SW_SIM_LOCK_STEP",
        f"rank {rank} waits for {other.name or other.kind}"
        f" while rank {first} waits for {call.name or call.kind}",
    )


def _members(
    call: CollectiveCall, ranks: Sequence[int], mesh: Mapping[str, int]
) -> Iterator[list[int]]:
    """The ranks of every group of a call."""
    for group in _groups(tuple(mesh.items()), call.axes).groups:
        yield [ranks[position] for position in group]


def _needed(
    call: CollectiveCall, size: int, position: int, source: np.ndarray, wanted: Sequence[int]
) -> np.ndarray | None:
    """What of a source the results of the positions `wanted` of its group depend on."""
    kind = CollectiveKind(call.kind)
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        read = any(s == position and t in wanted for s, t in call.pairs)
        return source if read else None
    if kind not in SPLITTING or len(wanted) == size:
        return source
    flat, at, found = source.reshape(-1), 0, []
    for part in call.shapes:
        end = at + math.prod(part)
        found.append(pieces_of(kind, flat[at:end].reshape(part), size, wanted).reshape(-1))
        at = end
    return np.concatenate(found)


def _parts(call: CollectiveCall, size: int, wanted: Sequence[int]) -> list[Shape]:
    """The parts of what `_needed` leaves of a source."""
    if CollectiveKind(call.kind) not in SPLITTING or len(wanted) == size:
        return list(call.shapes)
    return [(outer, dim // size * len(wanted), inner) for outer, dim, inner in call.shapes]


@lru_cache(maxsize=256)
def _groups(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> ReplicaGroups:
    return ReplicaGroups.from_axes(dict(mesh), axes)
