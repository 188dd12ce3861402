"""Integer operations that the machine computes in fewer bits, and who may use them.

Products and sums of integers in `dot`, computing scatters, reducing collectives and 64-bit powers
go through fp32 and are exact up to 2^24 only. `--implicit-integer-downcast` lists where that is
accepted; anywhere else it is an error. Source: the option's entry of the neuronx-cc command-line
reference and the error pages EVRF035, 060, 061, 062, 063. 64-bit integers are computed with 32
bits: harmless where the range of a value is known to fit, else a warning. With `--native-int64
enabled` they are computed as they are, from trn2 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from shardwright.compiler.diagnostics import CompileError, Diagnostic
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF, EXTREMES
from shardwright.compiler.ir.facts import combination, pairing, stored
from shardwright.compiler.ir.traits import CASTS, REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.ranges import integer_ranges
from shardwright.compiler.support.intervals import Interval, limits
from shardwright.compiler.surface.flags import DOWNCASTS


def permitted(setting: str) -> frozenset[str]:
    """The kinds a value of `--implicit-integer-downcast` accepts; `default` accepts all (2.27)."""
    if setting in ("default", "all"):
        return frozenset(DOWNCASTS)
    return frozenset(() if setting == "none" else setting.split(","))


def computes_64_bits(options: CompileOptions, generation: str) -> bool:
    """Whether 64-bit integers are computed as such: by choice, from trn2 on (documented)."""
    return options.native_int64 == "enabled" and generation not in ("v1", "v2")


def check_integers(graph: Graph, options: CompileOptions, generation: str) -> Graph:
    """The graph as it is. Raises CompileError for an integer operation that is not accepted."""
    allowed = permitted(options.implicit_integer_downcast)
    for op in graph.walk():
        rounded = _ROUNDED.get(op.name)
        if rounded and rounded.kind not in allowed and _loses(op, rounded, generation):
            raise _refusal(op, rounded)
    return graph


def _loses(op: Op, rounded: _Rounded, generation: str) -> bool:
    """False where an operation has a path for integers, or no integers."""
    if not op.results[0].type.dtype.is_integer or combination(op) not in rounded.loses:
        return False
    exact = rounded is _POWER or (rounded is _PRODUCT and generation == "v2")  # with a warning
    return not exact or max(v.type.dtype.bytes for v in op.operands) > 4


_HELD_AS = {DType.I64: DType.I32, DType.U64: DType.U32}
_ADVICE = (
    "convert to 32-bit integers, make them of bounded ones (counts, 32-bit inputs), or ask for 64"
    " bits with --native-int64 enabled (of a job: --set compiler.native_int64=enabled), on trn2 on"
)


def wide_operations(graph: Graph) -> list[Op]:
    """Operations on 64-bit integers that are not known to fit the 32 bits they are computed with,
    in a graph without dead code: JAX packs the words of a key into 64 bits that nobody reads.

    Taking the low bits alone is what a conversion to a shorter integer asks for.
    """
    wide = (v.type.dtype in _HELD_AS for op in graph.walk() for v in (*op.operands, *op.results))
    if not any(wide):
        return []
    ranges = integer_ranges(graph)
    return [op for op in graph.walk() if not op.regions and _is_cut(op, ranges)]


def _is_cut(op: Op, ranges: dict[Value, Interval]) -> bool:
    if stored(op) is not None:
        return False  # an error of its own (NCC_ESFH002)
    target = op.results[0].type.dtype if op.results else DType.PRED
    if op.name in CASTS and target.is_integer and target not in _HELD_AS:
        return False
    return any(not fits(v, ranges) for v in (*op.operands, *op.results))


def fits(value: Value, ranges: dict[Value, Interval]) -> bool:
    """Whether 32 bits hold every element; the limits of the type stand for infinity."""
    held = _HELD_AS.get(value.type.dtype)
    if held is None:
        return True
    low, high = limits(held)
    found = ranges.get(value)
    infinite = found is not None and found[0] == found[1] and found[0] in limits(value.type.dtype)
    return infinite or (found is not None and low <= found[0] <= found[1] <= high)


def _wide_type(op: Op) -> str:
    return next(str(v.type) for v in (*op.operands, *op.results) if v.type.dtype in _HELD_AS)


def rounded_operations(graph: Graph) -> list[Op]:
    """Operations on integers whose sums in fp32 are not known to stay within 2^24."""
    sums = [op for op in graph.walk() if _sums(op) and op.result.type.dtype.is_integer]
    ranges = integer_ranges(graph) if sums else {}
    return [op for op in sums if _largest_sum(op, ranges) > EXACT_IN_FP32]


def _sums(op: Op) -> bool:
    """Whether partial sums of `op` are numbers of fp32; maxima over ranks go the same way."""
    rounded, way = _ROUNDED.get(op.name), combination(op)
    adds = way == "add" or op.name in REDUCTIONS_OF_RANKS
    return rounded is not None and adds and way in rounded.loses


EXACT_IN_FP32 = 2**24
"""Every integer up to here is a number of fp32 (IEEE 754: 24 bits of significand)."""


def _largest_sum(op: Op, ranges: dict[Value, Interval]) -> float:
    """What no partial sum of an operation exceeds in size."""
    sizes = [_size(v, ranges) for v in op.operands if v.type.dtype.is_integer]
    return _ROUNDED[op.name].terms(op, sizes)


def _size(value: Value, ranges: dict[Value, Interval]) -> float:
    low, high = ranges.get(value, (-math.inf, math.inf))
    return max(abs(low), abs(high))


def _products(op: Op, sizes: list[float]) -> float:
    """Of lhs and rhs, as many as are multiplied per element of the result."""
    lhs, rhs = (v.type.num_elements for v in op.operands)
    dims = pairing(op)
    shape = op.operands[0].type.shape
    terms = lhs if dims is None else math.prod(shape[d] for d in dims.lhs_contract)
    return min(terms, lhs, rhs) * sizes[0] * sizes[1]


def _written(op: Op, sizes: list[float]) -> float:
    return sizes[0] + op.operands[2].type.num_elements * sizes[2]


def _over_ranks(op: Op, sizes: list[float]) -> float:
    return sizes[0] * (op.attrs.group_size if op.attrs.reduction == "add" else 1)


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Integer work that is done in fp32: `kind` and `code` are the vendor's names of it and of the
    error, it `loses` bits where elements are combined in one of these ways, and no partial sum
    exceeds what `terms` makes of the sizes of the operands.
    """

    kind: str
    code: str
    loses: Collection[str]
    terms: Callable[[Op, list[float]], float]


