"""Order between the kernels of a physical core: a function's kernels follow each other without a
barrier wherever no collective and no loaded register is between them.

An instruction waits for queues that have yet to finish an earlier kernel when that kernel stores
what it loads, touches the memory it stores to, or uses the on-chip bytes it overwrites. So loads
of the next kernel begin while this one is at work, as soon as their bytes are free. Tiles of a
kernel lie at the end of the memory or at its start, wherever fewer bytes are still in use. L0
checks the result with a race detector that knows nothing of this.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.isa.program import (
    AccessPattern,
    Border,
    Instr,
    Kernel,
    Loop,
    Space,
    Tile,
)
from shardwright.compiler.machine.target import Limits
from shardwright.compiler.schedule.allocate import ALIGN_BYTES, end_address, spaces
from shardwright.compiler.schedule.reach import bytes_of, patterns_of, reach
from shardwright.compiler.timing.max_plus import ENGINES, QUEUE


def order_kernels(
    subgraphs: Sequence[Sequence[Kernel]], tensors: Sequence[Tensor], limits: Limits
) -> None:
    """Set the borders of kernels and instructions; moves tiles as a whole. Physical cores of one
    logical core meet at every collective.
    """
    steps = zip(*subgraphs, strict=True)
    kinds = [{kernel.program.kind for kernel in kernels} for kernels in steps]
    for kernels in subgraphs:
        past, order = _Past(tensors, limits), _Order()
        for number, kernel in enumerate(kernels):
            if kinds[number] - {"compute", "idle"}:
                past.clear()
            elif kernel.program.kind == "compute":
                if past.is_empty:
                    order = _Order()
                else:
                    _turn(kernel, past, number, limits)
                order.pass_through(kernel, past, number)
                past.add(kernel, number)


def _turn(kernel: Kernel, past: _Past, number: int, limits: Limits) -> None:
    """Turn the tiles of `kernel` upside down where fewer bytes of the kernel before are met."""
    for space, capacity, unit in spaces(limits):
        tiles = [tile for tile in kernel.tiles if tile.space is space]
        turned = [capacity - -(-end_address(tile) // unit) * unit for tile in tiles]
        now = sum(past.met(space, tile.address, end_address(tile), number) for tile in tiles)
        then = sum(
            past.met(space, address, address + tile.slots * tile.slot_bytes, number)
            for tile, address in zip(tiles, turned, strict=True)
        )
        if then < now:
            for tile, address in zip(tiles, turned, strict=True):
                tile.address = address


_Touched = tuple[int, int, int, bool]  # first and end byte, queue, whether it writes
Known = list[int]  # per queue the last kernel known to be finished there


class _Order:
    """What every queue knows of the others, kernel after kernel, and the borders that it takes."""

    def __init__(self) -> None:
        self.known: list[Known] = [[-1] * len(ENGINES) for _ in ENGINES]
        self.ends: dict[int, list[Known]] = {}  # by kernel, what each queue knows behind it

    def pass_through(self, kernel: Kernel, past: _Past, number: int) -> None:
        """Walk through `kernel`, every loop once: nothing that later turns of a loop wait for is
        older than what the first one waits for. A kernel behind a barrier needs no borders.
        """
        tokens = [deque([[-1] * len(ENGINES)] * count) for count in kernel.tokens]
        borders: dict[Border, int] = {}
        for queue, known in enumerate(self.known):
            known[queue] = number - 1
        for instr, trips in _walk(kernel.body, {}):
            known, instr.borders = self.known[QUEUE[instr.engine]], ()
            for semaphore in instr.waits:
                _learn(known, tokens[semaphore].popleft())
            if not past.is_empty:
                for queue, last in self._taken(known, past.needed(instr, kernel.tiles, trips)):
                    border = Border(ENGINES[queue], number - last)
                    instr.borders += (borders.setdefault(border, len(borders)),)
                    _learn(known, self.ends[last][queue])
            for semaphore in instr.signals:
                tokens[semaphore].append(list(known))
        kernel.borders = None if past.is_empty else tuple(borders)
        self.ends[number] = [list(known) for known in self.known]
        for queue, known in enumerate(self.ends[number]):
            known[queue] = number

    def _taken(self, known: Known, needed: Sequence[int]) -> list[tuple[int, int]]:
        """(queue, kernel) of what is needed that is neither known nor implied by the others."""
        wanted = [(q, last) for q, last in enumerate(needed) if last > known[q]]
        taken = list(wanted)
        for queue, last in wanted:
            others = [self.ends[kernel][q] for q, kernel in taken if q != queue]
            if any(other[queue] >= last for other in others):
                taken.remove((queue, last))
        return taken


def _learn(known: Known, more: Known) -> None:
    known[:] = map(max, known, more)


def _walk(
    body: Sequence[Instr | Loop], trips: Mapping[int, int]
) -> Iterator[tuple[Instr, Mapping[int, int]]]:
    """Instructions in program order with the trips of the loops around them, by register."""
    for item in body:
        if isinstance(item, Loop):
            yield from _walk(item.body, {**trips, item.register: item.trip})
        else:
            yield item, trips


class _Past:
    """What the kernels since the last barrier have touched, by queue and latest kernel."""

    def __init__(self, tensors: Sequence[Tensor], limits: Limits) -> None:
        self.tensors, self.limits = tensors, limits
        self.clear()

    def clear(self) -> None:
        """A barrier: everything has finished."""
        self.is_empty = True
        self.hbm: dict[int, dict[_Touched, int]] = {}  # by memory, the last kernel
        self.on_chip = {  # [queue, `ALIGN_BYTES`]
            space: np.full((len(ENGINES), size // ALIGN_BYTES), -1)
            for space, size, _ in spaces(self.limits)
        }

    def met(self, space: Space, low: int, high: int, number: int) -> int:
        """Units of an on-chip memory that the kernel before kernel `number` has touched."""
        return int((self._units(space, low, high).max(axis=0, initial=-1) == number - 1).sum())

    def needed(self, instr: Instr, tiles: Sequence[Tile], trips: Mapping[int, int]) -> list[int]:
        """Per queue the last kernel that it must have finished; -1 for none."""
        found = [-1] * len(ENGINES)
        for pattern, writes in patterns_of(instr):
            if pattern.space is Space.HBM:
                for queue, last in self._clashing(instr, pattern, writes, trips):
                    found[queue] = max(found[queue], last)
            elif writes:
                tile = tiles[pattern.buffer]
                units = self._units(pattern.space, tile.address, end_address(tile))
                found = list(map(max, found, units.max(axis=1).tolist()))
        return found

    def add(self, kernel: Kernel, number: int) -> None:
        """Note what a kernel touches."""
        self.is_empty = False
        for instr, trips in _walk(kernel.body, {}):
            queue = QUEUE[instr.engine]
            for pattern, writes in patterns_of(instr):
                if pattern.space is Space.HBM:
                    memory, low, high = self._reach(instr, pattern, trips)
                    self.hbm.setdefault(memory, {})[low, high, queue, writes] = number
                else:
                    tile = kernel.tiles[pattern.buffer]
                    self._units(pattern.space, tile.address, end_address(tile))[queue] = number

    def _units(self, space: Space, low: int, high: int) -> np.ndarray:
        return self.on_chip[space][:, low // ALIGN_BYTES : -(-high // ALIGN_BYTES)]

    def _clashing(
        self, instr: Instr, pattern: AccessPattern, writes: bool, trips: Mapping[int, int]
    ) -> Iterator[tuple[int, int]]:
        """(queue, kernel) of what must not be passed."""
        memory, low, high = self._reach(instr, pattern, trips)
        for (first, end, queue, wrote), kernel in self.hbm.get(memory, {}).items():
            if first < high and low < end and (writes or wrote):
                yield queue, kernel

    def _reach(
        self, instr: Instr, pattern: AccessPattern, trips: Mapping[int, int]
    ) -> tuple[int, int, int]:
        """(memory, first byte, end byte) of all that an instruction touches through a pattern."""
        low, high = 0, math.prod(self.tensors[pattern.buffer].shape) - 1
        terms = pattern.offset.terms
        if instr.opcode == "dma" and all(register in trips for register, _ in terms):
            loops = ((c, trips[register]) for register, c in terms)
            low, high = reach(pattern.offset.const, (*loops, *pattern.dims))
        return bytes_of(self.tensors, pattern.buffer, low, high)
