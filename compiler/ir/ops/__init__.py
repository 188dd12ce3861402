"""Every op definition, imported by name so that `OPS` is complete, and every attrs class
re-exported.
"""

from __future__ import annotations

from compiler.ir.ops.collective import (
    COLLECTIVES,
    AllGatherAttrs,
    AllReduceAttrs,
    AllSliceAttrs,
    AllToAllAttrs,
    AxisIndexAttrs,
    ReduceScatterAttrs,
)
from compiler.ir.ops.control import LoopAttrs, ShardingConstraintAttrs
from compiler.ir.ops.dot import DotGeneralAttrs
from compiler.ir.ops.elementwise import BitcastConvertAttrs, CompareAttrs, ConvertAttrs
from compiler.ir.ops.gather import GatherAttrs, ScatterAttrs
from compiler.ir.ops.reduce import ReduceAttrs
from compiler.ir.ops.shape import (
    BroadcastInDimAttrs,
    ConcatenateAttrs,
    ConstantAttrs,
    DynamicSliceAttrs,
    IotaAttrs,
    PadAttrs,
    ReshapeAttrs,
    ReverseAttrs,
    SliceAttrs,
    TransposeAttrs,
)

__all__ = [
    "COLLECTIVES",
    "AllGatherAttrs",
    "AllReduceAttrs",
    "AllSliceAttrs",
    "AllToAllAttrs",
    "AxisIndexAttrs",
    "BitcastConvertAttrs",
    "BroadcastInDimAttrs",
    "CompareAttrs",
    "ConcatenateAttrs",
    "ConstantAttrs",
    "ConvertAttrs",
    "DotGeneralAttrs",
    "DynamicSliceAttrs",
    "GatherAttrs",
    "IotaAttrs",
    "LoopAttrs",
    "PadAttrs",
    "ReduceAttrs",
    "ReduceScatterAttrs",
    "ReshapeAttrs",
    "ReverseAttrs",
    "ScatterAttrs",
    "ShardingConstraintAttrs",
    "SliceAttrs",
    "TransposeAttrs",
]
