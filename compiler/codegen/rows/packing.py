"""Packed tiles of row contractions: the operand that does not span the rows, whole in SBUF.

A packed tile is the moving operand of a contraction of its own, so `codegen/packing.py` loads it:
the summed iter dim on the partitions, transposed on the tensor engine where it is innermost in HBM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.compiler.codegen.builder import NO_DIM, Box, Held, Scope, pieces
from shardwright.compiler.codegen.contract_plan import ContractPlan, Operand
from shardwright.compiler.codegen.domain import Domain, IterDims, Split
from shardwright.compiler.codegen.normalise import split
from shardwright.compiler.codegen.packing import Packer
from shardwright.compiler.codegen.rows.plan import RowPlan
from shardwright.compiler.codegen.rows.size import STAGING_BYTES
from shardwright.compiler.isa.kernel import Affine

# Runs of this many bytes reach 0.81 of the DMA rate (hardware.json
# efficiency_by_bytes_per_partition).
_RUN_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed tile in SBUF: [summed iter dim on the partitions, chunks of it, columns].

    `full` chunks of `height` partitions, then one of `tail`; elements from chunk to chunk and from
    column to column.
    """

    held: Held
    height: int
    full: int
    tail: int
    chunk_step: int
    column_step: int


def pack(plan: RowPlan, number: int, side: int, scope: Scope) -> Packed:
    """Load an operand of row contraction `number` for the parallel point of `scope`, and where an
    iter dim is blocked, for the points of its box: side 1 is the one that does not span the rows,
    side 0 the other one over all rows.
    """
    operand = plan.roles.packed[number][side]
    blocked = plan.blocked_dim if plan.is_blocked(operand) else NO_DIM
    if blocked >= 0:
        part = {**plan.domain.sizes, blocked: scope.extent(blocked)}
        plan = replace(plan, domain=replace(plan.domain, sizes=part))
    form = _form(plan, number, operand, scope)
    packer = Packer(scope.builder, form)
    sizes, made = form.domain.sizes, form.depth_split
    boxes = {a: Box(Affine(), sizes[a]) for a in (*form.columns, form.depth)}
    if blocked >= 0:
        boxes[blocked] = Box(scope.boxes[blocked].origin, boxes[blocked].extent)
    slots = 1 if plan.single_buffered and blocked < 0 else 0
    whole = packer.whole(scope.straight(boxes), slots)
    if made.major < 0:
        _fill(plan, packer, whole, scope.straight(boxes))
        return _packed(whole, form, 1, 0)
    for piece in pieces(sizes[made.major], sizes[made.major], made):
        inner = scope.straight(boxes).enter(made.major, piece)
        if blocked in inner.boxes:
            inner.boxes[blocked] = replace(inner.boxes[blocked], origin=scope.boxes[blocked].origin)
        _fill(plan, packer, packer.at(whole, inner), inner)
    return _packed(whole, form, sizes[made.major], made.tail)


def _fill(plan: RowPlan, packer: Packer, whole: Held, scope: Scope) -> None:
    """Load a packed tile: at once, or single-buffered, rows that are transposed a few at a time."""
    form, operand = packer.plan, packer.plan.moving
    if not (plan.single_buffered and operand.natural):
        packer.load(operand, whole, scope)
        return
    runs, *beside = form.columns
    beside_bytes = scope.elements(beside) * form.domain.sizes[form.depth] * form.packed_type.bytes
    blocks = max(1, STAGING_BYTES // beside_bytes)
    size, extent = form.domain.sizes[runs], blocks * scope.builder.limits.transpose_max
    for piece in pieces(size, min(size, extent)):
        first = scope.boxes[runs].origin
        inner = scope.within(runs, piece, True)
        at = inner.boxes[runs].origin + first * -1
        offset = whole.offset + at * whole.strides[runs]
        packer.load(operand, replace(whole, offset=offset), inner)


def _natural_fold(size: int, rows: int, row_bytes: int) -> int:
    """Neighbouring rows of a natural operand on a partition: their order does not matter, as the
    transpose puts them in place, but that many elements apart, so no more than long runs need.
    """
    fits = [f for f in (1, 2, 4, 8, 16) if size % f == 0 and (f == 1 or size // f >= rows)]
    return next((f for f in fits if f * row_bytes >= _RUN_BYTES), fits[-1])


def _fold(domain: Domain, iter_dim: int, fold: int) -> tuple[Domain, int]:
    """(domain, the iter dim that counts groups of `fold` neighbours on a partition; -1: none)."""
    if fold == 1:
        return domain, -1
    domain, made = split(domain, iter_dim, fold)
    return domain, made.major


def _packed(held: Held, form: ContractPlan, chunks: int, tail: int) -> Packed:
    """`chunks` counts whole runs of the split; folded ones hold several chunks each."""
    height, columns = form.domain.sizes[form.depth], form.columns
    step = held.strides[columns[-1]] if columns else 1
    beside = form.domain[form.number].over & set(columns)
    folded = next(iter(beside), None)
    if folded is None:
        chunk_step = held.strides.get(form.depth_split.major, 0)
        return Packed(held, height, chunks, tail, chunk_step, step)
    fold = form.domain.sizes[folded]
    return Packed(held, height, chunks * fold, 0, held.strides[folded], step)


def _form(plan: RowPlan, number: int, operand: int, scope: Scope) -> ContractPlan:
    """The contraction seen from one operand, all of which is held."""
    roles, limits = plan.roles, scope.builder.limits
    (depth,) = plan.domain[number].over
    free, natural = plan.packed_iter_dims(number, operand), plan.is_natural(number, operand)
    if natural:
        folded, sizes = free[0], plan.domain.sizes
        row_bytes = sizes[depth] * plan.domain[operand].dtype.bytes
        fold = _natural_fold(sizes[folded], limits.transpose_max, row_bytes)
    else:
        folded, fold = depth, plan.fold.get(depth, 1)
    domain, runs = _fold(plan.domain, folded, fold)
    if runs >= 0 and natural:
        columns: IterDims = (runs, folded)
    elif runs >= 0:
        depth, columns = runs, (depth, *free)
    else:
        columns = free
    domain, made = split(domain, depth, min(limits.contraction_max, domain.sizes[depth]))
    return ContractPlan(
        domain=domain,
        number=number,
        stationary=Operand(operand, (), False),
        moving=Operand(operand, columns, natural),
        rows=roles.row,
        row_split=Split(-1, roles.row, 0),
        depth=depth,
        depth_split=made,
        columns=columns,
        extents={a: domain.sizes[a] for a in columns},
        outer=plan.order,
        chunk=domain.sizes.get(made.major, 1),
        held=True,
        packed_type=plan.operand_type(number),
    )