_OF_RANKS = {"add", *EXTREMES}  # bits and products every rank computes itself (rank_reduce.py)
_PRODUCT = _Rounded("dot", "NCC_EVRF035", {"add"}, _products)
_SCATTER = _Rounded("scatter", "NCC_EVRF060", ELEMENTWISE_OF, _written)
_ALL_REDUCE = _Rounded("all_reduce", "NCC_EVRF061", _OF_RANKS, _over_ranks)
_REDUCE_SCATTER = _Rounded("reduce_scatter", "NCC_EVRF063", _OF_RANKS, _over_ranks)
_POWER = _Rounded("pow", "NCC_EVRF062", {""}, lambda op, sizes: 0)
_ROUNDED = {
    "all_reduce": _ALL_REDUCE,
    "convolution": _PRODUCT,
    "dot_general": _PRODUCT,
    "power": _POWER,
    "reduce_scatter": _REDUCE_SCATTER,
    "scatter": _SCATTER,
}


def downcasts(
    graph: Graph, options: CompileOptions = DEFAULTS, generation: str = "v2"
) -> list[Diagnostic]:
    """Warnings, each at the first place: 64-bit integers that may lose their high bits, and sums in
    fp32 that may be rounded."""
    wide = [] if computes_64_bits(options, generation) else wide_operations(graph)
    rounded = rounded_operations(graph)
    found = []
    if wide:
        message = f"{wide[0].name} of {_wide_type(wide[0])} is computed with 32 bits{_more(wide)}"
        found.append(Diagnostic("SW_INT64", message, wide[0].loc, _ADVICE, severity="warning"))
    if rounded:
        first = rounded[0]
        message = f"{first.name} of {first.result.type} is summed in fp32, exact up to 2^24"
        code, advice = _ROUNDED[first.name].code, "bound its operands, or compute in fp32"
        message += _more(rounded)
        found.append(Diagnostic(code, message, first.loc, advice, severity="warning"))
    return found


def _more(found: list[Op]) -> str:
    return f", and so do {len(found) - 1} more operations" if len(found) > 1 else ""


def _refusal(op: Op, rounded: _Rounded) -> CompileError:
    dtype, kind = op.results[0].type.dtype.value, rounded.kind
    return CompileError(
        rounded.code,
        f"{op.name} requires a float type or --implicit-integer-downcast={kind}, got {dtype}"
        " (computed in fp32, exact up to 2^24)",
        op.loc,
        f"cast to float, or accept it with --implicit-integer-downcast={kind}"
        f" (of a job: --set compiler.implicit_integer_downcast={kind})",
    )
