"""HBM space by liveness: offsets for buffers that live at different times, and an independent check
of the plan.

Largest buffer first, into the smallest gap that fits among the buffers alive at the same time; the
back-end study measured this order at the liveness bound on whole train steps. Positions are steps
of whatever is planned: kernels of a function, or calls of a program.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from shardwright.compiler.isa.kernel import Tensor

MAX_REPAIRS = 64  # placements tried after the first; each is quadratic in the buffers
ALIGNMENT_BYTES = 256
"""Of every buffer; our choice, a multiple of the 64-byte DMA element (inferred)."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `size_bytes` that is in use from step `start` to step `end`, both included."""

    size_bytes: int
    start: int
    end: int


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def placed_from(start: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Scratch tensors one after the other from the first aligned byte on, and where they end;
    `start` when there are none.
    """
    placed, end = [], start
    for tensor in tensors:
        offset = aligned(end)
        placed.append(replace(tensor, offset_bytes=offset))
        end = offset + tensor.num_bytes
    return placed, end


def live_bytes(lifetimes: Sequence[Lifetime], step: int) -> int:
    """Aligned bytes in use at a step."""
    return sum(aligned(life.size_bytes) for life in lifetimes if life.start <= step <= life.end)


def liveness_bound(lifetimes: Sequence[Lifetime]) -> int:
    """Largest sum of aligned sizes in use at one step: no plan needs less."""
    changes = [(life.start, aligned(life.size_bytes)) for life in lifetimes]
    changes += [(life.end + 1, -aligned(life.size_bytes)) for life in lifetimes]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def plan(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """(byte offset per buffer, arena size).

    When the first order misses the bound, other orders are tried, and in each the buffer on top is
    placed first and all others again, a few times over; the best plan wins.
    """
    bound = liveness_bound(lifetimes)
    plans = _plans(lifetimes)
    best = next(plans)
    while best[1] > bound and (made := next(plans, None)) is not None:
        best = min(best, made, key=lambda one: one[1])
    problems = check(lifetimes, *best)
    assert not problems, problems
    return best


_ORDERS: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
    lambda life: (-life.size_bytes, life.start),
    lambda life: (-life.size_bytes * (life.end - life.start + 1), life.start),
    lambda life: (life.start - life.end, -life.size_bytes, life.start),
    lambda life: (life.start, -life.size_bytes),
    lambda life: (-life.end, -life.size_bytes),
)


def _plans(lifetimes: Sequence[Lifetime]) -> Iterator[tuple[list[int], int]]:
    """The placements that all orders and their repairs give."""
    for key in _ORDERS:
        order = sorted(range(len(lifetimes)), key=lambda i: key(lifetimes[i]))
        yield (found := _place(lifetimes, order))
        for _ in range(MAX_REPAIRS):
            top = max(order, key=lambda i: found[0][i] + aligned(lifetimes[i].size_bytes))
            order.remove(top)
            order.insert(0, top)
            yield (found := _place(lifetimes, order))


def _place(lifetimes: Sequence[Lifetime], order: Sequence[int]) -> tuple[list[int], int]:
    """Offsets and arena size when buffers are placed in `order`."""
    offsets = [0] * len(lifetimes)
    placed: list[_Placed] = []
    size = 0
    for i in order:
        life, length = lifetimes[i], aligned(lifetimes[i].size_bytes)
        offsets[i] = at = _best_gap(placed, life.start, life.end, length)
        insort(placed, (at, at + length, life.start, life.end))
        size = max(size, at + length)
    return offsets, size


_Placed = tuple[int, int, int, int]  # first byte, byte after the last, start, end; sorted


def _best_gap(placed: Sequence[_Placed], start: int, end: int, size: int) -> int:
    """Start of the smallest gap of at least `size` between ranges in use from `start` to `end`,
    else the end of the last one.
    """
    best, best_size, top = -1, 0, 0
    for at, after, first, last in placed:
        if first > end or last < start:
            continue
        gap = at - top
        if gap >= size and (best < 0 or gap < best_size):
            best, best_size = top, gap
        if after > top:
            top = after
    return top if best < 0 else best


def check(lifetimes: Sequence[Lifetime], offsets: Sequence[int], arena_bytes: int) -> list[str]:
    """What is wrong with a plan, recomputed from the lifetimes alone: a sweep over steps, not over
    the planner's order.
    """
    problems: list[str] = []
    for i, (life, offset) in enumerate(zip(lifetimes, offsets, strict=True)):
        if offset < 0 or offset % ALIGNMENT_BYTES or offset + life.size_bytes > arena_bytes:
            problems.append(f"buffer {i} at {offset} requires an aligned place below {arena_bytes}")
    starts = sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].start)
    alive: list[int] = []
    for i in starts:
        alive = [j for j in alive if lifetimes[j].end >= lifetimes[i].start]
        for j in alive:
            low, high = (i, j) if offsets[i] <= offsets[j] else (j, i)
            if offsets[low] + lifetimes[low].size_bytes > offsets[high]:
                problems.append(f"buffers {j} and {i} share bytes while both are in use")
        if lifetimes[i].size_bytes:
            alive.append(i)
    return problems
