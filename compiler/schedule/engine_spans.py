"""Which part of a tile the elements of a body touch: accesses to different parts need no order.

A span is an interval of elements of a slot that moves with registers; a loop sweeps the span of its
body. Loops whose iterations step over their own reach touch a window of the tile each.
`engine_order.py` leaves out the orders that spans show to be needless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwright.compiler.isa.program import AccessPattern, Instr, Loop, Space
from shardwright.compiler.schedule.reach import reach


class Span(NamedTuple):
    """Elements low..high of a slot, moved by `terms` (register, elements per step)."""

    terms: tuple[tuple[int, int], ...]
    low: int
    high: int


Parts = Mapping[int, Span | None]  # per tile; None when no one span covers the accesses


class Spans:
    """Spans of the elements of a kernel, each found once: the body an element is in asks for them,
    and every body around."""

    def __init__(self) -> None:
        self._bodies: dict[int, Parts] = {}  # by loop register
        self._elements: dict[int, tuple[Instr | Loop, Parts]] = {}  # by identity, held alive

    def of(self, item: Instr | Loop) -> Parts:
        """Per tile the part that an element of a body touches."""
        if id(item) not in self._elements:
            self._elements[id(item)] = (item, self._touched(item))
        return self._elements[id(item)][1]

    def _touched(self, item: Instr | Loop) -> Parts:
        if isinstance(item, Loop):
            return {tile: _swept(span, item) for tile, span in self._body(item).items()}
        found: dict[int, Span | None] = {}
        for pattern in (*item.srcs, *item.dsts):
            if pattern.space is not Space.HBM:
                _widen(found, pattern.buffer, _span(pattern))
        return found

    def are_apart(self, tile: int, loop: Loop) -> bool:
        """Whether every iteration of `loop` touches a part of `tile` of its own."""
        span = self._body(loop).get(tile)
        return span is not None and span.high - span.low < dict(span.terms).get(loop.register, 0)

    def _body(self, loop: Loop) -> Parts:
        """Per tile the part that one iteration touches."""
        if loop.register not in self._bodies:
            found: dict[int, Span | None] = {}
            for item in loop.body:
                for tile, span in self.of(item).items():
                    _widen(found, tile, span)
            self._bodies[loop.register] = found
        return self._bodies[loop.register]


def fixed(span: Span | None, register: int) -> Span | None:
    """`span` where it stays in place while the loop runs that counts `register`."""
    return None if span is None or any(r == register for r, _ in span.terms) else span


def apart(one: Span | None, other: Span | None) -> bool:
    """Whether two spans that stay in place (`fixed`) never meet, in whatever iterations."""
    if one is None or other is None or one.terms != other.terms:
        return False
    return one.high < other.low or other.high < one.low


def _span(pattern: AccessPattern) -> Span:
    return Span(pattern.offset.terms, *reach(pattern.offset.const, pattern.dims[1:]))


def _swept(span: Span | None, loop: Loop) -> Span | None:
    """What all iterations of `loop` touch together."""
    if span is None:
        return None
    reach = dict(span.terms).get(loop.register, 0) * (loop.trip - 1)
    terms = tuple((r, c) for r, c in span.terms if r != loop.register)
    return Span(terms, span.low + min(0, reach), span.high + max(0, reach))


def _widen(found: dict[int, Span | None], tile: int, more: Span | None) -> None:
    known = found.get(tile, more)
    if known is None or more is None or known.terms != more.terms:
        found[tile] = None
    else:
        found[tile] = Span(more.terms, min(known.low, more.low), max(known.high, more.high))
