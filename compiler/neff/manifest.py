"""What the files of a bundle say about a step: the manifest, and the binding of each core.

The manifest mirrors the step plan in plain data (the machine never sees a graph): mesh, named
buffers with their place in HBM, schedule, programs by digest, target. A core file binds one rank to
coordinates and program digests. A bundle is a directory: `manifest.neff`, `programs/<sha256>.neff`,
`cores/core-00000.neff` or, above 1024 cores, one packed `cores.neff`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.neff.schedule import (
    STAGE_AXIS,
    LeafPart,
    OfStages,
    Schedule,
    Transfer,
    run_counts,
)

MAX_CORE_FILES = 1024
_MAX_AXIS = 2**24
"""Our choice: a hundred times the largest cluster that was ever simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBuffer(OfStages):
    """A named buffer of every core (see `compiler.program.BufferInfo`), placed at `offset_bytes` of
    its HBM, or of its part of the host's memory.
    """

    name: str
    role: str
    dtype: DType
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    initial: str
    offset_bytes: int
    part: LeafPart | None = None
    stages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    memory: str = "device"

    @property
    def leaf(self) -> str:
        """The user's leaf it belongs to."""
        return self.part.leaf if self.part else self.name

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot on one core."""
        elements = 1
        for size in self.local_shape:
            elements *= size
        return elements * self.dtype.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The step of a bundle."""

    name: str
    target: str
    instances: int
    lnc: int
    mesh: Mapping[str, int]  # axis -> size, major to minor
    buffers: Mapping[str, NamedBuffer]
    programs: Mapping[str, str]  # program name -> sha256 of its file
    schedules: tuple[Schedule, ...]  # per pipeline stage
    num_microbatches: int
    named_bytes: int  # named buffers per core
    arena_bytes: int  # largest arena plus scratch of any program
    compiler_version: str
    transfers: tuple[Transfer, ...] = ()
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # leaves along dim 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_cores(self) -> int:
        """Cores of the mesh."""
        return math.prod(self.mesh.values())

    def user_leaves(self, buffer: NamedBuffer) -> tuple[str, ...]:
        """The leaves of the user that a buffer holds, or holds a part of."""
        return self.stacks.get(buffer.leaf, (buffer.leaf,))

    @property
    def stage_mesh(self) -> Mapping[str, int]:
        """The mesh of one pipeline stage."""
        if len(self.schedules) == 1:
            return self.mesh
        return {axis: size for axis, size in self.mesh.items() if axis != STAGE_AXIS}

    def ranks(self, stage: int) -> range:
        """The ranks of a pipeline stage, which follow each other."""
        count = self.num_cores // len(self.schedules)
        return range(stage * count, (stage + 1) * count)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank * len(self.schedules) // self.num_cores

    def programs_on(self, stage: int) -> Mapping[str, str]:
        """The programs a stage runs, by name."""
        names = run_counts(self.schedules[stage])
        return {name: sha for name, sha in self.programs.items() if name in names}

    def to_meta(self) -> dict[str, Any]:
        """Plain data for a container's meta; the mesh stays an ordered list."""
        return {
            "name": self.name,
            "target": self.target,
            "instances": self.instances,
            "lnc": self.lnc,
            "mesh": [[axis, size] for axis, size in self.mesh.items()],
            "buffers": [_buffer_row(b) for b in self.buffers.values()],
            "programs": dict(self.programs),
            "schedules": [[[list(names), count] for names, count in s] for s in self.schedules],
            "transfers": [list(astuple(t)) for t in self.transfers],
            "num_microbatches": self.num_microbatches,
            "named_bytes": self.named_bytes,
            "arena_bytes": self.arena_bytes,
            "compiler_version": self.compiler_version,
            "metadata": dict(self.metadata),
            "stacks": [[name, list(leaves)] for name, leaves in self.stacks.items()],
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], source: str) -> Manifest:
        """Inverse of `to_meta`.

        Raises LoadError (SW_NEFF_CONTENT) when a field is missing or of the wrong kind.
        """
        try:
            buffers = [_read_buffer(row) for row in meta["buffers"]]
            fields = {k: _plain(k, meta[k]) for k in _PLAIN_FIELDS}
            return cls(
                mesh=_read_mesh(meta["mesh"]),
                buffers={b.name: b for b in buffers},
                schedules=tuple(
                    tuple((tuple(names), count) for names, count in s) for s in meta["schedules"]
                ),
                transfers=tuple(_read_transfer(row) for row in meta["transfers"]),
                stacks={name: tuple(leaves) for name, leaves in meta.get("stacks", ())},
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LoadError("SW_NEFF_CONTENT", f"{source}: manifest: {error!r}") from error


_PLAIN_FIELDS: Mapping[str, type] = {
    "name": str,
    "target": str,
    "instances": int,
    "lnc": int,
    "programs": dict,
    "num_microbatches": int,
    "named_bytes": int,
    "arena_bytes": int,
    "compiler_version": str,
    "metadata": dict,
}
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _plain(name: str, value: Any) -> Any:
    """A field of the kind it must have. Raises TypeError."""
    if type(value) is not _PLAIN_FIELDS[name] or (isinstance(value, int) and value < 0):
        raise TypeError(f"{name} is {value!r}")
    return _read_programs(value) if name == "programs" else value


def _read_programs(programs: Any) -> dict[str, str]:
    """Programs by name; digests become names of files. Raises TypeError."""
    for name, sha in programs.items():
        if not (isinstance(name, str) and isinstance(sha, str) and _SHA256.fullmatch(sha)):
            raise TypeError(f"program {name!r} has the digest {sha!r}")
    return dict(programs)


def _read_mesh(rows: Any) -> dict[str, int]:
    mesh = {axis: size for axis, size in rows}
    for axis, size in mesh.items():
        if not isinstance(axis, str) or type(size) is not int or not 0 < size <= _MAX_AXIS:
            raise TypeError(f"mesh axis {axis!r} has {size!r} cores")
    return mesh


def _buffer_row(b: NamedBuffer) -> list[Any]:
    axes = [list(a) for a in b.axes]
    shapes = [list(b.local_shape), list(b.global_shape)]
    part = list(astuple(b.part)) if b.part else None
    place = [b.offset_bytes, part, list(b.stages), list(b.slots)]
    memory = [b.memory] if b.memory != "device" else []
    return [b.name, b.role, b.dtype.value, *shapes, axes, b.initial, *place, *memory]


def _read_transfer(row: list[Any]) -> Transfer:
    names = [f.name for f in fields(Transfer)]
    return Transfer(**dict(zip(names, row, strict=True)))


def _read_part(row: list[Any]) -> LeafPart:
    leaf, dim, first = row
    return LeafPart(_text(leaf), _count(dim), _count(first))


def _read_buffer(row: list[Any]) -> NamedBuffer:
    name, role, dtype, local, global_, axes, initial, offset, *rest = row
    part, stages, slots, *memory = rest
    return NamedBuffer(
        name=_text(name),
        role=_text(role),
        dtype=DType(dtype),
        local_shape=_counts(local),
        global_shape=_counts(global_),
        axes=tuple(tuple(map(_text, a)) for a in axes),
        initial=_text(initial),
        offset_bytes=_count(offset),
        part=_read_part(part) if part else None,
        stages=_counts(stages),
        slots=_counts(slots),
        **_read_memory(memory),
    )


def _read_memory(given: list[Any]) -> dict[str, str]:
    """Where a row says it, which one of HBM does not. Raises TypeError."""
    if given not in ([], ["host"]):
        raise TypeError(f"memory is {given!r}")
    return {"memory": "host"} if given else {}


def _text(value: Any) -> str:
    """Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    """Raises TypeError."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreBinding:
    """One core of a bundle: rank, coordinates along the mesh axes, programs by digest."""

    rank: int
    coordinates: Mapping[str, int]
    programs: Mapping[str, str]
    target: str
    manifest_sha256: str

    def to_meta(self) -> dict[str, Any]:
        """Plain data for a container's meta."""
        return {
            "rank": self.rank,
            "coordinates": [[axis, index] for axis, index in self.coordinates.items()],
            "programs": dict(self.programs),
            "target": self.target,
            "manifest_sha256": self.manifest_sha256,
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], source: str) -> CoreBinding:
        """Inverse of `to_meta`.

        Raises LoadError (SW_NEFF_CONTENT).
        """
        try:
            return cls(
                rank=meta["rank"],
                coordinates={axis: index for axis, index in meta["coordinates"]},
                programs=_read_programs(meta["programs"]),
                target=meta["target"],
                manifest_sha256=meta["manifest_sha256"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LoadError("SW_NEFF_CONTENT", f"{source}: core binding: {error!r}") from error
