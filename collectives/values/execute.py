"""Run a `Schedule` on the arrays of one group.

The moves are followed once per schedule, symbolically: copies only say where a chunk ends up, so no
bytes move for them; reductions become a list of row operations, in the order of the moves. A call
then does those operations and writes each distinct result once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.schedule import Schedule, final_chunks, rounds
from shardwright.collectives.topology import IntArray

# Rows of at least this size are reduced one by one straight from the sources; smaller ones a round
# at a time from a table. Bits are the same; measured crossover on a 2-core host.
ROW_LOOP_BYTES = 12 * 1024
REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
SPLITTING = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
Array = npt.NDArray[Any]
Shape = tuple[int, int, int]
Rows = slice | IntArray
REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "multiply": np.multiply,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Row operations `out = a (+) b`, round by round, and the rows of each rank's result.

    Rows below `num_sources` are the pieces of the sources, rank by rank; the others are
    accumulators.
    """

    num_sources: int
    num_accumulators: int
    operations: tuple[tuple[IntArray, IntArray, IntArray], ...]
    slices: tuple[tuple[Rows, Rows, Rows], ...]
    results: tuple[tuple[int, ...], ...]


def execute(
    schedule: Schedule,
    sources: Sequence[Array],
    *,
    shape: Shape | None = None,
    reduction: str = "add",
    wanted: Sequence[int] | None = None,
) -> list[Array]:
    """The result of every rank, in group order, or of the ranks `wanted`, ascending. For these the
    sources of a kind that splits hold only their pieces (`pieces_of`); the bits are the same.

    Each hop reduces two payloads in fp32 (fp64, integers and bools in their own type) and rounds to
    the payload type, always in the same order. Ranks with equal results share one read-only array.

    Shapes: `shape` is [outer, dim, inner] of one source, default (1, size, 1). Gathers concatenate
    and scatters split along dim, in group order: results of all_gather are [outer, n * dim, inner],
    of reduce_scatter [outer, dim / n, inner], all others have the shape of the source.
    Raises CollectiveError when sources do not fit the schedule or a dim does not divide.
    """
    ranks = tuple(wanted) if wanted is not None else tuple(range(schedule.num_ranks))
    view = _check(schedule, sources, shape, len(ranks))
    blocks = [s.reshape(view) for s in sources]
    if schedule.kind in REDUCING:
        results = _reduce(schedule, blocks, reduction, ranks)
    else:
        _delivers(schedule)
        results = _copy(schedule, blocks, ranks)
    for result in results:
        result.flags.writeable = False
    return results


