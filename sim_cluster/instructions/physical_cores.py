"""L0 of the two physical cores of a logical NeuronCore: the order their kernels run in, and races
between them.

Each core runs its subgraph in order; a kernel starts when the other core has finished the kernels
it waits for. Within that, one core runs ahead as far as it may before the other one moves: an order
that is missing shows as a race, whatever the values happen to be. A kernel runs as a whole, so
accesses of the two cores are ordered exactly where their kernels are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.program import Kernel
from shardwright.sim_cluster.instructions.engines.registry import require
from shardwright.sim_cluster.instructions.races import Key, strides_overlap


def interleaved(subgraphs: Sequence[Sequence[Kernel]]) -> list[tuple[int, int]]:
    """(core, kernel) in an order that the semaphores allow, as skewed as they allow.

    Raises SimulationError SW_L0_DEADLOCK when every core waits for another.
    """
    done = [0] * len(subgraphs)
    order: list[tuple[int, int]] = []
    while len(order) < sum(map(len, subgraphs)):
        before = len(order)
        for core, kernels in enumerate(subgraphs):
            while done[core] < len(kernels) and kernels[done[core]].after <= done[core - 1]:
                order.append((core, done[core]))
                done[core] += 1
        if len(order) == before:
            raise _deadlock(subgraphs, done)
    return order


def _deadlock(subgraphs: Sequence[Sequence[Kernel]], done: Sequence[int]) -> SimulationError:
    stuck = [
        f"kernel {kernels[at].program.name} of physical core {core} waits for"
        f" {kernels[at].after} kernels of the other core, which has finished {done[core - 1]}"
        for core, (kernels, at) in enumerate(zip(subgraphs, done, strict=True))
        if at < len(kernels)
    ]
    return SimulationError("SW_L0_DEADLOCK", "; ".join(stuck))


@dataclass(slots=True)
class _Accesses:
    """What one kernel reads, or writes, of one tensor: patterns, and the bytes they lie within."""

    keys: set[Key] = field(default_factory=set)
    low: int = -1
    high: int = -1

    def add(self, key: Key) -> None:
        low, high = _reach(key)
        self.low = min(self.low, low) if self.keys else low
        self.high = max(self.high, high)
        self.keys.add(key)

    def meets(self, key: Key) -> bool:
        low, high = _reach(key)
        inside = low <= self.high and self.low <= high
        return inside and any(strides_overlap(key, other) for other in self.keys)


def _reach(key: Key) -> tuple[int, int]:
    """First and last byte of a strided pattern."""
    ends = (stride * (size - 1) for stride, size in zip(key[1::2], key[2::2], strict=True))
    return key[0], key[0] + sum(ends)


Record = dict[int, _Accesses]  # by tensor


class CoreWatch:
    """Accesses to HBM of both cores during one call."""

    def __init__(self) -> None:
        self._reads: tuple[list[Record], list[Record]] = ([], [])
        self._writes: tuple[list[Record], list[Record]] = ([], [])
        self._flying: dict[int, tuple[Record, Record]] = {}  # what collectives read and write
        self._core = 0
        self._finished = [0, 0]  # kernels of the other core that each core knows to have finished

    def enter(self, core: int, after: int) -> None:
        """`core` starts its next kernel, having waited for `after` kernels of the other."""
        self._core = core
        self._finished[core] = max(self._finished[core], after)
        self._reads[core].append({})
        self._writes[core].append({})

    def fly(self, collective: int) -> None:
        """What this kernel has touched so far is touched by a collective until it lands."""
        self._flying[collective] = self._reads[self._core][-1], self._writes[self._core][-1]

    def land(self, collective: int) -> None:
        """The collective has finished."""
        self._flying.pop(collective, None)

    def touch(self, tensor: int, key: Key, writes: bool) -> None:
        """A read or write. Raises SimulationError SW_L0_RACE when the other core may write there
        meanwhile, or touch what is written."""
        verb, record = ("write", self._writes) if writes else ("read", self._reads)
        self._check(verb, "written", self._writes, key)
        if writes:
            self._check(verb, "read", self._reads, key)
        self._check_flying(verb, key, (0, 1) if writes else (1,))
        record[self._core][-1].setdefault(tensor, _Accesses()).add(key)

    def _check(self, verb: str, done: str, records: Sequence[list[Record]], key: Key) -> None:
        first = self._finished[self._core]
        for number, record in enumerate(records[1 - self._core][first:], first):
            for tensor, accesses in record.items():
                require(
                    not accesses.meets(key),
                    "SW_L0_RACE",
                    f"{verb} on physical core {self._core} of what kernel {number} of the other"
                    f" core has {done} (tensor {tensor}): the kernel does not wait for it",
                )

    def _check_flying(self, verb: str, key: Key, sides: Sequence[int]) -> None:
        for collective, touched in self._flying.items():
            for side in sides:
                require(
                    not any(accesses.meets(key) for accesses in touched[side].values()),
                    "SW_L0_COLLECTIVE_RACE",
                    f"{verb} of memory of collective {collective} between its start and its wait",
                )
