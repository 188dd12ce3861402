"""Every move of every algorithm over a few ranks, written down by hand from its description.

A move is `source>target:chunk`; moves of one step stand on one line. Sources: the pages on
collectives inside and across instances; Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005), for rings and for halving and doubling.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.collectives.algorithms.pairwise import all_to_all, collective_permute
from shardwright.collectives.algorithms.tiers import tiers
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Charge, Schedule
from shardwright.collectives.values.execute import _assign_rows, _plan
from tests.support.collective_schedules import flat, rendered

GATHER, REDUCE, SCATTER = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
)


def moves(schedule: Schedule) -> list[str]:
    """One line per step, `+` in front where targets add; moves in order of source and target."""
    lines = []
    for step in schedule.steps():
        rows = zip(step.source.tolist(), step.target.tolist(), step.chunk.tolist(), strict=True)
        line = " ".join(f"{s}>{t}:{c}" for s, t, c in sorted(rows))
        lines.append(f"+ {line}" if step.reduce else line)
    return lines


# Everyone passes on what it got last, its own first: three steps for four ranks.
RING_OF_4 = [
    "0>1:0 1>2:1 2>3:2 3>0:3",
    "0>1:3 1>2:0 2>3:1 3>0:2",
    "0>1:2 1>2:3 2>3:0 3>0:1",
]
# The sum for rank 0 begins at rank 1 and goes round once.
RING_OF_3_SUMS = ["+ 0>1:2 1>2:0 2>0:1", "+ 0>1:1 1>2:2 2>0:0"]


def test_a_ring_gathers() -> None:
    assert moves(flat(GATHER, "ring", [range(4)])) == RING_OF_4


def test_a_ring_scatters_sums_and_reduces_in_both_halves() -> None:
    assert moves(flat(SCATTER, "ring", [range(3)])) == RING_OF_3_SUMS
    gathered = ["0>1:0 1>2:1 2>0:2", "0>1:2 1>2:0 2>0:1"]
    assert moves(flat(REDUCE, "ring", [range(3)])) == RING_OF_3_SUMS + gathered


def test_two_rings_carry_half_of_every_chunk_each() -> None:
    """Chunk 2 * owner + part: part 0 goes 0, 1, 2, part 1 goes 2, 1, 0."""
    assert moves(flat(GATHER, "ring", [(0, 1, 2), (2, 1, 0)])) == [
        "0>1:0 0>2:1 1>0:3 1>2:2 2>0:4 2>1:5",
        "0>1:4 0>2:3 1>0:5 1>2:0 2>0:2 2>1:1",
    ]


def test_a_mesh_takes_one_step_each_way() -> None:
    assert moves(flat(GATHER, "mesh", [range(3)])) == ["0>1:0 0>2:0 1>0:1 1>2:1 2>0:2 2>1:2"]
    assert moves(flat(REDUCE, "mesh", [range(3)])) == [
        "+ 0>1:1 0>2:2 1>0:0 1>2:2 2>0:0 2>1:1",
        "0>1:0 0>2:0 1>0:1 1>2:1 2>0:2 2>1:2",
    ]


def test_the_single_step_sends_whole_buffers() -> None:
    assert moves(flat(REDUCE, "single_step_mesh", [range(2)])) == ["+ 0>1:0 0>1:1 1>0:0 1>0:1"]
    (line,) = moves(flat(REDUCE, "single_step_mesh", [range(3)]))
    assert len(line.split()) - 1 == 3 * 2 * 3 and "2>1:0 2>1:1 2>1:2" in line


def test_doubling_and_halving() -> None:
    """Partners at distance 1, then 2, with what they have; the sums the other way round."""
    assert moves(flat(GATHER, "recursive", [range(4)])) == [
        "0>1:0 1>0:1 2>3:2 3>2:3",
        "0>2:0 0>2:1 1>3:0 1>3:1 2>0:2 2>0:3 3>1:2 3>1:3",
    ]
    assert moves(flat(SCATTER, "recursive", [range(4)])) == [
        "+ 0>2:2 0>2:3 1>3:2 1>3:3 2>0:0 2>0:1 3>1:0 3>1:1",
        "+ 0>1:1 1>0:0 2>3:3 3>2:2",
    ]


def test_tiers_gather_across_and_then_inside() -> None:
    """Two instances of two ranks: rank i with rank i of the other instance, then both chunks to the
    neighbour; sums the other way round."""
    grid = np.arange(4).reshape(2, 2)
    across, inside = "0>2:0 1>3:1 2>0:2 3>1:3", "0>1:0 0>1:2 1>0:1 1>0:3 2>3:0 2>3:2 3>2:1 3>2:3"
    for patterns in (("ring", "mesh"), ("mesh", "ring"), ("recursive", "mesh")):
        assert moves(tiers(GATHER, grid, patterns, [range(2)])) == [across, inside]
    assert moves(tiers(SCATTER, grid, ("ring", "mesh"))) == [
        "+ 0>1:1 0>1:3 1>0:0 1>0:2 2>3:1 2>3:3 3>2:0 3>2:2",
        "+ 0>2:2 1>3:3 2>0:0 3>1:1",
    ]


def test_kangaring_moves_every_second_rank_for_its_neighbour() -> None:
    """Pairs 0, 1 and 2, 3. The first of a pair takes its neighbour's chunk in, both chunks go round
    the ring of firsts, and the neighbour gets a copy of all but its own."""
    schedule = tiers(GATHER, np.arange(4).reshape(1, 4), ("ring", "kangaring"), [range(4)])
    assert moves(schedule) == [
        "1>0:1 3>2:3",
        "0>2:0 0>2:1 2>0:2 2>0:3",
        "0>1:0 0>1:2 0>1:3 2>3:0 2>3:1 2>3:2",
    ]
    charges = [Charge.NOTHING, Charge.MOVE, Charge.WRITE]
    assert [phase.charge for phase in schedule.phases] == charges
    schedule = tiers(SCATTER, np.arange(4).reshape(1, 4), ("ring", "kangaring"), [range(4)])
    assert moves(schedule) == [
        "+ 1>0:0 1>0:1 1>0:2 1>0:3 3>2:0 3>2:1 3>2:2 3>2:3",
        "+ 0>2:2 0>2:3 2>0:0 2>0:1",
        "0>1:1 2>3:3",
    ]
    charges = [Charge.READ, Charge.MOVE, Charge.WRITE]
    assert [phase.charge for phase in schedule.phases] == charges


def test_direct_exchanges() -> None:
    """Piece `3 * source + target` of an all_to_all; whole sources of a permute."""
    assert moves(all_to_all(3)) == ["0>1:1 0>2:2 1>0:3 1>2:5 2>0:6 2>1:7"]
    assert moves(collective_permute(4, [(0, 2), (3, 0), (1, 1)])) == ["0>2:0 3>0:3"]


def test_an_exchange_is_shown_in_the_order_of_ranks_nearest_successors_first() -> None:
    """By distance: 0, 1 and 2 to the next one, then to the one after that."""
    assert rendered(all_to_all(3)).splitlines() == [
        "pairwise all_to_all: 3 ranks, 1 parts, 1 steps, 6 moves",
        "  exchange (copy, 1 steps)",
        "    0: 0>1:1 1>2:5 2>0:6 0>2:2 1>0:3 2>1:7",
    ]


def test_where_ranks_keep_what_they_send_and_get() -> None:
    """What is sent is in front: of a permute at 0, of an all_to_all of three at the number of its
    target. Behind it is what comes in: at 1, and at 3 plus the number of its source. What all
    ranks have in the end lies by its number."""
    ranks = np.array([0, 1, 2, 0, 2])
    permute = collective_permute(3, [(0, 2)])
    assert permute.slot(ranks, np.array([0, 1, 0, 2, 2])).tolist() == [0, 0, 1, 1, 0]
    exchange = all_to_all(3)  # chunk 3 * source + target
    assert exchange.slot(ranks, np.array([1, 5, 6, 3, 2])).tolist() == [1, 2, 0, 4, 3]
    gathered = flat(GATHER, "ring", [range(3)])
    assert gathered.slot(ranks, np.array([2, 1, 0, 1, 2])).tolist() == [2, 1, 0, 1, 2]
    assert (permute.num_slots, exchange.num_slots, gathered.num_slots) == (2, 6, 3)


def test_phases_are_named_after_their_half_and_their_side() -> None:
    schedule = tiers(REDUCE, np.arange(4).reshape(2, 2), ("ring", "mesh"))
    assert [phase.name for phase in schedule.phases] == [
        "scatter along 1",
        "scatter along 0",
        "gather along 0",
        "gather along 1",
    ]


def test_a_schedule_that_does_not_deliver_says_where() -> None:
    """Of the 12 moves of a ring of four: without the last two, two chunks are missing; without one
    step four, without two of them eight; without ten moves ten, of which eight are named."""
    made = flat(GATHER, "ring", [range(4)])
    (phase,) = made.phases

    def lost_behind(moves: int) -> list[str]:
        starts = np.array([*range(0, moves, 4), moves])
        source, target, chunk = (c[:moves] for c in (phase.source, phase.target, phase.chunk))
        short = replace(phase, source=source, target=target, chunk=chunk, starts=starts)
        with pytest.raises(CollectiveError, match=r"^ring all_gather does not deliver: ") as told:
            replace(made, phases=(short,)).verify()
        return str(told.value).partition(": ")[2].split("; ")

    last = sorted(zip(phase.target[10:].tolist(), phase.chunk[10:].tolist(), strict=True))
    assert lost_behind(10) == [f"rank {r} ends without slot {c} complete" for r, c in last]
    assert [len(lost_behind(moves)) for moves in (8, 4, 2)] == [4, 8, 8]
    made.verify()


def test_a_copy_takes_the_place_of_what_was_there() -> None:
    """Two ranks that send each other all of two chunks have the sum where they add; where they
    copy, each has the part of the other one alone."""
    made = flat(REDUCE, "single_step_mesh", [range(2)])
    made.verify()
    (phase,) = made.phases
    with pytest.raises(CollectiveError) as told:
        replace(made, phases=(replace(phase, reduce=False),)).verify()
    assert str(told.value).partition(": ")[2].split("; ") == [
        f"rank {rank} ends without slot {slot} complete" for rank in (0, 1) for slot in (0, 1)
    ]


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_a_step_in_which_no_chunk_is_added_to_twice_is_one_operation(ranks: int) -> None:
    """A ring of n ranks adds n chunks in each of n - 1 steps; a mesh adds n - 1 parts to each chunk
    in one step, one after the other."""
    everyone = tuple(range(ranks))
    plan = _plan(flat(SCATTER, "ring", [everyone]), everyone)
    assert [len(out) for out, _, _ in plan.operations] == [ranks] * (ranks - 1)
    assert (plan.num_sources, len(plan.results)) == (ranks * ranks, ranks)
    one = _plan(
        flat(SCATTER, "ring", [everyone]), (1,)
    )  # of its chunk alone: one move in each step
    assert [len(out) for out, _, _ in one.operations] == [1] * (ranks - 1)
    assert one.num_sources == ranks
    at_once = _plan(flat(SCATTER, "mesh", [everyone]), everyone)
    assert [len(out) for out, _, _ in at_once.operations] == [ranks] * (ranks - 1)


def test_results_lie_one_after_the_other() -> None:
    """Two ranks add what both have; rows 0 and 1 are sources, and the results, in whatever order
    they are wanted, rows 2 and 3."""
    made = [(np.array([2, 3]), np.array([0, 1]), np.array([1, 0]))]
    for final in ([[2], [3]], [[3], [2]]):
        rows = _assign_rows(made, np.array(final), 2)
        assert rows[[0, 1]].tolist() == [0, 1]
        assert rows[np.array(final).ravel()].tolist() == [2, 3]
