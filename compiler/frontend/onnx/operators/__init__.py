"""ONNX's operators as functions on arrays, one file per kind; `registry.py` says how."""

from shardwright.compiler.frontend.onnx.operators import (
    control,
    convolution,
    elementwise,
    indexing,
    normalise,
    products,
    quantization,
    recurrent,
    reduction,
    resizing,
    shape,
)
from shardwright.compiler.frontend.onnx.operators.registry import ONNX

__all__ = ["ONNX"]
_KINDS = (
    *(control, convolution, elementwise, indexing, normalise, products, quantization),
    *(recurrent, reduction, resizing, shape),
)
"""Files whose rows the table has."""
