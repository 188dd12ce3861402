"""Addresses of on-chip tiles: every tile of a kernel gets its bytes of SBUF or its banks of PSUM.

Tiles lie side by side while they fit. Otherwise tiles that are never alive together share memory: a
tile lives from its first to its last use inside the body of the loop it rotates with.
`engine_order.py` orders what shares memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.isa.program import Instr, Kernel, Loop, Space, Tile
from shardwright.compiler.machine.target import Limits
from shardwright.compiler.schedule.reach import patterns_of

# inferred: DMA moves whole 64-byte lines best (hardware.json dma_model: 64 bytes is the second
# point of its curve)
ALIGN_BYTES = 64
_SMALL_SHARE = 6  # of SBUF for tiles that share with nobody (our choice)
_ALWAYS = 1 << 30  # after every element of a body
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """Where a tile is used: the body it belongs to (element indices from the top) and elements
    first..last of it.
    """

    home: Path
    first: int
    last: int

    @property
    def span(self) -> tuple[Path, Path]:
        """Its first element, and the one behind its last: paths sort in the order of the code, what
        is inside an element behind it and before the next one.
        """
        return (*self.home, self.first), (*self.home, self.last + 1)


def allocate(kernel: Kernel, limits: Limits) -> None:
    """Set the address of every tile of `kernel`.

    Raises CapacityError (SW_SBUF_CAPACITY, SW_PSUM_CAPACITY) naming kernel, tile and limit.
    """
    lives = lifetimes(kernel)
    for space, capacity, unit in spaces(limits):
        sizes = {
            n: -(-tile.slots * tile.slot_bytes // unit) * unit
            for n, tile in enumerate(kernel.tiles)
            if tile.space is space
        }
        memory = _Memory(kernel, space, capacity, sizes)
        if not memory.side_by_side():
            memory.share(lives)


def spaces(limits: Limits) -> tuple[tuple[Space, int, int], ...]:
    """On-chip memories: bytes per partition, and the alignment of tiles there."""
    return (
        (Space.SBUF, limits.sbuf_bytes, ALIGN_BYTES),
        (Space.PSUM, limits.psum_bytes, limits.psum_bank_bytes),
    )


def lifetimes(kernel: Kernel) -> list[Life]:
    """Life of every tile; a tile nobody touches lives nowhere (an empty range)."""
    homes: dict[int, Path] = {-1: ()}
    uses: list[list[Path]] = [[] for _ in kernel.tiles]
    for path, item in _paths(kernel.body, ()):
        if isinstance(item, Loop):
            homes[item.register] = path
        else:
            tiles = {p.buffer for p, _ in patterns_of(item) if p.space is not Space.HBM}
            for number in tiles:
                uses[number].append(path)
    lives = []
    for tile, paths in zip(kernel.tiles, uses, strict=True):
        home = homes[tile.loop] if paths else ()
        elements = [p[len(home)] for p in paths]
        lives.append(Life(home, min(elements, default=0), max(elements, default=-1)))
    return lives


def _paths(body: Sequence[Instr | Loop], prefix: Path) -> Iterator[tuple[Path, Instr | Loop]]:
    for at, item in enumerate(body):
        path = (*prefix, at)
        yield path, item
        if isinstance(item, Loop):
            yield from _paths(item.body, path)


@dataclass(frozen=True, slots=True)
class _Memory:
    """One on-chip memory: its bytes per partition, and those of the kernel's tiles in it by number,
    rounded up so that the next tile starts aligned.
    """

    kernel: Kernel
    space: Space
    capacity: int
    sizes: Mapping[int, int]

    def side_by_side(self) -> bool:
        """Place all tiles one after the other; False when they do not fit."""
        ends = list(accumulate(self.sizes.values()))
        if ends and ends[-1] > self.capacity:
            return False
        for (n, size), end in zip(self.sizes.items(), ends, strict=True):
            self.kernel.tiles[n].address = end - size
        return True

    def share(self, lives: Sequence[Life]) -> None:
        """Largest first, in turn through the memory, so that bytes are used again as late as
        possible, and tiles that rotate have theirs for the whole loop, whose iterations overlap.
        Where that does not fit, each at the lowest address.
        """
        whole = [
            Life(life.home, 0, _ALWAYS) if tile.slots > 1 and life.last >= 0 else life
            for life, tile in zip(lives, self.kernel.tiles, strict=True)
        ]
        for used, in_turn in ((whole, True), (whole, False)):
            try:
                self._place(used, in_turn)
                return
            except CapacityError:
                continue
        self._place(lives, in_turn=False)

    def _place(self, lives: Sequence[Life], in_turn: bool) -> None:
        """Each tile at an address free of tiles that live at the same time."""
        cursor = 0
        small, capacity = self._small() if in_turn else ([], self.capacity)
        placed: list[tuple[Path, Path, tuple[int, int]]] = []
        for n in sorted(self.sizes.keys() - {*small}, key=lambda n: (-self.sizes[n], n)):
            size, (first, end) = self.sizes[n], lives[n].span
            taken = sorted([at for other, until, at in placed if other < end and first < until])
            address = _first_gap(taken, size, cursor)
            if address + size > capacity:
                address = _first_gap(taken, size, 0)
            if address + size > capacity:
                raise self._overflow(n, address + size, capacity)
            cursor = address + size if in_turn else 0
            self.kernel.tiles[n].address = address
            placed.append((first, end, (address, address + size)))

    def _small(self) -> tuple[list[int], int]:
        """(small tiles, where they start): placed side by side at the end of SBUF, as sharing them
        saves little and makes engines wait for each other.
        """
        end = self.capacity
        least = end - end // _SMALL_SHARE if self.space is Space.SBUF else end
        found = []
        for n, size in sorted(self.sizes.items(), key=lambda item: (item[1], item[0])):
            if end - size < least:
                break
            end -= size
            self.kernel.tiles[n].address = end
            found.append(n)
        return found, end

    def _overflow(self, number: int, needed: int, capacity: int) -> CapacityError:
        kernel, name = self.kernel, self.space.value.upper()
        return CapacityError(
            f"SW_{name}_CAPACITY",
            f"kernel {kernel.program.name}, tile {kernel.tiles[number].name}: requires {needed}"
            f" bytes of {name} per partition, the limit is {capacity}",
            hint="a smaller sharded size or a smaller block of the kernel fits",
        )


def _first_gap(taken: Sequence[tuple[int, int]], size: int, address: int) -> int:
    """The first address from `address` on with `size` bytes free; `taken` is sorted."""
    for start, end in taken:
        if start - address >= size:
            break
        address = max(address, end)
    return address


def share_bytes(a: Tile, b: Tile) -> bool:
    """Whether two tiles have bytes in common."""
    return a.space is b.space and a.address < end_address(b) and b.address < end_address(a)


def end_address(tile: Tile) -> int:
    """The first byte behind all slots of a tile that has its address."""
    return tile.address + tile.slots * tile.slot_bytes
