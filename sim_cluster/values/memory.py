"""HBM of one simulated core: a byte buffer per named buffer, and one arena shared by all programs.

Everything starts poisoned (NaN in every float type, -1 in every signed integer), so that a value
nobody wrote shows. Typed flat views are handed out; nothing is ever copied here except by
`copy_named`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import ProgramBuffer
from shardwright.sim_cluster.instructions.tiles import POISON


class CoreMemory:
    """The HBM of one core. `named` maps buffer names to their sizes in bytes; `slots` says of which
    buffers there are several, for as many micro-batches. `select` chooses among them. `position` is
    that of the core along the axes of its mesh."""

    def __init__(
        self,
        named: Iterable[tuple[str, int]],
        slots: Mapping[str, int] | None = None,
        position: Mapping[str, int] | None = None,
    ) -> None:
        self.position = dict(position or {})
        self.named = {name: _poisoned(size) for name, size in named}
        several = ((name, count) for name, count in (slots or {}).items() if count > 1)
        self.slots = {
            name: [_poisoned(self.named[name].size) for _ in range(count)]
            for name, count in several
        }
        self.turn = 0  # tells apart the bindings of programs to different slots
        self.arena = _poisoned(0)
        # what functions bound to this memory, see `functions.py`
        self.bindings: dict[Any, Any] = {}

    def select(self, number: int) -> None:
        """Let every buffer with slots be the slot of micro-batch `number`."""
        for name, slots in self.slots.items():
            self.named[name] = slots[number % len(slots)]
        self.turn = number % math.lcm(*(len(slots) for slots in self.slots.values()))

    def slot(self, name: str, number: int) -> np.ndarray:
        """The bytes of a named buffer for micro-batch `number`."""
        slots = self.slots.get(name)
        return slots[number % len(slots)] if slots else self._named(name)

    def reserve(self, arena_bytes: int) -> None:
        """Make the arena at least this large."""
        if arena_bytes > self.arena.size:
            self.arena = _poisoned(arena_bytes)
            self.bindings.clear()

    def array(self, name: str, dtype: DType) -> np.ndarray:
        """Flat typed view of a named buffer. Raises SimulationError for an unknown name."""
        return self._named(name).view(dtype.numpy)

    def program_buffer(self, buffer: ProgramBuffer) -> np.ndarray:
        """The bytes of a program's buffer. Raises SimulationError when it does not fit where it is
        placed."""
        size, is_named = buffer.num_bytes, buffer.kind != "arena"
        memory = self._named(buffer.name) if is_named else self.arena
        start = 0 if is_named else buffer.offset_bytes
        if not 0 <= start <= start + size <= memory.size:
            raise SimulationError(
                "SW_SIM_BINDING",
                f"{buffer.kind} buffer {buffer.name} requires bytes {start}..{start + size},"
                f" its memory has {memory.size}",
            )
        return memory[start : start + size]

    def copy_named(self) -> CoreMemory:
        """Another core with equal named buffers and a poisoned arena."""
        other = CoreMemory(())
        other.named = {name: array.copy() for name, array in self.named.items()}
        return other

    def _named(self, name: str) -> np.ndarray:
        try:
            return self.named[name]
        except KeyError:
            raise SimulationError(
                "SW_SIM_BINDING", f"the step has no buffer named {name!r}"
            ) from None


def _poisoned(size: int) -> np.ndarray:
    return np.full(size, POISON, np.uint8)
