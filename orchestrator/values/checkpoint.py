"""Checkpoints of a value run: a directory per saved step, files of ranks in it.

    checkpoints/step-00000010/checkpoint.neff    which step, losses, who holds what, digests
    checkpoints/step-00000010/rank-00003.neff    named buffers of a rank, as they lie in its HBM

Equal buffers of several ranks are stored once, with the first of them. A directory appears under
its name when all of it is on disk, so the last one that is there is complete. Files are containers
of `compiler/neff/`: nothing in them is executed or unpickled, and a reader refuses what is damaged,
links and names of other places.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compiler.diagnostics import LoadError
from compiler.neff.manifest import Manifest, NamedBuffer
from compiler.neff.reader import Container
from compiler.neff.writer import pack
from sim_cluster import layout
from sim_cluster.result import L0Check

KEPT = 2  # besides that of the first step, which is compared with the unsharded run
_STEP = re.compile(r"step-(\d{8,12})")
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
    return [
        b
        for b in manifest.buffers.values()
        if b.initial in ("given", "zeros") and b.role not in ("batch", "coordinate")
    ]


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of a directory, the last step first."""
    found = [p for p in folder.glob("step-*") if _STEP.fullmatch(p.name) and not p.is_symlink()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


class Writer:
    """A checkpoint on its way to disk; `finish` makes it visible, leaving the block without it
    leaves nothing."""

    def __init__(self, folder: Path, step: int) -> None:
        self._target = step_folder(folder, step)
        self._path = folder / f".{self._target.name}.{uuid.uuid4().hex}"
        self._path.mkdir(parents=True)
        self._files: dict[int, str] = {}

    def add(self, rank: int, buffers: Mapping[str, np.ndarray]) -> None:
        """The file of a rank."""
        data = pack("state", {"rank": rank}, buffers, compress=False)
        self._files[rank] = hashlib.sha256(data).hexdigest()
        _write(self._path / _file(rank), data)

    def finish(self, head: Mapping[str, Any]) -> None:
        """Write the head, and put the checkpoint in its place."""
        files = [[rank, sha] for rank, sha in self._files.items()]
        _write(self._path / _HEAD, pack("checkpoint", {**head, "files": files}, {}))
        if self._target.exists():  # an earlier one that was not gone on from
            shutil.rmtree(self._target)
        self._path.rename(self._target)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


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


def clear(folder: Path) -> None:
    """Remove the checkpoints of another run."""
    for path in steps_in(folder):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path) -> None:
    """Remove what is no longer wanted: old steps, and what an interrupt left half written."""
    for path in steps_in(folder)[KEPT:]:
        if path != step_folder(folder, 1):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".step-*"):
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
        section = container.sections.get(name)
        if (
            section is None
            or section.codec != "raw"
            or {section.stored, section.raw} != {buffer.num_bytes}
        ):
            raise _senseless(self.path, f"{_file(rank)} does not hold buffer {name}")
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
            joined = layout.join_parts([(b, self._gathered(b)) for b in parts])
            rows = manifest.stacks.get(leaf)
            yield from zip(rows, joined, strict=True) if rows else [(leaf, joined)]

    def _gathered(self, buffer: NamedBuffer) -> np.ndarray:
        shards = {}
        for rank, holder in self.head.holders[buffer.name].items():
            shards[rank] = self.bytes_of(buffer.name, holder).view(buffer.dtype.numpy)
        return layout.cropped(buffer, layout.gather_array(buffer, self.head.manifest.mesh, shards))

    def _file(self, rank: int) -> Container:
        """The file of a rank, mapped, and checked when it is first read."""
        if rank not in self._files:
            file = self.path / _file(rank)
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
            l0=tuple(L0Check(*row) for row in meta["l0"]),
            identity=dict(meta["identity"]),
            manifest=Manifest.from_meta(meta["manifest"], str(path)),
            files={int(rank): str(sha) for rank, sha in meta["files"]},
            holders={str(n): {int(r): int(h) for r, h in by} for n, by in meta["holders"]},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _senseless(path, repr(error)) from error
    _check(head, path)
    return head


def _check(head: Head, path: Path) -> None:
    """Every kept buffer of every rank is in a file that is listed, and no other."""
    ranks = range(head.manifest.num_cores)
    for buffer in kept_buffers(head.manifest):
        wanted = {rank for rank in ranks if buffer.on(head.manifest.stage(rank))}
        held = head.holders.get(buffer.name, {})
        if held.keys() != wanted or not set(held.values()) <= head.files.keys():
            raise _senseless(path, f"buffer {buffer.name} is not complete")
    if head.step != len(head.losses) or not set(head.files) <= set(ranks):
        raise _senseless(path, "its steps or ranks do not fit")


def _senseless(path: Path, what: str) -> LoadError:
    return LoadError("SW_NEFF_CONTENT", f"{path}: checkpoint: {what}")


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.neff"


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _mapped(path: Path) -> memoryview:
    """The bytes of a file that is one, not a link to another. Raises LoadError."""
    try:
        # O_NONBLOCK: a pipe that somebody put here must not stop us at open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise LoadError("SW_NEFF_TRUNCATED", f"cannot read {path}: {error}") from error
