from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives.algorithms.pairwise import all_to_all, collective_permute
from shardwright.collectives.algorithms.table import ALGORITHMS
from shardwright.collectives.algorithms.tiers import tiers
from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Phase, Schedule
from shardwright.collectives.values.execute import ROW_LOOP_BYTES, execute
from tests.support.collective_reference import reference
from tests.support.collective_schedules import flat, num_moves, num_steps, rendered

GATHER, REDUCE, SCATTER = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
)
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint8, np.float64]


@st.composite
def schedules(draw):
    """A schedule of any algorithm over 1 to 17 ranks in a random order."""
    kind = draw(st.sampled_from([GATHER, REDUCE, SCATTER]))
    n = draw(st.integers(1, 17))
    order = draw(st.permutations(range(n)))
    name = draw(st.sampled_from(["ring", "rings", "mesh", "recursive", "hierarchical"]))
    if name == "mesh":
        return flat(kind, "mesh", [order])
    if name == "recursive":
        return flat(kind, "recursive", [draw(st.permutations(range(1 << draw(st.integers(0, 4)))))])
    if name == "hierarchical":
        return _hierarchical(draw, kind)
    extra = draw(st.integers(1, 3)) if name == "rings" else 0
    return flat(kind, "ring", [order] + [draw(st.permutations(range(n))) for _ in range(extra)])


def _hierarchical(draw, kind):
    outer = [draw(st.sampled_from([1, 2, 3, 4])) for _ in range(draw(st.integers(1, 2)))]
    local = draw(st.integers(1, 4))
    shape = (*outer, local)
    grid = np.array(draw(st.permutations(range(math.prod(shape))))).reshape(shape)
    rings = [draw(st.permutations(range(local))) for _ in range(draw(st.integers(1, 2)))]
    patterns = [draw(st.sampled_from(running_over(size))) for size in shape]
    return tiers(kind, grid, patterns, rings)


def running_over(members):
    """The names of all algorithms that run along a side of so many."""
    names = []
    for name, row in ALGORITHMS.items():
        if row.sides or row.orders:
            continue
        try:
            row.steps(members)
        except CollectiveError:
            continue
        names.append(name)
    return names


def small_values(rng, size, dtype):
    """Integers whose sums over 17 ranks are exact in every type, in any order."""
    return rng.integers(0, 7, size).astype(dtype)


@settings(deadline=None, max_examples=150)
@given(
    schedules(),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)),
    st.sampled_from(["add", "max", "min"]),
    st.integers(0, 2**32 - 1),
)
def test_any_schedule_verifies_and_delivers(schedule, dtype, shape, reduction, seed):
    schedule.verify()
    if schedule.kind is SCATTER:
        shape = (shape[0], shape[1] * schedule.num_ranks, shape[2])
    rng = np.random.default_rng(seed)
    sources = [small_values(rng, shape, dtype) for _ in range(schedule.num_ranks)]
    keep = [s.copy() for s in sources]
    results = execute(schedule, sources, shape=shape, reduction=reduction)
    wanted = reference(schedule.kind, sources, shape=shape, reduction=reduction)
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    for source, before in zip(sources, keep, strict=True):
        np.testing.assert_array_equal(source, before)


