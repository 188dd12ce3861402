"""One program without a manifest: arrays in by name, arrays out, on one core or on all ranks of its
mesh.

This is what `neff run` does. A program with collectives says over which mesh they are; its ranks
run in lock step, with arrays that have a first axis of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwright.collectives.ops import group_index, positions
from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.program import Program, ProgramBuffer
from shardwright.sim_cluster.instructions.index_watch import IndexWatch
from shardwright.sim_cluster.values.exchange import exchange
from shardwright.sim_cluster.values.functions import L1, CollectiveRequest
from shardwright.sim_cluster.values.host_memory import require_memory
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode

Running = list[Iterator[CollectiveRequest]]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The cores that run a program: axes of their mesh, major to minor (none: one core), and the
    inputs that tell a core its position along some axes."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    coordinates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many cores."""
        return math.prod(self.mesh.values())


def run_single(
    program: Program,
    inputs: Mapping[str, np.ndarray],
    level: str = L1,
    watch: IndexWatch | None = None,
    ranks: Ranks | None = None,
) -> dict[str, np.ndarray]:
    """Outputs of a program by name; `inputs` by name, in any float or integer type that converts.
    `watch` is told of indices out of bounds.

    Shapes: with several `ranks`, inputs are [ranks, ...], or without that axis the same on every
    rank; outputs are [ranks, ...].
    Raises SimulationError for a missing input, a wrong shape, or collectives without ranks.
    """
    ranks = ranks or Ranks()
    named = {b.name: b for b in program.buffers if b.kind != "arena"}
    given = {
        n: _given(named[n], inputs, ranks) for n in program.inputs if n not in ranks.coordinates
    }
    on_one = sum(b.num_bytes for b in named.values()) + program.arena_bytes
    require_memory(ranks.count * on_one, f"program {program.name} on {ranks.count} cores")
    memories = []
    for rank in range(ranks.count):
        sizes = [(name, b.num_bytes) for name, b in named.items()]
        memory = CoreMemory(sizes, position=positions(ranks.mesh, rank))
        for name, array in given.items():
            memory.array(name, named[name].dtype)[:] = array[rank].reshape(-1)
        for name, axes in ranks.coordinates.items():
            memory.array(name, named[name].dtype)[:] = group_index(ranks.mesh, axes, rank)
        memories.append(memory)
    code = ProgramCode(program, level, watch)
    with np.errstate(all="ignore"):
        _run(program, [code.run(memory) for memory in memories], ranks)
    return {name: _result(named[name], memories, ranks) for name in program.outputs}


def _run(program: Program, running: Running, ranks: Ranks) -> None:
    """Run all ranks in lock step."""
    while True:
        requests = [next(core, None) for core in running]
        waiting = [r for r in requests if r is not None]
        if not waiting:
            return
        call = waiting[0].call
        if missing := set(call.axes) - set(ranks.mesh):
            raise SimulationError(
                "SW_SIM_COLLECTIVE",
                f"program {program.name} runs {call.kind} over {', '.join(sorted(missing))},"
                " which one core cannot do alone",
                hint="run the whole bundle",
            )
        if len(waiting) < len(requests):
            raise SimulationError("SW_SIM_LOCK_STEP", f"some ranks of {program.name} end early")
        exchange(waiting, ranks.mesh)


def _given(buffer: ProgramBuffer, inputs: Mapping[str, np.ndarray], ranks: Ranks) -> np.ndarray:
    """The input of every rank, [ranks, ...]."""
    array, each = inputs.get(buffer.name), (ranks.count, *buffer.shape)
    allowed = [buffer.shape, each] if ranks.mesh else [buffer.shape]
    if array is None or array.shape not in allowed:
        got = "nothing" if array is None else f"shape {list(array.shape)}"
        shown = " or ".join(str(list(shape)) for shape in allowed)
        raise SimulationError(
            "SW_SIM_SHAPE", f"input {buffer.name} requires shape {shown}, got {got}"
        )
    same = array.shape == buffer.shape
    array = array.astype(buffer.dtype.numpy, copy=False)
    return np.broadcast_to(array, each) if same else array


def _result(buffer: ProgramBuffer, memories: Iterable[CoreMemory], ranks: Ranks) -> np.ndarray:
    """An output, with a first axis of ranks where there are several."""
    rows = [m.array(buffer.name, buffer.dtype).reshape(buffer.shape) for m in memories]
    return np.stack(rows) if ranks.mesh else rows[0]
