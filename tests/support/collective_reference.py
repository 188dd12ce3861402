"""What each collective means, on whole arrays: the oracle of `collectives/values/execute.py`.

Sources are viewed as [outer, dim, inner]; gathers concatenate and scatters split along the middle
dim, in group order. Reductions accumulate in fp32 for float types narrower than that and round once
at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.values.execute import Array, check_divides, ufunc


def reference(
    kind: CollectiveKind,
    sources: Sequence[Array],
    *,
    shape: tuple[int, int, int] | None = None,
    reduction: str = "add",
    pairs: Sequence[tuple[int, int]] = (),
) -> list[Array]:
    """The result of every rank of one group.

    Shapes: `shape` is [outer, dim, inner] of one source, default (1, size, 1); results of
    all_gather have [outer, n * dim, inner], of reduce_scatter [outer, dim / n, inner], all others
    the shape of the source.
    Raises CollectiveError when a dim does not divide or the reduction is unknown.
    """
    n = len(sources)
    view = shape or (1, sources[0].size, 1)
    blocks = [s.reshape(view) for s in sources]
    match kind:
        case CollectiveKind.ALL_GATHER:
            return [np.concatenate(blocks, axis=1)] * n
        case CollectiveKind.ALL_REDUCE:
            return [reduce_whole(blocks, reduction)] * n
        case CollectiveKind.REDUCE_SCATTER:
            check_divides(kind, view[1], n)
            return np.split(reduce_whole(blocks, reduction), n, axis=1)
        case CollectiveKind.ALL_TO_ALL:
            check_divides(kind, view[1], n)
            pieces = [np.split(b, n, axis=1) for b in blocks]
            return [np.concatenate([p[t] for p in pieces], axis=1) for t in range(n)]
        case CollectiveKind.COLLECTIVE_PERMUTE:
            sender = {t: s for s, t in pairs}
            zeros = np.zeros_like(blocks[0])
            return [blocks[sender[t]] if t in sender else zeros for t in range(n)]


def reduce_whole(blocks: Sequence[Array], reduction: str) -> Array:
    """All blocks reduced in order, narrow floats in fp32."""
    first, *others = blocks
    wide = _accumulated_in(first.dtype)
    total = first.astype(wide)
    for block in others:
        total = ufunc(reduction)(total, block.astype(wide))
    return total.astype(first.dtype)


def _accumulated_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Floats in fp32 or wider; extension types (bf16, fp8) report kind V."""
    return np.promote_types(dtype, np.float32) if dtype.kind in "fV" else dtype
