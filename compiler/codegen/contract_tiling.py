"""Choosing the tiles of a contraction: who is stationary, what goes where, how much stays in SBUF.

The m iter dims land on the partitions of the result and n along its rows, so exchanging the
operands stores the transposed result at no cost; both ways are planned and the cheaper estimate
wins. A block of m tiles stays in SBUF while packed tiles of the moving operand pass by, or the
whole moving operand stays. Sums are kept in PSUM over all of k, or `staged`: one bank per product,
added up in SBUF.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from shardwright.compiler.codegen.contract_plan import (
    ContractPlan,
    Operand,
    direct_rows,
    even_tile,
    is_natural,
    largest_access,
    natural_rows,
    needed_by_epilogue,
)
from shardwright.compiler.codegen.domain import (
    CODELESS,
    AccessMap,
    Domain,
    IterDims,
    Numbers,
    Split,
)
from shardwright.compiler.codegen.normalise import contiguous_run, near_divisor, split
from shardwright.compiler.codegen.planning import MIN_CYCLES, Room
from shardwright.compiler.codegen.transposed_blocks import is_plain, transposed_block
from shardwright.compiler.codegen.whole_operand import (
    can_be_whole,
    fetch_ns,
    is_load,
    is_short,
    packed_bytes,
    whole_elements,
)
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.isa.program import Engine

# Bytes per partition of one chunk of a moving packed tile: above this a transfer only starts later.
_CHUNKS = (2, 4, 8, 16)  # k tiles of a chunk that a thorough search tries as well
_CHUNK_BYTES = 16384
# k is contiguous in a natural operand: rows of this many bytes reach 0.97 of the DMA rate (see
# below).
_NATURAL_RUN_BYTES = 4096
# Runs of this many bytes reach 0.81 of the DMA rate (hardware.json
# efficiency_by_bytes_per_partition).
_RUN_BYTES = 2048
_RESIDENT_SHARE = (
    0.6  # of the budget: the stationary block; packed tiles and epilogue have the rest (our choice)
)
_MAX_COLUMN_AXES = 3
# With this many k tiles the pause to evict all accumulators at once is short beside the work on
# them.
_LONG_K = 8
_BLOCKS = (1, 2, 4, 8, 16, 32)  # row tiles that share a packed tile in staged plans
_EPILOGUE_SLOTS = 2  # of the tiles of a row tile behind its product
_FEWEST_ROWS = 32  # partitions of a result with several rows on each (our choice)
_LONGEST_BYTES = 8192  # of their run: what is longer moves no faster (our choice)
_STAGED_SLOTS = 4  # banks in flight between the tensor engine and the collecting copy
_TRANSPOSE_BANKS = 4  # of PSUM for transposed operands on their way to SBUF
_OVERLAP = 0.1  # part of the shorter work that shows beside the longest (inferred)


def plan_contraction(
    domain: Domain, number: int, roots: Iterable[int], room: Room
) -> list[ContractPlan]:
    """Tilings of contraction `number` in both orientations."""
    _require_floats(domain, number)
    return [
        plan
        for order in ((0, 1), (1, 0))
        for plan in _Planner(domain, number, tuple(roots), order, room).plans()
    ]


def _require_floats(domain: Domain, number: int) -> None:
    types = [domain[i].dtype for i in domain[number].inputs]
    if not all(t.is_float for t in types):
        raise CompileError(
            "SW_CODEGEN_CONTRACT_TYPE",
            f"kernel {domain.name}: the tensor engine requires float operands, got"
            f" {', '.join(t.value for t in types)}",
            hint="convert the operands to bf16 or f32",
        )


class _Planner:
    """One orientation of one contraction."""

    def __init__(
        self, domain: Domain, number: int, roots: Numbers, order: tuple[int, int], room: Room
    ) -> None:
        self.domain, self.number, self.roots = domain, number, roots
        self.room, self.limits, self.budget = room, room.limits, room.budget
        contract = domain[number]
        self.sides = tuple(contract.inputs[i] for i in order)
        iter_dims = [domain[n].iter_dims for n in self.sides]
        self.over = contract.over
        self.batch = (iter_dims[0] & iter_dims[1]) - self.over
        self.m = iter_dims[0] - self.over - self.batch
        self.n = iter_dims[1] - self.over - self.batch
        types = {domain[n].dtype for n in self.sides}
        self.packed_type = DType.F32 if DType.F32 in types else domain[self.sides[0]].dtype
        after = [domain[n] for n in (number, *needed_by_epilogue(domain, number, self.roots))]
        tiles = [v.dtype.bytes for v in after if v.op not in (*STORES, *CODELESS)]
        self.epilogue_bytes = _EPILOGUE_SLOTS * sum(tiles)  # per column
        self.accesses = [largest_access(domain, n) for n in self.sides]
        largest = max(roots, key=lambda n: domain.elements(domain[n]))
        self.out = domain[largest].map
        whole = domain.elements(domain[largest])
        self.stores = tuple(
            (access, is_plain(domain, n))
            for n in roots
            if (access := domain[n].map) and domain.elements(domain[n]) == whole
        )

    def _best(self, iter_dims: Iterable[int], accesses: Sequence[AccessMap | None]) -> int:
        """The iter dim that fills most partitions, then innermost in memory, then the largest."""
        size = self.domain.sizes

        def merit(a: int) -> tuple[int, int, int, int]:
            inner = sum(1 for w in accesses if w and w.stride(a) == 1)
            return (min(size[a], self.limits.partitions), inner, size[a], -a)

        return max(iter_dims, key=merit)

    def plans(self) -> Iterator[ContractPlan]:
        """Plans with the stationary block resident and streamed, moving tiles wide and narrow."""
        self.depth = self._best(self.over, self.accesses)
        rows = self._best(self.m, self.accesses[:1]) if self.m else None
        domain, row_split = self._split(self.domain, rows, self.limits.stationary_max, self.m)
        majors = [row_split.major] if row_split.major >= 0 else []
        rest = (*majors, *([rows] if rows is not None else []))
        yield from self._formed(domain, row_split, rows, rest)
        for each in self._beside(rows):
            assert rows is not None
            domain, made = split(self.domain, rows, each)
            single = Split(-1, made.major, 0)
            yield from self._formed(domain, single, made.major, (made.major, rows), (rows,))

    def _beside(self, rows: int | None) -> Iterator[int]:
        """Numbers of neighbouring, short rows of the result that may lie on one partition."""
        out, size = self.out, self.domain.sizes
        if rows is None or out is None:
            return
        inner = [a for a in self.n if out.stride(a)]
        row = contiguous_run(self.domain, out, inner, size)
        length = row * self.room.tensors[out.tensor].dtype.bytes
        if out.stride(rows) != row or row == 1 or length >= _RUN_BYTES:
            return
        fewest = max(2, math.ceil(size[rows] / self.limits.stationary_max))
        for each in (fewest, 2 * fewest):
            if size[rows] // each >= _FEWEST_ROWS and each * length <= _LONGEST_BYTES:
                yield each

    def _formed(
        self,
        domain: Domain,
        row_split: Split,
        rows: int | None,
        rest: IterDims,
        beside: IterDims = (),
    ) -> Iterator[ContractPlan]:
        """Plans of one way to split the rows: `rest` are free iter dims of the stationary side."""
        depth = self.depth
        domain, depth_split = self._split(domain, depth, self.limits.contraction_max, self.over)
        self.placed = [largest_access(domain, n) for n in self.sides]
        narrow = self.limits.moving_max
        wide = max(narrow, math.ceil(_RUN_BYTES / self.packed_type.bytes))
        for group in self._groups(domain, {*rest, depth}):
            stationary = self._operand(0, (*group, *rest))
            for limit in sorted({narrow, wide, 2 * wide, 4 * wide}):
                points = 1 if beside else math.prod(group.values())
                columns, extents = self._columns(limit // points)
                moving = self._operand(1, (*group, *columns))
                extents |= group | {a: domain.sizes[a] for a in beside}
                plan = ContractPlan(
                    domain=domain,
                    number=self.number,
                    stationary=stationary,
                    moving=moving,
                    rows=rows,
                    row_split=row_split,
                    depth=depth,
                    depth_split=depth_split,
                    columns=columns,
                    extents=extents,
                    outer=self._loops((self.batch | self.m) - {rows, row_split.major, *beside}),
                    across=self._loops(self.n - set(columns)),
                    along=self._loops(self.over - {depth, depth_split.major}),
                    group=(*group,),
                    beside=beside,
                    packed_type=self.packed_type,
                    rates=self.room.rates,
                )
                for resident, held in product((True, False), repeat=2):
                    for tiled in self._blockings(replace(plan, resident=resident, held=held)):
                        yield replace(tiled, cost=self._nanoseconds(tiled))

    def _groups(self, domain: Domain, taken: Collection[int]) -> Iterator[dict[int, int]]:
        """Batch iter dims whose neighbouring points share packed tiles, with how many do: none, and
        those that continue the runs of an operand or of the result while these are short.
        """
        yield {}
        found: dict[tuple[int, int], None] = {}
        own = [a for a in domain.sizes if a not in self.batch]
        for access in filter(None, (*self.placed, self.out)):
            item = self.room.tensors[access.tensor].dtype.bytes
            run = contiguous_run(domain, access, [a for a in own if access.stride(a)], domain.sizes)
            row = min([domain.sizes[a] for a in own if access.stride(a) == 1], default=run)
            wanted: tuple[int, ...] = (_RUN_BYTES, _NATURAL_RUN_BYTES)
            if row * item < _RUN_BYTES <= run * item:
                wanted = (_RUN_BYTES * self.limits.partitions,)  # for a block of short rows
            for iter_dim in sorted(a for a in self.batch - set(taken) if access.stride(a) == run):
                size = domain.sizes[iter_dim]
                counts = [min(size, math.ceil(most / (run * item))) for most in wanted]
                found |= {(iter_dim, near_divisor(size, n)): None for n in counts if n > 1}
        for iter_dim, points in found:
            yield {iter_dim: points}

    def _operand(self, side: int, free: IterDims) -> Operand:
        number = self.sides[side]
        return Operand(number, free, is_natural(self.domain, number, self.depth, free))

    def _blockings(self, plan: ContractPlan) -> Iterator[ContractPlan]:
        """`plan` with blocks, chunks and slots, which keeps the same operands in SBUF."""
        found = [] if plan.group or plan.beside else [self._tiles(plan)]
        rows = plan.domain.sizes.get(plan.row_split.major, 1)
        if not plan.has_tail:
            blocks = sorted({near_divisor(rows, b) for b in _BLOCKS if b <= rows})
            found += [self._staged(plan, block) for block in blocks]
        found.append(self._whole(plan) if plan.resident else None)
        for tiled in filter(None, found):
            yield tiled
            yield from self._variants(tiled)

    def _variants(self, plan: ContractPlan) -> Iterator[ContractPlan]:
        """Other chunks of k, which decide how well engines overlap, for a thorough search."""
        most = min(plan.domain.sizes.get(plan.depth_split.major, 1), 2 * plan.chunk)
        for chunk in _CHUNKS if self.room.thorough else ():
            if chunk <= most and chunk != plan.chunk:
                yield replace(plan, chunk=chunk, variant=True)

    def _loops(self, iter_dims: Iterable[int]) -> IterDims:
        """Iter dims that become loops of single points, major first in the result."""
        out = self.out
        return tuple(sorted(iter_dims, key=lambda a: (-abs(out.stride(a)) if out else 0, a)))

    def _split(
        self, domain: Domain, iter_dim: int | None, limit: int, iter_dims: Iterable[int]
    ) -> tuple[Domain, Split]:
        """`iter_dim` in tiles up to `limit`, or another of `iter_dims` that counts tiles."""
        if iter_dim is None:
            return domain, Split(-1, -1, 0)
        domain, made = split(domain, iter_dim, even_tile(domain.sizes[iter_dim], limit))
        others = {*iter_dims} - {iter_dim}
        if made.major >= 0 or not others:
            return domain, made

        def merit(a: int) -> tuple[bool, int, int]:
            longer = any(w and w.stride(a) == domain.sizes[iter_dim] for w in self.accesses)
            return longer, domain.sizes[a], -a

        return domain, replace(made, major=max(others, key=merit))

    def _columns(self, limit: int) -> tuple[IterDims, dict[int, int]]:
        """Iter dims of a packed tile (major to minor) and extents, up to `limit` columns."""
        width = 1
        extents: dict[int, int] = {}
        for iter_dim in sorted(
            self.n, key=lambda a: (abs(self.out.stride(a)) if self.out else 0, a)
        ):
            room = limit // width
            if room < 2 or len(extents) == _MAX_COLUMN_AXES:
                break
            extents[iter_dim] = even_tile(self.domain.sizes[iter_dim], room)
            width *= extents[iter_dim]
            if extents[iter_dim] < self.domain.sizes[iter_dim]:
                break
        return tuple(reversed(extents)), extents

    # blocking

    def _tiles(self, plan: ContractPlan) -> ContractPlan | None:
        """Blocks, chunks and slots that fit PSUM and the budget; None when the form does not."""
        transposes = plan.moving.natural + plan.stationary.natural
        slots = 1 if plan.depth_tiles >= _LONG_K else 2
        banks = (self.limits.psum_banks - _TRANSPOSE_BANKS * bool(transposes)) // slots
        rows = plan.domain.sizes.get(plan.row_split.major, 1)
        block = min(rows, banks // math.ceil(plan.width / self.limits.moving_max))
        if plan.resident:
            block = min(block, int(_RESIDENT_SHARE * self.budget) // plan.row_bytes)
        if block < 1:
            return None
        plan = replace(plan, block=near_divisor(rows, block), accumulator_slots=slots)
        return self._blocking(plan, 0)

    def _staged(self, plan: ContractPlan, block: int) -> ContractPlan | None:
        """The same for products that are collected in SBUF."""
        sums = 4 * plan.width * block if plan.depth_tiles > 1 else 0
        whole = plan.row_bytes * block if plan.resident else 0
        if sums + whole > _RESIDENT_SHARE * self.budget:
            return None
        staged = replace(plan, block=block, staged=True, accumulator_slots=_STAGED_SLOTS)
        return self._blocking(staged, sums)

    def _whole(self, plan: ContractPlan) -> ContractPlan | None:
        """The same with all row tiles of the stationary operand fetched whole, where it can be."""
        made = (plan.lines, plan.depth_split)
        if plan.row_split.minor < 0 or plan.along:
            return None
        number, natural = plan.stationary.number, plan.stationary.natural
        if plan.beside:
            short = is_load(plan.domain, number) and is_short(plan.domain, plan.depth_split)
            if not (plan.has_tail and natural and short):
                return None
        elif not can_be_whole(plan.domain, number, made):
            return None
        size = packed_bytes(plan.domain, made, plan.points, self.packed_type.bytes)
        if not natural:  # it may be transposed twice
            size += packed_bytes(plan.domain, made[::-1], plan.points, self.packed_type.bytes)
        sums = 4 * plan.width if plan.depth_tiles > 1 else 0
        if sums + size > _RESIDENT_SHARE * self.budget:
            return None
        whole = replace(plan, staged=True, accumulator_slots=_STAGED_SLOTS, whole=True)
        tiled = self._blocking(whole, sums + size)
        fits = 2 * size + sums <= _RESIDENT_SHARE * self.budget
        return tiled and replace(tiled, stationary_slots=2 if fits else 1)

    def _blocking(self, plan: ContractPlan, sums: int) -> ContractPlan | None:
        """The chunk of k for what the budget leaves beside the kept operands and `sums`."""
        item, width = self.packed_type.bytes, plan.width
        whole = plan.row_bytes * plan.block if plan.resident else 0
        slots = 2 if 2 * whole <= _RESIDENT_SHARE * self.budget else 1
        columns = self.domain.points(self.n) * plan.points
        held = plan.depth_tiles * columns * item if plan.held else 0
        left = self.budget - whole * slots - held - sums - self.epilogue_bytes * width
        if left <= 0 and (plan.held or plan.staged):
            return None
        per_tile = (0 if plan.held else width * item) + self._row_bytes(plan)
        per_tile += 0 if plan.resident else plan.block * plan.height * item
        most = max(1, min(max(0, left) // (2 * max(1, per_tile)), self._enough(plan)))
        majors = plan.domain.sizes.get(plan.depth_split.major, 1)
        both = plan.moving.natural and plan.stationary.natural
        return replace(
            plan,
            chunk=near_divisor(majors, min(most, majors)),
            stationary_slots=slots,
            transpose_slots=2 if sums or not both else 1,
        )

    def _row_bytes(self, plan: ContractPlan) -> int:
        """Bytes per k tile of rows that wait for their transposes."""
        largest = max((plan.extents[a] for a in plan.columns), default=1)
        rows = plan.width // largest * math.ceil(largest / self.limits.transpose_max)
        stationary = plan.block * plan.points * plan.stationary.natural
        waiting = rows * plan.moving.natural + stationary
        return waiting * plan.domain.sizes[plan.depth] * self.packed_type.bytes

    def _enough(self, plan: ContractPlan) -> int:
        """k tiles for long runs of a natural operand, and for large transfers of a direct one."""
        item = self.packed_type.bytes
        enough = _CHUNK_BYTES // (plan.width * item)
        if plan.moving.natural or plan.stationary.natural:
            row = plan.domain.sizes[plan.depth] * item
            enough = max(enough, math.ceil(_NATURAL_RUN_BYTES / row))
        return enough

    # cost

    def _nanoseconds(self, plan: ContractPlan) -> float:
        """Estimated time of a plan: the tensor engine, DMA and the copies out of PSUM overlap; the
        longest of them shows, and a part of the others.
        """
        size, tensors, rates = plan.domain.sizes, self.room.tensors, self.room.rates
        blocks = math.ceil(size.get(plan.row_split.major, 1) / plan.block)
        groups = {a: math.ceil(size[a] / plan.extents.get(a, 1)) for a in plan.outer}
        row_blocks = blocks * math.prod(groups.values())
        rounds = plan.domain.points(plan.across)
        rounds *= math.prod(math.ceil(size[a] / plan.extents[a]) for a in plan.columns)
        depth_tiles = plan.depth_tiles
        width = math.prod(plan.extents[a] for a in plan.columns)
        height = 1 if plan.rows is None else size[plan.rows]
        rows = plan.block * height
        once = math.prod(groups[a] for a in plan.shared)
        points, beside = plan.points, math.prod(plan.extents[a] for a in plan.beside)
        turns = beside + (plan.lines.tail if plan.beside else 0)
        passes = row_blocks * (1 if plan.resident else rounds)
        loads = (
            (plan.stationary, self.placed[0], passes, rows * points * beside),
            (
                plan.moving,
                self.placed[1],
                (once if plan.held else row_blocks) * rounds,
                width * points,
            ),
        )
        transposed = moved = 0.0
        for operand, access, runs, free in loads:
            if plan.whole and operand is plan.stationary and access is not None:
                fetched = math.prod(groups.values())
                taken, columns = fetch_ns(plan, access, tensors[access.tensor].dtype.bytes)
                moved += fetched * taken
                transposed += fetched * columns * whole_elements(plan)
                continue
            elements = runs * depth_tiles * size[plan.depth] * free
            if access is None:
                transposed += elements / size[plan.depth] * operand.natural
                continue
            item = tensors[access.tensor].dtype.bytes
            run, partitions, columns = _loaded(plan, operand, access, item)
            transposed += elements * columns
            moved += rates.transfer_ns(elements * item, run, partitions)
        total = row_blocks * rows * rounds * width * points * beside
        for out, plain in self.stores:
            taken, columns = self._stored_ns(plan, out, plain, total)
            moved, transposed = moved + taken, transposed + columns
        issued = row_blocks * plan.block * rounds * points * turns * max(width, MIN_CYCLES)
        evicted = row_blocks * plan.block * rounds * max(width * points * turns, MIN_CYCLES)
        products = rates.engine_ns(Engine.TENSOR, (issued * depth_tiles + transposed) * plan.passes)
        # The queue of the tensor engine waits for copies of what it transposes: half on each.
        products += rates.engine_ns(Engine.VECTOR, transposed / plan.transpose_slots)
        if plan.accumulator_slots == 1:  # and for accumulators that are all in use
            products += rates.engine_ns(Engine.VECTOR, evicted)
        copies = evicted * (plan.sums if plan.staged else 1) + transposed / 2
        copied = rates.engine_ns(Engine.VECTOR, copies)
        shown = (products, moved, copied)
        return max(shown) + _OVERLAP * (sum(shown) - max(shown))

    def _stored_ns(
        self, plan: ContractPlan, out: AccessMap, plain: bool, total: int
    ) -> tuple[float, float]:
        """(time to store `total` elements of a result in a place, columns transposed before)."""
        item, height = self.room.tensors[out.tensor].dtype.bytes, 1
        extents = plan.extents
        if plan.rows is not None:
            height = plan.domain.sizes[plan.rows]
            extents = {**extents, plan.rows: height}
        block = transposed_block(plan, out, extents, item) if plain else None
        if block is not None:
            taken = self.room.rates.transfer_ns(total * item, block.run * item, block.partitions)
            return taken, total / block.partitions
        run = contiguous_run(plan.domain, out, plan.out_axes, plan.extents) * item
        return self.room.rates.transfer_ns(total * item, run, height), 0.0


def _loaded(
    plan: ContractPlan, operand: Operand, access: AccessMap, item: int
) -> tuple[int, int, float]:
    """(bytes of a run, partitions, transposed columns per element) of a packed tile load."""
    size, depth = plan.domain.sizes, plan.domain.sizes[plan.depth]
    extents = dict(plan.extents) | {plan.row_split.major: plan.block, plan.depth: depth}
    if plan.rows is not None:
        extents[plan.rows] = size[plan.rows]
    extents = {a: extents[a] for a in (plan.depth, *operand.free)}
    extents |= {a: plan.chunk for a in (plan.depth_split.major,) if a >= 0}
    rows = natural_rows if operand.natural else direct_rows
    run, block = rows(plan, operand, access, extents, item)
    if block is None or plan.domain[operand.number].op != "load":
        return run * item, depth, operand.natural / depth
    columns = 1 / depth if operand.natural else 1 / block.row + 1 / depth
    return block.run * item, block.partitions, columns
