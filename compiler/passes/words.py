"""64-bit integers that are taken apart into words are pairs of words of 32 bits.

Generators of random numbers multiply words to 64 bits, and pack keys into them, to take both words
out again: shifted right by 32 and converted. The machine computes the low word alone
(`lower/narrow.py`), so that the other one would be zero. Here every value behind such a shift is
made as a pair (`ir/words.py`), where it follows from numbers of up to 32 bits, constants and what
is known to fit. Other 64-bit integers stay: `integers.py` warns where they may lose high bits.
"""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.rewrite import Level, within
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.ir.words import (
    BITS,
    Words,
    has_words,
    is_wide,
    made_of,
    shifts,
    shifts_down,
)
from shardwright.compiler.passes.integers import fits
from shardwright.compiler.passes.ranges import integer_ranges


def in_words(graph: Graph) -> Graph:
    """`graph` with pairs of words where a 64-bit integer is taken apart into them. What that leaves
    unused is left to `dce`."""
    graph = within(graph, in_words)
    if not any(shifts_down(op) and is_wide(op.result) for op in graph.ops):
        return graph
    reached = _Reached(graph)
    return _written(graph, reached) if reached.ends else graph


def _takes_low(op: Op) -> bool:
    """Whether an op asks for no more than the low bits of a 64-bit integer."""
    if not isinstance(op.attrs, ConvertAttrs) or not is_wide(op.operand):
        return False
    return op.attrs.dtype.is_integer and not is_wide(op.result)


class _Reached:
    """Which values of a level become pairs: `ends` are ops that take the low word of one, `values`
    what these follow from. Of `leaves` the machine's 32 bits are the number itself."""

    def __init__(self, graph: Graph) -> None:
        self.ranges = integer_ranges(graph)
        self.leaves: set[Value] = set()
        self.values: set[Value] = set()
        known, apart = set[Value](), set[Value]()
        for op in graph.ops:
            if _takes_low(op) and op.operand in apart:
                self.values.add(op.operand)
            elif len(op.results) == 1 and is_wide(op.result):
                self._note(op, known, apart)
        for op in reversed(graph.ops):
            if not self.values.isdisjoint(op.results) and op.result not in self.leaves:
                self.values.update(made_of(op))
        pairs = self.values - self.leaves
        self.ends = {op for op in graph.ops if _takes_low(op) and op.operand in pairs}

    def shift(self, op: Op) -> int:
        """By how many bits an op shifts all elements; -1 where that is not known."""
        low, high = self.ranges.get(op.operands[-1], (0, 1)) if shifts(op) else (0, 0)
        return low if low == high and 0 <= low < 2 * BITS else -1

    def _note(self, op: Op, known: set[Value], apart: set[Value]) -> None:
        """Whether both words of the result can be made, and whether its low one has bits that were
        high ones."""
        wide = [v for v in op.operands if is_wide(v)]
        if fits(op.result, self.ranges) and self.leaves.issuperset(wide):
            self.leaves.add(op.result)
            known.add(op.result)
        elif has_words(op) and self.shift(op) >= 0 and known.issuperset(own := made_of(op)):
            known.add(op.result)
            if shifts_down(op) or not apart.isdisjoint(own):
                apart.add(op.result)


def _written(graph: Graph, reached: _Reached) -> Graph:
    """The level with its pairs, each behind the value that it was."""
    level, words = Level(), Words()
    for op in graph.ops:
        now = level.update(op)
        words.begin(op.loc)
        if op in reached.ends:
            level.replace(op.results, (_low(words, now),))
        else:
            level.ops.append(now)
        if not reached.values.isdisjoint(op.results):
            is_given = op.result in reached.leaves and (made_of(op) or not has_words(op))
            words.pairs[op.result] = (
                words.extended(op.result) if is_given else words.of(now, reached.shift(op))
            )
        level.ops += words.make.ops
    return level.finish(graph)


def _low(words: Words, op: Op) -> Value:
    """What takes the low word of a pair, in the type that is asked for."""
    found, dtype = words.pairs[op.operand][0], op.result.type.dtype
    return words.bits(found, dtype) if dtype is DType.I32 else words.make.in_type(found, dtype)
