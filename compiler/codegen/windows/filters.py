"""The other operand of windows on chip: [partitions of a step, steps, columns].

With columns innermost in memory every step is a DMA of rows. With channels innermost, rows of
columns arrive and are transposed on the tensor engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.compiler.codegen.builder import Held, Scope, cut, merge_dims
from shardwright.compiler.codegen.windows.form import Form, points
from shardwright.compiler.codegen.windows.runs import Item, runs_of
from shardwright.compiler.codegen.windows.steps import Step
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import AccessPattern, Engine, Space

STEP = -13  # private iter dim number of a tile of filters
_WAITING_ELEMENTS = 8192  # per partition of rows that wait to be transposed (our choice)


class Filters:
    """Loads the other operand of `form` for `steps`, columns `axes` (major to minor)."""

    def __init__(self, form: Form, steps: Sequence[Step], axes: Sequence[int]) -> None:
        self.form = form
        self.steps = steps
        self.axes = tuple(axes)
        self.wide = max(axes, key=lambda a: form.domain.sizes[a], default=None)

    def load(self, scope: Scope) -> Held:
        """The filters for the boxes of `scope` of the columns."""
        width = scope.elements(self.axes)
        most = max(s.partitions for s in self.steps)
        tile = scope.tile("filters", most, len(self.steps) * width, self.form.packed_type, slots=1)
        held = replace(tile, strides={**scope.hold(tile, self.axes).strides, STEP: width})
        (self._transposed if self.form.transposes_filters else self._rows)(scope, held)
        return held

    def _rows(self, scope: Scope, held: Held) -> None:
        access = self.form.weights
        axes = sorted(self.axes, key=lambda a: -abs(access.stride(a)))
        for run in runs_of([Item(s.blocks, s.slice.count, s.column) for s in self.steps]):
            sizes = [run.count, *(scope.extent(a) for a in axes)]
            hbm, chip = merge_dims(
                sizes,
                [
                    [run.delta, *(access.stride(a) for a in axes)],
                    [held.strides[STEP], *(held.strides[a] for a in axes)],
                ],
            )
            address = scope.address_of(access.offset, access, self.axes) + run.address
            column = self.steps[run.item].column
            source = AccessPattern(Space.HBM, access.tensor, address, ((column, run.rows), *hbm))
            target = scope.on_chip(held, run.rows, chip, run.item * held.strides[STEP])
            scope.load(replace(target, start=run.start), source)

    # channels innermost

    def _transposed(self, scope: Scope, held: Held) -> None:
        assert self.wide is not None
        size, most = scope.extent(self.wide), scope.builder.limits.transpose_max
        others = ((a, held.strides[a]) for a in self.axes if a != self.wide)
        for index, column in points({a: scope.extent(a) for a in self.axes}, tuple(others)):
            for start, count in cut(size, most):
                at = {**index, self.wide: start}
                first = column + start * held.strides[self.wide]
                for chunk in _chunks(self.steps):
                    self._transpose(scope, held, (at, first, count), chunk)

    def _transpose(
        self, scope: Scope, held: Held, where: tuple[dict[int, int], int, int], chunk: range
    ) -> None:
        """Rows of columns `where` (index, first, count), for the steps of `chunk`."""
        index, columns, count = where
        steps = [self.steps[n] for n in chunk]
        starts = [sum(s.partitions for s in steps[:n]) for n in range(len(steps))]
        dtype = self.form.packed_type
        rows = scope.tile("rows", count, sum(s.partitions for s in steps), dtype, 1)
        for address, delta, number, at in _blocks(steps):
            self._fetch(scope, rows, index, count, (address, delta, number, at), steps[0])
        bank = scope.builder.limits.psum_bank_bytes // DType.F32.bytes // count
        for first, last in _alike(steps, bank):
            parts = steps[first].partitions
            transposed = scope.psum("turned", 1, 1)
            for n in range(first, last):
                source = scope.flat(rows, count, parts, starts[n])
                block = scope.flat(transposed, parts, count, (n - first) * count)
                scope.transpose(block, source)
            assert self.wide is not None
            strides = [held.strides[STEP], held.strides[self.wide]]
            into, out = merge_dims([last - first, count], [[count, 1], strides])
            at = (chunk[0] + first) * held.strides[STEP] + columns
            engine = Engine.VECTOR if first % 2 else Engine.SCALAR
            target = scope.on_chip(held, parts, out, at)
            scope.copy(engine, target, scope.on_chip(transposed, parts, into))
        scope.release(rows)

    def _fetch(
        self,
        scope: Scope,
        rows: Held,
        index: dict[int, int],
        count: int,
        run: tuple[int, int, int, int],
        step: Step,
    ) -> None:
        address, delta, number, at = run
        access, wide = self.form.weights, self.wide
        assert wide is not None
        width = step.slice.count
        hbm, chip = merge_dims([number, width], [[delta, step.column], [width, 1]])
        start = scope.address_of(access.offset, access, self.axes) + address
        start = start + sum(i * access.stride(a) for a, i in index.items())
        lines = (access.stride(wide), count)
        source = AccessPattern(Space.HBM, access.tensor, start, (lines, *hbm))
        target = scope.on_chip(rows, count, chip, at)
        scope.load(target, source)


def _chunks(steps: Sequence[Step]) -> Iterator[range]:
    """Steps of one slice width, as many as may wait at a time."""
    first, waiting = 0, 0
    for n, step in enumerate(steps):
        changed = step.slice.count != steps[first].slice.count
        if n > first and (changed or waiting + step.partitions > _WAITING_ELEMENTS):
            yield range(first, n)
            first, waiting = n, 0
        waiting += step.partitions
    yield range(first, len(steps))


def _blocks(steps: Sequence[Step]) -> Iterator[tuple[int, int, int, int]]:
    """(address, distance, number of blocks, place in a row) of blocks at even distances."""
    addresses = [b for s in steps for b in s.blocks]
    width, first = steps[0].slice.count, 0
    while first < len(addresses):
        count = 1
        delta = addresses[first + 1] - addresses[first] if first + 1 < len(addresses) else 0
        while (
            first + count < len(addresses)
            and addresses[first + count] - addresses[first + count - 1] == delta
        ):
            count += 1
        yield addresses[first], delta, count, first * width
        first += count


def _alike(steps: Sequence[Step], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of up to `most` steps with the same number of partitions."""
    first = 0
    for n in range(1, len(steps) + 1):
        full = n - first == max(1, most)
        if n == len(steps) or full or steps[n].partitions != steps[first].partitions:
            yield first, n
            first = n
