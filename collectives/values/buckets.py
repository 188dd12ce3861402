"""Collectives of buckets: several tensors of a rank lie one behind the other and move at once.

A bucket is launched once and its bytes are those of its parts; what becomes of each part is what
the schedule makes of it alone, so that bits do not depend on what shares a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from shardwright.collectives.ops import CollectiveError
from shardwright.collectives.schedule import Schedule
from shardwright.collectives.values.execute import Array, Shape, execute


def execute_parts(
    schedule: Schedule,
    sources: Sequence[Array],
    parts: Sequence[Shape],
    *,
    reduction: str = "add",
    wanted: Sequence[int] | None = None,
) -> list[Array]:
    """The result of every rank, or of those `wanted` (as in `execute`), in group order: flat, one
    part behind the other, where there are several.

    Shapes: `parts` are [outer, dim, inner] of what lies in one source.
    Raises CollectiveError when the parts are not the source, or as `execute`.
    """
    if len(parts) == 1:
        return execute(schedule, sources, shape=parts[0], reduction=reduction, wanted=wanted)
    ends = list(accumulate(map(math.prod, parts), initial=0))
    if any(source.size != ends[-1] for source in sources):
        raise CollectiveError(
            f"parts {list(parts)} require {ends[-1]} elements, got {sources[0].size}"
        )
    flat = [source.reshape(-1) for source in sources]
    results = [
        execute(schedule, [f[a:b] for f in flat], shape=part, reduction=reduction, wanted=wanted)
        for part, (a, b) in zip(parts, pairwise(ends), strict=True)
    ]
    return [np.concatenate([r.reshape(-1) for r in rank]) for rank in zip(*results, strict=True)]
