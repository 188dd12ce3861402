"""On-chip memory: SBUF and PSUM as bytes per partition, and what is known of every tile slot.

Tiles lie at the addresses the compiler gave them, so that slots that overlap or are too small
really collide. A slot knows which of its elements were written since it was last handed out; a
write through an overlapping tile takes that knowledge away.
"""

from __future__ import annotations

import numpy as np

from shardwright.compiler.isa.program import AccessPattern, Kernel, Space, Tile
from shardwright.compiler.machine.target import Limits
from shardwright.sim_cluster.instructions.races import History, Key, boxes_overlap

# Host rows are this much longer than a partition: equal offsets in all partitions would share one
# host cache set.
PITCH_PAD = 192
POISON = 0xFF  # all ones: NaN in every float type, -1 in every signed integer type


class OnChip:
    """SBUF and PSUM of one core."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bytes = {
            space: np.full((limits.partitions, size + PITCH_PAD), POISON, np.uint8)
            for space, size in ((Space.SBUF, limits.sbuf_bytes), (Space.PSUM, limits.psum_bytes))
        }

    def poison(self, tile: Tile) -> None:
        """Fill all slots of a tile with NaN and -1."""
        end = tile.address + tile.slots * tile.slot_bytes
        self.bytes[tile.space][: tile.partitions, tile.address : end] = POISON

    def view(self, tile: Tile, slot: int, pattern: AccessPattern, offset: int) -> np.ndarray:
        """The elements of `pattern` at element `offset` of the slot, writable."""
        memory, dtype = self.bytes[tile.space], tile.dtype
        pitch = memory.shape[1]
        start = pattern.start * pitch + tile.address + slot * tile.slot_bytes + offset * dtype.bytes
        strides = (pitch, *(stride * dtype.bytes for stride, _ in pattern.dims[1:]))
        return np.ndarray(pattern.shape, dtype.numpy, memory, start, strides)


class Slot:
    """One slot of one tile: which elements hold values, who wrote them, and the accesses for the
    race check."""

    def __init__(self, tile: Tile, number: int) -> None:
        self.tile = tile
        self.first_byte = tile.address + number * tile.slot_bytes
        self.history = History()
        self.before: list[int] | None = None  # per queue, its last access in earlier kernels
        self.neighbours: list[Slot] = []  # slots of other tiles at overlapping bytes
        self.renew()

    def reset(self) -> None:
        """A kernel starts: nothing written, nobody reading."""
        self.history.clear()
        self.renew()

    def renew(self) -> None:
        """The slot is handed to a new iteration: its old content no longer counts."""
        self._boxes: list[Key] = []
        self._mask: np.ndarray | None = None
        self.writers: set[int] = set()

    def holds(self, box: Key, pattern: AccessPattern, offset: int) -> bool:
        """Whether every element of the pattern was written."""
        if self._mask is None:
            for p0, p1, b0, b1 in self._boxes:
                if p0 <= box[0] and box[1] <= p1 and b0 <= box[2] and box[3] <= b1:
                    return True
        if not self._boxes and self._mask is None:
            return False
        return bool(_mask_view(self._element_mask(), pattern, offset).all())

    def write(
        self, box: Key, dense: bool, pattern: AccessPattern, offset: int, engine: int
    ) -> None:
        """Record a write of the pattern."""
        self.writers.add(engine)
        if self._mask is None and dense:
            self._boxes = merge(self._boxes, box)
        else:
            _mask_view(self._element_mask(), pattern, offset)[...] = True
        for other in self.neighbours:
            if boxes_overlap(box, other.extent()):
                other.renew()

    def extent(self) -> Key:
        """Box of the whole slot."""
        return (0, self.tile.partitions, self.first_byte, self.first_byte + self.tile.slot_bytes)

    def _element_mask(self) -> np.ndarray:
        """The written mask [partitions, elements], made from the boxes when first needed."""
        if self._mask is None:
            self._mask = np.zeros((self.tile.partitions, self.tile.elements), np.bool_)
            item = self.tile.dtype.bytes
            for p0, p1, b0, b1 in self._boxes:
                low, high = (b0 - self.first_byte) // item, (b1 - self.first_byte) // item
                self._mask[p0:p1, low:high] = True
        return self._mask


def _mask_view(mask: np.ndarray, pattern: AccessPattern, offset: int) -> np.ndarray:
    pitch = mask.shape[1]
    strides = (pitch, *(stride for stride, _ in pattern.dims[1:]))
    return np.ndarray(pattern.shape, np.bool_, mask, pattern.start * pitch + offset, strides)


def merge(boxes: list[Key], new: Key) -> list[Key]:
    """Boxes with `new` added; boxes that touch along one side become one."""
    kept = []
    for old in boxes:
        if old[0] <= new[0] and new[1] <= old[1] and old[2] <= new[2] and new[3] <= old[3]:
            return boxes
        if (joined := _joined(old, new)) is None:
            kept.append(old)
        else:
            new = joined
    if len(kept) < len(boxes):
        return merge(kept, new)
    return [*kept, new]


def _joined(a: Key, b: Key) -> Key | None:
    """The union of two boxes when that is a box."""
    if a[:2] == b[:2] and a[2] <= b[3] and b[2] <= a[3]:
        return (a[0], a[1], min(a[2], b[2]), max(a[3], b[3]))
    if a[2:] == b[2:] and a[0] <= b[1] and b[0] <= a[1]:
        return (min(a[0], b[0]), max(a[1], b[1]), a[2], a[3])
    return None


def make_slots(kernel: Kernel) -> list[list[Slot]]:
    """Slots of every tile of a kernel, with the overlaps between different tiles found."""
    slots = [[Slot(tile, n) for n in range(tile.slots)] for tile in kernel.tiles]
    flat = sorted(
        (s for group in slots for s in group), key=lambda s: (s.tile.space.value, s.first_byte)
    )
    for at, slot in enumerate(flat):
        end = slot.first_byte + slot.tile.slot_bytes
        for other in flat[at + 1 :]:
            if other.tile.space is not slot.tile.space or other.first_byte >= end:
                break
            if other.tile is not slot.tile:
                slot.neighbours.append(other)
                other.neighbours.append(slot)
    return slots
