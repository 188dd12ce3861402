"""Loop fusions: a loop nest over tiles, everything of a row in SBUF, reductions accumulated over
the loops they cross.

Every value runs at the shallowest loop that covers the iter dims it spans. What depends on a sum
over an inner loop runs after that loop; if it spans the loop again, a second pass over the loop
re-makes what it needs. `loop_fusion_plan.py` chooses the partition, extents and loop order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.compiler.codegen import indexed, reductions
from shardwright.compiler.codegen.builder import Builder, Held, Scope, pieces
from shardwright.compiler.codegen.domain import CODELESS, Domain, IterDims, Numbers
from shardwright.compiler.codegen.values import Frame
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.isa.kernel import STORES

Slots = tuple[int, int]
"""Of tiles that a DMA fills or empties, and of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """How a loop fusion is tiled.

    `axes` are the free iter dims, major to minor; `extents` the tile extent of every iter dim;
    `order` the looped iter dims, outermost first; `values` the numbers to compute; `slots` as in
    `Frame`; `cost` an estimate in nanoseconds.
    """

    domain: Domain
    values: Numbers
    partition: int | None
    axes: IterDims
    extents: dict[int, int]
    order: IterDims
    slots: Slots
    cost: float
    variant: bool = False  # see `Candidate`


@dataclass(frozen=True, slots=True)
class Depths:
    """Loops around a value: where its instructions run, and where its result can be read."""

    run: int
    result: int


def depths(domain: Domain, values: Iterable[int], order: Sequence[int]) -> dict[int, Depths]:
    """Depths of values for a loop order; a reduction over loops has its result outside them."""
    at = {a: i for i, a in enumerate(order)}
    found: dict[int, Depths] = {}
    for n in values:
        value = domain[n]
        spanned = value.iter_dims | value.over
        run = max((at[a] + 1 for a in spanned if a in at), default=0)
        run = max((run, *(found[i].result for i in value.inputs)))
        inner = [at[a] for a in value.over if a in at]
        found[n] = Depths(run, min(inner, default=run))
    return found


def emit_loops(plan: LoopPlan, builder: Builder) -> None:
    """Append the code of a loop fusion to the builder's body."""
    _Nest(builder, plan).level(0, builder.scope(plan.extents), list(plan.values))


