"""Panels of row contractions: the operand that does not span the rows, whole in SBUF.

A panel is the moving operand of a contraction of its own, so `codegen/panels.py` loads it: the
summed atom on the partitions, transposed on the tensor engine where it is innermost in HBM. Next:
`way.py` multiplies by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.codegen.builder import Box, Held, Scope, pieces
from compiler.codegen.contract_plan import ContractPlan, Operand, is_natural
from compiler.codegen.panels import Panels
from compiler.codegen.rows.plan import RowPlan, operand_type
from compiler.codegen.space import Split, split
from compiler.isa.region import Affine


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel in SBUF: [summed atom on the partitions, chunks of it, columns].

    `full` chunks of `height` partitions, then one of `tail`; elements from chunk to chunk and from
    column to column.
    """

    held: Held
    height: int
    full: int
    tail: int
    chunk_step: int
    column_step: int


def load_panel(plan: RowPlan, number: int, scope: Scope) -> Panel:
    """Load the panel of row contraction `number` for the parallel point of `scope`."""
    form = _form(plan, number, scope)
    panels = Panels(scope.builder, form)
    sizes, made = form.space.sizes, form.depth_split
    boxes = {a: Box(Affine(), sizes[a]) for a in (*form.columns, form.depth)}
    whole = panels.whole(scope.straight(boxes))
    if made.major < 0:
        panels.load(form.moving, whole, scope.straight(boxes))
        return _panel(whole, form, 1, 0)
    for piece in pieces(sizes[made.major], sizes[made.major], made):
        inner = scope.straight(boxes).enter(made.major, piece)
        panels.load(form.moving, panels.at(whole, inner), inner)
    return _panel(whole, form, sizes[made.major], made.tail)


def _panel(held: Held, form: ContractPlan, full: int, tail: int) -> Panel:
    column = held.strides[form.columns[0]] if form.columns else 1
    height = form.space.sizes[form.depth]
    return Panel(held, height, full, tail, held.strides.get(form.depth_split.major, 0), column)


def _form(plan: RowPlan, number: int, scope: Scope) -> ContractPlan:
    """The contraction seen from its panel: no rows, everything of the panel held."""
    roles, limits = plan.roles, scope.builder.limits
    tall, panel = roles.panels[number]
    (depth,) = plan.space.values[number].over
    columns = tuple(plan.space.values[panel].atoms & roles.inner - {depth})
    most = min(limits.contraction_max, plan.space.sizes[depth])
    space, made = split(plan.space, depth, most)
    natural = is_natural(plan.space, panel, depth, columns)
    return ContractPlan(
        space=space,
        number=number,
        stationary=Operand(tall, (), False),
        moving=Operand(panel, columns, natural),
        rows=roles.row,
        row_split=Split(-1, roles.row, 0),
        depth=depth,
        depth_split=made,
        columns=columns,
        extents={a: space.sizes[a] for a in columns},
        outer=plan.order,
        across=(),
        along=(),
        block=1,
        chunk=space.sizes.get(made.major, 1),
        resident=False,
        staged=False,
        held=True,
        spanned=(),
        panel_type=operand_type(plan.space, number),
        stationary_slots=1,
        accumulator_slots=2,
        turning_slots=2,
        cost=0.0,
    )
