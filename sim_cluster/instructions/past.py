"""Earlier kernels at L0: what those since the last barrier have touched, and how far every queue
knows the others to be.

A kernel without a barrier in front runs beside the end of those before it. Its accesses are races
unless the clock of their queue has passed the earlier ones, which only borders and tokens bring
about. What is kept of a finished kernel is coarse, by slot and by range of a tensor, and needs no
knowledge of how the compiler found its borders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.program import Border, Space
from shardwright.sim_cluster.instructions.engines.registry import require
from shardwright.sim_cluster.instructions.races import ENGINES, NUMBER, Clock, Key, boxes_overlap
from shardwright.sim_cluster.instructions.tiles import Slot


@dataclass(slots=True)
class Access:
    """Bytes low..high-1 of HBM that an instruction of `engine` has touched, up to time `time` of
    its queue."""

    engine: int
    writes: bool
    low: int
    high: int
    time: int


class HbmWatch:
    """What a kernel touches of HBM, and what earlier ones have touched. `bases` are the addresses
    of its tensors."""

    def __init__(self) -> None:
        self.bases: dict[int, int] = {}
        self.before: list[Access] = []
        self.found: dict[Hashable, Access] = {}  # by operand

    def note(self, operand: Hashable, access: Access, clock: Clock) -> None:
        """An access. Raises SimulationError SW_L0_RACE when an earlier kernel may still touch the
        same bytes."""
        for past in self.before:
            if clock[past.engine] < past.time and (access.writes or past.writes):
                require(
                    not (past.low < access.high and access.low < past.high),
                    "SW_L0_RACE",
                    f"{'write' if access.writes else 'read'} of HBM is not ordered after it was"
                    f" {'written' if past.writes else 'read'} by the {ENGINES[past.engine].value}"
                    " queue in an earlier kernel",
                )
        known = self.found.setdefault(operand, access)
        known.low, known.high = min(known.low, access.low), max(known.high, access.high)
        known.time = access.time


class Past:
    """The kernels of one physical core during one call of a function."""

    def __init__(self) -> None:
        self.clocks: list[Clock] = [[0] * len(ENGINES) for _ in ENGINES]
        self._finished: list[list[Clock]] = []  # per kernel, the clock of every queue at its end
        self._slots: list[tuple[Space, Key, Clock]] = []
        self._accesses: list[Access] = []

    def pass_barrier(self) -> None:
        """Everything has finished: nothing can race with it any more."""
        now = [max(column) for column in zip(*self.clocks, strict=True)]
        self.clocks = [list(now) for _ in ENGINES]
        self._slots, self._accesses = [], []

    def passed(self, borders: Iterable[Border]) -> list[Clock]:
        """Per border, what is known behind it. Raises SimulationError SW_L0_OPERANDS."""
        found = []
        for border in borders:
            if not 1 <= border.back <= len(self._finished):
                raise SimulationError(
                    "SW_L0_OPERANDS",
                    f"a border lies {border.back} kernels back, the call has run"
                    f" {len(self._finished)}",
                )
            found.append(self._finished[-border.back][NUMBER[border.queue]])
        return found

    def enter(self, slots: Iterable[Slot], watch: HbmWatch) -> None:
        """A kernel begins: what earlier ones did is made known to its slots and its watch."""
        for slot in slots:
            space, box = slot.tile.space, slot.extent()
            met = [times for s, b, times in self._slots if s is space and boxes_overlap(b, box)]
            slot.before = [max(column) for column in zip(*met, strict=True)] if met else None
        watch.before = list(self._accesses)
        watch.found.clear()

    def leave(self, slots: Iterable[Slot], watch: HbmWatch, clocks: Sequence[Clock]) -> None:
        """The kernel has run."""
        self.clocks = [list(clock) for clock in clocks]
        self._finished.append([list(clock) for clock in clocks])
        for slot in slots:
            times = list(map(max, slot.history.last_read, slot.history.last_write))
            if any(times):
                self._slots.append((slot.tile.space, slot.extent(), times))
        self._accesses += watch.found.values()

    def skip(self, is_barrier: bool) -> None:
        """A kernel without code: a barrier, or nothing."""
        if is_barrier:
            self.pass_barrier()
        self._finished.append([list(clock) for clock in self.clocks])
