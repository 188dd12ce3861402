"""Along which dims the elements of a value are proven to be alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.facts import counted_dim, dim_map, splat, stored
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.traits import LITERALS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.walks import answered
from shardwright.sharding.indices.dims import factors

MOST = 1 << 24  # elements of a table of places; larger lists of rows are not proven


@dataclass(slots=True)
class Repeats:
    """Of the values of one level, by the ops that made them."""

    made: Mapping[Value, Op]
    _known: dict[tuple[Value, int], bool] = field(default_factory=dict)

    def along(self, value: Value, dim: int) -> bool:
        """True when a value is proven to be the same along `dim`."""
        return answered((value, dim), self._known, self._read, self._is_repeated)

    def _read(self, asked: tuple[Value, int]) -> list[tuple[Value, int]]:
        """The dims that have to be repetitions for a dim to be one."""
        value, dim = asked
        op = self.made.get(value)
        if op is None or value.type.shape[dim] == 1:
            return []
        if (walked := dim_map(op)) is not None:
            return [(op.operands[0], d) for d in walked[dim : dim + 1] if d is not None]
        along = [f for f in factors(op) if asked in f] if OPS[op.name].elementwise else []
        return [(v, d) for f in along for v, d in f if v is not value]

    def _is_repeated(self, asked: tuple[Value, int]) -> bool:
        value, dim = asked
        op = self.made.get(value)
        if value.type.shape[dim] == 1 or op is None:
            return value.type.shape[dim] == 1
        if op.name in LITERALS:
            if splat(op) is not None or counted_dim(op) is not None:
                return counted_dim(op) != dim
            whole = elements(self.made, value)
            return whole is not None and not varies(whole, dim)
        follows = dim_map(op) is not None or OPS[op.name].elementwise
        return follows and all(self._known[one] for one in self._read(asked))


def varies(array: np.ndarray, dim: int) -> bool:
    """True when an array is not the same along `dim`."""
    return bool((array != np.take(array, [0], dim)).any())


def elements(made: Mapping[Value, Op], value: Value) -> np.ndarray | None:
    """The elements of a value of constants and counts; None for others, and for large ones."""
    held = stored(made.get(value))
    if held is not None and value.type.num_elements <= MOST:
        return held.array()
    return known_elements(made, value)
