"""A stationary operand of odd lengths, kept for all its row tiles and fetched whole.

Tiles of 128 leave a tail of rows and a tail of k, and runs in HBM that are cut there: up to four
transfers of short runs where one would do. An operand that is a plain load is fetched without those
cuts. Rows along k that follow each other in memory come several to a partition, in any number; the
transposes put them in order (as in `row_blocks.py`, whose blocks want rows in even numbers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.compiler.codegen.builder import Dims, Held, Scope, cut, merge_dims
from shardwright.compiler.codegen.contract_plan import TRANSPOSED, ContractPlan
from shardwright.compiler.codegen.domain import AccessMap, Domain, Split
from shardwright.compiler.codegen.row_blocks import PSUM_COLUMNS
from shardwright.compiler.isa.program import AccessPattern, Engine

MOST_TILES = 4  # of k and of rows: the code of each is written out (our choice)
_EACH = PSUM_COLUMNS // TRANSPOSED  # rows of a partition: what is transposed of them fills a bank
_WORTH = 0.75  # of the time of a plain transfer, as for `row_blocks.py`


@dataclass(frozen=True, slots=True)
class Lines:
    """Rows of an operand: where they start in memory and in the packed tile, how many, elements
    from one to the next in memory, and how many of them a partition takes; for how many points of a
    group a row of memory has theirs side by side, which follow each other in the packed tile.
    """

    memory: int
    packed: int
    count: int
    pitch: int
    each: int
    points: int = 1

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first row, partitions, rows of a partition); what is left over lies one to each."""
        first = 0
        for each in (self.each, 1):
            while (parts := min(TRANSPOSED, (self.count - first) // each)) > 0:
                yield first, parts, each
                first += parts * each


def length(domain: Domain, made: Split) -> int:
    """Points of an iter dim before it was split."""
    return domain.sizes.get(made.major, 1) * domain.sizes[made.minor] + made.tail


def is_load(domain: Domain, number: int) -> bool:
    """Whether a value is a plain load, of memory that has all of it."""
    value = domain[number]
    return value.op == "load" and value.map is not None and not value.map.bounds


def can_be_whole(domain: Domain, number: int, made: Sequence[Split]) -> bool:
    """Whether an operand, rows and k split as `made`, is a plain load of few tiles with a tail."""
    few = is_load(domain, number) and all(is_short(domain, m) for m in made)
    return few and any(m.tail for m in made)


def is_short(domain: Domain, made: Split) -> bool:
    """Whether an iter dim is split in few tiles, which no other iter dim counts."""
    own = made.major < 0 or domain.splits.get(made.major) == made
    return own and length(domain, made) <= MOST_TILES * domain.sizes[made.minor]


def packed_bytes(domain: Domain, made: tuple[Split, Split], points: int, item: int) -> int:
    """Bytes per partition of the whole packed tile of (rows, k) for `points` of a group."""
    rows, depth = made
    tiles = math.ceil(length(domain, depth) / domain.sizes[depth.minor])
    return tiles * length(domain, rows) * points * item


def whole_elements(plan: ContractPlan) -> int:
    """Elements of a packed tile."""
    return length(plan.domain, plan.lines) * length(plan.domain, plan.depth_split) * plan.points


def fetch_ns(plan: ContractPlan, access: AccessMap, item: int) -> tuple[float, float]:
    """(time of the transfers of one tile, transposed columns per element) at nominal rates."""
    made = (plan.lines, plan.depth_split)
    rows, k = (length(plan.domain, m) for m in made)
    if plan.stationary.natural:
        return _lines_ns(plan, _lines(plan, access, made, plan.points), k, item), 1 / k
    if not transposes_twice(plan, access, item):
        return _direct_ns(plan, access, item), 0.0
    return _lines_ns(plan, _lines(plan, access, made[::-1], plan.points), rows, item), _twice(plan)


def transposes_twice(plan: ContractPlan, access: AccessMap, item: int) -> bool:
    """Whether a direct operand is better fetched by its short rows, several to a partition, which
    k counts: transposed so that the rows' own index lies on the partitions, and back.
    """
    assert plan.rates is not None
    if access.stride(plan.lines.minor) != 1:
        return False
    lines = _lines(plan, access, (plan.depth_split, plan.lines), plan.points)
    columns = whole_elements(plan) * _twice(plan) * plan.passes
    ns = _lines_ns(plan, lines, length(plan.domain, plan.lines), item)
    transposed = plan.rates.engine_ns(Engine.TENSOR, columns)
    return ns + transposed < _WORTH * _direct_ns(plan, access, item)


def _twice(plan: ContractPlan) -> float:
    """Transposed columns per element of what is transposed and transposed back."""
    return sum(1 / plan.domain.sizes[m.minor] for m in (plan.lines, plan.depth_split))


def _direct_ns(plan: ContractPlan, access: AccessMap, item: int) -> float:
    assert plan.rates is not None
    rows = length(plan.domain, plan.lines) if access.stride(plan.lines.minor) == 1 else 1
    partitions = plan.domain.sizes[plan.depth]
    return plan.rates.transfer_ns(whole_elements(plan) * item, rows * item, partitions)


def _lines_ns(plan: ContractPlan, lines: Sequence[Lines], row: int, item: int) -> float:
    assert plan.rates is not None
    found = (
        (parts, each * line.points * row * item)
        for line in lines
        for _, parts, each in line.blocks()
    )
    return sum(plan.rates.transfer_ns(parts * run, run, parts) for parts, run in found)


def _lines(
    plan: ContractPlan, access: AccessMap, made: Sequence[Split], number: int
) -> list[Lines]:
    """Rows that the first of `made` counts, along the second: one line where points allow it."""
    count, row = (length(plan.domain, m) for m in made)
    pitch = access.stride(made[0].minor)
    between = access.stride(plan.group[0]) if plan.group else count * pitch
    if pitch == row and between == count * pitch:
        return [Lines(0, 0, number * count, pitch, _EACH)]
    if between == row and pitch == number * row:
        return [Lines(0, 0, count, pitch, max(1, _EACH // number), number)]
    each = _EACH if pitch == row else 1
    return [Lines(at * between, at * count, count, pitch, each) for at in range(number)]


class WholeLoader:
    """Fetches the whole stationary operand of one plan; `item` bytes per element in memory."""

    def __init__(self, plan: ContractPlan, copiers: Iterator[Engine], item: int) -> None:
        self.plan, self.copiers, self.item = plan, copiers, item
        self.access = plan.domain[plan.stationary.number].access
        self.rows = length(plan.domain, plan.lines)
        self.k = length(plan.domain, plan.depth_split)

    def load(self, scope: Scope) -> Held:
        """The packed tile [k, tiles of k, group, rows] at `scope`, filled."""
        plan, points = self.plan, scope.elements(self.plan.group)
        made = (plan.lines, plan.depth_split)
        step = points * self.rows
        packed = self._packed("stationary", step, plan.depth_split, scope)
        strides = {made[0].minor: 1, made[0].major: plan.domain.sizes[made[0].minor]}
        strides |= dict.fromkeys(plan.group, self.rows) | {made[1].major: step}
        if plan.stationary.natural:
            for line in _lines(plan, self.access, made, points):
                self._transposed(line, packed, step, made[1], scope)
        elif transposes_twice(plan, self.access, self.item):
            across_step = points * self.k
            across = self._packed("across", across_step, made[0], scope)
            for line in _lines(plan, self.access, made[::-1], points):
                self._transposed(line, across, across_step, made[0], scope)
            self._transposed_back(across, across_step, packed, step, scope)
        else:
            self._direct(packed, step, scope)
        return Held(packed.tile, strides)

    def _packed(self, name: str, step: int, made: Split, scope: Scope) -> Held:
        """Tiles of `made` on the partitions, `step` elements each."""
        plan, tiles = self.plan, len(list(self._tiles(made)))
        slots, partitions = plan.stationary_slots, plan.domain.sizes[made.minor]
        return scope.tile(name, partitions, tiles * step, plan.packed_type, slots)

    def _tiles(self, made: Split) -> Iterator[tuple[int, int, int]]:
        """(number, first point, how many) of the tiles of a split iter dim."""
        size, tile = length(self.plan.domain, made), self.plan.domain.sizes[made.minor]
        for number, (first, count) in enumerate(cut(size, tile)):
            yield number, first, count

    def _direct(self, packed: Held, step: int, scope: Scope) -> None:
        """A transfer per tile of k, of all rows."""
        group = self.plan.group
        sizes = [*(scope.extent(a) for a in group), self.rows]
        memory = [self.access.stride(a) for a in (*group, self.plan.lines.minor)]
        source, target = merge_dims(sizes, [memory, [*[self.rows] * len(group), 1]])
        for number, first, count in self._tiles(self.plan.depth_split):
            by_k = self.access.stride(self.plan.depth)
            hbm = self._memory(scope, first * by_k, ((by_k, count), *source))
            into = scope.on_chip(packed, count, target, number * step)
            scope.load(into, hbm)

    def _memory(self, scope: Scope, at: int, dims: Dims) -> AccessPattern:
        found = scope.hbm(self.access, dims)
        return replace(found, offset=found.offset + at)

    def _transposed(self, line: Lines, packed: Held, step: int, along: Split, scope: Scope) -> None:
        """Blocks of rows, each row transposed per tile of what it runs along; those of a partition
        go to every `each`-th column of a bank, which leaves it in the order of the rows.
        """
        length_of_row = length(self.plan.domain, along)
        for first, parts, each in line.blocks():
            run = each * line.points * length_of_row
            rows = scope.tile("rows", parts, run, self.plan.packed_type)
            across = ((line.pitch * each, parts), (1, run))
            hbm = self._memory(scope, line.memory + first * line.pitch, across)
            scope.load(scope.flat(rows, parts, run), hbm)
            tiles = product(range(line.points), self._tiles(along))
            for point, (number, low, count) in tiles:
                bank = scope.psum("turned", slots=self.plan.transpose_slots)
                for row in range(each):
                    at = (row * line.points + point) * length_of_row + low
                    block = scope.on_chip(bank, count, ((each, parts),), row)
                    scope.transpose(block, scope.flat(rows, parts, count, at))
                at = number * step + line.packed + point * line.count + first
                target = scope.flat(packed, count, parts * each, at)
                scope.copy(next(self.copiers), target, scope.flat(bank, count, parts * each))

    def _transposed_back(
        self, across: Held, across_step: int, packed: Held, step: int, scope: Scope
    ) -> None:
        """Tiles of k of every point, their rows side by side in a bank."""
        for point in range(across_step // self.k):
            for number, first, count in self._tiles(self.plan.depth_split):
                bank = scope.psum("turned", slots=self.plan.transpose_slots)
                for turn, low, size in self._tiles(self.plan.lines):
                    at = turn * across_step + point * self.k + first
                    block = scope.flat(bank, count, size, low)
                    scope.transpose(block, scope.flat(across, size, count, at))
                at = number * step + point * self.rows
                target = scope.flat(packed, count, self.rows, at)
                scope.copy(next(self.copiers), target, scope.flat(bank, count, self.rows))
