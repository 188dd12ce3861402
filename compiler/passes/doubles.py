"""64-bit floats, which no engine computes: refused where a step makes them.

JAX has none unless `jax_enable_x64` is set. Checked after folding, so that constants which are only
converted do not count. Source: error page NCC_ESPP004, unsupported element types.
"""

from __future__ import annotations

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph

_ADVICE = (
    "leave jax_enable_x64 (JAX_ENABLE_X64) unset, or make it float32 (dtype=jnp.float32) where"
    " arrays, constants and schedules are made"
)


def check_doubles(graph: Graph) -> Graph:
    """The graph as it is. Raises CompileError at the first operation that has or makes a 64-bit
    float, for an argument at its first reader; for one that is only returned, without a line.
    """
    for op in graph.walk():
        for value in (*op.operands, *op.results):
            if value.type.dtype is DType.F64:
                raise CompileError(
                    "NCC_ESPP004",
                    f"{op.name} requires elements of up to 32 bits, got {value.type}",
                    op.loc,
                    _ADVICE,
                )
    for value in graph.outputs:
        if value.type.dtype is DType.F64:
            raise CompileError(
                "NCC_ESPP004",
                f"results require elements of up to 32 bits, got {value.type}",
                hint=_ADVICE,
            )
    return graph
