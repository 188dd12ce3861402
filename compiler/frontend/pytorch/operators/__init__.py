"""ATen's operators as functions on JAX arrays, one file per kind; `registry.py` says how."""

from shardwright.compiler.frontend.pytorch.operators import (
    attention,
    backward,
    control,
    convolution,
    elementwise,
    indexing,
    losses,
    normalise,
    products,
    random,
    recurrent,
    reduction,
    resizing,
    selected_indices,
    selected_reductions,
    selected_shapes,
    shape,
)
from shardwright.compiler.frontend.pytorch.operators.registry import ATEN, HIGHER_ORDER

__all__ = ["ATEN", "HIGHER_ORDER"]
_KINDS = (
    *(attention, backward, control, convolution, elementwise, indexing, losses, normalise),
    *(products, random, recurrent, reduction, resizing, shape),
    *(selected_indices, selected_reductions, selected_shapes),
)
"""Files whose rows the tables have."""
