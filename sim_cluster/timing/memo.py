"""Functions that this process has read and timed lately.

Programs of one step call many of the same functions, and so do profiles of it and the points of a
sweep. What a function is follows from its bytes, and its time from that and the machine, so each is
read and timed once. `timing_unit.py` is who asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shardwright.compiler.isa.decode import decode_function
from shardwright.compiler.isa.program import Function
from shardwright.compiler.machine.target import Target
from shardwright.sim_cluster.timing.macro import Segments, evaluated

MOST_FUNCTIONS = 128
"""The newest: those of about five steps (our choice); up to 1 MB each."""
MOST_MACHINES = 12
"""Of one function, the newest: the profiles of four targets (our choice)."""


class FunctionMemo:
    """See the module. What it gives is shared: nobody may change it."""

    def __init__(self, most: int = MOST_FUNCTIONS) -> None:
        self._most = most
        self._functions: dict[bytes, Function] = {}
        self._times: dict[int, dict[str, Segments]] = {}  # of functions here, by identity

    def decode(self, sections: Mapping[str, Any]) -> Function:
        """As `decode_function`."""
        key = _digest(sections)
        function = self._functions.pop(key, None) or decode_function(sections)
        self._functions[key] = function  # the newest
        self._times.setdefault(id(function), {})
        if len(self._functions) > self._most:
            oldest = self._functions.pop(next(iter(self._functions)))
            del self._times[id(oldest)]
        return function

    def evaluate(self, function: Function, target: Target) -> Segments:
        """As `evaluated`."""
        times = self._times.get(id(function))
        if times is None:  # read by others, or dropped since
            return evaluated(function, target)
        machine = repr(target)
        if machine not in times:
            if len(times) == MOST_MACHINES:
                del times[next(iter(times))]
            times[machine] = evaluated(function, target)
        return times[machine]


def _digest(sections: Mapping[str, Any]) -> bytes:
    """Of all sections with their names and types."""
    state = hashlib.sha256()
    for name in sorted(sections):
        data = bytes(sections[name])
        state.update(f"{name} {getattr(sections[name], 'dtype', '')} {len(data)} ".encode())
        state.update(data)
    return state.digest()
