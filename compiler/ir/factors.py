"""The indices that an op walks, as factors: which dims of its operands and results are one index,
and what becomes of the op where a core has only a part of it.

Where an op is defined, its `factors` say so once (`OpDef.factors`). Labels of batches, classes of
dims that are sharded alike, forms of ops per core and what a partitioner has to leave whole are all
read from them. They are the factors of a sharding rule of Shardy
(https://openxla.org/shardy/propagation), with the kinds that those have there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.types import Op

Place = tuple[int, int]
"""A value of an op (operands from 0, results behind them) and one of its dims."""


class FactorKind(enum.Enum):
    """What parts along an index are worth."""

    PASSED = "a part of the operands gives that part of the results"
    COMBINED = "parts of the operands give results that combine to the whole"
    LOOKED_UP = "indices pick along it: of a part, those elements that it has"
    REPEATED = "the result is the same all along it, or follows from where it is"
    GROUPED = "the dims have the same groups: some groups of the operands give those of the results"
    LINKED = "the dims correspond, but no part of one gives a part of the other"


@dataclass(frozen=True, slots=True)
class Factor:
    """The dims that have one index. A dim that no factor of an op has is needed whole."""

    places: tuple[Place, ...]
    kind: FactorKind = FactorKind.PASSED

    def of(self, number: int) -> int | None:
        """The dim that value `number` has of it."""
        return next((d for n, d in self.places if n == number), None)


def at_their_places(op: Op) -> list[Factor]:
    """Elementwise: dims correspond by position; scalar operands (predicates, bounds) have none."""
    rank = op.results[0].type.rank
    numbers = [n for n, v in enumerate((*op.operands, *op.results)) if v.type.rank == rank]
    return [along(numbers, d) for d in range(rank)]


def one_by_one(op: Op) -> list[Factor]:
    """Result i is operand i."""
    count = len(op.operands)
    ranks = [v.type.rank for v in op.results]
    return [along((n, count + n), d) for n, rank in enumerate(ranks) for d in range(rank)]


def along(numbers: Iterable[int], dim: int, kind: FactorKind = FactorKind.PASSED) -> Factor:
    """Dim `dim` of each of these values."""
    return Factor(tuple([(n, dim) for n in numbers]), kind)


def where_equal(op: Op, one: int, other: int) -> list[Factor]:
    """The dims of two values of equal rank that have one size: what is taken along them is all."""
    values = (*op.operands, *op.results)
    sizes = zip(values[one].type.shape, values[other].type.shape, strict=True)
    return [along((one, other), d) for d, (a, b) in enumerate(sizes) if a == b]


def repeated(number: int, dims: Iterable[int]) -> list[Factor]:
    """Dims of a result along which it is the same."""
    return [along((number,), d, FactorKind.REPEATED) for d in dims]


def in_pairs(one: int, dims: Sequence[int], other: int, others: Sequence[int]) -> list[Factor]:
    """Dims of two values, pair by pair."""
    return [Factor(((one, d), (other, e))) for d, e in zip(dims, others, strict=True)]
