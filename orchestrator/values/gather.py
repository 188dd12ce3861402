"""`shardwright checkpoint gather`: the state of a checkpoint as one file of global arrays."""

from __future__ import annotations

import zipfile
from pathlib import Path

from numpy.lib import format as npy

from compiler.diagnostics import UsageError
from orchestrator.values.checkpoint import Checkpoint, steps_in


def gather(folder: Path, out: Path) -> int:
    """Write the user's leaves of a checkpoint, or of the last one in a directory of them, as .npz;
    returns the exit code.

    One leaf is in memory at a time. Raises UsageError where there is no checkpoint, LoadError for
    one that is damaged.
    """
    found = Checkpoint(_step(folder))
    count = total = 0
    temporary = out.with_name(f".{out.name}.part")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, array in found.leaves():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    npy.write_array(file, array, allow_pickle=False)
                count, total = count + 1, total + array.nbytes
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{out}: {count} leaves, {total / 1e9:.3f} GB, after step {found.head.step}")
    return 0


def _step(folder: Path) -> Path:
    for path in (folder, folder / "checkpoints"):
        if (path / "checkpoint.neff").exists():
            return path
        if steps := steps_in(path):
            return steps[0]
    raise UsageError(
        "SW_CHECKPOINT",
        f"checkpoint gather requires a directory with checkpoints, got {folder}",
        hint="run.checkpoint_every writes them to `checkpoints` in the output directory",
    )
