"""`nccom --check`: the collective's own schedule, run on arrays, against NumPy on whole arrays.

What runs is what the cores of a run compute (L1, `collectives/values/execute.py`), along the
algorithm that the time is of. Buffers above `MOST_BYTES` are checked at that size: a schedule is
the same at any. Source: the tool's user guide, "Data Integrity".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.schedule import Schedule
from shardwright.collectives.values.execute import execute
from shardwright.compiler.dtypes import DType
from shardwright.sim_cluster.network.what_if import WhatIf, default_pairs

MOST_BYTES = 256 << 10  # of one rank (our choice: 64 ranks of it take a second)
DTYPES = {
    "uint8": DType.U8,
    "int8": DType.I8,
    "uint16": DType.U16,
    "int16": DType.I16,
    "uint32": DType.U32,
    "int32": DType.I32,
    "fp16": DType.F16,
    "bf16": DType.BF16,
    "fp32": DType.F32,
}
"""The tool's types."""
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What became of the check of one size; `saved` is the file of the arrays of one that failed.

    Units: bytes of the larger buffer of a rank; errors relative to the largest golden value.
    """

    size_bytes: int
    mode: str
    seed: int
    ranks: int
    error: float
    bound: float
    are_equal: bool
    saved: str = ""

    @property
    def passed(self) -> bool:
        """Within the bound, and the same on all ranks where it has to be."""
        return self.are_equal and self.error <= self.bound


def check(
    what_if: WhatIf, size_bytes: int, datatype: str, mode: str, seed: int, folder: Path
) -> Checked:
    """Run the collective in every group, and compare. Arrays of a check that fails are written to
    `folder` (inputs, outputs, golden). Raises CollectiveError for what does not fit."""
    dtype = DTYPES[datatype]
    choice = what_if.choice(size_bytes, dtype.bytes)
    groups = what_if.replica_groups()
    count = _elements(what_if, size_bytes // dtype.bytes, groups.size, dtype)
    error, are_equal, saved = 0.0, True, ""
    for number in range(len(groups.groups)):
        rng = np.random.default_rng((seed, number))
        sources = _sources(what_if, count, groups.size, dtype, mode, rng)
        found = _run(what_if, choice.schedule(number), sources, count)
        wanted = _golden(what_if, sources, count)
        off = max(map(_error, found, wanted))
        alike = what_if.kind not in _SAME or all(_bits(f) == _bits(found[0]) for f in found)
        if (off > _bound(what_if, dtype, groups.size) or not alike) and not saved:
            file = folder / f"nccom_check_{what_if.kind.value}_{size_bytes}.npz"
            saved = _save(file, sources, found, wanted)
        error, are_equal = max(error, off), are_equal and alike
    return Checked(
        size_bytes=count * dtype.bytes,
        mode=mode,
        seed=seed,
        ranks=groups.size,
        error=error,
        bound=_bound(what_if, dtype, groups.size),
        are_equal=are_equal,
        saved=saved,
    )


_SAME = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
"""All ranks end with one result."""
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


def _elements(what_if: WhatIf, asked: int, ranks: int, dtype: DType) -> int:
    """Elements of the larger buffer that is checked: as asked, or so many that ranks share out."""
    most = MOST_BYTES // dtype.bytes
    if what_if.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.COLLECTIVE_PERMUTE):
        return min(asked, most)
    if what_if.kind is CollectiveKind.ALL_GATHER:
        return max(ranks, min(asked, most))
    return max(1, min(asked, most) // ranks) * ranks


def _sources(
    what_if: WhatIf, count: int, ranks: int, dtype: DType, mode: str, rng: np.random.Generator
) -> list[Array]:
    """What every rank has: ones, or random numbers of the type."""
    size = count // ranks if what_if.kind is CollectiveKind.ALL_GATHER else count
    if mode == "all_ones":
        return [np.ones(size, dtype.numpy)] * ranks
    if dtype.is_float:
        return [rng.uniform(-1, 1, size).astype(dtype.numpy) for _ in range(ranks)]
    limits = np.iinfo(dtype.numpy)
    return [
        rng.integers(limits.min, limits.max, size, dtype.numpy, endpoint=True) for _ in range(ranks)
    ]


def _run(what_if: WhatIf, schedule: Schedule, sources: list[Array], count: int) -> list[Array]:
    """What every rank ends with. Pieces of different sizes travel in chunks of the longest."""
    if what_if.kind is CollectiveKind.ALL_GATHER:
        sizes = [len(source) for source in sources]
        found = execute(schedule, [_padded([s], max(sizes)) for s in sources])
        return [_joined(result, sizes) for result in found]
    if not what_if.shares:
        return [result.reshape(-1) for result in execute(schedule, sources)]
    counts = what_if.counts(count)
    padded = [_padded(_cut(s, counts[n]), int(counts.max())) for n, s in enumerate(sources)]
    found = execute(schedule, padded)
    return [_joined(result, counts[:, n].tolist()) for n, result in enumerate(found)]


def _cut(source: Array, counts: Array) -> list[Array]:
    """The pieces of a source, one behind the other."""
    ends = np.cumsum(counts).tolist()
    return [source[end - size : end] for end, size in zip(ends, counts.tolist(), strict=True)]


def _padded(pieces: list[Array], length: int) -> Array:
    """Pieces as chunks of one length."""
    room = np.zeros((len(pieces), length), pieces[0].dtype)
    for row, piece in zip(room, pieces, strict=True):
        row[: len(piece)] = piece
    return room.reshape(-1)


def _joined(chunks: Array, sizes: list[int]) -> Array:
    """What of chunks of one length is no padding."""
    rows = chunks.reshape(len(sizes), -1)
    return np.concatenate([row[:size] for row, size in zip(rows, sizes, strict=True)])


def _golden(what_if: WhatIf, sources: list[Array], count: int) -> list[Array]:
    """What every rank has to end with, from all sources at once."""
    ranks = len(sources)
    match what_if.kind:
        case CollectiveKind.ALL_GATHER:
            return [np.concatenate(sources)] * ranks
        case CollectiveKind.ALL_REDUCE:
            return [_sum(np.stack(sources))] * ranks
        case CollectiveKind.REDUCE_SCATTER:
            return np.split(_sum(np.stack(sources)), ranks)
        case CollectiveKind.COLLECTIVE_PERMUTE:
            come_from = {t: s for s, t in what_if.pairs or default_pairs(ranks)}
            zeros = np.zeros_like(sources[0])
            return [sources[come_from[t]] if t in come_from else zeros for t in range(ranks)]
    counts = what_if.counts(count)
    starts = np.cumsum(counts, axis=1) - counts
    return [
        np.concatenate(
            [x[starts[s, t] : starts[s, t] + counts[s, t]] for s, x in enumerate(sources)]
        )
        for t in range(ranks)
    ]


def _sum(stack: Array) -> Array:
    """The sum of all rows: whole numbers in their type, others in fp64."""
    if stack.dtype.kind in "iu":
        return np.asarray(np.add.reduce(stack, axis=0, dtype=stack.dtype))
    return np.asarray(np.add.reduce(stack.astype(np.float64), axis=0))


def _error(found: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest golden value; infinite for another size."""
    if found.shape != wanted.shape:
        return float("inf")
    if not found.size:
        return 0.0
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    return float(np.abs(one - other).max() / max(float(np.abs(other).max()), 1.0))


def _bound(what_if: WhatIf, dtype: DType, ranks: int) -> float:
    """Nothing for what is only moved and for whole numbers; for sums of floats a rounding of the
    type per rank that is added (numerics.md: results of a hop are rounded to it)."""
    if what_if.kind not in _REDUCING or not dtype.is_float:
        return 0.0
    return ranks * _EPSILON[dtype]


_EPSILON = {DType.F32: 2.0**-23, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}


def _bits(array: Array) -> bytes:
    return array.tobytes()


def _save(file: Path, sources: list[Array], found: list[Array], wanted: list[Array]) -> str:
    """The arrays of one group in one file; numbers that NumPy has no name for as fp32."""
    named = {"input": sources, "output": found, "golden": wanted}
    arrays: dict[str, Any] = {
        f"{name}{rank}": array if array.dtype.kind in "iuf" else array.astype(np.float32)
        for name, rows in named.items()
        for rank, array in enumerate(rows)
    }
    with file.open("wb") as out:
        np.savez(out, **arrays)
    return str(file)