@settings(deadline=None, max_examples=20)
@given(schedules(), st.integers(3100, 4000), st.integers(0, 100))
def test_large_rows_take_the_other_path_with_equal_bits(schedule, elements, seed):
    per_row = 1 if schedule.kind is GATHER else schedule.num_slots
    rng = np.random.default_rng(seed)
    assert elements * 4 > ROW_LOOP_BYTES > 32
    size = elements * per_row - (3 if schedule.kind is REDUCE else 0)
    sources = [rng.standard_normal(size).astype(np.float32) for _ in range(schedule.num_ranks)]
    large = execute(schedule, sources)
    if schedule.kind is REDUCE:
        cut = per_row * 8
        width = -(-size // per_row)
        columns = np.arange(per_row * width).reshape(per_row, width)[:, :8].ravel()
        assert len(columns) == cut
        narrow = [np.r_[s, np.zeros(3, np.float32)][columns] for s in sources]
        for whole, part in zip(large, execute(schedule, narrow), strict=True):
            padded = np.r_[whole.ravel(), np.zeros(3, np.float32)]
            np.testing.assert_array_equal(padded[columns], part.ravel())
    for got, want in zip(large, reference(schedule.kind, sources), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_hop_rounds_to_the_payload_type_and_adds_in_fp32():
    order = [2, 0, 3, 1]
    rng = np.random.default_rng(3)
    sources = [rng.standard_normal(4 * 3000).astype(ml_dtypes.bfloat16) for _ in order]
    results = execute(flat(SCATTER, "ring", [order]), sources)
    for index, rank in enumerate(order):
        chain = [order[(index + 1 + k) % 4] for k in range(4)]
        piece = slice(3000 * rank, 3000 * (rank + 1))
        total = sources[chain[0]][piece]
        for other in chain[1:]:
            total = total.astype(np.float32) + sources[other][piece].astype(np.float32)
            total = total.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(results[rank].ravel(), total)


def test_partial_sums_that_are_read_twice_are_kept():
    """A butterfly sends whole partial sums, so both partners still need theirs."""
    phases = []
    for distance in (1, 2):
        source, chunk = np.divmod(np.arange(16), 4)
        starts = np.array([0, 16])
        phases.append(Phase("swap", source, source ^ distance, chunk, starts, True))
    schedule = Schedule(REDUCE, "butterfly", 4, 1, tuple(phases))
    schedule.verify()
    for elements in (8, 8 * ROW_LOOP_BYTES):
        sources = [np.arange(elements, dtype=np.float32) % 7 + r for r in range(4)]
        for got in execute(schedule, sources):
            np.testing.assert_array_equal(got.ravel(), sum(sources))


def test_booleans_reduce_as_logic():
    sources = [np.array([i == 1, True, False, i == 2]) for i in range(4)]
    schedule = flat(REDUCE, "mesh", [range(4)])
    assert execute(schedule, sources, reduction="max")[0].ravel().tolist() == [1, 1, 0, 1]
    assert execute(schedule, sources, reduction="min")[0].ravel().tolist() == [0, 1, 0, 0]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 3))
def test_all_to_all_delivers(n, dtype, outer, inner):
    schedule = all_to_all(n)
    schedule.verify()
    shape = (outer, 2 * n, inner)
    sources = [np.arange(outer * 2 * n * inner).astype(dtype).reshape(shape) + r for r in range(n)]
    wanted = reference(CollectiveKind.ALL_TO_ALL, sources, shape=shape)
    for got, want in zip(execute(schedule, sources, shape=shape), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_permute_moves_pairs_and_gives_zeros_elsewhere():
    pairs = [(0, 1), (1, 2), (3, 3)]
    schedule = collective_permute(4, pairs)
    schedule.verify()
    sources = [np.full(3, r + 1.0) for r in range(4)]
    results = execute(schedule, sources)
    assert not any(np.shares_memory(r, s) for r in results for s in sources)
    got = [r.ravel().tolist() for r in results]
    assert got == [[0] * 3, [1] * 3, [2] * 3, [4] * 3]
    assert got == [
        r.ravel().tolist()
        for r in reference(CollectiveKind.COLLECTIVE_PERMUTE, sources, pairs=pairs)
    ]


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 4)], [(-1, 0)]])
def test_bad_pairs_are_refused(pairs):
    with pytest.raises(CollectiveError, match="distinct sources and targets"):
        collective_permute(4, pairs)


def moved_one_by_one(schedule):
    """Every slot after plain execution; rank r contributes 3**r, so sums tell all apart."""
    slots = [[0] * schedule.num_slots for _ in range(schedule.num_ranks)]
    for rank, row in enumerate(slots):
        for slot in range(schedule.num_slots):
            if schedule.kind is not GATHER or slot // schedule.parts == rank:
                row[slot] = 3**rank
    for step in schedule.steps():
        moves = list(
            zip(step.source.tolist(), step.target.tolist(), step.chunk.tolist(), strict=True)
        )
        sent = [slots[s][c] for s, _, c in moves]
        for (_, target, chunk), value in zip(moves, sent, strict=True):
            slots[target][chunk] = value + (slots[target][chunk] if step.reduce else 0)
    return slots


