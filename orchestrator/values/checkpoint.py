"""Checkpoints of a value run: a directory per saved step, files of ranks in it.

    checkpoints/step-00000010/checkpoint.neff        the head: step, losses, who holds what, digests
    checkpoints/step-00000010/rank-00003-<sha>.neff  named buffers of a rank, as they lie in its HBM

Equal buffers of several ranks are stored once, with the first of them. Files of ranks are named by
rank and digest, so those of another checkpoint of the same step may lie beside them; a checkpoint
is there when its head is, which is renamed over the one before. So a directory with a head is
complete, whenever a writer was ended. Files are containers of `compiler/neff/`: nothing in them is
executed or unpickled, and a reader refuses what is damaged, links and names of other places.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.neff.manifest import Manifest, NamedBuffer
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.compiler.support.files import write_atomic
from shardwright.orchestrator.terminal.outputs import writing
from shardwright.sim_cluster.values import layout
from shardwright.sim_cluster.values.result import L0Check

KEPT = 2  # besides that of the first step, which is compared with the unsharded run
_STEP = re.compile(r"step-(\d{8,12})")
_SHA, _SHA_CHARS = re.compile(r"[0-9a-f]{64}"), 16
_HEAD = "checkpoint.neff"
Holders = Mapping[str, Mapping[int, int]]
"""Buffer -> rank -> the rank in whose file its bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a checkpoint says of itself. `identity` is what a run must share to go on from it."""

    step: int
    losses: tuple[float, ...]
    l0: tuple[L0Check, ...]
    identity: Mapping[str, Any]
    manifest: Manifest
    files: Mapping[int, str]  # rank -> sha256
    holders: Holders


def kept_buffers(manifest: Manifest) -> list[NamedBuffer]:
    """What outlives a step: neither input nor computed anew in each."""
    lasting = (b for b in manifest.buffers.values() if b.initial in ("given", "zeros"))
    return [b for b in lasting if b.role not in ("batch", "coordinate")]


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of a directory, the last step first."""
    return [path for path in _step_folders(folder) if os.path.lexists(path / _HEAD)]


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


class Writer:
    """A checkpoint on its way to disk; `finish` puts it in the place of one of the same step,
    leaving the block without it leaves that one alone. All raise UsageError (SW_OUTPUT)."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = step_folder(folder, step)
        self._files: dict[int, str] = {}
        with writing(self._path):
            if self._path.is_symlink():  # what it leads to is not ours
                self._path.unlink()
            self._path.mkdir(parents=True, exist_ok=True)
            self._old = {path.name for path in self._path.iterdir()}

    def add(self, rank: int, buffers: Mapping[str, np.ndarray]) -> None:
        """The file of a rank."""
        data = pack("state", {"rank": rank}, buffers, compress=False)
        self._files[rank] = hashlib.sha256(data).hexdigest()
        self._write(_file(rank, self._files[rank]), data)

    def finish(self, head: Mapping[str, Any]) -> None:
        """Write the head, with which the checkpoint is there, and remove what it replaces."""
        files = [[rank, sha] for rank, sha in self._files.items()]
        data = pack("checkpoint", {**head, "files": files}, {})
        self._write(_HEAD, data)
        self._remove(self._old - self._names() - {_HEAD})
        self._files.clear()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove(self._names() - self._old)
        if not os.path.lexists(self._path / _HEAD):
            _remove(self._path)

    def _write(self, name: str, data: bytes) -> None:
        with writing(self._path):
            write_atomic(self._path / name, data, lasting=True)

    def _names(self) -> set[str]:
        return {_file(rank, sha) for rank, sha in self._files.items()}

    def _remove(self, names: set[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self._path / name).unlink()


def head_meta(
    step: int,
    losses: Sequence[float],
    l0: Sequence[L0Check],
    identity: Mapping[str, Any],
    manifest: Manifest,
    holders: Holders,
) -> dict[str, Any]:
    """What the head of a checkpoint holds."""
    return {
        "step": step,
        "losses": list(losses),
        "l0": [list(astuple(check)) for check in l0],
        "identity": dict(identity),
        "manifest": manifest.to_meta(),
        "holders": [[name, list(by.items())] for name, by in holders.items()],
    }


def clear(folder: Path, kept: Path) -> None:
    """Remove the checkpoints of another run, all but `kept`."""
    for path in _step_folders(folder):
        if path != kept:
            _remove(path)


def prune(folder: Path, last: Path) -> None:
    """Remove what is no longer wanted now that `last` is there: old steps, later ones, which the
    run did not go on from, and what an interrupt left half written."""
    steps = steps_in(folder)
    newest = steps.index(last)
    kept = {*steps[newest : newest + KEPT], step_folder(folder, 1)}
    for path in _step_folders(folder):
        if path not in kept or not os.path.lexists(path / _HEAD):
            _remove(path)


def _step_folders(folder: Path) -> list[Path]:
    """Directories named as those of checkpoints, the last step first."""
    found = [p for p in folder.glob("step-*") if _STEP.fullmatch(p.name) and not p.is_symlink()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def _remove(path: Path) -> None:
    """The head first: what is left of the others is no checkpoint."""
    with suppress(OSError):
        (path / _HEAD).unlink()
    shutil.rmtree(path, ignore_errors=True)


class Checkpoint:
    """A checkpoint on disk. Raises LoadError for one that is missing, damaged, or makes no sense;
    files of ranks are looked at when they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = _read_head(path)
        self._files: dict[int, Container] = {}

    def bytes_of(self, name: str, rank: int) -> np.ndarray:
        """The bytes of a named buffer in the file of a rank. Raises LoadError."""
        container, buffer = self._file(rank), self.head.manifest.buffers[name]
        found, size = container.sections.get(name), buffer.num_bytes
        if found is None or (found.codec, found.stored, found.raw) != ("raw", size, size):
            file = _file(rank, self.head.files[rank])
            raise senseless(self.path, f"{file} does not hold buffer {name}")
        return np.frombuffer(container.read(name), np.uint8)

    def stored(self) -> Iterator[tuple[str, int, list[int]]]:
        """What there is: a buffer, the rank in whose file it is, and the ranks that have it."""
        for name, by_rank in self.head.holders.items():
            for holder in sorted(set(by_rank.values())):
                yield name, holder, [rank for rank, held in by_rank.items() if held == holder]

    def leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """The global arrays of the user's state, leaf by leaf. Raises LoadError."""
        manifest = self.head.manifest
        by_leaf: dict[str, list[NamedBuffer]] = {}
        for buffer in kept_buffers(manifest):
            if buffer.initial == "given":
                by_leaf.setdefault(buffer.leaf, []).append(buffer)
        for leaf, parts in by_leaf.items():
            try:
                joined = layout.join_parts([(b, self._gathered(b)) for b in parts])
                rows = manifest.stacks.get(leaf)
                named = list(zip(rows, joined, strict=True)) if rows else [(leaf, joined)]
            except (ValueError, IndexError, TypeError, KeyError) as error:  # no shapes of this mesh
                raise senseless(self.path, f"leaf {leaf!r}: {error}") from error
            yield from named

    def _gathered(self, buffer: NamedBuffer) -> np.ndarray:
        shards = {
            rank: self.bytes_of(buffer.name, holder).view(buffer.dtype.numpy)
            for rank, holder in self.head.holders[buffer.name].items()
        }
        return layout.cropped(buffer, layout.gather_array(buffer, self.head.manifest.mesh, shards))

    def _file(self, rank: int) -> Container:
        """The file of a rank, mapped, and checked when it is first read."""
        if rank not in self._files:
            file = self.path / _file(rank, self.head.files[rank])
            data = _mapped(file)
            if hashlib.sha256(data).hexdigest() != self.head.files[rank]:
                raise LoadError(
                    "SW_NEFF_CHECKSUM",
                    f"{file}: the file is not the one the checkpoint was written with",
                    hint=f"remove {self.path} to go on from an earlier step",
                )
            self._files[rank] = Container(data, str(file), "state")
        return self._files[rank]


