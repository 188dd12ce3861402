"""The table of algorithms: moves and loads of every row follow from its steps."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.collectives.algorithms.algorithm import Algorithm, Steps
from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.algorithms.table import ALGORITHMS, by_name
from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups
from shardwright.collectives.timing.times import closed_time, wires_ps
from shardwright.collectives.topology import torus
from tests.support.collective_schedules import flat, schedule_time, schedule_wires_ps
from tests.support.machines import NOMINAL

KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
ALONG = [name for name, row in ALGORITHMS.items() if not row.sides and not row.orders]
TIER = {"ranks_per_chip": 2, "link_bytes_per_s": 10**9, "link_latency_ps": 700}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALONG)
def test_loads_and_moves_of_every_row_agree(name: str, kind: CollectiveKind) -> None:
    """Inside of an instance of eight chips in a ring, and across four instances where it may."""
    there = torus(2, 4, **TIER)
    across = torus(2, 2, instances=4, efa_bytes_per_s=10**9, efa_devices=2, **TIER)
    choices = [Choice(kind, place(there, _all(there.num_ranks)), name, "")]
    if not ALGORITHMS[name].scatter:
        layout = place(across, _all(across.num_ranks))
        choices.append(Choice(kind, layout, "hierarchical", "", "mesh", name))
    for choice in choices:
        choice.schedule().verify()
        asked = (choice, 4096, 4, NOMINAL)
        assert closed_time(*asked) == schedule_time(*asked)
        assert wires_ps(*asked) == schedule_wires_ps(*asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALONG)
def test_every_row_delivers_among_any_members_that_it_takes(
    name: str, kind: CollectiveKind
) -> None:
    taken = []
    for members in range(2, 18):
        try:
            schedule = flat(kind, name, [range(members)])
        except CollectiveError:
            continue
        schedule.verify()
        taken.append(members)
    assert len(taken) >= 4, "powers of two at least"


def _all(ranks: int) -> ReplicaGroups:
    return ReplicaGroups((tuple(range(ranks)),))


def test_a_scatter_is_the_gather_backwards_over_the_same_edges() -> None:
    """A ring gathers from i to i + 1; turned round and run backwards, so do the sums: the chunk
    that member 0 owns starts at member 1."""
    ((steps, moves),) = ALGORITHMS["ring"].moves(4, reduces=True)
    assert (steps.times, steps.blocks.shape) == (3, (4, 1))
    sent = [list(zip(*(column.tolist() for column in step), strict=True)) for step in moves]
    assert all(target == (source + 1) % 4 for step in sent for source, target, _ in step)
    assert [source for step in sent for source, _, owner in step if owner == 0] == [1, 2, 3]


def test_a_gather_that_turns_into_other_edges_needs_a_scatter_of_its_own() -> None:
    """From 0 to 1 of three, turned round and backwards, is from 1 to 2."""
    step = Steps(np.array([0]), np.array([[1]]), np.array([[0]]))
    odd = Algorithm(name="odd", gather=lambda members: [step])
    assert odd.moves(3, reduces=False)
    with pytest.raises(CollectiveError, match=r"odd requires a scatter of its own: .* 3 members"):
        odd.moves(3, reduces=True)


def test_a_name_stands_for_one_algorithm() -> None:
    with pytest.raises(ValueError, match="two algorithms are called ring"):
        by_name([ALGORITHMS["ring"], ALGORITHMS["ring"]])
    assert all(row.name == name for name, row in ALGORITHMS.items())


@pytest.mark.parametrize(("name", "members"), [("recursive", 6), ("kangaring", 5)])
def test_members_that_an_algorithm_cannot_run_over_are_refused(name: str, members: int) -> None:
    with pytest.raises(CollectiveError, match=f"requires? .*, got {members}"):
        ALGORITHMS[name].steps(members)
