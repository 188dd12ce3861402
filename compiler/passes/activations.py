"""Elementwise code that computes a function of the Scalar engine becomes that function, whatever
its spelling: GELU, SiLU and their derivatives.

Technology mapping, as logic synthesis maps gates to cells: every value gets small sets of values it
follows from element by element (cuts), and what it is of a cut is compared with the engine's
functions on sample points. A function of two values is taken when it is linear in one of them (a
derivative times a gradient, a gate times a value). Source of the mapping: Mishchenko, Chatterjee
and Brayton, "DAG-aware AIG rewriting" (2006); of the functions: NKI reference, `nki.language`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder, defining
from shardwright.compiler.ir.facts import chooses, splat
from shardwright.compiler.ir.ops import CompareAttrs
from shardwright.compiler.ir.ops.elementwise import ACTIVATIONS, COMPARE, erf, erfc, logistic
from shardwright.compiler.ir.rewrite import Level, within
from shardwright.compiler.ir.traits import CASTS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.dce import dce

MAX_CUTS = 12  # per value, those that reach back furthest (our choice)
MAX_CONE_OPS = 160  # of a cut; the exact GELU, where erfc is written out, has about 110

Samples = npt.NDArray[np.float64]

_CURVED: dict[str, Callable[..., Samples]] = {
    "erf": erf,
    "erfc": erfc,
    "exponential": np.exp,
    "exponential_minus_one": np.expm1,
    "logistic": logistic,
    "power": np.power,
    "tanh": np.tanh,
}
_CODE: dict[str, Callable[..., Samples]] = _CURVED | {
    "abs": np.abs,
    "add": np.add,
    "convert": np.positive,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "select": np.where,
    "subtract": np.subtract,
}
_POINTS: Samples = np.concatenate((np.linspace(-9, 9, 61), [-0.01, 1e-3, 0.05]))
_FAR = (12.0, 25.0, 80.0)  # where the functions are flat or straight
_GRADIENTS = (1.0, -2.0, 0.375)
_TOLERANCE = {DType.F32: 1e-6, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
"""Distance allowed of a function beside 1 + its size: constants of the code are rounded to its
type.
"""

Cut = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    """A value is `function` of `source`, times `factor` when there is one."""

    function: str
    source: Value
    factor: Value | None
    saved: int


def activations(graph: Graph) -> Graph:
    """`graph` with the Scalar engine's functions in place of code that computes them."""
    graph = within(graph, activations)
    if not any(op.name in _CURVED for op in graph.ops):
        return graph
    found = _Mapper(graph).matches()
    while found:
        graph = dce(_replaced(graph, found))
        found = _Mapper(graph).matches()
    return graph


