"""Whether the tokens of a kernel are there when instructions wait for them.

Instructions are looked at in program order, which is one legal order of the queues. A loop changes
every count by the same amount in each turn, so that its first and last turns decide, however often
it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.compiler.isa.program import Instr, Kernel, Loop

MOST_TOKENS = 2**15
"""Our choice: what one semaphore ever holds. A slot of a tile is worth a token."""


class _Change(NamedTuple):
    """Of one semaphore: how its count has changed in the end, at its lowest and at its highest."""

    end: int = 0
    low: int = 0
    high: int = 0

    def then(self, other: _Change) -> _Change:
        """One behind the other."""
        low, high = self.end + other.low, self.end + other.high
        return _Change(self.end + other.end, min(self.low, low), max(self.high, high))

    def times(self, count: int) -> _Change:
        """`count` of them, one behind the other."""
        if not count:
            return _Change()
        last = self.end * (count - 1)
        return _Change(self.end * count, self.low + min(0, last), self.high + max(0, last))


_TAKEN, _GIVEN = _Change(-1, -1, 0), _Change(1, 0, 1)
Changes = dict[int, _Change]


def check_tokens(kernel: Kernel) -> None:
    """Raises ValueError for a wait that nothing ends, a semaphore that the kernel does not leave as
    it found it, and numbers that the kernel has no semaphore for."""
    tokens = kernel.tokens
    if any(not 0 <= count <= MOST_TOKENS for count in tokens):
        raise ValueError(f"0..{MOST_TOKENS} tokens are required, got {tokens}")
    changes = _changes(kernel.body)
    for semaphore in changes:
        if not 0 <= semaphore < len(tokens):
            raise ValueError(f"there is no semaphore {semaphore}")
    for semaphore, change in changes.items():
        if tokens[semaphore] + change.low < 0:
            raise ValueError(f"a wait for semaphore {semaphore}, which nothing signals")
        if change.end or tokens[semaphore] + change.high > MOST_TOKENS:
            raise ValueError(f"semaphore {semaphore} is not left as it was found")


def _changes(body: Sequence[Instr | Loop]) -> Changes:
    found: Changes = {}
    for item in body:
        if isinstance(item, Loop):
            moved = [(s, c.times(item.trip)) for s, c in _changes(item.body).items()]
        else:
            moved = [*((s, _TAKEN) for s in item.waits), *((s, _GIVEN) for s in item.signals)]
        for semaphore, change in moved:
            found[semaphore] = found.get(semaphore, _Change()).then(change)
    return found
