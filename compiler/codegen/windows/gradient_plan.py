"""Tiles for windows whose channels are kept, and which sums lie on the partitions together.

The largest tiles that fit are taken. What tiles become is in `gradient.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.compiler.codegen.builder import cut
from shardwright.compiler.codegen.contract_plan import even_tile
from shardwright.compiler.codegen.domain import AccessMap, Domain, PerDim
from shardwright.compiler.codegen.planning import MIN_CYCLES, Room
from shardwright.compiler.codegen.windows import lines as raw
from shardwright.compiler.codegen.windows.form import Dim, Form, points, refused
from shardwright.compiler.codegen.windows.lines import Extent, Planning
from shardwright.compiler.codegen.windows.steps import tap_pieces
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine

_SUM_SHARE = 0.4  # of the budget for sums; lines have the rest


@dataclass(frozen=True, slots=True)
class Part:
    """Sums that lie on the partitions together: taps at `line`, `rows` rows of it from `row` on,
    `positions` in each, by channels first..first+count-1 of group `group`. `taps` are the indices
    of each.
    """

    line: int
    row: int
    rows: int
    position: int
    positions: int
    depths: tuple[int, ...]
    group: int
    first: int
    count: int
    taps: tuple[PerDim, ...]

    @property
    def partitions(self) -> int:
        """Partitions of the sums."""
        return self.rows * self.positions * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """Tiles: `images` images of `height` lines and `width` positions of the other operand at a
    time, `columns` of the widest column iter dim.
    """

    images: int
    height: int
    width: int
    columns: int
    cost: float = 0.0


class GradientPlanner(Planning):
    """The contraction and its parts."""

    def __init__(self, form: Form, roots: Sequence[int], room: Room) -> None:
        self.stores = _stores(form.domain, form.number, roots)
        self.line, self.inner = _summed(form.line), _summed(form.inner)
        super().__init__(form, room, self.line[1], form.weights)
        self.parts = list(_parts(form, self.rows, self.most))
        for dim in (form.line, form.inner):
            if len(dim.summed) > 1:
                raise refused(form.domain, "one summed index along a dim")

    @property
    def length(self) -> int:
        """Lines of the other operand per image."""
        return self.form.domain.size(self.line[0])

    def reach(self) -> tuple[int, int]:
        """First and last + 1 line that line 0 of the other operand meets."""
        return raw.span([p.line for p in self.parts])

    def plan(self) -> GradientPlan | None:
        """As many images, positions and columns at a time as fit."""
        together = raw.images_continue(self.form) and self._continues()
        images = self.even_images(self.length) if together else 1
        low, high = self.reach()
        height = self.length
        if images == 1:
            room = (self.most - (high - low)) // self.stride + 1
            height = even_tile(self.length, max(1, min(self.most, room)))
        for columns, count in product(
            self._column_tiles(), range(1, self.form.domain.size(self.inner[0]) + 1)
        ):
            width = math.ceil(self.form.domain.size(self.inner[0]) / count)
            plan = GradientPlan(images=images, height=height, width=width, columns=columns)
            if self._bytes(plan) <= self.room.budget:
                return replace(plan, cost=self._cost(plan))
        return None

    def _continues(self) -> bool:
        """Whether lines of the next image follow those of an image in the other operand too."""
        if self.line[0] is None:
            return True
        assert self.image is not None
        access = self.form.weights
        return access.stride(self.image) == access.stride(self.line[0]) * self.length

    def _column_tiles(self) -> Iterator[int]:
        if self.wide is None:
            yield 1
            return
        each = len(self.parts) * self.beside * DType.F32.bytes
        bank = self.room.limits.moving_max // self.beside
        most = min(int(_SUM_SHARE * self.room.budget) // each, bank)
        while most >= 1:
            yield even_tile(self.sizes[self.wide], most)
            most //= 2

    def _bytes(self, plan: GradientPlan) -> int:
        item = self.form.packed_type.bytes
        extent = self.extent(0, plan.width)
        width = plan.columns * self.beside
        lines = extent.elements(self.form.pixel) * (2 + len(self.shifts())) * item
        groups = self.form.domain.points(self.form.groups)
        other = 2 * plan.width * width * groups * item
        return lines + other + (4 + item) * len(self.parts) * width + 1024

    def shifts(self) -> list[int]:
        """Lines that are moved."""
        return sorted({p.line for p in self.parts})

    def extent(self, start: int, width: int) -> Extent:
        """What of the lines positions start..start+width-1 of the other operand meet."""
        step = self.inner[1]
        low = min(p.position for p in self.parts) + start * step
        high = max(p.position + p.positions for p in self.parts) + (start + width - 1) * step
        rows = (min(p.row for p in self.parts), max(p.row + p.rows for p in self.parts))
        return Extent(rows, (low, high))

    def _cost(self, plan: GradientPlan) -> float:
        images = self.form.domain.points(self.form.images) / plan.images
        tiles = images * math.ceil(self.length / plan.height) * self.form.domain.size(self.inner[0])
        cycles = tiles * len(self.parts) * max(MIN_CYCLES, plan.columns * self.beside)
        return self.room.rates.engine_ns(Engine.TENSOR, cycles)


def _summed(dim: Dim) -> tuple[int | None, int]:
    """(iter dim, step) that walks the other operand along a dim."""
    return dim.summed[0] if dim.summed else (None, 1)


def _stores(
    domain: Domain, number: int, roots: Sequence[int]
) -> list[tuple[tuple[DType, ...], AccessMap]]:
    """Per store, the types its value is rounded to on the way, and where it goes.

    Raises CompileError when there is more than conversions between contraction and store.
    """
    found = []
    for root in roots:
        types: list[DType] = []
        at = domain[root].inputs[0]
        while at != number:
            value = domain[at]
            if value.op != "convert":
                raise refused(domain, f"conversions alone behind a filter gradient, got {value.op}")
            types.append(value.dtype)
            (at,) = value.inputs
        types.append(domain[number].dtype)
        found.append((tuple(reversed(types)), domain[root].access))
    return found


def _parts(form: Form, rows: int, most: int) -> Iterator[Part]:
    """All sums, those of one line shift together."""
    sizes = form.domain.sizes
    kept = [a for a in form.channels if a not in form.groups]
    channel = kept[-1] if kept and form.access.stride(kept[-1]) == 1 else None
    if len(kept) > (channel is not None):
        raise refused(form.domain, "one channel index, innermost")
    length = sizes[channel] if channel is not None else 1
    tile = even_tile(length, most)
    room = max(1, most // length) if length == form.pixel else 1
    taps: dict[tuple[tuple[int, ...], int], dict[int, dict[int, dict[int, int]]]] = {}
    dims = (*form.depths, form.line, form.inner)
    for combined in product(*(list(points(sizes, d.kept)) for d in dims)):
        index = {a: i for at, _ in combined for a, i in at.items()}
        *depths, line, position = (
            d.start + moved for d, (_, moved) in zip(dims, combined, strict=True)
        )
        shift, row = divmod(line, rows)
        table = taps.setdefault((tuple(depths), shift), {})
        table.setdefault(row, {})[position] = index
    groups = list(product(*(range(sizes[a]) for a in form.groups)))
    for (depths_at, shift), table in sorted(taps.items()):
        for number, at in enumerate(groups):
            group = dict(zip(form.groups, at, strict=True))
            first = sum(i * form.access.stride(a) for a, i in group.items())
            for row, rows_here, position, found in tap_pieces(table, room):
                for start, count in cut(length, tile):
                    index = group | ({channel: start} if channel is not None else {})
                    yield Part(
                        line=shift,
                        row=row,
                        rows=rows_here,
                        position=position,
                        positions=len(found) // rows_here,
                        depths=depths_at,
                        group=number,
                        first=first + start,
                        count=count,
                        taps=tuple(tap | index for tap in found),
                    )