class _Mapper:
    """Cuts of the values of one level, and the matches that save code."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.uses = graph.uses()
        self.outputs = set(graph.outputs)
        self.cuts: dict[Value, list[Cut]] = {}
        made = [v for op in graph.ops for v in op.results]
        self.position = {v: i for i, v in enumerate((*graph.inputs, *made))}
        for op in graph.ops:
            if _is_code(op):
                self.cuts[op.result] = self._cuts(op)

    def _cuts(self, op: Op) -> list[Cut]:
        """Sets of at most two values that `op` follows from, none of them inside another."""
        found: list[Cut] = [()]
        for operand in op.operands:
            choices = self._choices(operand)
            joined = {self._ordered({*a, *b}) for a in found for b in choices}
            found = [cut for cut in joined if len(cut) <= 2]
        return sorted((cut for cut in found if cut), key=self._reach)[:MAX_CUTS]

    def _ordered(self, cut: set[Value]) -> Cut:
        return tuple(sorted(cut, key=self.position.__getitem__))

    def _reach(self, cut: Cut) -> tuple[int, ...]:
        """Fewest values first, then the earliest ones."""
        return (len(cut), *(self.position[v] for v in cut))

    def _choices(self, value: Value) -> list[Cut]:
        if self._constant(value) is not None:
            return [()]
        return [*self.cuts.get(value, ()), (value,)]

    def _constant(self, value: Value) -> float | None:
        """The number a splat holds."""
        held = splat(self.producers.get(value))
        return None if held is None else float(held.element)

    def matches(self) -> dict[Value, _Match]:
        """Matches that share no code, later ones first."""
        found: dict[Value, _Match] = {}
        gone: set[Op] = set()
        for op in reversed(self.graph.ops):
            if len(op.results) != 1 or op.result not in self.cuts or op in gone:
                continue
            if op.name not in CASTS and op.result.type.dtype.is_float:
                best = max(self._of(op.result), key=lambda pair: pair[0].saved, default=None)
                if best is not None:
                    found[op.result] = best[0]
                    gone |= best[1]
        return found

    def _of(self, value: Value) -> Iterator[tuple[_Match, set[Op]]]:
        """Matches of one value that save code, each with the ops it makes superfluous."""
        for cut in self.cuts[value]:
            if any(v.type.shape != value.type.shape for v in cut):
                continue
            cone = self._cone(value, cut)
            if not any(op.name in _CURVED for op in cone):
                continue
            free = self._only_for(value, cone)
            saved = sum(op.name not in CASTS for op in free) - len(cut)
            if saved <= 0:
                continue
            match = self._match(value, cut, cone, saved)
            if match is not None:
                yield match, free

    def _cone(self, value: Value, cut: Cut) -> list[Op]:
        """The code between `cut` and `value`, in program order; none where it is more than
        `MAX_CONE_OPS`."""
        cone: set[Op] = set()
        todo = [value]
        while todo:
            if len(cone) > MAX_CONE_OPS:
                return []
            at = todo.pop()
            op = self.producers.get(at)
            if at in cut or op is None or op in cone or self._constant(at) is not None:
                continue
            cone.add(op)
            todo += op.operands
        return sorted(cone, key=lambda op: self.position[op.result])

    def _only_for(self, value: Value, cone: Sequence[Op]) -> set[Op]:
        """The ops of `cone` that nothing but `value` needs."""
        free: set[Op] = set()
        for op in reversed(cone):
            result = op.result
            readers = self.uses.get(result, ())
            if result is value or (
                result not in self.outputs and all(reader in free for reader in readers)
            ):
                free.add(op)
        return free

    def _match(self, value: Value, cut: Cut, cone: Sequence[Op], saved: int) -> _Match | None:
        floats = [op.result.type.dtype for op in cone if op.result.type.dtype.is_float]
        narrowest = min(floats, key=lambda d: d.bytes)
        tolerance = _TOLERANCE.get(narrowest)
        if tolerance is None:
            return None
        first, other = cut[0], cut[1] if len(cut) > 1 else None
        sides = ((first, other), (other, first)) if other else ((first, None),)
        for source, factor in sides:
            name = self._function(cone, source, factor, tolerance)
            if name and self._goes_on(name, cone, source, factor, tolerance):
                return _Match(name, source, factor, saved)
        return None

    def _function(
        self, cone: Sequence[Op], source: Value, factor: Value | None, tolerance: float
    ) -> str:
        """The function of `source` that `cone` is at the sample points, times `factor`, if any."""
        if factor is None:
            return _nearest(self._values(cone, {source: _POINTS}), tolerance)
        at = [
            self._values(cone, {source: _POINTS, factor: np.full_like(_POINTS, g)})
            for g in _GRADIENTS
        ]
        linear = all(
            np.allclose(f, g * at[0], rtol=tolerance, atol=tolerance)
            for f, g in zip(at, _GRADIENTS, strict=True)
        )
        return _nearest(at[0], tolerance) if linear else ""

    def _goes_on(
        self, name: str, cone: Sequence[Op], source: Value, factor: Value | None, tolerance: float
    ) -> bool:
        """Whether `cone` is the function beyond the sample points and each of its constants, too: a
        limit of its source may be as far out as it likes.
        """
        numbers = {self._constant(v) for op in cone for v in op.operands}
        reach = np.array([*_FAR, *(2 * abs(n) + 1 for n in numbers if n and np.isfinite(n))])
        points = np.concatenate((-reach, reach))
        leaves = {source: points} | ({factor: np.ones_like(points)} if factor else {})
        with np.errstate(all="ignore"):
            wanted = ACTIVATIONS[name](points)
        return _distance(self._values(cone, leaves), wanted) <= tolerance

    def _values(self, cone: Sequence[Op], leaves: Mapping[Value, Samples]) -> Samples:
        """What the last op of `cone` is at samples of its leaves, in fp64."""
        known = dict(leaves)
        with np.errstate(all="ignore"):
            for op in cone:
                operands = [self._sample(v, known) for v in op.operands]
                fn = (
                    COMPARE[a.direction]
                    if isinstance(a := op.attrs, CompareAttrs)
                    else _CODE[op.name]
                )
                known[op.result] = fn(*operands)
        return known[cone[-1].result]

    def _sample(self, value: Value, known: Mapping[Value, Samples]) -> Samples:
        if value in known:
            return known[value]
        number = self._constant(value)
        assert number is not None
        return np.array(number)


def _is_code(op: Op) -> bool:
    """Arithmetic on floats, and choices between them."""
    if isinstance(op.attrs, CompareAttrs):
        return op.operands[0].type.dtype.is_float
    floats = op.operands[chooses(op) :]
    return op.name in _CODE and all(v.type.dtype.is_float for v in (*floats, op.result))


def _nearest(values: Samples, tolerance: float) -> str:
    """The function that `values` at the sample points belong to; empty when there is none."""
    best, distance = "", tolerance
    for name, known in _at_points().items():
        found = _distance(values, known)
        if found <= distance:
            best, distance = name, found
    return best


def _distance(values: Samples, known: Samples) -> float:
    """The largest distance of samples beside 1 + their size."""
    return float(np.max(np.abs(values - known) / (1 + np.abs(known))))


@cache
def _at_points() -> Mapping[str, Samples]:
    return {name: fn(_POINTS) for name, fn in ACTIVATIONS.items()}


def _replaced(graph: Graph, found: Mapping[Value, _Match]) -> Graph:
    level = Level()
    for op in graph.ops:
        match = found.get(op.result) if len(op.results) == 1 else None
        if match is None:
            level.ops.append(level.update(op))
        else:
            level.ops += _code(op, match, level)
    return level.finish(graph)


def _code(op: Op, match: _Match, level: Level) -> list[Op]:
    """The ops of a match; the last one defines the result of `op`.

    They compute in the wider of the types of the source and the result.
    """
    wanted, code = op.result.type.dtype, Builder(loc=op.loc)
    source = level.now(match.source)
    wide = max(wanted, source.type.dtype, key=lambda d: d.bytes)
    value = code.op(match.function, code.in_type(source, wide))
    if match.factor is not None:
        value = code.multiply(value, code.in_type(level.now(match.factor), wide))
    code.in_type(value, wanted)
    *before, last = code.ops
    return [*before, defining(last, op.results)]
