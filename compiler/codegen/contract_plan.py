"""A contraction as tiles: the plan that code is generated from, and what stands around it.

out[batch, m, n] = sum over k of stationary[batch, k, m] * moving[batch, k, n]. Plans are made by
`contract_tiling.py`; what an epilogue or an operand is computed from is refused here when it would
need a loop of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.compiler.codegen.domain import AccessMap, Domain, IterDims, PerDim, Split
from shardwright.compiler.codegen.normalise import contiguous_run
from shardwright.compiler.codegen.planning import Rates
from shardwright.compiler.codegen.row_blocks import RowBlock, row_block
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine

# Rows of a block that is transposed (documented: nki/api/nki/isa/__init__.py, transpose).
TRANSPOSED = 128
_FP32_PASSES = 4  # documented: nki/api/nki/isa/__init__.py, fp32 matmul takes four passes


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a contraction: value number, free iter dims, and whether k is innermost in HBM.

    A `natural` operand is loaded with its free iter dim on the partitions and transposed on the
    tensor engine.
    """

    number: int
    free: IterDims
    natural: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractPlan:
    """How a contraction is tiled.

    Major parts of `row_split` and `depth_split` count tiles of 128; where such an iter dim fits in
    one tile, another m (or k) iter dim counts; -1 when there is none. `outer`, `across` and `along`
    are loops of single points. Neighbouring points of a `group` share the packed tiles of both
    operands and the tile of the result, which makes runs in HBM longer. `beside` counts
    neighbouring rows of the result that lie on one partition, where short rows are one run of HBM:
    `rows` then counts such partitions, and each product takes every so-many-th row of the
    stationary packed tile. Both are at most one iter dim, `beside` in staged plans only.
    """

    domain: Domain
    number: int  # of the contraction
    stationary: Operand
    moving: Operand
    rows: int | None  # the iter dim on the partitions of the result
    row_split: Split  # of m, `rows` its minor part
    depth: int  # the iter dim on the partitions of the operands
    depth_split: Split  # of k, `depth` its minor part
    columns: IterDims  # n iter dims of a packed tile, major to minor
    extents: PerDim  # points at a time of the iter dims `columns`, `group` and `beside`
    outer: IterDims  # batch and other m iter dims
    across: IterDims = ()  # other n iter dims
    along: IterDims = ()  # other k iter dims
    block: int = 1  # row tiles in SBUF at a time
    chunk: int = 1  # k tiles in SBUF at a time
    resident: bool = False  # all of k of the stationary block stays
    staged: bool = False  # products of a row tile and a PSUM bank each are added up in SBUF
    held: bool = False  # the whole moving operand stays over all row blocks
    group: IterDims = ()  # batch iter dims
    packed_type: DType  # of both operands in SBUF
    stationary_slots: int = 1  # tiles of SBUF for the stationary block
    accumulator_slots: int = 2  # tiles of PSUM for products
    transpose_slots: int = 2  # banks of PSUM for transposed operands
    cost: float = 0.0  # nanoseconds
    beside: IterDims = ()
    whole: bool = False  # all of k of all row tiles stays (`whole_operand.py`)
    variant: bool = False  # see `Candidate`
    rates: Rates | None = None  # None: rows are folded already, not put into blocks

    @property
    def shared(self) -> IterDims:
        """Outer loops that choose another moving operand."""
        moves = self.domain[self.moving.number].iter_dims
        return tuple(a for a in self.outer if a in moves)

    @property
    def out_axes(self) -> IterDims:
        """Iter dims along a row of the result, major to minor."""
        return (*self.group, *self.beside, *self.columns)

    @property
    def lines(self) -> Split:
        """How rows of the stationary operand are split: in tiles, or in those of a partition."""
        return self.domain.splits[self.rows or 0] if self.beside else self.row_split

    @property
    def passes(self) -> int:
        """Passes of the tensor engine over its operands."""
        return _FP32_PASSES if self.packed_type is DType.F32 else 1

    @property
    def points(self) -> int:
        """Batch points whose packed tiles are in SBUF together."""
        return math.prod(self.extents[a] for a in self.group)

    @property
    def width(self) -> int:
        """Elements of a row of a tile of the result."""
        return math.prod(self.extents.values())

    @property
    def depth_tiles(self) -> int:
        """Tiles of all of k."""
        return tile_count(self.domain, self.depth_split) * self.domain.points(self.along)

    @property
    def height(self) -> int:
        """Packed stationary columns for one row tile, those of a group counted together."""
        height = self.domain.sizes.get(self.row_split.minor, 1)
        return height * math.prod(self.extents[a] for a in (*self.group, *self.beside))

    @property
    def row_bytes(self) -> int:
        """Bytes per partition of one row tile of the stationary operand with all of k."""
        return self.depth_tiles * self.height * self.packed_type.bytes

    @property
    def has_tail(self) -> bool:
        """Whether rows are left over that no partition is full of."""
        return bool(self.beside and self.lines.tail)

    @property
    def sums(self) -> int:
        """Chunks of k that are added up."""
        made, full = self.depth_split, self.domain.sizes.get(self.depth_split.major, 1)
        chunks = math.ceil(full / self.chunk) + (1 if made.tail else 0)
        return chunks * self.domain.points(self.along)


