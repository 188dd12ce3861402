"""Copies: a view stored through another view is a DMA from HBM to HBM, whatever the strides, where
runs are long; else a loop fusion, or a copy that is transposed.

A transposed copy has other innermost indices on its two sides: blocks are transposed on the tensor
engine, so that both transfers move rows. `along` is innermost in the source, `across` in the
target. Rows of the source lie on the partitions by `across`, are transposed 128 by 128, and leave
with `along` on the partitions. Where one of the two is short but the other continues it in memory,
a partition holds several rows (`rows`), which then make one run; a transposed block takes every
`rows`-th element. An infinity becomes NaN in its row, as with every transpose on the tensor engine
(docs/numerics.md, `saturate_infinity`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from shardwright.compiler.codegen.builder import Builder, Held, Scope, cut, merge_dims
from shardwright.compiler.codegen.domain import AccessMap, Domain, Tensors, Value
from shardwright.compiler.codegen.loop_fusion_plan import loop_candidates
from shardwright.compiler.codegen.planning import MIN_CYCLES, Candidate, Room
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import AccessPattern, Engine

# A DMA pattern has a first dim and the free dims of the limits.
_FIRST = 1
# Shorter runs are transposed on chip, where both sides of the transfer can have longer ones (the
# DMA curve of hardware.json reaches 0.05 at 128 bytes); a copy this small is one descriptor per
# engine anyway.
_MIN_RUN_BYTES = 128
_SMALL_BYTES = 65536


def is_copy(domain: Domain, root: int, tensors: Tensors) -> bool:
    """Whether `root` stores a load, by runs that are long enough, that nothing else reads."""
    source = copied(domain, root, tensors)
    if source is None:
        return False
    accesses = source.access, domain[root].access
    rounds_once = source.dtype in {tensors[access.tensor].dtype for access in accesses}
    return rounds_once and _run_bytes(domain, root, tensors) >= _MIN_RUN_BYTES


def copied(domain: Domain, root: int, tensors: Tensors) -> Value | None:
    """The load that `root` stores, where nothing else reads it and they do not overlap."""
    value = domain[root]
    source = domain[value.inputs[0]]
    if value.op != "store" or source.op != "load":
        return None
    users = domain.users()[value.inputs[0]]
    ends = tensors[source.access.tensor], tensors[value.access.tensor]
    apart = ends[0] is not ends[1] and not any(t.alias >= 0 for t in ends)
    return source if users == [root] and apart else None


def _run_bytes(domain: Domain, root: int, tensors: Tensors) -> int:
    """Bytes that lie together on both sides of a copy; a whole small copy counts as one run."""
    store = domain[root]
    source, target = domain[store.inputs[0]].access, store.access
    item = tensors[target.tensor].dtype.bytes
    if domain.elements(store) * item < _SMALL_BYTES:
        return _MIN_RUN_BYTES
    run = 1
    for iter_dim in sorted(store.iter_dims, key=lambda a: abs(target.stride(a))):
        if not target.stride(iter_dim) == source.stride(iter_dim) == run:
            break
        run *= domain.sizes[iter_dim]
    return run * item


def copy_candidates(domain: Domain, roots: list[int], room: Room) -> Sequence[Candidate]:
    """There is one way to copy."""
    (root,) = roots
    return (Candidate(0.0, lambda builder: emit_copy(builder, domain, root)),)


def emit_copy(builder: Builder, domain: Domain, root: int) -> None:
    """Append the DMAs of one copy; dims beyond what a pattern holds become loops."""
    store = domain[root]
    source, target = domain[store.inputs[0]].access, store.access
    iter_dims = sorted(store.iter_dims, key=lambda a: -abs(target.stride(a)))
    looped = len(iter_dims) - builder.limits.free_dims - _FIRST
    extents = {a: 1 if at < looped else domain.sizes[a] for at, a in enumerate(iter_dims)}
    outer = dict.fromkeys(iter_dims[: max(0, looped)], 1)
    (scope,) = builder.scope(extents).nested(domain.sizes, outer)
    sizes = [extents[a] for a in iter_dims]
    strides = [[access.stride(a) for a in iter_dims] for access in (source, target)]
    into, out = merge_dims(sizes, strides)
    scope.load(scope.hbm(target, out), scope.hbm(source, into))


# Rows that reach the plateau of the DMA curve (hardware.json), and half of that.
_RUN_BYTES = (4096, 2048)
_MIN_ELEMENTS = 1 << 14  # of a copy: below that a few descriptors do (our choice)
_MIN_SIZE = 16  # of both indices: narrower blocks fill too little of a partition (our choice)
_GROUP = 4  # transposed blocks of 128 columns fill a bank of PSUM


@dataclass(frozen=True, slots=True)
class Side:
    """An innermost index: iter dim, size, how many of it a partition of the other side holds."""

    iter_dim: int
    size: int
    rows: int


@dataclass(frozen=True, slots=True)
class TransposePlan:
    """A copy of `source` to `target`, in blocks of `length` along and `width` across."""

    source: AccessMap
    target: AccessMap
    dtype: DType
    along: Side
    across: Side
    length: int
    width: int


def transposes_of(domain: Domain, root: int, tensors: Tensors) -> list[TransposePlan]:
    """Ways to transpose the copy that `root` is; none if it is none, or not worth it."""
    value, load = domain[root], copied(domain, root, tensors)
    if load is None or load.access.bounds or load.iter_dims != value.iter_dims:
        return []
    source, target = load.access, value.access
    inner = [[a for a in value.iter_dims if w.stride(a) == 1] for w in (source, target)]
    if not all(inner) or inner[0] == inner[1] or not load.dtype.is_float:
        return []
    along, across = inner[0][0], inner[1][0]
    small = min(domain.sizes[along], domain.sizes[across]) < _MIN_SIZE
    if small or domain.elements(value) < _MIN_ELEMENTS or load.dtype.bytes < DType.BF16.bytes:
        return []
    runs = (n // load.dtype.bytes for n in _RUN_BYTES)
    return [_tiled(domain, source, target, load.dtype, (along, across), run) for run in runs]


def _tiled(
    domain: Domain,
    source: AccessMap,
    target: AccessMap,
    dtype: DType,
    inner: tuple[int, int],
    run: int,
) -> TransposePlan:
    """Blocks whose rows have about `run` elements."""
    along, across = inner
    n, m = domain.sizes[along], domain.sizes[across]
    rows_across = _rows(m, run // n) if source.stride(across) == n else 1
    rows_along = _rows(n, run // m) if target.stride(along) == m else 1
    length = n if rows_across > 1 else min(n, _blocks(run, 128 * rows_along))
    width = m if rows_along > 1 else min(m, _blocks(run, 128 * rows_across))
    sides = Side(along, n, rows_along), Side(across, m, rows_across)
    return TransposePlan(source, target, dtype, *sides, length, width)


def _rows(size: int, most: int) -> int:
    """The largest divisor of `size` up to `most`."""
    return max((r for r in range(1, most + 1) if size % r == 0), default=1)


def _blocks(run: int, least: int) -> int:
    """A multiple of `least` of at least about `run` elements, or one."""
    return max(1, run // least) * least


def transpose_candidates(domain: Domain, roots: list[int], room: Room) -> Sequence[Candidate]:
    """Transposed copies beside the tilings of a loop fusion."""
    (root,) = roots
    transposed = [
        Candidate(_cost(domain, plan, room), partial(_emit, domain, plan), plan=plan)
        for plan in transposes_of(domain, root, room.tensors)
        if _bytes(plan) <= room.budget
    ]
    return [*transposed, *loop_candidates(domain, roots, room)]


def _bytes(plan: TransposePlan) -> int:
    """SBUF bytes per partition: two slots of each side."""
    tiles = math.ceil(plan.width / (128 * plan.across.rows))
    outs = math.ceil(plan.length / (128 * plan.along.rows))
    rows = tiles * plan.across.rows * plan.length + outs * plan.along.rows * plan.width
    return 2 * rows * plan.dtype.bytes


def _cost(domain: Domain, plan: TransposePlan, room: Room) -> float:
    total = domain.points({*plan.source.strides, *plan.target.strides})
    moved = 0.0
    for side, run in ((plan.across, plan.length), (plan.along, plan.width)):
        rows = min(128, side.size // side.rows)
        item = plan.dtype.bytes
        moved += room.rates.transfer_ns(total * item, run * side.rows * item, rows)
    columns = total / min(128, plan.along.size // plan.along.rows)
    passes = 4 if plan.dtype is DType.F32 else 1
    transposed = room.rates.engine_ns(Engine.TENSOR, max(columns, MIN_CYCLES) * passes)
    return max(moved, transposed, room.rates.engine_ns(Engine.VECTOR, columns / 2))


def _emit(domain: Domain, plan: TransposePlan, builder: Builder) -> None:
    iter_dims = sorted(
        {*plan.source.strides, *plan.target.strides}, key=lambda a: -abs(plan.target.stride(a))
    )
    extents = dict.fromkeys(iter_dims, 1)
    extents |= {plan.along.iter_dim: plan.length, plan.across.iter_dim: plan.width}
    for place in builder.scope(extents).nested(domain.sizes, extents):
        _Block(plan, place).emit()


class _Block:
    """One block: rows in, blocks transposed, rows out."""

    def __init__(self, plan: TransposePlan, scope: Scope) -> None:
        self.plan, self.scope = plan, scope
        self.length = scope.extent(plan.along.iter_dim)
        self.width = scope.extent(plan.across.iter_dim)

    def emit(self) -> None:
        plan, scope = self.plan, self.scope
        across, along = self.width // plan.across.rows, self.length // plan.along.rows  # partitions
        rows = [self._load(*part) for part in cut(across, 128)]
        engines = (Engine.VECTOR, Engine.SCALAR)
        for number, (first, count) in enumerate(cut(along, 128)):
            elements = plan.along.rows * self.width
            out = scope.tile("out", count, elements, plan.dtype)
            jobs = list(product(range(len(rows)), range(plan.across.rows), range(plan.along.rows)))
            for at, low in enumerate(range(0, len(jobs), _GROUP)):
                engine = engines[(at + number) % 2]
                self._transpose(rows, out, jobs[low : low + _GROUP], (first, count), engine)
            self._store(out, first, count)

    def _load(self, first: int, count: int) -> tuple[Held, int]:
        """`count` partitions of rows of the source from number `first` on."""
        plan = self.plan
        held = self.scope.tile("rows", count, plan.across.rows * self.length, plan.dtype)
        near, far = self._ends(plan.source, plan.across, self.length, held, (first, count))
        self.scope.load(near, far)
        return held, count

    def _store(self, held: Held, first: int, count: int) -> None:
        plan = self.plan
        near, far = self._ends(plan.target, plan.along, self.width, held, (first, count))
        self.scope.store(far, near)

    def _ends(
        self, access: AccessMap, side: Side, run: int, held: Held, part: tuple[int, int]
    ) -> tuple[AccessPattern, AccessPattern]:
        """(on chip, in HBM) of partitions `part` (first, count) of rows of `run` elements."""
        (first, count), step = part, access.stride(side.iter_dim)
        hbm, chip = merge_dims([side.rows, run], [[step, 1], [run, 1]])
        far = self.scope.hbm(access, ((step * side.rows, count), *hbm))
        far = replace(far, offset=far.offset + first * side.rows * step)
        return self.scope.on_chip(held, count, chip), far

    def _transpose(
        self,
        rows: Sequence[tuple[Held, int]],
        out: Held,
        jobs: Sequence[tuple[int, int, int]],
        part: tuple[int, int],
        engine: Engine,
    ) -> None:
        """Up to a bank of blocks, and their copies: (tile of rows, row across, row along) each."""
        plan, scope, (first, count) = self.plan, self.scope, part
        bank = scope.psum("turned", 1, 2)
        wide = plan.across.rows
        places = []
        for at, (tile, row, step) in enumerate(jobs):
            held, columns = rows[tile]
            offset = row * self.length + first * plan.along.rows + step
            source = scope.on_chip(held, columns, ((plan.along.rows, count),), offset)
            block = scope.flat(bank, count, columns, at * 128)
            scope.transpose(block, source)
            places.append((step * self.width + tile * 128 * wide + row, columns))
        for low, high, delta in _even(places):
            columns = places[low][1]
            into, to = merge_dims([high - low, columns], [[128, 1], [delta, wide]])
            target = scope.on_chip(out, count, to, places[low][0])
            scope.copy(engine, target, scope.on_chip(bank, count, into, low * 128))


def _even(places: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first, last + 1, distance) of ranges of (place, columns) at even distances."""
    found, low = [], 0
    while low < len(places):
        high = low + 1
        delta = places[high][0] - places[low][0] if high < len(places) else 0
        while (
            high < len(places)
            and places[high][1] == places[low][1]
            and places[high][0] - places[high - 1][0] == delta
        ):
            high += 1
        found.append((low, high, delta))
        low = high
    return found
