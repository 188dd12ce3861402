"""Whether a step takes the mean over its samples: from its traces with two and with four of them.

A batch that repeats its samples leaves a mean as it is and doubles a sum. Both traces are the same
ops in the same order, on other sizes; constants that count samples differ. Walking both, every
value gets its factor: how much larger it is on four samples that are two samples twice. The step
takes means where every output has the factor 1; what cannot be told is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.facts import behind, pairing
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import PadAttrs
from shardwright.compiler.ir.traits import CONTRACTIONS, IDENTITIES, REDUCTIONS, WRITES
from shardwright.compiler.ir.types import Graph, Op, Value

UNKNOWN = math.nan
ZERO = 0.0  # of a value that is zero everywhere: as large as any other


Pair = tuple[Value, Value]  # the same value in both traces
Makers = tuple[Mapping[Value, Op], Mapping[Value, Op]]


def scaled_output(two: Graph, four: Graph) -> Loc | None:
    """Where an output comes from that is not proven to be a mean; None when all are."""
    found = _outputs(two, four, [1.0] * len(two.inputs))
    producers = two.producers()
    for value, factor in zip(two.outputs, found or [UNKNOWN] * len(two.outputs), strict=True):
        if factor not in (1.0, ZERO):
            return producers[value].loc if value in producers else UNKNOWN_LOC
    return None


def _outputs(two: Graph, four: Graph, given: Sequence[float]) -> list[float] | None:
    """The factors of the outputs from those of the inputs; None when the ops are not the same.

    The graphs are walked from their outputs: ops that do not depend on each other may be in another
    order, and values that are equal by chance, like two sizes, one value in only one of them.
    """
    if len(two.inputs) != len(four.inputs) or len(two.outputs) != len(four.outputs):
        return None
    inputs = zip(two.inputs, four.inputs, strict=True)
    factors: dict[Pair, float] = dict(zip(inputs, given, strict=True))
    makers = two.producers(), four.producers()
    ends = _pairs(two.outputs, four.outputs, makers)
    todo = list(ends)
    while todo:
        pair = todo[-1]
        if pair in factors:
            todo.pop()
            continue
        a, b = makers[0].get(pair[0]), makers[1].get(pair[1])
        if a is None or b is None or not _is_same(a, b, pair):
            return None
        operands = _pairs(a.operands, b.operands, makers)
        missing = [p for p in operands if p not in factors]
        todo += missing
        if not missing:
            results = zip(a.results, b.results, strict=True)
            found = _factors(a, b, [factors[p] for p in operands])
            factors.update(zip(results, found, strict=True))
    return [factors[p] for p in ends]


def _pairs(ones: Sequence[Value], others: Sequence[Value], makers: Makers) -> list[Pair]:
    """Values of both traces, behind barriers: copies of ops decide whether a barrier is left."""
    pairs = zip(ones, others, strict=True)
    return [(_before(a, makers[0]), _before(b, makers[1])) for a, b in pairs]


def _before(value: Value, makers: Mapping[Value, Op]) -> Value:
    return behind(value, makers, lambda op: op.name in IDENTITIES)


def _is_same(a: Op, b: Op, pair: Pair) -> bool:
    """True for the same op on other sizes, of which `pair` is the same result."""
    return (
        a.name == b.name
        and (len(a.operands), len(a.results)) == (len(b.operands), len(b.results))
        and a.results.index(pair[0]) == b.results.index(pair[1])
        and (_is_sized(a) or a.attrs == b.attrs)
    )


def _is_sized(op: Op) -> bool:
    """Whether the attributes of `op` hold sizes; others are the same in both traces."""
    return OPS[op.name].resize is not None or isinstance(op.attrs, PadAttrs)


def _loop(a: Op, b: Op, given: Sequence[float]) -> list[float]:
    """The factors of carries, which must hold for any number of iterations."""
    carries = list(given)
    while True:
        after = _outputs(a.regions[0], b.regions[0], carries)
        if after is None:
            return [UNKNOWN] * len(carries)
        joined = [_common(pair) for pair in zip(carries, after, strict=True)]
        if str(joined) == str(carries):  # as text, in which what is unknown equals itself
            return joined
        carries = joined


def _common(factors: Sequence[float]) -> float:
    """The one factor of values that are not zero."""
    found = {f for f in factors if f != ZERO}
    return found.pop() if len(found) == 1 else UNKNOWN if found else ZERO


def _factors(a: Op, b: Op, given: Sequence[float]) -> list[float]:
    """The factors of the results of an op."""
    if a.regions:
        return _loop(a, b, given)
    rule = _RULES.get(a.name, _passed)
    return [rule(a, b, given)] * len(a.results)


def _passed(a: Op, b: Op, given: Sequence[float]) -> float:
    """Of what moves elements, to places that have to be the same, and of anything else."""
    passed = OPS[a.name].passes if len(a.results) == 1 else None
    if passed is None:
        return _plain(given)
    said = [f for k, f in enumerate(given) if k not in range(len(given))[passed]]
    return _common(given[passed]) if _plain(said) == 1.0 else UNKNOWN


def _product(a: Op, b: Op, given: Sequence[float]) -> float:
    return ZERO if ZERO in given else given[0] * given[1] * _added(a, b)


def _quotient(a: Op, b: Op, given: Sequence[float]) -> float:
    return given[0] / given[1] if given[1] else UNKNOWN


def _reduced(a: Op, b: Op, given: Sequence[float]) -> float:
    kind = a.attrs.kind
    if kind not in ("add", "max", "min"):
        return _plain(given)
    return given[0] * (_added(a, b) if kind == "add" else 1.0)


def _compared(a: Op, b: Op, given: Sequence[float]) -> float:
    return 1.0 if not math.isnan(_common(given)) else UNKNOWN


def _scattered(a: Op, b: Op, given: Sequence[float]) -> float:
    if a.attrs.kind != "add":
        return _plain(given)
    total = _common((given[0], given[2] * _added(a, b)))
    return total if _plain(given[1:2]) == 1.0 else UNKNOWN


def _plain(given: Sequence[float]) -> float:
    """Of an op that may do anything with its operands, as long as they are the same."""
    return 1.0 if all(f in (1.0, ZERO) for f in given) else UNKNOWN


def _added(a: Op, b: Op) -> float:
    """How many times as many addends every element of the result has in `b`."""
    return _addends(b) / _addends(a)


def _addends(op: Op) -> float:
    shapes = [v.type.shape for v in op.operands]
    if op.name in WRITES:
        return math.prod(shapes[2]) / max(1, math.prod(shapes[0]))
    if (pairs := pairing(op)) is not None:
        return float(math.prod(shapes[0][d] for d in pairs.lhs_contract))
    if op.name in CONTRACTIONS:
        return float(math.prod(shapes[1]) / shapes[1][op.attrs.rhs[0]])
    dims = op.attrs.dims if op.name in REDUCTIONS else ()
    return float(math.prod(shapes[0][d] for d in dims))


def _of_constant(a: Op, b: Op, given: Sequence[float]) -> float:
    """The ratio of two constants, which is the same for all elements."""
    one, other = (np.frombuffer(op.attrs.data, op.attrs.type.dtype.numpy) for op in (a, b))
    if a.attrs.data == b.attrs.data:
        return 1.0 if one.any() else ZERO
    if not (one.size and other.size and (one == one[0]).all() and (other == other[0]).all()):
        return UNKNOWN
    first, second = float(one[0]), float(other[0])
    if first == second:
        return 1.0 if first else ZERO
    return second / first if first and second else UNKNOWN


def _alike(a: Op, b: Op, given: Sequence[float]) -> float:
    """Of what is larger by a positive factor where all operands are."""
    return _common(given)


_RULES: Mapping[str, Callable[[Op, Op, Sequence[float]], float]] = {
    **dict.fromkeys(("abs", "add", "convert", "maximum", "minimum"), _alike),
    **dict.fromkeys(("negate", "subtract"), _alike),
    "constant": _of_constant,
    **dict.fromkeys(("convolution", "dot_general", "multiply"), _product),
    "divide": _quotient,
    "reduce": _reduced,
    "compare": _compared,
    "scatter": _scattered,
}
