"""Lines of memory on the partitions: [line, rows of it, positions, channels], zeros where windows
leave the operand along the innermost dim.

A line holds `rows` steps of the line dim, so that the windows of a strided convolution start at
every line. Lines that windows reach beyond the operand are not loaded: who reads them, knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.builder import Held, Scope, merge_dims
from shardwright.compiler.codegen.contract_plan import even_tile
from shardwright.compiler.codegen.domain import AccessMap
from shardwright.compiler.codegen.planning import Room
from shardwright.compiler.codegen.windows.form import Form
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import AccessPattern, Space

ROW, POSITION = -11, -12  # private iter dim numbers of a tile of lines


@dataclass(frozen=True, slots=True)
class Extent:
    """What of every line is on chip: rows first..last-1 of it, positions low..high-1."""

    rows: tuple[int, int]
    positions: tuple[int, int]

    @property
    def num_rows(self) -> int:
        """Rows of a line on chip."""
        return self.rows[1] - self.rows[0]

    @property
    def num_positions(self) -> int:
        """Positions on chip."""
        return self.positions[1] - self.positions[0]

    def elements(self, pixel: int) -> int:
        """Elements per partition."""
        return self.num_rows * self.num_positions * pixel


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines first..last-1 of each of `images` images, one after the other on the partitions."""

    images: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """Partitions."""
        return self.images * (self.last - self.first)


class Lines:
    """Loads lines of the windowed operand of `form`, `rows` steps of the line dim each."""

    def __init__(self, form: Form, rows: int) -> None:
        self.form = form
        self.rows = rows
        self.length = form.line.size // rows
        self.item: DType = form.packed_type

    def pieces(self, images: int, first: int, last: int, most: int) -> list[Piece]:
        """Lines first..last-1 that exist, up to `most` to a tile; of several images all lines."""
        if images > 1:
            return [Piece(images, 0, self.length)]
        low, high = max(0, first), min(self.length, last)
        return [Piece(1, at, min(high, at + most)) for at in range(low, high, most)]

    def tile(self, scope: Scope, piece: Piece, extent: Extent, slots: int = 2) -> Held:
        """An empty tile for the lines of `piece`."""
        pixel = self.form.pixel
        tile = scope.tile("lines", piece.count, extent.elements(pixel), self.item, slots)
        return replace(tile, strides={ROW: extent.num_positions * pixel, POSITION: pixel})

    def load(
        self, scope: Scope, tile: Held, piece: Piece, extent: Extent, depths: Mapping[int, int]
    ) -> None:
        """Fill `tile`; `depths` are coordinates of the depth dims, by position. Images are those at
        the origin of the boxes of `scope`.
        """
        form, pixel = self.form, self.form.pixel
        low, high = extent.positions
        inside = (max(0, low), min(form.inner.size, high))
        pads = [(low, min(high, 0)), (max(low, form.inner.size), high)]
        if inside[0] >= inside[1] or not all(
            0 <= at < form.depths[d].size for d, at in depths.items()
        ):
            pads, inside = [(low, high)], (0, 0)
        for start, end in pads:
            if start < end:
                sizes = [extent.num_rows, (end - start) * pixel]
                (dims,) = merge_dims(sizes, [[tile.strides[ROW], 1]])
                scope.fill(scope.on_chip(tile, piece.count, dims, (start - low) * pixel), 0.0)
        if inside[0] >= inside[1]:
            return
        address = scope.address_of(form.origin, form.access, form.images)
        address = address + sum(at * form.depths[d].unit for d, at in depths.items())
        first = piece.first * self.rows + extent.rows[0]
        address = address + first * form.line.unit + inside[0] * pixel
        sizes = [extent.num_rows, (inside[1] - inside[0]) * pixel]
        hbm, chip = merge_dims(sizes, [[form.line.unit, 1], [tile.strides[ROW], 1]])
        lines = (self.rows * form.line.unit, piece.count)
        source = AccessPattern(Space.HBM, form.access.tensor, address, (lines, *hbm))
        target = scope.on_chip(tile, piece.count, chip, (inside[0] - low) * pixel)
        scope.load(target, source)


class Planning:
    """What planners of windows share: a window starts every `step`, columns lie as in `access`."""

    def __init__(self, form: Form, room: Room, step: int, access: AccessMap) -> None:
        self.form, self.room, self.sizes = form, room, form.domain.sizes
        self.most = room.limits.partitions
        dense = form.line.unit == form.inner.size * form.inner.unit
        self.rows = step if step > 1 and form.line.size % step == 0 and dense else 1
        self.stride = step // self.rows  # lines from window to window
        self.lines = Lines(form, self.rows)
        self.columns = sorted(form.columns, key=lambda a: -abs(access.stride(a)))
        self.wide = max(self.columns, key=lambda a: self.sizes[a], default=None)
        self.beside = form.domain.points(a for a in self.columns if a != self.wide)
        self.image = form.images[-1] if form.images else None

    def even_images(self, length: int) -> int:
        """Images whose lines, `length` each on the other side, lie on the partitions together."""
        room = self.most // max(self.lines.length, length)
        return even_tile(self.sizes[self.image], room) if room > 1 and self.image is not None else 1


def images_continue(form: Form) -> bool:
    """Whether lines of the next image follow those of an image in memory."""
    if not form.images or form.depths:
        return False
    return form.access.stride(form.images[-1]) == form.line.size * form.line.unit


def span(values: Sequence[int]) -> tuple[int, int]:
    """(smallest, largest + 1)."""
    return min(values), max(values) + 1
