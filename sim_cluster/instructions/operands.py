"""Operands of an instruction while L0 runs: from an access pattern to a checked array view.

`TileOperand` addresses SBUF and PSUM, `HbmOperand` the tensors a function call has bound. Both are
decoded once per kernel; a call evaluates the affine offset, checks bounds, initialisation and
races, and returns the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Space, extent
from shardwright.sim_cluster.instructions.checks import check_bank
from shardwright.sim_cluster.instructions.engines.registry import require
from shardwright.sim_cluster.instructions.past import Access, HbmWatch
from shardwright.sim_cluster.instructions.physical_cores import CoreWatch
from shardwright.sim_cluster.instructions.races import NUMBER, Clock, History, Key, strided_key
from shardwright.sim_cluster.instructions.tiles import OnChip, Slot
from shardwright.sim_cluster.values.kernels import affine

Dims = tuple[tuple[int, int], ...]


class HbmTensors:
    """The tensors of one function call: flat typed arrays, written masks (None: holds data),
    histories for races inside a kernel, the watches over races between kernels, and between
    physical cores where there are two."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = list(arrays)
        self.masks: list[np.ndarray | None] = [None] * len(self.arrays)
        self.histories: list[History | None] = [None] * len(self.arrays)
        self.between: HbmWatch | None = None
        self.watch: CoreWatch | None = None


def is_dense(dims: Dims) -> bool:
    """Whether the pattern touches every element between its lowest and highest."""
    covered = 1
    for stride, size in sorted((abs(s), n) for s, n in dims if n > 1 and s):
        if stride > covered:
            return False
        covered += stride * (size - 1)
    return True


class TileOperand:
    """A pattern over a tile. `entries` remembers the views of the (slot, offset) pairs seen."""

    def __init__(
        self,
        instr: Instr,
        pattern: AccessPattern,
        slots: list[Slot],
        chip: OnChip,
        registers: dict[int, int],
    ) -> None:
        tile = slots[0].tile
        self.pattern, self.slots, self.chip, self.registers = pattern, slots, chip, registers
        self.engine = NUMBER[instr.engine]
        self.offset = affine(pattern.offset)
        self.loop = tile.loop if tile.slots > 1 else -1
        self.extent, self.dense = extent(pattern.dims[1:]), is_dense(pattern.dims[1:])
        self.bank_rule = instr.engine is Engine.TENSOR and pattern.space is Space.PSUM
        self.entries: dict[int, tuple[np.ndarray, Key, Slot, int]] = {}

    def read(self, clock: Clock, time: int) -> np.ndarray:
        """The view, after checking that its elements were written and that no race is on."""
        view, box, slot, offset = self._entry()
        if not slot.holds(box, self.pattern, offset):
            raise SimulationError(
                "SW_L0_UNINITIALISED",
                f"reads {list(self.pattern.shape)} elements at {offset} of tile {slot.tile.name}"
                " that were not all written in this iteration",
            )
        self._touch(slot, box, clock, time, False)
        return view

    def write(self, clock: Clock, time: int, accumulate: bool = False) -> np.ndarray:
        """The view to write, after the race check; `accumulate` also requires old values of the
        same engine."""
        view, box, slot, offset = self._entry()
        if accumulate:
            self._check_accumulation(slot, box, offset)
        self._touch(slot, box, clock, time, True)
        slot.write(box, self.dense, self.pattern, offset, self.engine)
        return view

    def _touch(self, slot: Slot, box: Key, clock: Clock, time: int, writes: bool) -> None:
        """Check an access for races, and record it."""
        conflict = slot.history.conflict(box, clock, writes)
        for other in slot.neighbours:
            conflict = conflict or other.history.conflict(box, clock, writes)
        if writes and slot.before is not None and any(map(gt, slot.before, clock)):
            conflict = conflict or "used by an earlier kernel"
        if conflict:
            raise _race(f"{_VERBS[writes]} of tile {slot.tile.name}", conflict)
        slot.history.add(box, self.engine, time, writes)

    def _entry(self) -> tuple[np.ndarray, Key, Slot, int]:
        offset = self.offset(self.registers)
        number = self.registers[self.loop] % len(self.slots) if self.loop >= 0 else 0
        key = offset * len(self.slots) + number
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = self._locate(offset, number)
        return entry

    def _locate(self, offset: int, number: int) -> tuple[np.ndarray, Key, Slot, int]:
        slot, pattern = self.slots[number], self.pattern
        tile = slot.tile
        low, high = self.extent[0] + offset, self.extent[1] + offset
        require(
            low >= 0 and high < tile.elements,
            "SW_L0_BOUNDS",
            f"elements {low}..{high} lie outside tile {tile.name} of {tile.elements} elements",
        )
        item = tile.dtype.bytes
        first, end = slot.first_byte + low * item, slot.first_byte + (high + 1) * item
        if self.bank_rule:
            check_bank(first, end, self.chip.limits)
        box = (pattern.start, pattern.start + pattern.dims[0][1], first, end)
        return self.chip.view(tile, number, pattern, offset), box, slot, offset

    def _check_accumulation(self, slot: Slot, box: Key, offset: int) -> None:
        name = slot.tile.name
        require(
            slot.holds(box, self.pattern, offset),
            "SW_L0_ACCUMULATE",
            f"adds onto tile {name} at element {offset} before anything was written there",
        )
        foreign = slot.writers - {self.engine}
        require(
            not (foreign and self.bank_rule),
            "SW_L0_ACCUMULATE",
            f"adds onto tile {name}, which another engine wrote: undefined on NeuronCore-v2",
        )


