"""fp8 formats a NeuronCore generation does not have.

The 4-bit exponent format comes in two kinds: with infinities (`f8E4M3`) up to trn3, and without
(`f8E4M3FN`) from trn3 on. Source: the error pages EVRF051 and EVRF052.
"""

from __future__ import annotations

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import CompileOptions

_GENERATIONS = ("v1", "v2", "v3", "v4")


def check_formats(graph: Graph, options: CompileOptions, generation: str) -> Graph:
    """The graph as it is. Raises CompileError for a format that `generation` lacks."""
    refused = _refused(options, generation)
    for op in graph.walk() if refused else ():
        for value in (*op.operands, *op.results):
            if value.type.dtype in refused:
                code, advice = refused[value.type.dtype]
                given = value.type.dtype.value
                message = f"{op.name} requires another fp8 format on this target, got {given}"
                raise CompileError(code, message, op.loc, advice)
    return graph


def _refused(options: CompileOptions, generation: str) -> dict[DType, tuple[str, str]]:
    """(code, what to do) of each format that is not there."""
    advice = (
        "use f8E4M3, compile for trn3, or accept the difference with"
        " --experimental-unsafe-fp8e4m3fn-as-fp8e4m3 (of a job: --set"
        " compiler.experimental_unsafe_fp8e4m3fn_as_fp8e4m3=true)"
    )
    if generation not in _GENERATIONS:
        return {DType.F8E4M3: ("NCC_EVRF052", "use f8E4M3FN")}
    if generation in ("v1", "v2", "v3") and not options.experimental_unsafe_fp8e4m3fn_as_fp8e4m3:
        return {DType.F8E4M3FN: ("NCC_EVRF051", advice)}
    return {}
