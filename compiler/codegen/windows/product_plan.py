"""Choosing tiles for windows with summed channels: how many images, lines, positions and columns at
a time, and whether a tile of results is lines at one position or positions of a few lines.

The largest tiles that fit are taken; the two forms are estimated and tried. What tiles become is in
`product.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.compiler.codegen.contract_plan import even_tile
from shardwright.compiler.codegen.domain import BINARY, CODELESS
from shardwright.compiler.codegen.normalise import contiguous_run, joined_iter_dims
from shardwright.compiler.codegen.planning import MIN_CYCLES, Room
from shardwright.compiler.codegen.windows import lines as raw
from shardwright.compiler.codegen.windows.form import Dim, Form, Steps
from shardwright.compiler.codegen.windows.lines import Extent, Planning
from shardwright.compiler.codegen.windows.steps import Sheet, sheets_of, steps_of
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.isa.program import Engine

_FILTER_SHARE = 0.45  # of the budget for filters; lines, sheets and results have the rest
_OVERLAP = 0.1  # part of the shorter work that shows beside the longest (inferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """Tiles: `images` images of `height` output lines and `width` positions at a time, `columns`
    of the widest column iter dim; results of `lines` lines are a tile unless `by_line`.
    """

    form: Form
    rows: int
    by_line: bool
    images: int
    height: int
    width: int
    lines: int
    columns: int
    cost: float


@dataclass(frozen=True, slots=True)
class Index:
    """A dim of the output: the iter dim a tile walks, its step, and the looped ones."""

    iter_dim: int | None
    step: int
    size: int
    others: Steps


def _index(form: Form, dim: Dim) -> Index:
    if not dim.kept:
        return Index(None, 1, 1, ())
    (iter_dim, step), *others = dim.kept
    return Index(iter_dim, step, form.domain.sizes[iter_dim], tuple(others))


class Planner(Planning):
    """What all tilings of one kind share, and the largest that fits."""

    def __init__(
        self, form: Form, epilogue: list[int], roots: Sequence[int], room: Room, by_line: bool
    ) -> None:
        self.epilogue, self.by_line = epilogue, by_line
        self.line, self.inner = _index(form, form.line), _index(form, form.inner)
        self.out = max((form.domain[n] for n in roots), key=form.domain.elements).access
        super().__init__(form, room, self.line.step, self.out)
        self.steps = steps_of(form, self.rows, self.most)
        self.sheets = sheets_of(self.steps)
        self.distinct = {s.slice: s for s in self.sheets.values()}

    @cached_property
    def epilogue_is_light(self) -> bool:
        """Whether Vector has little to do behind the products."""
        return not any(self.form.domain[n].op in BINARY for n in self.epilogue)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """First and last + 1 line that the output at line 0 looks at."""
        return raw.span([s.line for s in self.steps])

    def continues(self, outer: int | None, inner: int | None) -> bool:
        """Whether two output iter dims are one index for everything behind the contraction."""
        if outer is None or inner is None:
            return False
        return joined_iter_dims(self.form.domain, self.epilogue, outer, inner) is not None

    def plan(self) -> ProductPlan | None:
        """The largest tiles that fit; None when there are none of this form."""
        if not self.by_line and self.inner.iter_dim is None:
            return None
        joins = self.line.iter_dim is None or self.continues(self.image, self.line.iter_dim)
        together = joins and raw.images_continue(self.form)
        images = self.even_images(self.line.size) if together else 1
        height = even_tile(self.line.size, self.most)
        plan = self._widest(images, height)
        return None if plan is None else replace(plan, cost=self._cost(plan))

    def _widest(self, images: int, height: int) -> ProductPlan | None:
        """As many positions, columns and images at a time as fit."""
        for columns in self._column_tiles():
            for some in dict.fromkeys((images, max(1, images // 2), 1)):
                for count in range(1, self.inner.size + 1):
                    width = math.ceil(self.inner.size / count)
                    if count > 1 and math.ceil(self.inner.size / width) != count:
                        continue
                    plan = self._tiled(some, height, width, columns)
                    if plan is not None:
                        return plan
        return None

    def _column_tiles(self) -> Iterator[int]:
        """Columns of the widest iter dim whose filters fit."""
        if self.wide is None:
            yield 1
            return
        size, last = self.sizes[self.wide], 0
        each = len(self.steps) * self.beside * self.form.packed_type.bytes
        for count in range(1, size + 1):
            tile = math.ceil(size / count)
            if tile != last and tile * each <= _FILTER_SHARE * self.room.budget:
                yield tile
                last = tile
                if count > 4:
                    return

    def _tiled(self, images: int, height: int, width: int, columns: int) -> ProductPlan | None:
        lines = height
        if not self.by_line:
            width = min(width, self.most)
            whole = width == self.inner.size and self.continues(
                self.line.iter_dim, self.inner.iter_dim
            )
            lines = max(1, min(height, self.most // width)) if whole else 1
            lines = even_tile(height, lines)
        plan = ProductPlan(
            form=self.form,
            rows=self.rows,
            by_line=self.by_line,
            images=images,
            height=height,
            width=width,
            lines=lines,
            columns=columns,
            cost=0.0,
        )
        return plan if self._bytes(plan) <= self.room.budget else None

    def _bytes(self, plan: ProductPlan) -> int:
        item, pixel = self.form.packed_type.bytes, self.form.pixel
        extent = self.extent(0, plan.width)
        waiting = 2 * extent.elements(pixel) * item
        lines = plan.images * self.line_count(plan.height)
        sheets = sum(self.entries(s, plan.width) for s in self.distinct.values()) * lines * item
        width = plan.columns * self.beside
        filters = len(self.steps) * width * item
        groups = self.form.domain.points(self.form.groups)
        positions = plan.width if plan.by_line else 1
        values = [self.form.domain[n] for n in (self.form.number, *self.epilogue)]
        each = sum(v.dtype.bytes for v in values if v.op not in (*STORES, *CODELESS))
        return waiting + 2 * sheets + filters + 2 * positions * width * groups * each

    def line_count(self, height: int) -> int:
        """Lines that `height` output lines look at."""
        low, high = self.reach
        return (height - 1) * self.stride + high - low

    def entries(self, sheet: Sheet, width: int) -> int:
        """Positions of a sheet that `width` outputs look at."""
        low, high = raw.span(sheet.positions)
        return ((width - 1) * self.inner.step + high - 1 - low) // self.grid(sheet) + 1

    def grid(self, sheet: Sheet) -> int:
        """Distance of the positions of a sheet on chip."""
        return sheet.grid(self.inner.step)

    def extent(self, start: int, width: int) -> Extent:
        """What of the lines the outputs start..start+width-1 look at."""
        low = min(min(s.positions) for s in self.distinct.values())
        high = max(max(s.positions) + s.width for s in self.distinct.values())
        first = start * self.inner.step
        rows = (
            min(s.slice.row for s in self.steps),
            max(s.slice.row + s.slice.num_rows for s in self.steps),
        )
        return Extent(rows, (first + low, first + (width - 1) * self.inner.step + high))

    def _cost(self, plan: ProductPlan) -> float:
        """Estimated nanoseconds: the most of tensor engine, DMA and copies, a part of the rest."""
        rates, item = self.room.rates, self.form.packed_type.bytes
        points = self.form.domain.points
        images = points(self.form.images)
        blocks = math.ceil(images / plan.images) * math.ceil(self.line.size / plan.height)
        blocks *= points(a for d in self.form.depths for a, _ in d.kept)
        width = points(self.columns)
        chunks = math.ceil(self.sizes[self.wide] / plan.columns) if self.wide is not None else 1
        tiles = self.inner.size
        if not plan.by_line:
            tiles = plan.images * math.ceil(plan.height / plan.lines)
            tiles *= math.ceil(self.inner.size / plan.width)
        passes = 4 if item == 4 else 1
        products = blocks * tiles * len(self.steps) * max(width, MIN_CYCLES * chunks)
        entries = sum(self.entries(s, self.inner.size) for s in self.distinct.values())
        transposed = blocks * chunks * entries * min(self.most, plan.images * plan.height)
        tensor = rates.engine_ns(Engine.TENSOR, (products + transposed) * passes)
        copied = rates.engine_ns(Engine.VECTOR, (transposed + blocks * tiles * width) / 2)
        run = self._result_run(plan)
        total = images * self.line.size * self.inner.size * width
        stored = rates.transfer_ns(total * item, run * item, self.most)
        extent = self.extent(0, self.inner.size).elements(self.form.pixel)
        read = rates.transfer_ns(
            images * self.lines.length * extent * chunks * item, extent * item, self.most
        )
        shown = (tensor, copied, stored + read)
        return max(shown) + _OVERLAP * (sum(shown) - max(shown))

    def _result_run(self, plan: ProductPlan) -> int:
        """Elements in a row of a store."""
        extents = {a: self.sizes[a] for a in (*self.columns, *self.form.groups)}
        if self.wide is not None:
            extents[self.wide] = plan.columns
        free = [*extents]
        if plan.by_line and self.inner.iter_dim is not None:
            free.append(self.inner.iter_dim)
            extents[self.inner.iter_dim] = plan.width
        return contiguous_run(self.form.domain, self.out, free, extents)
