"""Windows with summed channels: lines are transposed so that channels lie on the partitions, and
every tap is a product with a shifted view of them.

Output positions are the stationary side, so results come out with positions on the partitions and
columns along the rows, as memory has them. A tile of results is lines at one position (`by_line`,
then all positions of a line are one row of the result in memory) or positions of a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from shardwright.compiler.codegen.builder import Box, Builder, Held, Scope, cut, merge_dims, pieces
from shardwright.compiler.codegen.contract_plan import even_tile, needed_by_epilogue
from shardwright.compiler.codegen.domain import Domain, PerDim
from shardwright.compiler.codegen.normalise import joined_iter_dims
from shardwright.compiler.codegen.planning import Candidate, Room
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.codegen.windows import lines as raw
from shardwright.compiler.codegen.windows.filters import STEP, Filters
from shardwright.compiler.codegen.windows.form import Form, points
from shardwright.compiler.codegen.windows.lines import Extent
from shardwright.compiler.codegen.windows.product_plan import Planner, ProductPlan
from shardwright.compiler.codegen.windows.steps import Sheet, Slice, Step
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine

_ENTRY, _IMAGE, _LINE = -21, -22, -23  # private iter dim numbers of a sheet on chip
_UNROLLED = 96  # products side by side: enough to hide the copy out of PSUM (our choice)


def product_candidates(form: Form, roots: Sequence[int], room: Room) -> list[Candidate]:
    """Tilings of a contraction whose windows have summed channels."""
    epilogue = needed_by_epilogue(form.domain, form.number, roots)
    found = []
    for by_line in (True, False):
        planner = Planner(form, epilogue, roots, room, by_line)
        plan = planner.plan()
        if plan is not None:
            nest = _Nest(planner, plan)
            found.append(Candidate(plan.cost, nest.emit, plan=plan))
    return found


class _Late:
    """Filters that are loaded when they are first asked for: behind the first lines, which are
    transposed meanwhile. Inside a loop over images that would be once per iteration.
    """

    def __init__(self, filters: Filters, scope: Scope) -> None:
        self._filters, self._scope = filters, scope
        self._held: Held | None = None

    def held(self) -> Held:
        """Where the filters are."""
        if self._held is None:
            self._held = self._filters.load(self._scope)
        return self._held


class _Nest:
    """The code of one plan."""

    def __init__(self, planner: Planner, plan: ProductPlan) -> None:
        self.planner, self.plan, self.form = planner, plan, plan.form
        self.sizes = planner.sizes
        self.inner, self.line, self.wide = planner.inner, planner.line, planner.wide
        axes = [*planner.form.groups, *planner.columns]
        if plan.by_line and self.inner.iter_dim is not None:
            axes.append(self.inner.iter_dim)
        self.axes = sorted(axes, key=lambda a: -abs(planner.out.stride(a)))
        self.partition, self.domain = self._partition()

    def _partition(self) -> tuple[int | None, Domain]:
        """The iter dim on the partitions of results, and the domain in which it is one iter dim."""
        form, epilogue = self.form, self.planner.epilogue
        pair = (self.planner.image, self.line.iter_dim)
        many = self.plan.images > 1
        if not self.plan.by_line:
            pair, many = (self.line.iter_dim, self.inner.iter_dim), self.plan.lines > 1
        outer, inner = pair
        if many and outer is not None and inner is not None:
            joined = joined_iter_dims(form.domain, epilogue, outer, inner)
            assert joined is not None
            return inner, joined
        if self.plan.by_line and inner is None and many:
            return outer, form.domain
        return inner, form.domain

    def emit(self, builder: Builder) -> None:
        """Everything, into the builder's body."""
        form = self.form
        whole = {a: self.sizes[a] for a in (*self.planner.columns, *form.groups)}
        scope = builder.scope(dict.fromkeys(self.sizes, 1) | whole)
        extents = {a: 1 for a in form.images} | {self.planner.image: self.plan.images}
        # A loop over images has everything in front of it that stays.
        looped = any(self.sizes[a] >= 2 * extents[a] for a in form.images)
        for place in scope.nested(self.sizes, {self.wide: self.plan.columns}):
            filters = _Late(Filters(form, self.planner.steps, self.planner.columns), place)
            if looped:
                filters.held()
            for image in place.nested(self.sizes, extents):
                self._blocks(image, filters)

    def _blocks(self, scope: Scope, filters: _Late) -> None:
        """Everything else is unrolled: blocks know which of their lines and positions exist."""
        plan = self.plan
        looped = [s for d in self.form.depths for s in d.kept]
        looped += [*self.line.others, *self.inner.others]
        lines = range(0, self.line.size, plan.height)
        starts = range(0, self.inner.size, plan.width)
        used: list[list[Held]] = []
        single = len(lines) * len(starts) * self.form.domain.points(a for a, _ in looped) == 1
        for index, _ in points(self.sizes, tuple(looped)):
            for first, start in product(lines, starts):
                block = _Block(self, scope, index, first, start, 2 if single else 1)
                used.append(block.emit(filters))
                for held in used[-2] if len(used) > 1 else ():
                    scope.release(held)


