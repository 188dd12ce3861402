"""How much of attention a causal mask hides: FLOPs of scores that no result depends on.

The usual count of a model's FLOPs takes attention in full, and so do published figures. Beside it
a report says what is left without the scores that a comparison of positions hides. Attention is
found by its structure (`compiler/attention`), a mask as a choice between scores and a number far
below them. What is no comparison of two positions (lengths, documents, windows) counts in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.attention import Instance, find_attention
from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.facts import chooses, counted_dim, splat
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import CompareAttrs
from shardwright.compiler.ir.traits import CASTS, CONTRACTIONS, IDENTITIES, LITERALS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.walks import answered

FAR_BELOW = -1e4  # our choice: of no score; its exponential is 0 in every type
_SPREADING = CASTS | IDENTITIES | VIEWS


@dataclass(frozen=True, slots=True)
class Attention:
    """FLOPs of the products of attention, and those of them that masks hide."""

    whole: int
    hidden: int


def attention_flops(graph: Graph, passes: Callable[[Op], int] = lambda _: 1) -> Attention:
    """Of the forward instances of a graph, bodies of loops once per iteration, each product as
    often as `passes` says."""
    level = _Levels(graph)
    whole = hidden = 0.0
    for one in find_attention(graph):
        if one.kind == "forward":
            made = {level.producers[v] for v in one.scores if v in level.producers}
            products = {op for op in made if op.name in CONTRACTIONS} | {one.op}
            own = level.times[one.level] * sum(
                passes(op) * OPS[op.name].flops(op) for op in products
            )
            whole += own
            hidden += own * level.hidden(one)
    return Attention(round(whole), round(hidden))


def levels(graph: Graph, times: int = 1) -> Iterator[tuple[Graph, int]]:
    """A graph and the bodies of its loops, each with how often it runs."""
    yield graph, times
    for op in graph.ops:
        for region in op.regions:
            yield from levels(region, times * op.attrs.trip)


@dataclass(frozen=True, slots=True)
class _Along:
    """A value that changes along one dim alone, by its elements there; `dim` -1: along none."""

    dim: int
    elements: np.ndarray


class _Levels:
    """A graph with its loop bodies: who makes a value, and how often a level runs."""

    def __init__(self, graph: Graph) -> None:
        self.producers: dict[Value, Op] = {}
        self.times: dict[Graph, int] = {}
        self.outer: dict[Value, Value] = {}  # what a loop hands to every iteration
        self._known: dict[Value, _Along | None] = {}
        for level, times in levels(graph):
            self.times[level] = times
            self.producers |= level.producers()
            for op in level.ops:
                if op.regions:
                    inside = op.regions[0].inputs
                    self.outer |= {inside[n]: op.operands[n] for n in invariant_carries(op)}

    def hidden(self, one: Instance) -> float:
        """The share of the scores of an instance that its masks hide; masks repeat each other."""
        return max((share for v in one.scores for share in self._masks(v)), default=0.0)

    def _masks(self, score: Value) -> Iterator[float]:
        """What a choice hides that makes `score`, or that is added to make it."""
        op = self.producers.get(score)
        if op is None:
            return
        choices = [op] if chooses(op) else []
        if op.name == "add":
            choices = [one for v in op.operands if (one := self._made(v)) and chooses(one)]
        for choice in choices:
            predicate, on_true, on_false = choice.operands
            share = self._share(self._made(predicate))
            if share is not None:
                yield 1 - share if self._is_far_below(on_false) else 0.0
                yield share if self._is_far_below(on_true) else 0.0

    def _made(self, value: Value) -> Op | None:
        """What made a value, behind what only spreads it out; None for an argument."""
        while True:
            value = self.outer.get(value, value)
            op = self.producers.get(value)
            if op is None or op.name not in _SPREADING:
                return op
            value = op.operands[op.results.index(value)]  # of a barrier the one in its place

    def _is_far_below(self, value: Value) -> bool:
        op = self._made(value)
        number = _number(op) if op else None
        return number is not None and float(number[0]) <= FAR_BELOW

    def _share(self, op: Op | None) -> float | None:
        """The share of pairs of positions for which a comparison holds; None for anything else."""
        if op is None or not isinstance(op.attrs, CompareAttrs):
            return None
        left, right = (self._along(v) for v in op.operands)
        if left is None or right is None or -1 in (left.dim, right.dim) or left.dim == right.dim:
            return None
        ordered, asked = np.sort(right.elements), left.elements
        below = np.searchsorted(ordered, asked, "left").sum()
        up_to = np.searchsorted(ordered, asked, "right").sum()
        pairs = ordered.size * asked.size
        holds = {"GT": below, "GE": up_to, "LT": pairs - up_to, "LE": pairs - below}
        found = holds.get(op.attrs.direction)
        return None if found is None else float(found / pairs)

    def _along(self, value: Value) -> _Along | None:
        """A value as counts and constants make it along one of its dims."""
        return answered(value, self._known, self._needs, self._found)

    def _needs(self, value: Value) -> Sequence[Value]:
        if value in self.outer:
            return (self.outer[value],)
        op = self.producers.get(value)
        if op is None or not (op.name in _MOVED or OPS[op.name].elementwise):
            return ()
        return op.operands

    def _found(self, value: Value) -> _Along | None:
        if value in self.outer:
            return self._known[self.outer[value]]
        op = self.producers.get(value)
        if op is None:
            return None
        if (dim := counted_dim(op)) is not None:
            return _Along(dim, np.arange(value.type.shape[dim], dtype=np.int64))
        if op.name in LITERALS:
            number = _number(op)
            return None if number is None else _Along(-1, number)
        if op.name in _MOVED:
            inner = self._known[op.operands[0]]
            return inner and _MOVED[op.name](inner, op)
        return self._combined(op) if OPS[op.name].elementwise else None

    def _combined(self, op: Op) -> _Along | None:
        """An elementwise operator of such values, where all that change do so along one dim."""
        parts = [self._known[v] for v in op.operands]
        known = [part for part in parts if part is not None]
        dims = {part.dim for part in known} - {-1}
        if len(known) < len(parts) or len(dims) > 1:
            return None
        elements = OPS[op.name].reference(op, [part.elements for part in known])[0]
        return _Along(dims.pop() if dims else -1, elements)


def _number(op: Op) -> np.ndarray | None:
    """The one element that a constant stores for all, else None."""
    held = splat(op)
    return None if held is None else np.frombuffer(held.data, held.type.dtype.numpy)


def _spread(inner: _Along, op: Op) -> _Along:
    return _Along(op.attrs.dims[inner.dim] if inner.dim >= 0 else -1, inner.elements)


def _reshaped(inner: _Along, op: Op) -> _Along | None:
    """Behind a reshape that only adds or removes dims of one element."""
    if inner.dim < 0:
        return inner
    before, after = op.operands[0].type.shape, op.result.type.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1] or inner.elements.size < 2:
        return None
    place = sum(n != 1 for n in before[: inner.dim])
    return _Along([n for n, size in enumerate(after) if size != 1][place], inner.elements)


_MOVED = {"broadcast_in_dim": _spread, "reshape": _reshaped}
