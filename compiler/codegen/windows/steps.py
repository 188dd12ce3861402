"""The products that make one output position: which slice of a line meets which taps.

A *sheet* is a slice of every line, transposed so that its elements lie on the partitions: channels
of one position, or of several positions (and rows) where the channels are few. A *step* is one
product with a sheet: a line and a position relative to those of the output, and the taps its
partitions meet. Steps share sheets: a tap is a shift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

from shardwright.compiler.codegen.builder import cut
from shardwright.compiler.codegen.contract_plan import even_tile
from shardwright.compiler.codegen.windows.form import Dim, Form, points

Tap = TypeVar("Tap")


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` channels of group `group`, `apart` apart from `first` on, rows `row`.. of a line, at
    coordinates `depths` of the depth dims.
    """

    depths: tuple[int, ...]
    group: int
    row: int
    num_rows: int
    first: int
    count: int
    apart: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One product. `line` and `position` are relative to those of the output; `blocks` are the
    addresses of taps in the other operand, one per `slice.count` partitions; `column` is what the
    other operand moves per partition of a block.
    """

    slice: Slice
    line: int
    position: int
    blocks: tuple[int, ...]
    column: int

    @property
    def partitions(self) -> int:
        """Partitions of the operands."""
        return len(self.blocks) * self.slice.count


@dataclass(slots=True)
class Sheet:
    """What is transposed: a slice at `width` positions from each that its steps want."""

    slice: Slice
    width: int = 0
    positions: list[int] = field(default_factory=list)

    @property
    def partitions(self) -> int:
        """Elements that are transposed per position."""
        return self.slice.num_rows * self.width * self.slice.count

    def begins_with(self, other: Slice, width: int) -> bool:
        """Whether the first partitions of this sheet are a slice of `width` positions."""
        same = replace(other, num_rows=self.slice.num_rows) == self.slice
        return same and (self.slice.num_rows == 1 or self.width == width)

    def grid(self, step: int) -> int:
        """Distance of the positions that are needed when outputs are `step` apart."""
        return math.gcd(step, *(p - min(self.positions) for p in self.positions))


def steps_of(form: Form, rows: int, most: int) -> list[Step]:
    """All steps, group by group, of up to `most` partitions; `rows` line steps are a line."""
    found = []
    tiles, apart = _tiles(form, most)
    column = apart * _column(form)
    room = max(1, most // form.pixel) if tiles[0][1] == form.pixel else 1
    for group, first, offset in _channel_blocks(form):
        for depths, moved in _taps(form, form.depths):
            for line, table in sorted(_planes(form, rows, offset + moved).items()):
                for (row, num_rows, position, blocks), (start, count) in product(
                    tap_pieces(table, room), tiles
                ):
                    where = Slice(depths, group, row, num_rows, first + start, count, apart)
                    at = tuple(address + start * _column(form) for address in blocks)
                    found.append(Step(where, line, position, at, column))
    return found


def sheets_of(steps: Sequence[Step]) -> dict[Slice, Sheet]:
    """The sheets that `steps` share."""
    found: dict[Slice, Sheet] = {}
    for step in sorted(steps, key=lambda s: -s.slice.num_rows):
        width = len(step.blocks) // step.slice.num_rows
        first = next((s for s in found.values() if s.begins_with(step.slice, width)), None)
        sheet = found.setdefault(step.slice, first or Sheet(step.slice))
        sheet.width = max(sheet.width, width)
        sheet.positions.append(step.position)
    return found


def _column(form: Form) -> int:
    iter_dim = form.channel
    return form.weights.stride(iter_dim) if iter_dim is not None else 0


def _tiles(form: Form, most: int) -> tuple[list[tuple[int, int]], int]:
    """(first channel, count) of the tiles of a group's channels, and how far apart the channels of
    a tile are. Where columns are innermost in the other operand, neighbouring channels go to
    different tiles: what is loaded for all tiles of a tap is then one run per partition.
    """
    inner = form.channel
    length = form.domain.sizes[inner] if inner is not None else 1
    tile = even_tile(length, most)
    count = length // tile
    if count > 1 and length == count * tile and not form.transposes_filters:
        return [(n, tile) for n in range(count)], count
    return cut(length, tile), 1


def _channel_blocks(form: Form) -> Iterator[tuple[int, int, int]]:
    """(group number, first channel in memory, address in the other operand)."""
    sizes, inner = form.domain.sizes, form.channel
    majors = [a for a in form.channels if a in form.over and a != inner]
    groups = list(product(*(range(sizes[a]) for a in form.groups)))
    for number, at in enumerate(groups):
        for index in product(*(range(sizes[a]) for a in majors)):
            iter_dims = list(zip((*form.groups, *majors), (*at, *index), strict=True))
            first = sum(i * form.access.stride(a) for a, i in iter_dims)
            yield number, first, sum(i * form.weights.stride(a) for a, i in iter_dims)


def _taps(form: Form, dims: Sequence[Dim]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(coordinate per dim at the first output, address in the other operand) of every tap."""
    options = [list(points(form.domain.sizes, d.summed)) for d in dims]
    for taps in product(*options):
        offset = sum(i * form.weights.stride(a) for index, _ in taps for a, i in index.items())
        yield tuple(d.start + moved for d, (_, moved) in zip(dims, taps, strict=True)), offset


def _planes(form: Form, rows: int, offset: int) -> dict[int, dict[int, dict[int, int]]]:
    """Address of a tap by line, row of the line and position."""
    found: dict[int, dict[int, dict[int, int]]] = {}
    for (at, position), moved in _taps(form, (form.line, form.inner)):
        line, row = divmod(at, rows)
        found.setdefault(line, {}).setdefault(row, {})[position] = offset + moved
    return found


def tap_pieces(
    table: Mapping[int, Mapping[int, Tap]], room: int
) -> Iterator[tuple[int, int, int, tuple[Tap, ...]]]:
    """(row, rows, position, taps) of pieces of a `table` of taps by row and position: up to `room`
    taps side by side in memory, in rows below each other where whole rows fit.
    """
    waiting: list[tuple[int, int, int, tuple[Tap, ...]]] = []
    for row, taps in sorted(table.items()):
        runs = list(_runs(sorted(taps), room))
        for run in runs:
            found = tuple(taps[p] for p in run)
            if len(runs) == 1 and waiting:
                first, count, position, before = waiting[-1]
                fits = len(before) + len(found) <= room and first + count == row
                if fits and position == run[0] and len(before) == count * len(found):
                    waiting[-1] = (first, count + 1, position, before + found)
                    continue
            waiting.append((row, 1, run[0], found))
    yield from waiting


def _runs(positions: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbouring positions, up to `most` at a time."""
    run: list[int] = []
    for position in positions:
        if run and (position != run[-1] + 1 or len(run) == most):
            yield run
            run = []
        run.append(position)
    yield run
