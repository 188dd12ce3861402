"""One program on one core, without a manifest: arrays in by name, arrays out.

This is what `neff run` does. A collective has nobody to talk to here and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.diagnostics import SimulationError
from compiler.isa.program import Program, ProgramBuffer
from sim_cluster.functions import L1
from sim_cluster.index_watch import IndexWatch
from sim_cluster.memory import CoreMemory
from sim_cluster.programs import ProgramCode


def run_single(
    program: Program,
    inputs: Mapping[str, np.ndarray],
    level: str = L1,
    watch: IndexWatch | None = None,
) -> dict[str, np.ndarray]:
    """Outputs of a program by name; `inputs` by name, in any float or integer type that converts.
    `watch` is told of indices out of bounds (at L1).

    Raises SimulationError for a missing input, a wrong shape, or a program with collectives.
    """
    named = {b.name: b for b in program.buffers if b.kind == "named"}
    memory = CoreMemory((name, _bytes(b)) for name, b in named.items())
    for name in program.inputs:
        memory.array(name, named[name].dtype)[:] = _given(named[name], inputs)
    with np.errstate(all="ignore"):
        for request in ProgramCode(program, level, watch).run(memory):
            raise SimulationError(
                "SW_SIM_COLLECTIVE",
                f"program {program.name} runs {request.call.kind} over {request.call.axes},"
                " which one core cannot do alone",
                hint="run the whole bundle",
            )
    return {
        name: memory.array(name, named[name].dtype).reshape(named[name].shape)
        for name in program.outputs
    }


def _bytes(buffer: ProgramBuffer) -> int:
    return int(np.prod(buffer.shape, dtype=np.int64)) * buffer.dtype.bytes


def _given(buffer: ProgramBuffer, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    array = inputs.get(buffer.name)
    if array is None or tuple(array.shape) != buffer.shape:
        got = "nothing" if array is None else f"shape {list(array.shape)}"
        raise SimulationError(
            "SW_SIM_SHAPE", f"input {buffer.name} requires shape {list(buffer.shape)}, got {got}"
        )
    return array.astype(buffer.dtype.numpy, copy=False).reshape(-1)
