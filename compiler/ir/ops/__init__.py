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
    CollectivePermuteAttrs,
    ReduceScatterAttrs,
)
from compiler.ir.ops.control import LoopAttrs, ShardingConstraintAttrs
from compiler.ir.ops.convolution import ConvolutionAttrs
from compiler.ir.ops.dot import DotGeneralAttrs
from compiler.ir.ops.elementwise import BitcastConvertAttrs, CompareAttrs, ConvertAttrs
from compiler.ir.ops.gather import GatherAttrs, ScatterAttrs
from compiler.ir.ops.host import HostEmptyAttrs, HostLoadAttrs, MoveToAttrs
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
from compiler.ir.ops.sort import SortAttrs
from compiler.ir.ops.window import ReduceWindowAttrs, SelectAndScatterAttrs, UnfoldAttrs

__all__ = [
    "COLLECTIVES",
    "AllGatherAttrs",
    "AllReduceAttrs",
    "AllSliceAttrs",
    "AllToAllAttrs",
    "AxisIndexAttrs",
    "BitcastConvertAttrs",
    "BroadcastInDimAttrs",
    "CollectivePermuteAttrs",
    "CompareAttrs",
    "ConcatenateAttrs",
    "ConstantAttrs",
    "ConvertAttrs",
    "ConvolutionAttrs",
    "DotGeneralAttrs",
    "DynamicSliceAttrs",
    "GatherAttrs",
    "HostEmptyAttrs",
    "HostLoadAttrs",
    "IotaAttrs",
    "LoopAttrs",
    "MoveToAttrs",
    "PadAttrs",
    "ReduceAttrs",
    "ReduceScatterAttrs",
    "ReduceWindowAttrs",
    "ReshapeAttrs",
    "ReverseAttrs",
    "ScatterAttrs",
    "SelectAndScatterAttrs",
    "ShardingConstraintAttrs",
    "SliceAttrs",
    "SortAttrs",
    "TransposeAttrs",
    "UnfoldAttrs",
]
