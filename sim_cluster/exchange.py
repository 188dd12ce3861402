"""Collectives of a lock-step run: the requests of all ranks in, every rank's result delivered.

Groups follow from the call's mesh axes; the chunks move as the schedule of a group says. Which
schedule that is, the caller may decide; a ring in rank order is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from collectives.algorithms.pairwise import all_to_all, collective_permute
from collectives.algorithms.ring import ring
from collectives.buckets import execute_parts
from collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from collectives.schedule import Schedule
from compiler.diagnostics import SimulationError
from compiler.isa.program import CollectiveCall
from sim_cluster.functions import CollectiveRequest

Schedules = Callable[
    [CollectiveCall, int], Schedule
]  # (call, ranks per group) -> schedule of one group


def ring_schedules(call: CollectiveCall, size: int) -> Schedule:
    """The default: a ring in rank order, direct for all_to_all and permutes."""
    return _ring(CollectiveKind(call.kind), size, call.pairs)


@lru_cache(maxsize=256)
def _ring(kind: CollectiveKind, size: int, pairs: tuple[tuple[int, int], ...]) -> Schedule:
    if kind is CollectiveKind.ALL_TO_ALL:
        return all_to_all(size)
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return collective_permute(size, pairs)
    return ring(kind, [range(size)])


def exchange(
    requests: Sequence[CollectiveRequest],
    mesh: Mapping[str, int],
    schedules: Schedules = ring_schedules,
) -> None:
    """Run the collective all ranks of `mesh` wait for, and deliver.

    Raises SimulationError when ranks wait for different collectives, or the collective cannot be.
    """
    call = requests[0].call
    for rank, request in enumerate(requests):
        if request.call is not call and request.call.met != call.met:
            raise SimulationError(
                "SW_SIM_LOCK_STEP",
                f"rank {rank} waits for {request.call.name or request.call.kind}"
                f" while rank 0 waits for {call.name or call.kind}",
            )
    try:
        groups = _groups(tuple(mesh.items()), call.axes)
        for group in groups.groups:
            _run_group(call, [requests[r] for r in group], schedules)
    except CollectiveError as error:
        raise SimulationError(
            "SW_SIM_COLLECTIVE", f"{call.kind} {call.name} over {call.axes}: {error}"
        ) from error


@lru_cache(maxsize=256)
def _groups(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> ReplicaGroups:
    return ReplicaGroups.from_axes(dict(mesh), axes)


def _run_group(
    call: CollectiveCall, members: Sequence[CollectiveRequest], schedules: Schedules
) -> None:
    if len(members) == 1:
        members[0].deliver(members[0].source)
        return
    results = execute_parts(
        schedules(call, len(members)),
        [m.source for m in members],
        call.parts or (call.source_shape,),
        reduction=call.reduction or "add",
    )
    for member, result in zip(members, results, strict=True):
        member.deliver(result)
