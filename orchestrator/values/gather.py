"""`shardwright checkpoint gather`: the state of a checkpoint as one file of global arrays."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PureWindowsPath

import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.neff.arrays import write_arrays
from shardwright.orchestrator.terminal.outputs import writing
from shardwright.orchestrator.terminal.terminal import say
from shardwright.orchestrator.values.checkpoint import Checkpoint, senseless, steps_in

_MAX_NAME = 2**12
"""Our choice: a path of Linux; a name of ours has tens of characters."""


def gather(folder: Path, out: Path) -> int:
    """Write the user's leaves of a checkpoint, or of the last one in a directory of them, as .npz;
    returns the exit code. One leaf is in memory at a time. Raises UsageError where there is no
    checkpoint, LoadError for one that is damaged."""
    found = Checkpoint(_step(folder))
    with writing(out):
        count, total = _write(found, out)
    say(f"{out}: {count} leaves, {total / 1e9:.3f} GB, after step {found.head.step}")
    return 0


def _write(found: Checkpoint, out: Path) -> tuple[int, int]:
    """How many leaves, and their bytes. Raises LoadError, OSError."""
    seen: dict[str, int] = {}

    def counted() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in found.leaves():
            if not _is_member(name) or name in seen:
                what = "is no name of an array" if not _is_member(name) else "is there twice"
                raise senseless(found.path, f"leaf {name!r} {what} in an .npz file")
            seen[name] = array.nbytes
            yield name, array

    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            write_arrays(file, counted())
        temporary.replace(out)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return len(seen), sum(seen.values())


def _is_member(name: str) -> bool:
    """Whether a leaf may name a member of an archive: those who unpack it get a file of that name,
    and a checkpoint that somebody forged may say anything."""
    parts = name.split("/")
    return (
        name.isprintable()
        and len(name) <= _MAX_NAME
        and "\\" not in name
        and not PureWindowsPath(name).drive
        and not {"", ".", ".."} & set(parts)
    )


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