def pieces_of(kind: CollectiveKind, source: Array, num_ranks: int, wanted: Sequence[int]) -> Array:
    """What of a source, [outer, dim, inner], the results of `wanted` depend on, in a kind that
    splits: their pieces along dim. Raises CollectiveError when dim does not divide."""
    outer, dim, inner = source.shape
    check_divides(kind, dim, num_ranks)
    pieces = source.reshape(outer, num_ranks, dim // num_ranks, inner)[:, list(wanted)]
    return pieces.reshape(outer, -1, inner)


def _check(schedule: Schedule, sources: Sequence[Array], shape: Shape | None, pieces: int) -> Shape:
    """The [outer, dim, inner] view of a source, in so many pieces where the kind splits."""
    if len(sources) != schedule.num_ranks:
        raise CollectiveError(
            f"this schedule requires {schedule.num_ranks} sources, got {len(sources)}"
        )
    kinds = {(s.dtype, s.size) for s in sources}
    view = shape or (1, sources[0].size, 1)
    if len(kinds) != 1 or view[0] * view[1] * view[2] != sources[0].size:
        raise CollectiveError(
            f"sources require one type and the size of {view}, got {sorted(map(str, kinds))}"
        )
    if schedule.kind in SPLITTING:
        check_divides(schedule.kind, view[1], pieces)
    return view


@lru_cache(maxsize=1024)
def _delivers(schedule: Schedule) -> None:
    """Verify a schedule once; copies have no other meaning than where chunks end up."""
    schedule.verify()


def _copy(schedule: Schedule, blocks: Sequence[Array], ranks: tuple[int, ...]) -> list[Array]:
    """Results of the kinds that only move."""
    n = len(ranks)
    if schedule.kind is CollectiveKind.ALL_GATHER:
        return [np.concatenate(blocks, axis=1)] * n
    if schedule.kind is CollectiveKind.COLLECTIVE_PERMUTE:
        zeros = np.zeros_like(blocks[0])
        moved = {t: blocks[s].copy() for s, t in schedule.pairs if t in ranks}
        return [moved.get(t, zeros) for t in ranks]
    pieces = [np.split(b, n, axis=1) for b in blocks]
    return [np.concatenate([p[t] for p in pieces], axis=1) for t in range(n)]


def _reduce(
    schedule: Schedule, blocks: Sequence[Array], reduction: str, ranks: tuple[int, ...]
) -> list[Array]:
    """Results of all_reduce and reduce_scatter."""
    split = schedule.kind is CollectiveKind.REDUCE_SCATTER
    plan, function = _plan(schedule, ranks), ufunc(reduction)
    pieces = len(ranks) if split else 1
    outer, dim, inner = blocks[0].shape
    result_shape = (outer, dim // pieces, inner)
    per_block = schedule.parts if split else schedule.num_slots
    elements = outer * result_shape[1] * inner
    width = -(-elements // per_block)
    if width * blocks[0].itemsize < ROW_LOOP_BYTES:
        rows = _run_rounds(plan, _padded(blocks, pieces, per_block, width, plan), function)
    else:
        rows = _run_rows(plan, _pieces(blocks, pieces, per_block, width), function)
    made: dict[tuple[int, ...], Array] = {}
    for wanted in plan.results:
        if wanted not in made:
            flat = np.concatenate([rows[r].reshape(-1) for r in wanted])
            made[wanted] = flat[:elements].reshape(result_shape)
    return [made[wanted] for wanted in plan.results]


def _padded(blocks: Sequence[Array], pieces: int, per_block: int, width: int, plan: _Plan) -> Array:
    """All source rows, zero-padded to `width`, with room for the accumulators: [rows, width]."""
    n = len(blocks)
    outer, dim, inner = blocks[0].shape
    table = np.empty((plan.num_sources + plan.num_accumulators, width), dtype=blocks[0].dtype)
    filled = table[: plan.num_sources].reshape(n, pieces, per_block * width)
    size = outer * (dim // pieces) * inner
    filled[:, :, size:] = 0
    for rank, block in enumerate(blocks):
        split_dim = block.reshape(outer, pieces, dim // pieces, inner)
        filled[rank, :, :size] = split_dim.swapaxes(0, 1).reshape(pieces, size)
    return table


def _pieces(blocks: Sequence[Array], pieces: int, per_block: int, width: int) -> list[Array]:
    """All source rows as views where the pieces are regular, as copies where they need padding."""
    rows: list[Array] = []
    for block in blocks:
        for piece in np.split(block, pieces, axis=1):
            rows += [piece] if per_block == 1 else _cut(piece.reshape(-1), per_block, width)
    return rows


def _cut(flat: Array, count: int, width: int) -> list[Array]:
    """`count` rows of `width`; the last ones are padded with zeros."""
    if flat.size < count * width:
        flat = np.concatenate([flat, np.zeros(count * width - flat.size, dtype=flat.dtype)])
    return list(flat.reshape(count, width))


def _run_rounds(plan: _Plan, table: Array, function: np.ufunc) -> list[Array]:
    """One NumPy call per round over all its rows."""
    for out, a, b in plan.slices:
        table[out] = function(table[a], table[b])
    return list(table)


def _run_rows(plan: _Plan, rows: list[Array], function: np.ufunc) -> list[Array]:
    """One NumPy call per row: large rows pay no copy of the sources."""
    rows += list(np.empty((plan.num_accumulators, *rows[0].shape), dtype=rows[0].dtype))
    for out, a, b in plan.operations:
        for o, x, y in zip(out.tolist(), a.tolist(), b.tolist(), strict=True):
            function(rows[x], rows[y], out=rows[o])
    return rows


@lru_cache(maxsize=256)
def _plan(schedule: Schedule, ranks: tuple[int, ...]) -> _Plan:
    """Follow the moves of a reducing schedule, as far as the results of `ranks` depend on them.
    Raises CollectiveError when it does not verify."""
    _delivers(schedule)
    rank, chunk = final_chunks(schedule)
    wanted = np.isin(rank, ranks)
    rank, chunk = rank[wanted], chunk[wanted]
    kept = np.unique(chunk)  # a chunk is made of nothing but itself
    num_sources = schedule.num_ranks * len(kept)
    versions, steps = _trace(schedule, kept)
    final = versions[rank, np.searchsorted(kept, chunk)].reshape(len(ranks), -1)
    row_of = _assign_rows(steps, final, num_sources)
    operations = []
    for out, a, b in steps:
        placed = row_of[out]
        order = np.argsort(placed)
        operations.append((placed[order], row_of[a][order], row_of[b][order]))
    return _Plan(
        num_sources,
        int(row_of.max(initial=-1)) + 1 - num_sources,
        tuple(operations),
        tuple((_as_slice(o), _as_slice(a), _as_slice(b)) for o, a, b in operations),
        tuple(tuple(int(r) for r in row) for row in row_of[final]),
    )


def _trace(
    schedule: Schedule, kept: IntArray
) -> tuple[IntArray, list[tuple[IntArray, IntArray, IntArray]]]:
    """The version each (rank, kept chunk) ends with, and the operations that make new versions from
    two old ones."""
    made = schedule.num_ranks * len(kept)
    versions = np.arange(made, dtype=np.int64).reshape(schedule.num_ranks, -1)
    operations = []
    for step in schedule.steps():
        moves = np.flatnonzero(np.isin(step.chunk, kept))
        source, target = step.source[moves], step.target[moves]
        chunk = np.searchsorted(kept, step.chunk[moves])
        incoming = versions[source, chunk]
        for index in rounds(target * len(kept) + chunk):
            where = (target[index], chunk[index])
            if not step.reduce:
                versions[where] = incoming[index]
                continue
            new = made + np.arange(len(index))
            made += len(index)
            operations.append((new, versions[where], incoming[index]))
            versions[where] = new
    return versions, operations


def _assign_rows(
    operations: Sequence[tuple[IntArray, IntArray, IntArray]], final: IntArray, num_sources: int
) -> IntArray:
    """Row of every version: an operation overwrites an operand that nothing else reads, else takes
    a new row.

    Rows are numbered so that the results of the first ranks lie one after the other.
    """
    made = num_sources + sum(len(out) for out, _, _ in operations)
    reads = np.zeros(made, dtype=np.int64)
    for _, a, b in operations:
        np.add.at(reads, a, 1)
        np.add.at(reads, b, 1)
    reads[final] += 1
    row_of = np.arange(made)
    free = num_sources
    for out, a, b in operations:
        for o, x, y in zip(out.tolist(), a.tolist(), b.tolist(), strict=True):
            spare = next((v for v in (y, x) if v >= num_sources and reads[v] == 1), None)
            row_of[o] = free if spare is None else row_of[spare]
            free += spare is None
    order = dict.fromkeys(row_of[final.ravel()].tolist())
    wanted = [row for row in order if row >= num_sources]
    others = sorted(set(range(num_sources, free)) - set(wanted))
    renumber = np.arange(max(free, made))
    renumber[np.array(wanted + others, dtype=np.int64)] = np.arange(num_sources, free)
    return renumber[row_of]


def _as_slice(rows: IntArray) -> Rows:
    """A slice when the rows follow each other, which saves a copy."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def ufunc(reduction: str) -> np.ufunc:
    """The NumPy function of a reduction. Raises CollectiveError for an unknown one."""
    if reduction not in REDUCTIONS:
        raise CollectiveError(f"reductions are {', '.join(REDUCTIONS)}, got {reduction!r}")
    return REDUCTIONS[reduction]


def check_divides(kind: CollectiveKind, dim: int, num_ranks: int) -> None:
    """Raises CollectiveError unless the split dim divides by the group size."""
    if dim % num_ranks:
        raise CollectiveError(
            f"{kind.value} requires a dim that divides by its {num_ranks} ranks, got {dim}"
        )
