"""Gathers and scatters with random dimension numbers, at both levels against XLA."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from shardwright.compiler.ir.ops.gather import SCATTER_KINDS
from shardwright.compiler.ir.printer import to_stablehlo
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.support import xla
from tests.support.cells import long_in_matrix
from tests.support.compiled import run_levels

INDEX_TYPES = (DType.I32, DType.I32, DType.U32, DType.I8)


class Draw:
    """One operand with index map, batching dims, windows and the index tensor that fits."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        rank = int(rng.integers(1, 5))
        self.operand = tuple(int(n) for n in rng.integers(2, 8, rank))
        dims = [int(d) for d in rng.permutation(rank)]
        count = int(rng.integers(1, rank + 1))
        self.map = tuple(dims[:count])
        rest = dims[count:]
        self.batching = tuple(sorted(rest[: int(rng.integers(0, len(rest) + 1))]))
        self.sizes = [int(rng.integers(1, n + 1)) for n in self.operand]
        for d in self.batching:
            self.sizes[d] = 1
        ones = [d for d in range(rank) if self.sizes[d] == 1 and d not in self.batching]
        self.collapsed = tuple(d for d in ones if rng.integers(0, 2))
        batch = [int(n) for n in rng.integers(1, 6, int(rng.integers(0, 3)))]
        batch += [self.operand[d] for d in self.batching]
        self.vector = int(rng.integers(0, len(batch) + 1))
        order = [int(i) for i in rng.permutation(len(batch))]
        shape = [batch[i] for i in order]
        own = len(batch) - len(self.batching)
        where = [order.index(own + k) for k in range(len(self.batching))]
        self.index_batching = tuple(i + (i >= self.vector) for i in where)
        shape.insert(self.vector, count)
        self.indices = tuple(shape)
        gone = self.collapsed + self.batching
        self.window = [self.sizes[d] for d in range(rank) if d not in gone]
        moving = len(batch) + len(self.window)
        self.window_dims = tuple(
            sorted(int(d) for d in rng.choice(moving, len(self.window), replace=False))
        )
        walked, windows = iter(shape[: self.vector] + shape[self.vector + 1 :]), iter(self.window)
        self.moving = tuple(
            next(windows) if d in self.window_dims else next(walked) for d in range(moving)
        )
        self.index_type = INDEX_TYPES[int(rng.integers(0, len(INDEX_TYPES)))]

    @property
    def values(self) -> str:
        """Indices, some of them out of bounds (below is for unsigned ones)."""
        return "below:9" if self.index_type is DType.U32 else "around:6"


def gather_case(seed: int) -> OpCase:
    d = Draw(seed)
    attrs = GatherAttrs(
        offset_dims=d.window_dims,
        collapsed_slice_dims=d.collapsed,
        operand_batching_dims=d.batching,
        start_indices_batching_dims=d.index_batching,
        start_index_map=d.map,
        index_vector_dim=d.vector,
        slice_sizes=tuple(d.sizes),
    )
    dtype = (DType.F32, DType.BF16, DType.I32, DType.PRED)[int(d.rng.integers(0, 4))]
    operands = ((d.operand, dtype), (d.indices, d.index_type))
    return OpCase("gather", operands, attrs, ("", d.values))


def scatter_case(seed: int) -> OpCase:
    d = Draw(seed)
    kind = SCATTER_KINDS[int(d.rng.integers(0, len(SCATTER_KINDS)))]
    attrs = ScatterAttrs(
        update_window_dims=d.window_dims,
        inserted_window_dims=d.collapsed,
        input_batching_dims=d.batching,
        scatter_indices_batching_dims=d.index_batching,
        scatter_dims_to_operand_dims=d.map,
        index_vector_dim=d.vector,
        kind=kind,
    )
    dtype = (DType.F32, DType.I32)[int(d.rng.integers(0, 2))]
    operands = ((d.operand, dtype), (d.indices, d.index_type), (d.moving, dtype))
    rounded = kind in ("add", "multiply") and dtype.is_float
    return OpCase("scatter", operands, attrs, ("", d.values, ""), 1e-5 if rounded else 0.0)


def check(case: OpCase) -> None:
    graph, inputs = build_graph(case), case_inputs(case)
    (want,) = xla.run(to_stablehlo(graph), inputs)
    for level, (have,) in zip(("L0", "L1"), run_levels(graph, inputs), strict=True):
        if case.rtol:
            scale = float(np.abs(want).max())
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * scale, err_msg=level)
        else:
            np.testing.assert_array_equal(have, want, err_msg=level)


@pytest.mark.parametrize("seed", range(16))
def test_gather(seed: int) -> None:
    check(gather_case(seed))


@pytest.mark.parametrize("seed", range(16))
def test_scatter(seed: int) -> None:
    check(scatter_case(seed))


@pytest.mark.parametrize("seed", long_in_matrix(range(100, 400), range(100, 180), range(180, 400)))
def test_many(seed: int) -> None:
    check(gather_case(seed))
    check(scatter_case(seed))
