"""Blocks of short rows that follow each other in memory, several to a partition.

What is transposed on the tensor engine may lie on the partitions in any order, so a transfer need
not put one row on each: partition p of a block takes rows p * each .. p * each + each - 1, which
are one run of HBM, whatever indices count the rows. The transposes put them in order again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.compiler.codegen.domain import AccessMap, IterDims, PerDim
from shardwright.compiler.codegen.planning import Rates
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Space

_MOST = 16  # rows of a partition: as many of 128 bytes are a run of 2 KiB
# Partitions of a block, and those transposed together: an access may start at a multiple of its
# size (documented: nki/guides/architecture/trainium_inferentia2_arch.rst, partition start rule).
_PARTITIONS = (128, 64, 32)
_WORTH = 0.75  # of the time of a plain transfer: less gained is not worth longer code (our choice)
_SLACK = 1.25  # runs of 2 KiB, 1.2 times the time of long ones, keep the code short (our choice)
PSUM_COLUMNS = 512  # fp32 elements of a bank (documented: hardware.json psum bank bytes)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """`partitions` x `each` rows of `row` elements: `extents` of `iter_dims` (innermost first)."""

    row: int
    iter_dims: IterDims
    extents: tuple[int, ...]
    each: int
    partitions: int

    @property
    def run(self) -> int:
        """Elements of a partition."""
        return self.each * self.row

    @property
    def unit(self) -> int:
        """Partitions whose rows fill at most a PSUM bank when they are transposed."""
        most = min(self.partitions, PSUM_COLUMNS // self.each)
        return next(p for p in _PARTITIONS if p <= most)

    def hbm(self, access: AccessMap, address: Affine) -> AccessPattern:
        """The block in memory, from `address` on."""
        dims = ((self.run, self.partitions), (1, self.run))
        return AccessPattern(Space.HBM, access.tensor, address, dims)

    def loops(self, iter_dims: Iterable[int]) -> list[tuple[int, int]]:
        """(iter dim, extent) of loops over all blocks: other `iter_dims` by point, then its own."""
        beside = [(a, 1) for a in iter_dims if a not in self.iter_dims]
        return [*beside, *reversed([*zip(self.iter_dims, self.extents, strict=True)])]

    def strides(self, strides: PerDim) -> list[int]:
        """`strides` of the counting iter dims, in their order."""
        return [strides[a] for a in self.iter_dims]

    def every(self, strides: PerDim) -> tuple[list[int], list[int]]:
        """(sizes, steps), outermost first, of every `each`-th row: one of each partition."""
        reach = spread(self.each, self.extents)
        assert reach is not None, self
        dims = list(zip(reach, self.extents, self.strides(strides), strict=True))
        sizes = [extent // step for step, extent, _ in reversed(dims)]
        return sizes, [step * stride for step, _, stride in reversed(dims)]

    def place(self, row: int, strides: PerDim) -> int:
        """Where row number `row` of the block is in a tile with these strides."""
        place = 0
        for extent, stride in zip(self.extents, self.strides(strides), strict=True):
            row, digit = divmod(row, extent)
            place += digit * stride
        return place


def spread(count: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """How far `count` neighbouring points reach along `sizes` (innermost first); None if uneven."""
    reach = []
    for size in sizes:
        if count % size and size % count:
            return None
        reach.append(min(count, size))
        count = max(1, count // size)
    return tuple(reach) if count == 1 else None


def row_block(
    access: AccessMap,
    row: int,
    points: PerDim,
    item: int,
    rates: Rates,
    plain_ns: float,
    extra_ns: float = 0.0,
) -> RowBlock | None:
    """The block of rows of `row` elements that loads or stores `points` per iter dim fastest; None
    when a plain transfer, which takes `plain_ns`, is about as good. What blocks cost beside their
    transfers is `extra_ns`.

    Units: `item` in bytes per element.
    """
    iter_dims, pitch = [], row
    for iter_dim in sorted((a for a in points if points[a] > 1), key=access.stride):
        if access.stride(iter_dim) != pitch:
            break
        iter_dims.append(iter_dim)
        pitch *= points[iter_dim]
    total = row * item * math.prod(points.values())
    found = [
        (rates.transfer_ns(total, block.run * item, block.partitions), block)
        for block in _blocks(row, tuple(iter_dims), tuple(points[a] for a in iter_dims))
    ]
    least = min((ns for ns, _ in found), default=math.inf)
    near = [(block.each, ns, block) for ns, block in found if ns <= _SLACK * least]
    _, ns, block = min(near, key=lambda n: n[:2], default=(0, math.inf, None))
    return block if ns + extra_ns < _WORTH * plain_ns else None


@lru_cache(maxsize=4096)  # a search asks for the same few rows at every candidate
def _blocks(row: int, iter_dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[RowBlock, ...]:
    found = []
    for each in range(2, _MOST + 1):
        for partitions in _PARTITIONS:
            extents = spread(each * partitions, sizes)
            if extents is None:
                continue
            block = RowBlock(row, iter_dims, extents, each, partitions)
            if None not in (spread(each * block.unit, extents), spread(each, extents)):
                found.append(block)
    return tuple(found)
