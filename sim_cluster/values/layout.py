"""Between global arrays and the named buffers of ranks: which slice of a global array a rank holds.

A buffer names, per dim, the mesh axes that shard it, major to minor; ranks are row-major over the
mesh. The batch is cut micro-batch first, then by rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.collectives.ops import group_index
from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.neff.manifest import NamedBuffer

Mesh = Mapping[str, int]


def sharded_shape(buffer: NamedBuffer, mesh: Mesh) -> tuple[int, ...]:
    """Shape all shards of a buffer make up together (of one micro-batch, for batch buffers)."""
    return tuple(
        size * math.prod(mesh[a] for a in axes)
        for size, axes in zip(buffer.local_shape, buffer.axes, strict=True)
    )


def stacked(
    state: Mapping[str, np.ndarray], stacks: Mapping[str, Sequence[str]]
) -> dict[str, np.ndarray]:
    """`state` with the leaves of each stack as one array. Raises SimulationError when leaves of one
    stack have several shapes or are given in part."""
    rest = dict(state)
    for name, leaves in stacks.items():
        given = [np.asarray(rest.pop(leaf)) for leaf in leaves if leaf in rest]
        if not given:
            continue
        if len(given) < len(leaves):
            missing = next(leaf for leaf in leaves if leaf not in state)
            raise SimulationError(
                "SW_SIM_BINDING", f"{name} requires every one of its leaves, {missing} is not given"
            )
        if len({array.shape for array in given}) > 1:
            shapes = sorted({array.shape for array in given})
            raise SimulationError(
                "SW_SIM_SHAPE", f"{name} requires leaves of one shape, got {shapes}"
            )
        rest[name] = np.stack(given)
    return rest


def part_of(buffer: NamedBuffer, array: np.ndarray) -> np.ndarray:
    """The part of a leaf that a buffer holds: its layers of a stack, or all of it."""
    if buffer.part is None:
        return array
    low = buffer.part.first
    rows = slice(low, low + buffer.global_shape[buffer.part.dim])
    return array[(slice(None),) * buffer.part.dim + (rows,)]


def join_parts(parts: Sequence[tuple[NamedBuffer, np.ndarray]]) -> np.ndarray:
    """A leaf from the arrays of the buffers that hold it."""
    first = parts[0][0].part
    if first is None:
        return parts[0][1]
    ordered = sorted(parts, key=lambda pair: pair[0].part.first if pair[0].part else 0)
    return np.concatenate([array for _, array in ordered], axis=first.dim)


def padded(buffer: NamedBuffer, array: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """`array` with zeros behind it up to `wanted`, where the buffer holds more than its leaf."""
    if array.shape != tuple(buffer.global_shape) or array.shape == tuple(wanted):
        return array
    return np.pad(array, [(0, size - n) for n, size in zip(array.shape, wanted, strict=True)])


def cropped(buffer: NamedBuffer, array: np.ndarray) -> np.ndarray:
    """The leaf in what the shards of a buffer make up."""
    return array[tuple(slice(size) for size in buffer.global_shape)]


def check_leaf(parts: Sequence[NamedBuffer], array: np.ndarray) -> np.ndarray:
    """`array`, if it has the shape of the leaf that lies in `parts`. Raises SimulationError."""
    first = parts[0]
    if first.part is None:
        return array
    shape = list(first.global_shape)
    shape[first.part.dim] = sum(b.global_shape[first.part.dim] for b in parts)
    _require_shape(f"leaf {first.leaf} ({first.role})", array, shape)
    return array


def _require_shape(what: str, array: np.ndarray, wanted: Sequence[int]) -> None:
    if list(array.shape) != list(wanted):
        raise SimulationError(
            "SW_SIM_SHAPE", f"{what} requires shape {list(wanted)}, got {list(array.shape)}"
        )


def shard_slices(buffer: NamedBuffer, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Where a rank's shard lies in the global array."""
    starts = (
        group_index(mesh, axes, rank) * size
        for size, axes in zip(buffer.local_shape, buffer.axes, strict=True)
    )
    return tuple(slice(s, s + size) for s, size in zip(starts, buffer.local_shape, strict=True))


def shard_start(buffer: NamedBuffer, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where a rank's shard begins in the global array."""
    return tuple(s.start for s in shard_slices(buffer, mesh, rank))


def check_global(buffer: NamedBuffer, array: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """`array` in the buffer's type. Raises SimulationError when its shape is not `wanted`."""
    _require_shape(f"buffer {buffer.name} ({buffer.role})", array, wanted)
    return array.astype(buffer.dtype.numpy, copy=False)


def micro_batch(
    buffer: NamedBuffer, mesh: Mesh, array: np.ndarray, number: int, count: int
) -> np.ndarray:
    """Micro-batch `number` of `count` of a batch array: contiguous along the dim that is `count`
    times what the ranks take together. Scalars and what is no batch go to every micro-batch whole.

    Raises SimulationError when the shapes do not fit.
    """
    shape = sharded_shape(buffer, mesh)
    if count == 1 or not shape or buffer.role != "batch":
        return check_global(buffer, array, shape)
    pairs = enumerate(zip(array.shape, shape, strict=False))
    dim = next((d for d, (given, size) in pairs if given != size), 0)
    rows = shape[dim]
    whole = check_global(buffer, array, (*shape[:dim], rows * count, *shape[dim + 1 :]))
    return whole[(slice(None),) * dim + (slice(number * rows, (number + 1) * rows),)]


def gather_array(buffer: NamedBuffer, mesh: Mesh, shards: Mapping[int, np.ndarray]) -> np.ndarray:
    """The global array from the flat shards of the ranks that have the buffer. Raises as
    `distinct`."""
    result = np.empty(sharded_shape(buffer, mesh), buffer.dtype.numpy)
    for rank, shard in distinct(buffer, mesh, shards).items():
        result[shard_slices(buffer, mesh, rank)] = shard.reshape(buffer.local_shape)
    return result


def distinct(
    buffer: NamedBuffer, mesh: Mesh, shards: Mapping[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """One rank's of all equal shards.

    Raises SimulationError (SW_SIM_REPLICAS) when ranks that must hold the same shard differ in any
    bit.
    """
    owner: dict[tuple[int, ...], int] = {}
    for rank, shard in shards.items():
        first = owner.setdefault(shard_start(buffer, mesh, rank), rank)
        if first != rank and shard.tobytes() != shards[first].tobytes():
            raise SimulationError(
                "SW_SIM_REPLICAS",
                f"buffer {buffer.name} requires equal copies on ranks {first} and {rank},"
                " they differ",
            )
    return {rank: shards[rank] for rank in owner.values()}


def coordinate(buffer: NamedBuffer, mesh: Mesh, rank: int) -> int:
    """What a coordinate buffer of a rank holds: its row-major position along the buffer's axes."""
    axes = [a for per_dim in buffer.axes for a in per_dim]
    return group_index(mesh, axes, rank)