_VERBS = ("read", "write")  # by whether it writes


def _race(what: str, conflict: str) -> SimulationError:
    return SimulationError("SW_L0_RACE", f"{what} is not ordered after it was {conflict}")


class HbmOperand:
    """A pattern over a bound tensor; `dims` replaces the pattern's (indexed DMA uses the window of
    all rows)."""

    def __init__(
        self, instr: Instr, pattern: AccessPattern, dims: Dims, item: int, registers: dict[int, int]
    ) -> None:
        self.pattern, self.dims, self.item, self.registers = pattern, dims, item, registers
        self.engine = NUMBER[instr.engine]
        self.offset = affine(pattern.offset)
        self.shape = tuple(size for _, size in dims)
        self.extent = extent(dims)
        self.shift, *self.key_tail = strided_key(0, [(s * item, n) for s, n in dims], item)

    def read(self, tensors: HbmTensors, clock: Clock, time: int) -> np.ndarray:
        """The view, after checking bounds, initialisation and races."""
        offset, mask = self._offset(tensors), tensors.masks[self.pattern.buffer]
        if mask is not None and not self._view(mask, offset).all():
            raise SimulationError(
                "SW_L0_UNINITIALISED",
                f"reads elements of tensor {self.pattern.buffer} that were never written",
            )
        return self._touched(tensors, offset, clock, time, False)

    def write(self, tensors: HbmTensors, clock: Clock, time: int) -> np.ndarray:
        """The view to write, after checking bounds and races; `mark` records the write."""
        return self._touched(tensors, self._offset(tensors), clock, time, True)

    def _touched(
        self, tensors: HbmTensors, offset: int, clock: Clock, time: int, writes: bool
    ) -> np.ndarray:
        """The view, after the checks for races within the kernel, with earlier ones and with the
        other core."""
        number = self.pattern.buffer
        history = tensors.histories[number]
        if history is not None:
            key = self._key(tensors, offset)
            if conflict := history.conflict(key, clock, writes):
                raise _race(f"{_VERBS[writes]} of tensor {number}", conflict)
            history.add(key, self.engine, time, writes)
        self._note(tensors, offset, writes, clock)
        if tensors.watch is not None:
            tensors.watch.touch(number, self._key(tensors, offset), writes)
        return self._view(tensors.arrays[number], offset)

    def mark(self, tensors: HbmTensors, rows: np.ndarray | None) -> None:
        """Record that the pattern (or the given rows of it) now holds data."""
        mask = tensors.masks[self.pattern.buffer]
        if mask is None:
            return
        view = self._view(mask, self.offset(self.registers))
        if rows is None:
            view[...] = True
        else:
            view[rows[(rows >= 0) & (rows < len(view))]] = True

    def _note(self, tensors: HbmTensors, offset: int, writes: bool, clock: Clock) -> None:
        """Tell the watch between kernels of an access."""
        between = tensors.between
        if between is not None:
            base = between.bases[self.pattern.buffer]
            low = base + (self.extent[0] + offset) * self.item
            high = base + (self.extent[1] + offset + 1) * self.item
            access = Access(self.engine, writes, low, high, clock[self.engine])
            between.note(self, access, clock)

    def _offset(self, tensors: HbmTensors) -> int:
        number, offset = self.pattern.buffer, self.offset(self.registers)
        low, high = self.extent[0] + offset, self.extent[1] + offset
        size = tensors.arrays[number].size
        if low < 0 or high >= size:
            raise SimulationError(
                "SW_L0_BOUNDS",
                f"elements {low}..{high} lie outside tensor {number} of {size} elements",
            )
        return offset

    def _view(self, array: np.ndarray, offset: int) -> np.ndarray:
        item = array.itemsize
        strides = tuple(stride * item for stride, _ in self.dims)
        return np.ndarray(self.shape, array.dtype, array, offset * item, strides)

    def _key(self, tensors: HbmTensors, offset: int) -> Key:
        address = tensors.arrays[self.pattern.buffer].ctypes.data + offset * self.item + self.shift
        return (address, *self.key_tail)
