"""A node that holds a NEFF: arrays in, arrays of the types that its model says out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import LoadError, SimulationError
from shardwright.orchestrator.neff.loaded import LoadedNeff

AGAIN = "save the model again: shardwright save"
_I32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class NeffNode:
    """A node: what errors call it, its NEFF, and the types of its results. Calls may be at the same
    time."""

    name: str
    neff: LoadedNeff
    types: tuple[np.dtype[Any], ...]

    @classmethod
    def of(
        cls, name: str, executable: bytes, types: Sequence[np.dtype[Any]], target: str = ""
    ) -> NeffNode:
        """That of a NEFF's bytes. Raises LoadError for damage, and for a machine that does not take
        it."""
        neff = LoadedNeff.of(executable, name, target)
        if len(types) != len(neff.outputs):
            raise LoadError(
                "SW_SAVED_FILE",
                f"{name} requires a type of each of {len(neff.outputs)} results, got {len(types)}",
                hint=AGAIN,
            )
        return cls(name, neff, tuple(types))

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Its results in order. Raises SimulationError for operands that its NEFF does not take."""
        if len(arrays) != len(self.neff.inputs):
            raise _unfit(f"{self.name} requires {len(self.neff.inputs)} operands", len(arrays))
        for (name, _, shape), array in zip(self.neff.inputs, arrays, strict=True):
            if array.shape != shape:
                said = f"{self.name} requires {name} of shape {list(shape)}"
                raise _unfit(said, list(array.shape))
            if array.dtype in (np.int64, np.uint64) and array.size:
                low, high = int(array.min()), int(array.max())
                if low < _I32.min or high > _I32.max:
                    wrong = low if low < _I32.min else high
                    raise _unfit(f"{self.name} requires {name} of integers of 32 bits", wrong)
        found = self.neff.run(arrays)
        return [array.astype(kind) for array, kind in zip(found, self.types, strict=True)]


def _unfit(required: str, given: object) -> SimulationError:
    return SimulationError(
        "SW_SAVED_INPUT",
        f"{required}, got {given}",
        hint="a NEFF has the shapes that it was compiled for: save the model again for others,"
        " --input-shape",
    )
