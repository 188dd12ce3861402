"""The loops around row tiles: parallel points, panels and vectors they share, groups of row tiles,
sums over all of them.

for parallel: load panels and shared vectors; for group of row tiles: every stage of the plan for
one tile after the other, so that engines work on one tile while another waits; then what follows
from the sums. Next: `way.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from compiler.codegen.builder import Box, Builder, Held, Scope, pieces
from compiler.codegen.rows.panels import Panel, load_panel
from compiler.codegen.rows.plan import RowPlan, plan_rows, sum_depth
from compiler.codegen.rows.sums import Sums
from compiler.codegen.rows.way import Way
from compiler.codegen.search import Candidate, Room
from compiler.codegen.space import SPLATS, Space
from compiler.codegen.values import Frame
from compiler.isa.region import Affine

# A plan with fewer row tiles in flight is tried second, in case its tiles do better (our choice).
_TRIES = 2


def row_candidates(space: Space, sinks: list[int], room: Room) -> list[Candidate]:
    """Ways to tile a row region.

    Raises: CompileError when the values are no row region, CapacityError when nothing fits.
    """

    def emit(plan: RowPlan, builder: Builder) -> None:
        Nest(builder, plan).emit()

    plans = plan_rows(space, sinks, room)[:_TRIES]
    return [Candidate(float(1 + at), partial(emit, plan)) for at, plan in enumerate(plans)]


class Nest:
    """Recursion over the parallel loops of one plan."""

    def __init__(self, builder: Builder, plan: RowPlan) -> None:
        self.builder, self.plan, self.space = builder, plan, plan.space
        self.height = min(builder.limits.partitions, self.space.sizes[plan.roles.row])
        self.panels: dict[int, Panel] = {}
        self.sums = Sums(builder, plan)
        axes = sorted(plan.roles.inner)
        self.shared = Frame(builder, self.space, plan.roles.row, axes)

    def emit(self) -> None:
        """Everything, into the builder's body."""
        roles, sizes = self.plan.roles, self.space.sizes
        boxes = {a: Box(Affine(), sizes[a]) for a in roles.inner}
        boxes |= {a: Box(Affine(), 1) for a in roles.parallel}
        boxes[roles.row] = Box(Affine(), self.height)
        self._level(0, Scope(self.builder, self.builder.body, boxes))

    def _level(self, depth: int, scope: Scope) -> None:
        """Code inside `depth` parallel loops."""
        order = self.plan.order
        self._prepare(depth, scope)
        own = [n for n in self.plan.roles.sums if self._sum_depth(n) == depth]
        for n in own:
            self.sums.begin(n, scope)
        if depth == len(order):
            self._groups(scope)
        else:
            for piece in pieces(self.space.sizes[order[depth]], 1):
                self._level(depth + 1, scope.enter(order[depth], piece))
        if own:
            self.sums.finish(own, scope)

    def _sum_depth(self, number: int) -> int:
        return sum_depth(self.plan.order, self.space.values[number])

    def _depth_of(self, numbers: Iterable[int]) -> int:
        """Parallel loops that choose the points of some values."""
        order = self.plan.order
        atoms = {a for n in numbers for a in self.space.values[n].atoms}
        return max((order.index(a) + 1 for a in atoms if a in order), default=0)

    def _prepare(self, depth: int, scope: Scope) -> None:
        """Panels and vectors that the loops so far choose."""
        for n in self.plan.roles.shared:
            value = self.space.values[n]
            if value.op not in SPLATS and self._depth_of(self.space.slice([n])) == depth:
                self.shared.emit(n, scope)
        loaded: dict[object, Panel] = {}
        for n, (_, panel) in self.plan.roles.panels.items():
            if self._depth_of(self.space.slice([panel])) == depth:
                key = (panel, self.space.values[n].over)
                if key not in loaded:
                    loaded[key] = load_panel(self.plan, n, scope)
                self.panels[n] = loaded[key]

    # rows

    def _groups(self, scope: Scope) -> None:
        """All row tiles, `ways` of them per iteration."""
        row = self.plan.roles.row
        size = self.space.sizes[row]
        step = self.height * min(self.plan.ways, max(1, size // self.height))
        for piece in pieces(size, step):
            inner = scope.enter(row, piece)
            ways = [
                self._way(inner, start, min(self.height, piece.extent - start))
                for start in range(0, piece.extent, self.height)
            ]
            for stage in self.plan.stages:
                for way in ways:
                    way.stage(stage)

    def _way(self, scope: Scope, start: int, rows: int) -> Way:
        row = self.plan.roles.row
        boxes = scope.boxes | {row: Box(scope.boxes[row].origin + start, rows)}
        place = Scope(self.builder, scope.body, boxes, scope.register, scope.trip)
        held: dict[int, Held] = dict(self.shared.held)
        return Way(self.plan, place, self.panels, self.sums, held)