def is_delivered(schedule):
    slots, n = moved_one_by_one(schedule), schedule.num_ranks
    owners = [slot // schedule.parts for slot in range(schedule.num_slots)]
    total = sum(3**r for r in range(n))
    if schedule.kind is GATHER:
        return all(row == [3**o for o in owners] for row in slots)
    if schedule.kind is REDUCE:
        return all(value == total for row in slots for value in row)
    return all(slots[o][slot] == total for slot, o in enumerate(owners))


@settings(deadline=None, max_examples=150)
@given(schedules(), st.sampled_from(["drop", "twice", "target", "chunk"]), st.data())
def test_verify_agrees_with_moving_one_by_one(schedule, damage, data):
    assert is_delivered(schedule)
    sizes = [len(p.source) for p in schedule.phases]
    if schedule.num_ranks < 2 or not sum(sizes):
        return
    number = data.draw(st.sampled_from([i for i, s in enumerate(sizes) if s]))
    phase = schedule.phases[number]
    move = data.draw(st.integers(0, sizes[number] - 1))
    if damage in ("drop", "twice"):
        broken = _repeat(phase, move) if damage == "twice" else _drop(phase, move)
    else:
        column = getattr(phase, damage).copy()
        top = schedule.num_ranks if damage == "target" else schedule.num_slots
        column[move] = (column[move] + data.draw(st.integers(1, top - 1))) % top
        broken = replace(phase, **{damage: column})
    phases = (*schedule.phases[:number], broken, *schedule.phases[number + 1 :])
    damaged = replace(schedule, phases=phases)
    try:
        damaged.verify()
    except CollectiveError:
        with pytest.raises(CollectiveError, match="does not deliver"):
            execute(damaged, [np.zeros(schedule.num_ranks)] * schedule.num_ranks)
    else:
        assert is_delivered(damaged)
        assert damage != "drop", "every move of these schedules is needed"
        assert not (damage == "twice" and phase.reduce)


def _drop(phase, move):
    """The phase without one move."""
    columns = {n: np.delete(getattr(phase, n), move) for n in ("source", "target", "chunk")}
    return replace(phase, starts=phase.starts - (phase.starts > move), **columns)


def _repeat(phase, move):
    """The phase with one move done a second time at the end of its step."""
    step = int(np.searchsorted(phase.starts, move, side="right")) - 1
    at = int(phase.starts[step + 1])
    columns = {
        name: np.insert(getattr(phase, name), at, getattr(phase, name)[move])
        for name in ("source", "target", "chunk")
    }
    return replace(phase, starts=phase.starts + (np.arange(len(phase.starts)) > step), **columns)


def test_results_are_shared_read_only():
    sources = [np.arange(6, dtype=np.float32) + r for r in range(3)]
    results = execute(flat(GATHER, "mesh", [range(3)]), sources)
    assert results[0] is results[2]
    with pytest.raises(ValueError, match="read-only"):
        results[0][:] = 0
    for result in results:
        np.testing.assert_array_equal(result.ravel(), np.concatenate(sources))


@pytest.mark.parametrize(
    ("schedule", "sources", "shape", "text"),
    [
        (flat(REDUCE, "mesh", [range(2)]), [np.zeros(2)], None, "requires 2 sources, got 1"),
        (
            flat(REDUCE, "mesh", [range(2)]),
            [np.zeros(2), np.zeros(3)],
            None,
            "one type and the size",
        ),
        (
            flat(REDUCE, "mesh", [range(2)]),
            [np.zeros(2), np.zeros(2, int)],
            None,
            "one type and the size",
        ),
        (
            flat(SCATTER, "mesh", [range(2)]),
            [np.zeros(3), np.zeros(3)],
            None,
            "divides by its 2 ranks",
        ),
        (flat(GATHER, "mesh", [range(2)]), [np.zeros(4), np.zeros(4)], (1, 3, 1), "size of"),
    ],
)
def test_misuse_is_refused(schedule, sources, shape, text):
    with pytest.raises(CollectiveError, match=text):
        execute(schedule, sources, shape=shape)


def test_unknown_reductions_and_odd_recursion_are_refused():
    with pytest.raises(CollectiveError, match="reductions are add"):
        execute(flat(REDUCE, "mesh", [range(2)]), [np.zeros(2)] * 2, reduction="mean")
    with pytest.raises(CollectiveError, match="power of two"):
        flat(REDUCE, "recursive", [range(6)])
    with pytest.raises(CollectiveError, match="same ranks"):
        flat(REDUCE, "ring", [(0, 1, 2), (0, 1, 3)])


def test_steps_and_traffic_are_the_textbook_ones():
    n = 12
    for kind, steps in ((GATHER, n - 1), (SCATTER, n - 1), (REDUCE, 2 * (n - 1))):
        schedule = flat(kind, "ring", [range(n)])
        assert (num_steps(schedule), num_moves(schedule)) == (steps, n * steps)
    assert num_steps(flat(REDUCE, "recursive", [range(16)])) == 8
    assert num_steps(flat(REDUCE, "mesh", [range(9)])) == 2
    two = tiers(REDUCE, np.arange(12).reshape(3, 4), ("ring", "ring"), [range(4)])
    assert num_steps(two) == 2 * (3 + 2) and num_moves(two) == 2 * 12 * 11


def test_the_print_shows_steps_and_moves():
    text = rendered(flat(GATHER, "ring", [range(3)]))
    assert text.splitlines()[0] == "ring all_gather: 3 ranks, 1 parts, 2 steps, 6 moves"
    assert text.splitlines()[2] == "    0: 0>1:0 1>2:1 2>0:2"
