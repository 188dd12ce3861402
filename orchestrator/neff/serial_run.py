"""Runs a file of several pieces: programs on simulated cores, what stays on the host by the
reference interpreter, tensors from one to the next."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import TensorType
from shardwright.compiler.neff.serial import SerialFile
from shardwright.sim_cluster.instructions.index_watch import IndexWatch
from shardwright.sim_cluster.values.run_single import run_single

Arrays = dict[str, np.ndarray]


def run_serial(
    file: SerialFile, inputs: Mapping[str, np.ndarray], level: str, watch: IndexWatch | None = None
) -> Arrays:
    """The outputs of a file by name; `inputs` by name.

    Raises SimulationError (SW_SIM_SHAPE) for a missing or misshapen input, and what programs raise.
    """
    values = {name: _given(name, kind, inputs) for name, kind in file.inputs.items()}
    for stage in file.stages:
        read = {name: values[name] for name in stage.inputs}
        if stage.program is not None:
            values |= run_single(stage.program, read, level, watch)
        else:
            assert stage.graph is not None
            with np.errstate(all="ignore"):
                made = evaluate(stage.graph, list(read.values()))
            values |= dict(zip(stage.outputs, made, strict=True))
    return {name: values[value] for name, value in file.outputs}


def _given(name: str, kind: TensorType, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """An input in its type."""
    array = inputs.get(name)
    if array is None or array.shape != kind.shape:
        got = "nothing" if array is None else f"shape {list(array.shape)}"
        raise SimulationError(
            "SW_SIM_SHAPE", f"input {name} requires shape {list(kind.shape)}, got {got}"
        )
    return array.astype(kind.dtype.numpy, copy=False)