def _read_head(path: Path) -> Head:
    meta = Container(_mapped(path / _HEAD), str(path / _HEAD), "checkpoint").meta
    try:
        head = Head(
            step=int(meta["step"]),
            losses=tuple(map(float, meta["losses"])),
            l0=tuple(map(_l0_check, meta["l0"])),
            identity=dict(meta["identity"]),
            manifest=Manifest.from_meta(meta["manifest"], str(path)),
            files={int(rank): _digest(sha) for rank, sha in meta["files"]},
            holders={str(n): {int(r): int(h) for r, h in by} for n, by in meta["holders"]},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise senseless(path, repr(error)) from error
    _check(head, path)
    return head


def _check(head: Head, path: Path) -> None:
    """Every kept buffer of every rank is in a file that is listed, and no other."""
    manifest, ranks = head.manifest, range(head.manifest.num_cores)
    stages = [manifest.ranks(stage) for stage in range(len(manifest.schedules))]
    for buffer in kept_buffers(manifest):
        spans = [span for stage, span in enumerate(stages) if buffer.on(stage)]
        held = head.holders.get(buffer.name, {})
        # Counted by subtraction: a mesh of any size can be written down, its ranks cannot.
        is_whole = len(held) == sum(span.stop - span.start for span in spans)
        is_whole = is_whole and all(any(rank in span for span in spans) for rank in held)
        if not is_whole or not set(held.values()) <= head.files.keys():
            raise senseless(path, f"buffer {buffer.name} is not complete")
    if head.step != len(head.losses) or not all(rank in ranks for rank in head.files):
        raise senseless(path, "its steps or ranks do not fit")


def _l0_check(row: Any) -> L0Check:
    program, rank, instructions, distance, worst, allowed = row
    numbers = int(rank), int(instructions), float(distance)
    return L0Check(str(program), *numbers, str(worst), float(allowed))


def senseless(path: Path, what: str) -> LoadError:
    """The error of a checkpoint that contradicts itself, or that nobody of us has written."""
    return LoadError("SW_NEFF_CONTENT", f"{path}: checkpoint: {what}")


def _file(rank: int, sha: str) -> str:
    return f"rank-{rank:05d}-{sha[:_SHA_CHARS]}.neff"


def _digest(sha: object) -> str:
    """A digest, which becomes part of a file's name. Raises TypeError."""
    if not (isinstance(sha, str) and _SHA.fullmatch(sha)):
        raise TypeError(f"{sha!r} is no digest")
    return sha


def _mapped(path: Path) -> memoryview:
    """The bytes of a file that is one, not a link to another. Raises LoadError."""
    try:
        # O_NONBLOCK: a pipe that somebody put here must not stop us at open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise LoadError("SW_NEFF_TRUNCATED", f"cannot read {path}: {error}") from error
