"""Type rules refuse what does not fit, in the form "X requires Y, got Z"."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllToAllAttrs,
    BitcastConvertAttrs,
    BroadcastInDimAttrs,
    CompareAttrs,
    ConcatenateAttrs,
    ConstantAttrs,
    DotGeneralAttrs,
    DynamicSliceAttrs,
    GatherAttrs,
    IotaAttrs,
    PadAttrs,
    ReduceAttrs,
    ReduceScatterAttrs,
    ReshapeAttrs,
    ReverseAttrs,
    ScatterAttrs,
    ShardingConstraintAttrs,
    SliceAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.types import TensorType, tensor_type

F32, I32, PRED = DType.F32, DType.I32, DType.PRED


def t(*shape: int, dtype: DType = F32) -> TensorType:
    return tensor_type(shape, dtype)


EMBED = {"offset_dims": (1,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}
ROW = {"update_window_dims": (1,), "inserted_window_dims": (0,), "index_vector_dim": 1}

REFUSED: list[tuple[str, list[TensorType], Any, str]] = [
    (
        "dot_general",
        [t(8, 4096), t(4095, 8)],
        DotGeneralAttrs((), (), (1,), (0,), F32),
        "dot_general requires equal contracting dims, got lhs 4096 and rhs 4095",
    ),
    (
        "dot_general",
        [t(2, 3), t(4, 3)],
        DotGeneralAttrs((0,), (0,), (1,), (1,), F32),
        "equal batch dims, got lhs 2 and rhs 4",
    ),
    ("dot_general", [t(2), t(2, dtype=I32)], DotGeneralAttrs((), (), (0,), (0,), F32), "one elem"),
    ("dot_general", [t(2), t(2)], DotGeneralAttrs((), (), (1,), (0,), F32), "below rank 1"),
    ("add", [t(2), t(3)], None, "add requires operands of one type, got tensor<2xf32> and"),
    ("add", [t(2)], None, "add requires 2 operands, got 1"),
    ("tanh", [t(2, dtype=I32)], None, "tanh requires float elements"),
    ("and", [t(2), t(2)], None, "and requires integer or i1 elements"),
    ("subtract", [t(2, dtype=PRED)] * 2, None, "subtract requires number elements"),
    ("abs", [t(2, dtype=DType.U32)], None, "abs requires signed or float"),
    ("is_finite", [t(2, dtype=I32)], None, "float elements"),
    ("compare", [t(2), t(2)], CompareAttrs("LESS"), "a direction of EQ NE"),
    ("compare", [t(2), t(2)], None, "attributes of class CompareAttrs, got NoneType"),
    ("select", [t(2), t(2), t(2)], None, "an i1 predicate"),
    ("clamp", [t(3), t(2), t(3)], None, "bounds of type tensor<2xf32>"),
    ("bitcast_convert", [t(2)], BitcastConvertAttrs(DType.BF16), "as wide as f32, got bf16"),
    ("broadcast_in_dim", [t(3)], BroadcastInDimAttrs((0,), (4, 2)), "size 1 or 4, got 3"),
    ("broadcast_in_dim", [t(3)], BroadcastInDimAttrs((), (3,)), "1 dims for tensor<3xf32>"),
    ("reshape", [t(3, 4)], ReshapeAttrs((5, 2)), "reshape requires 12 elements, got shape"),
    ("reshape", [t(3, 4)], ReshapeAttrs((-3, -4)), "reshape requires 12 elements"),
    ("transpose", [t(3, 4)], TransposeAttrs((0, 0)), "a permutation of 2 dims"),
    ("slice", [t(3)], SliceAttrs((0,), (4,), (1,)), "bounds inside of 3, got 0:4:1"),
    ("slice", [t(3)], SliceAttrs((0,), (3,), (0,)), "bounds inside of 3"),
    ("slice", [t(3)], SliceAttrs((), (3,), (1,)), "1 starts, limits and strides"),
    ("concatenate", [t(2, 3), t(2, 4)], ConcatenateAttrs(0), "differ .* only in dim 0"),
    ("concatenate", [], ConcatenateAttrs(0), "at least one operand"),
    ("pad", [t(3), t(1)], PadAttrs((0,), (0,), (0,)), "a scalar padding value"),
    ("pad", [t(3), t()], PadAttrs((-4,), (0,), (0,)), "no dim below 0"),
    ("reverse", [t(3)], ReverseAttrs((1,)), "below rank 1"),
    ("iota", [], IotaAttrs(1, t(3)), "a dim below rank 1, got 1"),
    ("constant", [], ConstantAttrs(b"12345", t(3)), "12 bytes for tensor<3xf32>"),
    ("dynamic_slice", [t(3), t(dtype=I32)], DynamicSliceAttrs((4,)), "sizes within"),
    ("dynamic_slice", [t(3)], DynamicSliceAttrs((2,)), "1 start indices, got 0"),
    ("dynamic_slice", [t(3), t()], DynamicSliceAttrs((2,)), "scalar integer start"),
    ("dynamic_update_slice", [t(3), t(4), t(dtype=I32)], None, "an update within"),
    ("reduce", [t(3)], ReduceAttrs("mean", (0,)), "a reduction of add multiply"),
    ("reduce", [t(3)], ReduceAttrs("and", (0,)), "integer or i1 elements for and"),
    ("reduce", [t(3)], ReduceAttrs("add", (1,)), "distinct dims below rank 1"),
    (
        "gather",
        [t(9, 4), t(5, 1)],
        GatherAttrs(**EMBED, index_vector_dim=1, slice_sizes=(1, 4)),
        "integer indices",
    ),
    (
        "gather",
        [t(9, 4), t(5, 2, dtype=I32)],
        GatherAttrs(**EMBED, index_vector_dim=1, slice_sizes=(1, 4)),
        "an index map of 2 dims",
    ),
    (
        "gather",
        [t(9, 4), t(5, 1, dtype=I32)],
        GatherAttrs(**EMBED, index_vector_dim=1, slice_sizes=(2, 4)),
        "slices of size 1",
    ),
    (
        "scatter",
        [t(9, 4), t(5, 1, dtype=I32), t(6, 4)],
        ScatterAttrs(**ROW, scatter_dims_to_operand_dims=(0,), kind="add"),
        "batch dims .5., got .6.",
    ),
    (
        "scatter",
        [t(9, 4), t(5, 1, dtype=I32), t(5, 5)],
        ScatterAttrs(**ROW, scatter_dims_to_operand_dims=(0,), kind="add"),
        "update windows within",
    ),
    (
        "scatter",
        [t(9, 4), t(5, 1, dtype=I32), t(5, 4)],
        ScatterAttrs(**ROW, scatter_dims_to_operand_dims=(0,), kind="xor"),
        "a kind of add replace multiply min max, got xor",
    ),
    ("sharding_constraint", [t(3)], ShardingConstraintAttrs(((), ())), "a spec of 1 dims"),
    (
        "reduce_scatter",
        [t(10)],
        ReduceScatterAttrs(0, ("dp_shard",), "add", 4),
        "reduce_scatter requires dim 0 divisible by the group of 4, got 10",
    ),
    ("all_gather", [t(10)], AllGatherAttrs(1, ("a",), 4), "a dim below rank 1"),
    ("all_gather", [t(10)], AllGatherAttrs(0, (), 4), "distinct mesh axes"),
    ("all_to_all", [t(4, 6)], AllToAllAttrs(1, 0, ("a",), 4), "dim 1 divisible by the group of 4"),
]


@pytest.mark.parametrize(
    ("op", "types", "attrs", "message"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_refused(op: str, types: list[TensorType], attrs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPS[op].infer(types, attrs, ())


def test_collective_types_follow_the_group_size() -> None:
    global_type, local = t(8, 6), t(2, 6)
    (same,) = OPS["all_gather"].infer([global_type], AllGatherAttrs(0, ("a",)), ())
    (grown,) = OPS["all_gather"].infer([local], AllGatherAttrs(0, ("a",), 4), ())
    (cut,) = OPS["reduce_scatter"].infer([global_type], ReduceScatterAttrs(0, ("a",), "add", 4), ())
    (moved,) = OPS["all_to_all"].infer([local], AllToAllAttrs(1, 0, ("a",), 2), ())
    assert (same, grown, cut, moved) == (global_type, global_type, local, t(4, 3))
