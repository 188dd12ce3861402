"""Partitions that move alike: as few transfers as there are rows of memory at even distances.

An item is what one step (or one sum) has on its partitions: blocks of `width` partitions, one per
address, `column` elements of memory from partition to partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """Blocks on the partitions, one after the other."""

    blocks: tuple[int, ...]
    width: int
    column: int


@dataclass(frozen=True, slots=True)
class Run:
    """`count` items from number `item` on that move alike: `rows` partitions from `start` on, at
    `address`, `delta` elements from item to item.
    """

    item: int
    count: int
    start: int
    rows: int
    address: int
    delta: int


def runs_of(items: Sequence[Item]) -> Iterator[Run]:
    """All rows of all items."""
    last: Run | None = None
    for number, item in enumerate(items):
        pieces = list(_pieces(item))
        for start, rows, address in pieces:
            alone = Run(number, 1, start, rows, address, 0)
            joined = _joined(last, alone) if last is not None and len(pieces) == 1 else None
            if last is not None and joined is None:
                yield last
            last = joined or alone
    if last is not None:
        yield last


def _joined(run: Run, other: Run) -> Run | None:
    alike = (run.start, run.rows, run.item + run.count) == (other.start, other.rows, other.item)
    delta = other.address - run.address - (run.count - 1) * run.delta
    if not alike or (run.count > 1 and delta != run.delta):
        return None
    return Run(run.item, run.count + 1, run.start, run.rows, run.address, delta)


def _pieces(item: Item) -> Iterator[tuple[int, int, int]]:
    """(first partition, partitions, address): blocks that continue each other's rows."""
    first = 0
    for n in range(1, len(item.blocks) + 1):
        ends = n == len(item.blocks)
        if ends or item.blocks[n] - item.blocks[n - 1] != item.width * item.column:
            yield first * item.width, (n - first) * item.width, item.blocks[first]
            first = n
