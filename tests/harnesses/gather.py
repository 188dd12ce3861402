"""Harness rows of `gather` and `scatter`: embeddings, take_along_axis, strided windows, indices
out of bounds.
"""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import GatherAttrs, ScatterAttrs
from tests.harnesses.case import BF16_ULP, EXACT, FLOAT_ULPS, OpCase

F32, BF16, I32, U32 = DType.F32, DType.BF16, DType.I32, DType.U32
Shape = tuple[int, ...]

EMBEDDING = GatherAttrs(
    offset_dims=(2,),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    index_vector_dim=2,
    slice_sizes=(1, 6),
)
ALONG_AXIS = GatherAttrs(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
    start_index_map=(1,),
    index_vector_dim=2,
    slice_sizes=(1, 1),
)
WINDOWS = GatherAttrs(
    offset_dims=(0, 2),
    collapsed_slice_dims=(),
    start_index_map=(1, 0),
    index_vector_dim=0,
    slice_sizes=(3, 2),
)
BATCHED_WINDOWS = GatherAttrs(
    offset_dims=(1,),
    collapsed_slice_dims=(),
    operand_batching_dims=(1,),
    start_indices_batching_dims=(1,),
    start_index_map=(0,),
    index_vector_dim=0,
    slice_sizes=(2, 1),
)


def _gather(
    attrs: GatherAttrs,
    operand: Shape,
    indices: Shape,
    note: str,
    dtype: DType = F32,
    index: DType = I32,
) -> OpCase:
    values = ("", f"around:{max(operand)}")
    return OpCase("gather", ((operand, dtype), (indices, index)), attrs, values, note=note)


def _scatter(kind: str, note: str, dtype: DType = F32, unique: bool = False) -> OpCase:
    """Embedding gradient: rows of updates added to (or put into) rows of a table."""
    attrs = ScatterAttrs(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=1,
        kind=kind,
        unique=unique,
    )
    indices = ((1 if unique else 9, 1), I32)
    operands = (((7, 6), dtype), indices, ((indices[0][0], 6), dtype))
    rounded = kind in ("add", "multiply") and dtype.is_float
    rtol = {F32: FLOAT_ULPS, BF16: 4 * BF16_ULP}[dtype] if rounded else EXACT
    return OpCase("scatter", operands, attrs, ("", "around:7", ""), rtol, note)


def _scatter_windows(kind: str, shape: Shape) -> OpCase:
    """Windows larger than one element, dropped whole when they would leave the operand."""
    attrs = ScatterAttrs(
        update_window_dims=(1, 2),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(0, 1),
        index_vector_dim=1,
        kind=kind,
    )
    operands = ((shape, F32), ((6, 2), I32), ((6, 2, 3), F32))
    return OpCase("scatter", operands, attrs, ("", "around:7", ""), FLOAT_ULPS, f"windows_{kind}")


def _scatter_batched_windows(kind: str) -> OpCase:
    """Windows at computed starts, one per batch row: the gradient of a vmapped dynamic_slice."""
    attrs = ScatterAttrs(
        update_window_dims=(2,),
        inserted_window_dims=(),
        input_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=2,
        kind=kind,
    )
    operands = (((4, 9), F32), ((4, 3, 1), I32), ((4, 3, 2), F32))
    return OpCase(
        "scatter", operands, attrs, ("", "around:9", ""), FLOAT_ULPS, f"batched_windows_{kind}"
    )


def _scatter_points(kind: str, note: str, dtype: DType = F32) -> OpCase:
    """Single elements picked by two indices, most of them more than once."""
    attrs = ScatterAttrs(
        update_window_dims=(),
        inserted_window_dims=(0, 1),
        scatter_dims_to_operand_dims=(1, 0),
        index_vector_dim=0,
        kind=kind,
    )
    operands = (((5, 4), dtype), ((2, 41), I32), ((41,), dtype))
    rtol = FLOAT_ULPS if kind in ("add", "multiply") and dtype.is_float else EXACT
    return OpCase("scatter", operands, attrs, ("", "around:4", ""), rtol, note)


def _scatter_batched() -> OpCase:
    """The gradient of take_along_axis."""
    attrs = ScatterAttrs(
        update_window_dims=(),
        inserted_window_dims=(1,),
        input_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=2,
        kind="add",
    )
    operands = (((4, 9), F32), ((4, 3, 1), I32), ((4, 3), F32))
    return OpCase("scatter", operands, attrs, ("", "around:9", ""), FLOAT_ULPS, "along_axis")


CASES: tuple[OpCase, ...] = (
    _gather(EMBEDDING, (11, 6), (3, 5, 1), "embedding"),
    _gather(EMBEDDING, (11, 6), (3, 5, 1), "embedding_bf16", BF16),
    _gather(EMBEDDING, (11, 6), (3, 5), "implicit_index_vector"),
    _gather(ALONG_AXIS, (4, 9), (4, 3, 1), "along_axis"),
    _gather(WINDOWS, (7, 8), (2, 5), "windows"),
    _gather(WINDOWS, (7, 8), (2, 5), "windows_u32", index=U32),
    _gather(WINDOWS, (7, 8), (2, 5), "windows_bf16", BF16),
    _gather(BATCHED_WINDOWS, (7, 5), (1, 5), "batched_windows"),
    _scatter("add", "embedding"),
    _scatter("add", "embedding_bf16", BF16),
    _scatter("add", "embedding_i32", I32),
    _scatter("replace", "replace", unique=True),
    _scatter("replace", "last_wins"),
    _scatter("replace", "last_wins_i32", I32),
    _scatter("max", "max"),
    _scatter("min", "min_i32", I32),
    _scatter("multiply", "multiply"),
    _scatter("add", "unique_i32", I32, unique=True),
    _scatter_windows("add", (8, 9)),
    _scatter_windows("replace", (8, 9)),
    _scatter_windows("max", (8, 9)),
    _scatter_batched_windows("add"),
    _scatter_batched_windows("replace"),
    *(_scatter_points(k, f"points_{k}") for k in ("add", "replace", "multiply", "min", "max")),
    _scatter_points("add", "points_add_i32", I32),
    _scatter_batched(),
)
