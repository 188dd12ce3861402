"""Integer operations that the machine computes in fp32, and who may use them.

Products and sums of integers in `dot`, computing scatters, reducing collectives and 64-bit powers
go through fp32 and are exact up to 2^24 only. `--implicit-integer-downcast` lists where that is
accepted; anywhere else it is an error. Source: the option's entry of the neuronx-cc command-line
reference and the error pages EVRF035, 060, 061, 062, 063.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.diagnostics import CompileError
from compiler.ir.types import Graph, Op
from compiler.options import CompileOptions

KINDS = ("dot", "scatter", "all_reduce", "reduce_scatter", "pow")
_CODES = {
    "dot": "NCC_EVRF035",
    "scatter": "NCC_EVRF060",
    "all_reduce": "NCC_EVRF061",
    "reduce_scatter": "NCC_EVRF063",
    "pow": "NCC_EVRF062",
}
_OF_OP = {
    "dot_general": "dot",
    "convolution": "dot",
    "scatter": "scatter",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "power": "pow",
}


def permitted(setting: str) -> frozenset[str]:
    """The kinds a value of `--implicit-integer-downcast` accepts; `default` accepts all (2.27)."""
    if setting in ("default", "all"):
        return frozenset(KINDS)
    return frozenset(() if setting == "none" else setting.split(","))


def check_integers(options: CompileOptions, generation: str) -> Callable[[Graph], Graph]:
    """A pass that changes nothing and raises CompileError for an integer operation that is not
    accepted.
    """
    allowed = permitted(options.implicit_integer_downcast)

    def check(graph: Graph) -> Graph:
        for op in graph.walk():
            kind = _kind(op, generation)
            if kind and kind not in allowed:
                raise _refusal(op, kind)
        return graph

    return check


def _kind(op: Op, generation: str) -> str:
    """What an operation counts as; empty when it has an integer path or no integers."""
    kind = _OF_OP.get(op.name, "")
    if not kind or not op.results[0].type.dtype.is_integer:
        return ""
    wide = max(v.type.dtype.bytes for v in op.operands) > 4
    if kind == "dot" and generation == "v2" and not wide:
        return ""  # 32-bit products are accepted there, with a warning
    if kind == "pow" and not wide:
        return ""
    moves = kind == "scatter" and op.attrs.kind == "replace"
    moves = moves or getattr(op.attrs, "reduction", "add") in ("and", "or")
    return "" if moves else kind


def _refusal(op: Op, kind: str) -> CompileError:
    dtype = op.results[0].type.dtype.value
    return CompileError(
        _CODES[kind],
        f"{op.name} requires a float type or --implicit-integer-downcast={kind}, got {dtype}"
        " (computed in fp32, exact up to 2^24)",
        op.loc,
        f"cast to float, or accept it with --implicit-integer-downcast={kind}",
    )