class _Nest:
    """Recursion over the loops of one plan."""

    def __init__(self, builder: Builder, plan: LoopPlan) -> None:
        self.plan = plan
        self.domain = plan.domain
        self.frame = Frame(builder, plan.domain, plan.partition, plan.axes, plan.slots)
        self.depths = depths(plan.domain, plan.values, plan.order)
        self.partial: dict[int, Held] = {}

    def level(self, depth: int, scope: Scope, todo: list[int]) -> None:
        """Code for `todo`, all of which runs at `depth` or deeper."""
        units = self._units(depth, todo)
        last = self._last_uses(units)
        stored: set[int] = set()
        for at, (numbers, is_pass) in enumerate(units):
            self._refuse_reload(numbers, stored)
            if is_pass:
                self._pass(depth, scope, numbers)
            else:
                self._value(numbers[0], scope)
            for n in last.get(at, ()):
                scope.release(self.frame.held[n])

    def _refuse_reload(self, numbers: list[int], stored: set[int]) -> None:
        """A pass may not read again what an earlier one has overwritten in place."""
        touched = [
            (v.op in STORES, v.map.tensor)
            for v in map(self.domain.values.__getitem__, numbers)
            if v.map
        ]
        root = self.frame.builder.root
        if any(not stores and tensor >= 0 and root(tensor) in stored for stores, tensor in touched):
            raise CompileError(
                "SW_CODEGEN_IN_PLACE",
                f"kernel {self.domain.name} reads a tensor again after storing to its memory",
                hint="store to another buffer",
            )
        stored |= {root(tensor) for stores, tensor in touched if stores}

    def _units(self, depth: int, todo: list[int]) -> list[tuple[list[int], bool]]:
        """Single values of this depth, and passes over the next loop, in an order that works."""
        ready = self._rounds(depth, todo)
        units: list[tuple[list[int], bool]] = []
        for number in range(max(ready.values(), default=-1) + 1):
            here = [
                n
                for n in todo
                if ready[n] == number and self.depths[n].run == depth and self._has_code(n)
            ]
            units += [([n], False) for n in sorted(here, key=self._is_root)]
            ends = [n for n in todo if ready[n] == number and self._ends_pass(n, depth)]
            if ends:
                units.append((self._needed(depth, todo, ends), True))
        return units

    def _rounds(self, depth: int, todo: list[int]) -> dict[int, int]:
        """How many passes over the next loop must be finished before a value can start."""
        ready: dict[int, int] = {}
        for n in todo:
            known = [i for i in self.domain[n].inputs if i in ready]
            ready[n] = max((ready[i] + self._crosses(i, depth) for i in known), default=0)
        return ready

    def _crosses(self, number: int, depth: int) -> bool:
        """A reduction that runs inside the next loop and has its result here or further out."""
        at = self.depths[number]
        return at.result <= depth < at.run

    def _has_code(self, number: int) -> bool:
        return self.domain[number].op not in CODELESS

    def _ends_pass(self, number: int, depth: int) -> bool:
        inside = self.depths[number].run > depth
        return self._crosses(number, depth) or (self._is_root(number) and inside)

    def _is_root(self, number: int) -> bool:
        return self.domain[number].op in STORES

    def _needed(self, depth: int, todo: list[int], ends: list[int]) -> list[int]:
        """`ends` and what they need inside the next loop, earlier passes' rematerialised."""
        wanted = set(ends)
        for n in reversed(todo):
            if n in wanted:
                inputs = self.domain[n].inputs
                wanted.update(
                    i for i in inputs if self.depths[i].run > depth and not self._crosses(i, depth)
                )
        return [n for n in todo if n in wanted]

    def _last_uses(self, units: list[tuple[list[int], bool]]) -> dict[int, list[int]]:
        """Values made by single units here, by the unit that reads them last."""
        own = {numbers[0] for numbers, is_pass in units if not is_pass}
        own |= {n for numbers, is_pass in units if is_pass for n in numbers}
        homes = self.domain.homes(own)
        last: dict[int, int] = {}
        for at, (numbers, _) in enumerate(units):
            inside = set(numbers)
            for n in numbers:
                read = [i for i in self.domain[n].inputs if i not in inside]
                last.update({homes.get(i, i): at for i in read})
        dead: dict[int, list[int]] = {}
        for n, at in last.items():
            if n in own and self._has_code(n):
                dead.setdefault(at, []).append(n)
        return dead

    def _value(self, number: int, scope: Scope) -> None:
        op = self.domain[number].op
        if number in self.partial:
            reductions.accumulate(self.frame, number, self.partial[number], scope, looped=True)
        elif op == "reduce":
            reductions.emit_reduce(self.frame, number, scope)
        elif op == "load_indexed":
            indexed.emit_gather(self.frame, number, scope)
        elif op == "store_indexed":
            indexed.emit_scatter(self.frame, number, scope)
        else:
            self.frame.emit(number, scope)

    def _pass(self, depth: int, scope: Scope, numbers: list[int]) -> None:
        """One run over the next loop; reductions that end here get their accumulators around it."""
        own = [n for n in numbers if self._crosses(n, depth) and self.depths[n].result == depth]
        for n in own:
            self.partial[n] = reductions.new_accumulator(self.frame, n, scope)
        iter_dim = self.plan.order[depth]
        size = scope.sizes.get(iter_dim, self.domain.sizes[iter_dim])
        extent = min(size, self.plan.extents[iter_dim])
        for piece in pieces(size, extent, self.domain.splits.get(iter_dim)):
            self.level(depth + 1, scope.enter(iter_dim, piece), numbers)
        for n in own:
            reductions.finish(self.frame, n, self.partial.pop(n), scope)
