"""What a failed execution leaves: its inputs as the runtime writes them, and how to run them again.

A folder `input_dump_NUMBER_h_nn_ID` with `input0.bin`, `input1.bin`, ... in the order of the
program, and `model_name.txt`, which is written last: a folder without it is not complete. Source:
the runtime's troubleshooting page. `inputs.npz` beside them is ours, for `neff run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shardwright.compiler.diagnostics import SimulationError, UsageError
from shardwright.compiler.neff.arrays import write_arrays
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.runtime.status import status_of
from shardwright.orchestrator.terminal.terminal import say

VARIABLE = "NEURON_RT_DBG_DUMP_INPUTS_ON_ERR"


@contextmanager
def dumping(folder: Path | None, model: str, inputs: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Leave `inputs` in a new folder of `folder` where what runs inside fails; without a folder, in
    the working directory where the runtime's variable names the status of the failure."""
    try:
        yield
    except SimulationError as error:
        if folder is None and reading.value(VARIABLE, None) == status_of(error):
            folder = Path.cwd()
        if folder is not None:
            say(f"inputs of the execution that failed: {_dump(folder, model, inputs)}", err=True)
        raise


def _dump(folder: Path, model: str, inputs: Mapping[str, np.ndarray]) -> Path:
    """The folder of one failure. Raises UsageError where it cannot be written."""
    number = int.from_bytes(os.urandom(4), "little")
    place = folder / f"input_dump_{number}_h_nn_{os.getpid()}"
    try:
        place.mkdir(parents=True)
        for n, array in enumerate(inputs.values()):
            (place / f"input{n}.bin").write_bytes(np.ascontiguousarray(array).tobytes())
        named = {f"arg{n}": name for n, name in enumerate(inputs)}
        with (place / "inputs.npz").open("wb") as stream:
            write_arrays(stream, ((key, inputs[name]) for key, name in named.items()), named)
        (place / "model_name.txt").write_text(f"{model}\n")
    except OSError as error:
        raise UsageError(
            "SW_USAGE", f"--dump-inputs requires a place that can be written: {error}"
        ) from error
    return place