class _Block:
    """One tile of images, lines and positions: its sheets, then its results."""

    def __init__(
        self, nest: _Nest, scope: Scope, index: PerDim, first: int, start: int, slots: int
    ) -> None:
        self.nest, self.planner, self.plan, self.form = nest, nest.planner, nest.plan, nest.form
        self.slots = slots
        planner = self.planner
        self.images = scope.extent(planner.image)
        self.height = min(self.plan.height, nest.line.size - first)
        self.width = min(self.plan.width, nest.inner.size - start)
        self.first, self.start = first, start
        self.index = index
        boxes = {a: Box(Affine(i), 1) for a, i in index.items()}
        for iter_dim, at, count in (
            (nest.line.iter_dim, first, self.height),
            (nest.inner.iter_dim, start, self.width),
        ):
            if iter_dim is not None:
                boxes[iter_dim] = Box(Affine(at), count)
        self.scope = scope.straight(boxes)
        # What the other iter dims of a dim add to its coordinate.
        self.line_shift = sum(index[a] * s for a, s in nest.line.others)
        self.inner_shift = sum(index[a] * s for a, s in nest.inner.others)
        if self.line_shift % self.plan.rows:
            raise AssertionError("other iteration dims of the line dim move by whole lines")
        self.top = first * planner.stride + planner.reach[0]
        self.top += self.line_shift // self.plan.rows

    def emit(self, filters: _Late) -> list[Held]:
        """The tiles that are free once the block is done."""
        sheets, used = self._sheets()
        self._results(sheets, filters.held())
        return [*used, *sheets.values()]

    # sheets

    def _sheets(self) -> tuple[dict[Slice, Held], list[Held]]:
        planner, scope = self.planner, self.scope
        first = self.start * planner.inner.step + self.inner_shift
        extent = planner.extent(self.start, self.width)
        low, high = extent.positions
        extent = replace(extent, positions=(low + self.inner_shift, high + self.inner_shift))
        count = planner.line_count(self.height)
        made = {
            key: self._empty(sheet, count, planner.entries(sheet, self.width))
            for key, sheet in planner.distinct.items()
        }
        used = []
        for depths in dict.fromkeys(s.depths for s in planner.distinct):
            there = self._depths(depths)
            found = planner.lines.pieces(
                self.images, self.top, self.top + count, planner.room.limits.partitions
            )
            self._clear([made[k] for k in made if k.depths == depths], count)
            for piece in found:
                tile = planner.lines.tile(scope, piece, extent, self.slots)
                planner.lines.load(scope, tile, piece, extent, there)
                used.append(tile)
                for key, sheet in planner.distinct.items():
                    if key.depths == depths:
                        at = first + min(sheet.positions) - extent.positions[0]
                        self._transpose(sheet, made[key], (tile, piece, extent, at), count)
        return made, used

    def _depths(self, relative: tuple[int, ...]) -> dict[int, int]:
        """Coordinates of the depth dims for taps at `relative`."""
        dims = self.form.depths
        return {
            d: at + sum(self.index[a] * s for a, s in dims[d].kept) for d, at in enumerate(relative)
        }

    def _empty(self, sheet: Sheet, lines: int, entries: int) -> Held:
        elements = entries * self.images * lines
        dtype = self.form.packed_type
        tile = self.scope.tile("sheet", sheet.partitions, elements, dtype, self.slots)
        return replace(tile, strides={_ENTRY: self.images * lines, _IMAGE: lines, _LINE: 1})

    def _clear(self, sheets: Sequence[Held], count: int) -> None:
        """Zeros where lines lie outside of the operand."""
        length = self.planner.lines.length
        outside = [(self.top, min(0, self.top + count)), (max(length, self.top), self.top + count)]
        for low, high in outside:
            if low >= high:
                continue
            for held in sheets:
                tile = self.scope.builder.tiles[held.tile]
                entries = tile.elements // held.strides[_ENTRY]
                strides = [held.strides[a] for a in (_ENTRY, _IMAGE, _LINE)]
                (dims,) = merge_dims([entries, self.images, high - low], [strides])
                target = self.scope.on_chip(held, tile.partitions, dims, low - self.top)
                self.scope.fill(target, 0.0)

    def _transpose(
        self, sheet: Sheet, held: Held, source: tuple[Held, raw.Piece, Extent, int], count: int
    ) -> None:
        """Put the lines of one piece into a sheet, position by position."""
        tile, piece, extent, at = source
        lines = (max(piece.first, self.top), min(piece.last, self.top + count))
        if lines[0] >= lines[1]:
            return
        limits = self.scope.builder.limits
        most = min(4, limits.moving_max // piece.count)
        entries = self.planner.entries(sheet, self.width)
        step = self.planner.grid(sheet) * self.form.pixel
        row = (sheet.slice.row - extent.rows[0]) * tile.strides[raw.ROW]
        start = row + at * self.form.pixel + sheet.slice.first
        for part in pieces(entries, 2 * most):
            inner, at_entry = self.scope.repeat(part)
            for turn, (low, group) in enumerate(cut(part.extent, most)):
                entry = at_entry + low
                engine = Engine.SCALAR if turn % 2 else Engine.VECTOR
                spec = (tile, entry * step + start, step, piece)
                self._transpose_group(inner, sheet, held, spec, (entry, group), lines, engine)

    def _transpose_group(
        self,
        scope: Scope,
        sheet: Sheet,
        held: Held,
        source: tuple[Held, Affine, int, raw.Piece],
        entries: tuple[Affine, int],
        lines: tuple[int, int],
        engine: Engine,
    ) -> None:
        tile, offset, step, piece = source
        entry, group = entries
        bank = scope.psum("turned", 1, 2)
        part = sheet.slice
        strides = [tile.strides[raw.ROW], self.form.pixel, part.apart]
        (dims,) = merge_dims([part.num_rows, sheet.width, part.count], [strides])
        for g in range(group):
            rows = scope.on_chip(tile, piece.count, dims, offset + g * step)
            block = scope.flat(bank, sheet.partitions, piece.count, g * piece.count)
            scope.transpose(block, rows)
        length = piece.last - piece.first
        sizes = [group, piece.images, lines[1] - lines[0]]
        to = [held.strides[a] for a in (_ENTRY, _IMAGE, _LINE)]
        into, out = merge_dims(sizes, [[piece.count, length, 1], to])
        target = scope.on_chip(
            held, sheet.partitions, out, entry * held.strides[_ENTRY] + (lines[0] - self.top)
        )
        from_bank = scope.on_chip(bank, sheet.partitions, into, lines[0] - piece.first)
        scope.copy(engine, target, from_bank)

    # results

    def _results(self, sheets: Mapping[Slice, Held], filters: Held) -> None:
        if self.plan.by_line:
            self._result(self.scope, sheets, filters, Affine(), Affine(), self.height)
            return
        for image in pieces(self.images, 1):
            inner, at = self.scope.repeat(image)
            if self.planner.image is not None:
                box = inner.boxes[self.planner.image]
                inner.boxes[self.planner.image] = Box(box.origin + at, 1)
            for part in pieces(self.height, self.plan.lines):
                place, line = inner.repeat(part)
                if self.nest.line.iter_dim is not None:
                    place.boxes[self.nest.line.iter_dim] = Box(line + self.first, part.extent)
                self._result(place, sheets, filters, at, line, part.extent)

    def _result(
        self,
        scope: Scope,
        sheets: Mapping[Slice, Held],
        filters: Held,
        image: Affine,
        line: Affine,
        height: int,
    ) -> None:
        """One tile of results and what follows from it."""
        nest = self.nest
        place = scope.straight(self._tile_box(scope))
        frame = Frame(scope.builder, nest.domain, nest.partition, nest.axes)
        number = self.form.number
        total = frame.new(number, nest.domain[number], place)
        groups = tuple((a, total.strides[a]) for a in self.form.groups)
        for at, (_, moved) in enumerate(points(nest.sizes, groups)):
            part = replace(total, offset=total.offset + moved)
            steps = [(n, s) for n, s in enumerate(self.planner.steps) if s.slice.group == at]
            for columns in self._column_pieces(place):
                self._columns(place, steps, sheets, filters, part, (image, line, height), columns)
        last = {i: n for n in self.planner.epilogue for i in nest.domain[n].inputs}
        for n in self.planner.epilogue:
            frame.emit(n, place)
            for i in {*nest.domain[n].inputs}:
                if last[i] == n and i in frame.held:
                    place.release(frame.held[i])

    def _tile_box(self, scope: Scope) -> dict[int, Box]:
        """The box of the iter dim on the partitions, where it stands for two."""
        nest, boxes = self.nest, scope.boxes
        if nest.domain is self.form.domain or nest.partition is None:
            return {}
        outer = nest.line.iter_dim if not self.plan.by_line else self.planner.image
        assert outer is not None
        low, high = boxes[outer], boxes[nest.partition]
        size = nest.sizes[nest.partition]
        return {nest.partition: Box(low.origin * size + high.origin, low.extent * high.extent)}

    def _column_pieces(self, scope: Scope) -> Iterator[tuple[int, int]]:
        """(first, count) of the widest column iter dim: what fits a bank of PSUM."""
        wide = self.nest.wide
        if wide is None:
            yield 0, 1
            return
        others = scope.elements(a for a in self.planner.columns if a != wide)
        bank = scope.builder.limits.moving_max
        tile = even_tile(scope.extent(wide), max(1, bank // others))
        yield from cut(scope.extent(wide), tile)

    def _columns(
        self,
        scope: Scope,
        steps: Sequence[tuple[int, Step]],
        sheets: Mapping[Slice, Held],
        filters: Held,
        total: Held,
        where: tuple[Affine, Affine, int],
        columns: tuple[int, int],
    ) -> None:
        """Positions side by side in a bank of PSUM, then one copy."""
        nest, (first, count) = self.nest, columns
        scope = scope.straight({})
        if nest.wide is not None:
            scope.boxes[nest.wide] = Box(scope.boxes[nest.wide].origin, count)
            total = replace(total, offset=total.offset + first * total.strides[nest.wide])
        width = scope.elements(self.planner.columns)
        iter_dim = nest.inner.iter_dim if self.plan.by_line else None
        positions = scope.extent(iter_dim)
        most = min(scope.builder.limits.moving_max // width, _UNROLLED // len(steps))
        most = even_tile(positions, max(1, most))
        for part in pieces(positions, 2 * most if positions >= 2 * most else most):
            group, at = scope.repeat(part)
            for low, count_here in cut(part.extent, most):
                start = at + low
                bank = group.hold(group.psum("product", 1, 2), self.planner.columns)
                for turn in range(count_here):
                    self._multiply(group, steps, sheets, (filters, first), bank, start, turn, where)
                if iter_dim is not None:
                    bank = replace(bank, strides={**bank.strides, iter_dim: width})
                    group.boxes[iter_dim] = Box(Affine(), count_here)
                light = self.planner.epilogue_is_light
                engine = Engine.VECTOR if light and not low else Engine.SCALAR
                self._evict(group, total, (bank, start, iter_dim), where[2], engine)

    def _evict(
        self,
        scope: Scope,
        total: Held,
        source: tuple[Held, Affine, int | None],
        height: int,
        engine: Engine,
    ) -> None:
        bank, start, iter_dim = source
        if iter_dim is not None:
            total = replace(total, offset=total.offset + start * total.strides[iter_dim])
        axes = [a for a in self.nest.axes if a in bank.strides]
        out, into = scope.patterns(self._rows(height), axes, total, bank)
        scope.copy(engine, out, into)

    def _rows(self, height: int) -> int:
        return self.images * height if self.plan.by_line else height * self.width

    def _multiply(
        self,
        scope: Scope,
        steps: Sequence[tuple[int, Step]],
        sheets: Mapping[Slice, Held],
        filters: tuple[Held, int],
        bank: Held,
        start: Affine,
        turn: int,
        where: tuple[Affine, Affine, int],
    ) -> None:
        """All steps of one position (of all positions of the tile, unless `by_line`)."""
        held, first = filters
        columns, wide = self.planner.columns, self.nest.wide
        width = scope.elements(columns)
        (across,) = merge_dims(
            [scope.extent(a) for a in columns], [[held.strides[a] for a in columns]]
        )
        moved = first * held.strides[wide] if wide is not None else 0
        out = scope.flat(bank, self._rows(where[2]), width, turn * width)
        for at, (number, step) in enumerate(steps):
            sheet = self.planner.sheets[step.slice]
            rows = self._stationary(scope, sheet, sheets[sheet.slice], step, start + turn, where)
            taps = scope.on_chip(held, step.partitions, across, number * held.strides[STEP] + moved)
            scope.matmul(out, (rows, taps), None if at else ())

    def _stationary(
        self,
        scope: Scope,
        sheet: Sheet,
        held: Held,
        step: Step,
        position: Affine,
        where: tuple[Affine, Affine, int],
    ) -> AccessPattern:
        """The view of a sheet that meets `step`, for all outputs of the tile."""
        image, line, height = where
        planner = self.planner
        grid, entry = planner.grid(sheet), held.strides[_ENTRY]
        apart = planner.inner.step // grid * entry
        offset = position * apart + (step.position - min(sheet.positions)) // grid * entry
        offset = offset + line * planner.stride + (step.line - planner.reach[0])
        offset = offset + image * held.strides[_IMAGE]
        if self.plan.by_line:
            sizes, strides = [self.images, height], [held.strides[_IMAGE], planner.stride]
        else:
            sizes, strides = [height, self.width], [planner.stride, apart]
        (dims,) = merge_dims(sizes, [strides])
        return scope.on_chip(held, step.partitions, dims, offset)
