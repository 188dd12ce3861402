"""A collective as steps of chunk moves: one object that `values/execute.py` reads for values and
`timing/loads.py` for time.

Ranks are positions in the group, so a schedule serves every group of the same shape. Moves of one
step read what was there before the step. Phases cut the steps where the limiting resource may
change (inside and across instances, reducing and copying).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.topology import IntArray

GATHERED = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


def halves(kind: CollectiveKind) -> tuple[bool, ...]:
    """The halves of a collective: whether each reduces (scatters) or copies (gathers)."""
    both = {CollectiveKind.ALL_REDUCE: (True, False), CollectiveKind.REDUCE_SCATTER: (True,)}
    return both.get(kind, (False,))


class Charge(enum.Enum):
    """What the moves of a phase cost the ranks."""

    MOVE = "move"  # a DMA transfer and a hop
    READ = "read"  # one more operand, on the same chip, of the transfers that follow; no hop
    WRITE = "write"  # one more target, on the same chip, of the transfers before; one hop
    NOTHING = "nothing"  # what follows reads the chunk where it lies


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """Steps that all reduce, or all copy. Arrays [moves]; moves of step i are `starts[i]:starts[i +
    1]`."""

    name: str
    source: IntArray
    target: IntArray
    chunk: IntArray
    starts: IntArray
    reduce: bool
    charge: Charge = Charge.MOVE


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The moves of one step: rank `source[i]` sends `chunk[i]` to `target[i]`, which adds it if
    `reduce`."""

    source: IntArray
    target: IntArray
    chunk: IntArray
    reduce: bool


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """All moves of one collective in one group.

    `chunk = owner * parts + part` for all_gather, reduce_scatter and all_reduce: piece `part` (the
    channel, or ring) of what position `owner` contributes or ends up with. all_to_all: `chunk =
    source * num_ranks + target`. permute: `chunk = source`, and `pairs` lists (source, target).
    """

    kind: CollectiveKind
    algorithm: str
    num_ranks: int
    parts: int
    phases: tuple[Phase, ...]
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def num_slots(self) -> int:
        """Places for chunks each rank has."""
        if self.kind in GATHERED:
            return self.num_ranks * self.parts
        return 2 if self.kind is CollectiveKind.COLLECTIVE_PERMUTE else 2 * self.num_ranks

    def steps(self) -> Iterator[Step]:
        """All steps in order."""
        for p in self.phases:
            for a, b in zip(p.starts[:-1], p.starts[1:], strict=True):
                yield Step(p.source[a:b], p.target[a:b], p.chunk[a:b], p.reduce)

    def slot(self, ranks: IntArray, chunks: IntArray) -> IntArray:
        """Where `ranks` keep `chunks`: by number, or sent pieces first and received ones after
        them."""
        if self.kind in GATHERED:
            return chunks
        if self.kind is CollectiveKind.COLLECTIVE_PERMUTE:
            return np.where(chunks == ranks, 0, 1)
        source, target = np.divmod(chunks, self.num_ranks)
        return np.where(source == ranks, target, self.num_ranks + source)

    def verify(self) -> None:
        """Follow every contribution through all moves.

        Raises CollectiveError with all findings: a move of something its source does not hold, a
        contribution reduced twice, a rank that ends without a chunk it must have or with one that
        lacks contributions.
        """
        findings: list[str] = []
        held = self._initial()
        for number, step in enumerate(self.steps()):
            incoming = held[step.source, self.slot(step.source, step.chunk)]
            if not incoming.any(axis=1).all():
                findings.append(f"step {number} sends chunks their source does not hold")
            slots = self.slot(step.target, step.chunk)
            for index in rounds(step.target * self.num_slots + slots):
                where = (step.target[index], slots[index])
                if step.reduce and (held[where] & incoming[index]).any():
                    findings.append(f"step {number} reduces a contribution twice")
                held[where] = held[where] | incoming[index] if step.reduce else incoming[index]
        for rank, slot, wanted in zip(*self._required(), strict=True):
            if (held[rank, slot] != wanted).any():
                findings.append(f"rank {rank} ends without slot {slot} complete")
        if findings:
            shown = "; ".join(findings[:8])
            raise CollectiveError(f"{self.algorithm} {self.kind.value} does not deliver: {shown}")

    def _initial(self) -> npt.NDArray[np.uint64]:
        """Contributions (one bit per rank) in every slot before the first step, [ranks, slots,
        words]."""
        n = self.num_ranks
        held = np.zeros((n, self.num_slots, -(-n // 64)), dtype=np.uint64)
        bits = _bits(np.arange(n), n)
        if self.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
            held[:] = bits[:, None]
        elif self.kind is CollectiveKind.ALL_GATHER:
            owners = np.arange(self.num_slots) // self.parts
            held[owners, np.arange(self.num_slots)] = bits[owners]
        else:
            sent = 1 if self.kind is CollectiveKind.COLLECTIVE_PERMUTE else n
            held[:, :sent] = bits[:, None]
        return held

    def _required(self) -> tuple[IntArray, IntArray, npt.NDArray[np.uint64]]:
        """Ranks, slots and contributions that must be there after the last step."""
        rank, chunk = final_chunks(self)
        everything = np.bitwise_or.reduce(_bits(np.arange(self.num_ranks), self.num_ranks))
        slots = self.slot(rank, chunk)
        if self.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
            return rank, slots, np.broadcast_to(everything, (len(rank), len(everything)))
        of_one = {CollectiveKind.ALL_GATHER: self.parts, CollectiveKind.ALL_TO_ALL: self.num_ranks}
        return rank, slots, _bits(chunk // of_one.get(self.kind, 1), self.num_ranks)


def final_chunks(schedule: Schedule) -> tuple[IntArray, IntArray]:
    """(rank, chunk) of everything the collective must deliver, rank by rank in the order of the
    result.

    The piece an all_to_all rank keeps for itself never moves, so it appears with its source slot.
    """
    n, parts = schedule.num_ranks, schedule.parts
    if schedule.kind is CollectiveKind.COLLECTIVE_PERMUTE:
        pairs = np.array(schedule.pairs, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 1], pairs[:, 0]
    if schedule.kind is CollectiveKind.REDUCE_SCATTER:
        return np.repeat(np.arange(n), parts), np.arange(n * parts)
    if schedule.kind is CollectiveKind.ALL_TO_ALL:
        rank = np.repeat(np.arange(n), n)
        return rank, np.tile(np.arange(n), n) * n + rank
    return np.repeat(np.arange(n), n * parts), np.tile(np.arange(n * parts), n)


def rounds(keys: IntArray) -> Iterator[IntArray]:
    """Split moves so that no key repeats: all first occurrences, then all second ones, ... in move
    order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]] if len(keys) else np.zeros(0, dtype=bool)
    start = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    occurrence = np.empty(len(keys), dtype=np.int64)
    occurrence[order] = np.arange(len(keys)) - start
    for i in range(int(occurrence.max(initial=-1)) + 1):
        yield np.flatnonzero(occurrence == i)


def _bits(ranks: IntArray, num_ranks: int) -> npt.NDArray[np.uint64]:
    """One bit per rank, [len(ranks), words]."""
    table = np.zeros((len(ranks), -(-num_ranks // 64)), dtype=np.uint64)
    table[np.arange(len(ranks)), ranks // 64] = np.uint64(1) << (ranks % 64).astype(np.uint64)
    return table
