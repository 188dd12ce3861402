"""The products that make one output position: which slice of a line meets which taps.

A *sheet* is a slice of every line, turned so that its elements lie on the partitions: channels of
one position, or of several positions (and rows) where the channels are few. A *step* is one product
with a sheet: a line and a position relative to those of the output, and the taps its partitions
meet. Steps share sheets: a tap is a shift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from compiler.codegen.contract_plan import even_tile
from compiler.codegen.windows.form import Dim, Form, points


@dataclass(frozen=True, slots=True)
class Slice:
    """Channels first..first+count-1 of group `group`, rows `row`.. of a line, at coordinates
    `depths` of the depth dims.
    """

    depths: tuple[int, ...]
    group: int
    row: int
    num_rows: int
    first: int
    count: int


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
    """What is turned: a slice at `width` positions from each of the positions its steps want."""

    slice: Slice
    width: int = 0
    positions: list[int] = field(default_factory=list)

    @property
    def partitions(self) -> int:
        """Elements that are turned per position."""
        return self.slice.num_rows * self.width * self.slice.count

    def grid(self, step: int) -> int:
        """Distance of the positions that are needed when outputs are `step` apart."""
        return math.gcd(step, *(p - min(self.positions) for p in self.positions))


def steps_of(form: Form, rows: int, most: int) -> list[Step]:
    """All steps, those of a group together; `rows` steps of the line dim are a line, a step takes
    up to `most` partitions.
    """
    found = []
    for group, first, offset, width in _channel_tiles(form, most):
        for depths, moved in _taps(form, form.depths):
            made = _planes(form, rows, offset + moved)
            for line, table in sorted(made.items()):
                for piece in _pieces(table, width == form.pixel, width, most):
                    row, num_rows, position, blocks = piece
                    where = Slice(depths, group, row, num_rows, first, width)
                    found.append(Step(where, line, position, blocks, _column(form)))
    return found


def sheets_of(steps: Sequence[Step]) -> dict[Slice, Sheet]:
    """The sheets that `steps` share."""
    found: dict[Slice, Sheet] = {}
    for step in steps:
        sheet = found.setdefault(step.slice, Sheet(step.slice))
        sheet.width = max(sheet.width, len(step.blocks) // step.slice.num_rows)
        sheet.positions.append(step.position)
    return found


def _channel(form: Form) -> int | None:
    """The summed channel atom that is innermost."""
    summed = [a for a in form.channels if a in form.over]
    return summed[-1] if summed and form.walk.stride(summed[-1]) == 1 else None


def _column(form: Form) -> int:
    atom = _channel(form)
    return form.weights.stride(atom) if atom is not None else 0


def _channel_tiles(form: Form, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(group number, first channel in memory, address in the other operand, channels)."""
    sizes, inner = form.space.sizes, _channel(form)
    length = sizes[inner] if inner is not None else 1
    tile = even_tile(length, most)
    majors = [a for a in form.channels if a in form.over and a != inner]
    groups = list(product(*(range(sizes[a]) for a in form.groups)))
    for number, at in enumerate(groups):
        for index in product(*(range(sizes[a]) for a in majors)):
            atoms = list(zip((*form.groups, *majors), (*at, *index), strict=True))
            first = sum(i * form.walk.stride(a) for a, i in atoms)
            offset = sum(i * form.weights.stride(a) for a, i in atoms)
            for start in range(0, length, tile):
                column = start * _column(form)
                yield number, first + start, offset + column, min(tile, length - start)


def _taps(form: Form, dims: Sequence[Dim]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(coordinate per dim at the first output, address in the other operand) of every tap."""
    options = [list(points(form.space.sizes, d.summed)) for d in dims]
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


def _pieces(
    table: dict[int, dict[int, int]], whole: bool, width: int, most: int
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """(row, rows, position, addresses): taps side by side in memory go on the partitions together
    where a position has all channels.
    """
    room = max(1, most // width) if whole else 1
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = []
    for row, taps in sorted(table.items()):
        runs = list(_runs(sorted(taps), room))
        for run in runs:
            addresses = tuple(taps[p] for p in run)
            if len(runs) == 1 and waiting:
                first, count, position, before = waiting[-1]
                fits = len(before) + len(addresses) <= room and first + count == row
                if fits and position == run[0] and len(before) == count * len(addresses):
                    waiting[-1] = (first, count + 1, position, before + addresses)
                    continue
            waiting.append((row, 1, run[0], addresses))
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
