"""MXNet's operators as functions on arrays, one file per kind; `registry.py` says how."""

from shardwright.compiler.frontend.mxnet.operators import (
    convolution,
    elementwise,
    indexing,
    losses,
    normalise,
    products,
    recurrent,
    reduction,
    resizing,
    shape,
)
from shardwright.compiler.frontend.mxnet.operators.registry import MXNET

__all__ = ["MXNET"]
_KINDS = (
    *(convolution, elementwise, indexing, losses, normalise, products),
    *(recurrent, reduction, resizing, shape),
)
"""Files whose rows the table has."""
