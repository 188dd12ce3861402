"""Every op definition, imported by name so that `OPS` is complete, and every attrs class
re-exported.
"""

from __future__ import annotations

from shardwright.compiler.ir.ops.collective import (
    AllGatherAttrs,
    AllReduceAttrs,
    AllSliceAttrs,
    AllToAllAttrs,
    AxisIndexAttrs,
    CollectivePermuteAttrs,
    ReduceScatterAttrs,
)
from shardwright.compiler.ir.ops.control import (
    LoopAttrs,
    ManualRegionAttrs,
    ShardingConstraintAttrs,
)
from shardwright.compiler.ir.ops.convolution import ConvolutionAttrs
from shardwright.compiler.ir.ops.dot import DotGeneralAttrs
from shardwright.compiler.ir.ops.elementwise import BitcastConvertAttrs, CompareAttrs, ConvertAttrs
from shardwright.compiler.ir.ops.gather import GatherAttrs, ScatterAttrs, Windows, windows_of
from shardwright.compiler.ir.ops.host import HostEmptyAttrs, HostLoadAttrs, MoveToAttrs
from shardwright.compiler.ir.ops.reduce import ReduceAttrs
from shardwright.compiler.ir.ops.shape import (
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
from shardwright.compiler.ir.ops.sort import SortAttrs
from shardwright.compiler.ir.ops.window import ReduceWindowAttrs, SelectAndScatterAttrs, UnfoldAttrs

__all__ = [
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
    "ManualRegionAttrs",
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
    "Windows",
    "windows_of",
]