def natural_rows(
    plan: ContractPlan, operand: Operand, access: AccessMap, extents: PerDim, item: int
) -> tuple[int, RowBlock | None]:
    """(elements of a run when a natural operand is loaded with one row to a partition, the block of
    rows that is faster) in boxes of `extents`; k iter dims included, `item` bytes per element.
    """
    major, depth = plan.depth_split.major, extents[plan.depth]
    chunk = extents.get(major, 1)
    row = row_iter_dim(plan, operand, extents)
    across = [a for a in (plan.depth, major, *operand.free) if a >= 0 and a != row]
    run = contiguous_run(plan.domain, access, [a for a in across if extents[a] > 1], extents)
    if plan.rates is None or row == plan.depth:
        return run, None
    joined = chunk == 1 or access.stride(major) == depth
    points = {a: extents[a] for a in operand.free} | ({} if joined else {major: chunk})
    total = depth * chunk * math.prod(extents[a] for a in operand.free) * item
    plain = plan.rates.transfer_ns(total, run * item, min(extents[row], TRANSPOSED))
    length = depth * chunk if joined else depth
    return run, row_block(access, length, points, item, plan.rates, plain)


def direct_rows(
    plan: ContractPlan, operand: Operand, access: AccessMap, extents: PerDim, item: int
) -> tuple[int, RowBlock | None]:
    """The same for a direct operand: k counts its rows, and the block holds all of a tile of k."""
    free = [a for a in operand.free if access.stride(a)]
    run = contiguous_run(plan.domain, access, free, extents)
    inner = next((a for a in free if access.stride(a) == 1), None)
    if plan.rates is None or inner is None or extents[inner] > TRANSPOSED:
        return run, None
    total = math.prod(extents.values())
    plain = plan.rates.transfer_ns(total * item, run * item, extents[plan.depth])
    points = {a: n for a, n in extents.items() if a != inner}
    transposed = total / extents[inner] + total / extents[plan.depth]
    extra = plan.rates.engine_ns(Engine.TENSOR, transposed * plan.passes)
    block = row_block(access, extents[inner], points, item, plan.rates, plain, extra)
    if block is None or (block.iter_dims[0], block.extents[0]) != (plan.depth, extents[plan.depth]):
        return run, None
    return run, block


def row_iter_dim(plan: ContractPlan, operand: Operand, extents: PerDim) -> int:
    """The free iter dim on the partitions while a natural operand waits for its transpose."""
    row = max(operand.free, key=lambda a: (extents[a], a == operand.free[-1]))
    return plan.row_split.minor if row == plan.row_split.major else row


def even_tile(size: int, limit: int) -> int:
    """Tile size: a divisor of `size` where that makes at most 5/4 as many tiles, else `limit`."""
    if size <= limit:
        return size
    fewest = math.ceil(size / limit)
    for count in range(fewest, fewest * 5 // 4 + 1):
        if size % count == 0:
            return size // count
    return limit


def largest_access(domain: Domain, number: int) -> AccessMap | None:
    """The access map of the largest tensor an operand is made from."""
    loads = [domain[n] for n in domain.slice([number])]
    accesses = [(domain.elements(v), v.map) for v in loads if v.map and v.map.tensor >= 0]
    return max(accesses, key=lambda w: w[0])[1] if accesses else None


def is_natural(domain: Domain, number: int, depth: int, free: Sequence[int]) -> bool:
    """k is innermost in HBM and there are rows to put on the partitions instead."""
    access = largest_access(domain, number)
    return bool(access and free and abs(access.stride(depth)) == 1 and domain.sizes[depth] > 1)


def tile_count(domain: Domain, made: Split) -> int:
    """Tiles of a split iter dim, a partial last one included."""
    return domain.sizes.get(made.major, 1) + (1 if made.tail else 0)


def needed_by_epilogue(domain: Domain, number: int, roots: Iterable[int]) -> list[int]:
    """Values after contraction `number`, and what they need beside it, in order.

    Raises CompileError for values that need a loop of their own.
    """
    inside = domain.slice(roots)
    after = {number}
    for n in inside:
        if after & set(domain[n].inputs):
            after.add(n)
    found = [n for n in domain.slice(after, given=(number,)) if n != number]
    _require_simple(domain, found, "after")
    _require_same_points(domain, number, [n for n in found if n in after])
    return found


def _require_same_points(domain: Domain, number: int, after: Iterable[int]) -> None:
    """An epilogue walks the points of its contraction: a broadcast to more has no place."""
    own = domain[number].iter_dims
    if any(domain[n].iter_dims - own for n in after):
        raise CompileError(
            "SW_CODEGEN_EPILOGUE",
            f"kernel {domain.name} requires values over the indices of its contraction after it,"
            " got a broadcast",
            hint="lower it to a kernel of its own",
        )


def needed_by_operand(domain: Domain, number: int) -> list[int]:
    """What an operand is computed from, in order, the operand last."""
    found = domain.slice([number])
    _require_simple(domain, found, "before")
    return found


def _require_simple(domain: Domain, numbers: Iterable[int], where: str) -> None:
    refused = ("reduce", "contract", "load_indexed", "store_indexed")
    bad = [domain[n].op for n in numbers if domain[n].op in refused]
    if bad:
        raise CompileError(
            "SW_CODEGEN_EPILOGUE",
            f"kernel {domain.name} requires elementwise values {where} its contraction,"
            f" got {bad[0]}",
            hint="lower it to a kernel of its own",
        )
