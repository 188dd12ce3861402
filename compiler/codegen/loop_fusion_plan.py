"""Choosing the tiles of a loop fusion: which iter dim on the partitions, what stays whole in a
row, what is looped.

Candidates are every iter dim, every useful split of a large iter dim, and no partition iter dim at
all. Each gets free extents that fit the SBUF budget, a loop order in which sums come last, and an
estimate of its time; the cheapest legal one wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from shardwright.compiler.codegen import fusion
from shardwright.compiler.codegen.builder import pieces
from shardwright.compiler.codegen.coalesce import coalesce
from shardwright.compiler.codegen.domain import (
    CODELESS,
    AccessMap,
    Domain,
    IterDims,
    Numbers,
    PerDim,
    Value,
)
from shardwright.compiler.codegen.loop_fusion import LoopPlan, Slots, depths, emit_loops
from shardwright.compiler.codegen.normalise import contiguous_run, near_divisor, split
from shardwright.compiler.codegen.planning import MIN_CYCLES, Candidate, Room
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.isa.program import Engine
from shardwright.compiler.machine.target import Limits

# A row of 4096 bytes reaches the plateau of the DMA curve (hardware.json
# efficiency_by_bytes_per_partition: 0.97) and leaves room for many tiles in flight; longer rows
# make fewer, longer instructions and load less often what does not span the row.
_ROW_BYTES = (4096, 16384)
_MORE_ROW_BYTES = (2048, 8192)  # of a thorough search
# Slots of tiles that a DMA fills or empties, and of the others; how much of the shorter of
# transfers and computation then shows (inferred: 1 with nothing in flight, little with two of
# everything).
_SLOTS = {(2, 2): 0.1, (2, 1): 0.2, (1, 1): 1.0}
_ALTERNATING = 0.1  # inferred: little with two slots of everything
_SPLIT_RUNS = (512, 2048)  # elements of a row when a single large iter dim is cut
_MAX_AXES = 3  # of the 4 free dims: one is left for the folded dim of a reduction


def loop_candidates(domain: Domain, roots: Iterable[int], room: Room) -> list[Candidate]:
    """Tilings of everything `roots` need. Raises CompileError when there is none."""
    plans = plan_loops(*coalesce(domain, roots, room.tensors), room)
    made = {id(p): Candidate(p.cost, partial(emit_loops, p), p.variant, plan=p) for p in plans}
    return [made[id(plan)] for plan in plans]


def plan_loops(domain: Domain, roots: Iterable[int], room: Room) -> list[LoopPlan]:
    """Tilings of everything `roots` need, with at most about the room's SBUF bytes; one that
    several choices lead to is there as often.

    Raises CompileError when no partition iter dim and loop order can compute it.
    """
    plans = []
    for candidate, partition in _candidates(domain, roots, room.limits):
        plans += _Planner(candidate, tuple(candidate.slice(roots)), partition, room).plans()
    if not plans:
        raise CompileError(
            "SW_CODEGEN_STRIP",
            f"kernel {domain.name} requires an iteration dim for the partitions and a loop order in"
            " which its reductions nest, found none",
            hint="split the kernel at one of its reductions",
        )
    exact = [p for p in plans if not _transposes_extremes(p)]
    return exact if any(p.partition is not None for p in exact) else plans


def _transposes_extremes(plan: LoopPlan) -> bool:
    """Whether an extreme crosses the partitions by products with 0, which make NaN of inf."""
    nodes = (plan.domain[n] for n in plan.values)
    return any(
        v.op == "reduce" and plan.partition in v.over and v.attrs["kind"] != "add" for v in nodes
    )


def _candidates(
    domain: Domain, roots: Iterable[int], limits: Limits
) -> Iterator[tuple[Domain, int | None]]:
    """(domain, partition iter dim) pairs worth an estimate."""
    used = {a for n in domain.slice(roots) for a in (*domain[n].iter_dims, *domain[n].over)}
    used -= domain.coalesced
    indexed = _index_iter_dims(domain)
    yield domain, None
    for iter_dim in sorted(used):
        yield domain, iter_dim
        if iter_dim in indexed or domain.sizes[iter_dim] < 4:
            continue
        for run in _runs(domain.sizes[iter_dim], limits.partitions):
            cut, made = split(domain, iter_dim, run)
            yield cut, made.major


def _index_iter_dims(domain: Domain) -> set[int]:
    return {a for v in domain.values if _is_indexed(v) for a in domain[v.inputs[-1]].iter_dims}


def _is_indexed(value: Value) -> bool:
    return value.op in ("load_indexed", "store_indexed")


def _runs(size: int, partitions: int) -> list[int]:
    """Row lengths to cut an iter dim into: even over the partitions, or long; divisors if good."""
    wanted = {math.ceil(size / partitions), *_SPLIT_RUNS}
    return sorted({near_divisor(size, run) for run in wanted if 1 < run < size})


class _Planner:
    """Extents for one partition iter dim, and the tilings they make."""

    def __init__(self, domain: Domain, values: Numbers, partition: int | None, room: Room) -> None:
        self.domain = domain
        self.values = values
        self.nodes = [domain[n] for n in values]
        self.partition = partition
        self.room, self.limits, self.budget = room, room.limits, room.budget
        self.stored = {i for v in self.nodes if v.op == "store" for i in v.inputs}
        self.sizes = {a: domain.sizes[a] for v in self.nodes for a in (*v.iter_dims, *v.over)}
        self.reduced = {a for v in self.nodes if v.op == "reduce" for a in v.over}
        self.homes = domain.homes(values)
        self.freed = self._freed()
        self.spanned = [self._spanned(v) for v in self.nodes]

    def plans(self) -> list[LoopPlan]:
        """Plans by slots and longest row; none when this partition iter dim cannot do it."""
        if not all(self._is_legal(v) for v in self.nodes):
            return []
        ranked = self._ranked_iter_dims()
        known: dict[tuple[int, ...], _Tiling] = {}
        found = []
        rows = (*_ROW_BYTES, *_MORE_ROW_BYTES) if self.room.thorough else _ROW_BYTES
        for slots, row_bytes in product(_SLOTS, rows):
            extents = self._extents(ranked, slots, row_bytes)
            key = tuple(extents[a] for a in ranked)
            if key not in known:
                known[key] = _Tiling(self, ranked, extents)
            plan = known[key].plan(slots)
            if plan is not None:
                more = row_bytes in _MORE_ROW_BYTES
                found.append(replace(plan, variant=True) if more else plan)
        return found

    def _is_legal(self, value: Value) -> bool:
        p = self.partition
        if value.op == "contract":
            return False
        if _is_indexed(value):
            iter_dims = self.domain[value.inputs[-1]].iter_dims
            order = value.attrs.get("order", ())
            in_order = p is None or not order or p == order[-1]
            return (
                (p in iter_dims or p is None or not iter_dims)
                and not value.access.stride(p)
                and in_order
            )
        if value.op == "reduce" and p in value.over:
            return value.dtype.is_float and value.attrs["kind"] in ("add", "max", "min")
        return True

    def _ranked_iter_dims(self) -> list[int]:
        """Iter dims in the order of the largest view's strides, major first."""
        accesses = [
            (self.domain.elements(v), v.map) for v in self.nodes if v.map and v.map.tensor >= 0
        ]
        accesses.sort(key=lambda w: -w[0])

        def rank(iter_dim: int) -> tuple[int, int]:
            for at, (_, access) in enumerate(accesses):
                if access.stride(iter_dim):
                    return (-abs(access.stride(iter_dim)), at)
            return (-(1 << 62), iter_dim)

        return sorted(self.sizes, key=rank)

    # extents

    def _extents(self, ranked: Sequence[int], slots: Slots, row_bytes: int) -> dict[int, int]:
        """Tile extents: reduced iter dims first, then from the innermost out, within the budget."""
        extents = dict.fromkeys(self.sizes, 1)
        fixed = set()
        if self.partition is not None:
            extents[self.partition] = min(self.limits.partitions, self.sizes[self.partition])
            fixed.add(self.partition)
        for iter_dim in self.domain.coalesced & set(self.sizes):
            extents[iter_dim] = self.sizes[iter_dim]
            fixed.add(iter_dim)
        for value in self.nodes:
            if _is_indexed(value):
                fixed |= self.domain[value.inputs[-1]].iter_dims
        inner = [a for a in reversed(ranked) if a not in fixed]
        for iter_dim in sorted(inner, key=lambda a: a not in self.reduced):
            if sum(1 for a in inner if extents[a] > 1) == _MAX_AXES:
                break
            if not self._grow(extents, iter_dim, slots, row_bytes):
                break
        return extents

    def _grow(self, extents: dict[int, int], iter_dim: int, slots: Slots, row_bytes: int) -> bool:
        """Give `iter_dim` the largest extent that fits; False when that is not all of it."""
        size = self.sizes[iter_dim]
        limit = size
        if iter_dim not in self.reduced:
            limit = max(1, min(size, row_bytes // self._row_bytes(extents)))
        if not self._fits(extents | {iter_dim: limit}, slots):
            low, high = 1, limit
            while high - low > 1:
                middle = (low + high) // 2
                fits = self._fits(extents | {iter_dim: middle}, slots)
                low, high = (middle, high) if fits else (low, middle)
            limit = low
        blocks = math.ceil(size / limit)
        extents[iter_dim] = math.ceil(size / blocks)
        return blocks == 1

    def _spanned(self, value: Value) -> IterDims:
        """Iter dims along the row of a value's tile."""
        spanned = value.iter_dims | value.over if value.op in STORES else value.iter_dims
        return tuple([a for a in spanned if a != self.partition])

    def _tiles(self, extents: PerDim) -> list[int]:
        """Elements per partition of every value's tile."""
        elements = {dims: math.prod([extents[a] for a in dims]) for dims in {*self.spanned}}
        return [elements[dims] for dims in self.spanned]

    def _row_bytes(self, extents: PerDim) -> int:
        rows = zip(self._tiles(extents), self.nodes, strict=True)
        return max(elements * v.dtype.bytes for elements, v in rows)

    def _fits(self, extents: PerDim, slots: Slots) -> bool:
        tiles = self._tiles(extents)
        if max(tiles) > self.limits.dim_stride_max:
            return False
        return self._footprint(tiles, extents, slots) <= self.budget

    def _freed(self) -> list[list[int]]:
        """Per value, in order, what nothing reads any more once it is computed."""
        last = {self.homes.get(i, i): at for at, v in enumerate(self.nodes) for i in v.inputs}
        freed: list[list[int]] = [[] for _ in self.nodes]
        for n, at in last.items():
            freed[at].append(n)
        for at, number in enumerate(self.values):
            if number not in last:
                freed[at].append(number)
        return freed

    def _footprint(self, tiles: Sequence[int], extents: PerDim, slots: Slots) -> int:
        """Peak SBUF bytes of the values alive at a time, all their slots counted."""
        alive, peak, sizes = 0, 0, {}
        rows = zip(self.values, self.nodes, tiles, self.freed, strict=True)
        for number, value, elements, freed in rows:
            held = value.op in CODELESS or number in self.homes
            each = 0 if held else self._bytes_each(number, value, extents, slots)
            sizes[number] = elements * each
            alive += sizes[number]
            peak = max(peak, alive)
            alive -= sum([sizes[n] for n in freed])
        return peak

    def _bytes_each(self, number: int, value: Value, extents: PerDim, slots: Slots) -> int:
        """SBUF bytes per element of a value's tile."""
        if value.op == "store" and self.domain[value.inputs[0]].op not in CODELESS:
            return 0
        moved = value.op in ("load", "load_indexed") or number in self.stored
        rotates = any(extents[a] < self.sizes[a] for a in value.iter_dims)
        count = slots[0 if moved else 1] if rotates else 1
        partials = 4 if value.op == "reduce" and value.dtype.is_float else 0
        return value.dtype.bytes * count + partials


class _Tiling:
    """Loop order and cost of tiles of some extents; the domain is the one fused for these tiles."""

    def __init__(self, planner: _Planner, ranked: Sequence[int], extents: dict[int, int]) -> None:
        self.partition, self.sizes, self.room = planner.partition, planner.sizes, planner.room
        self.extents = extents
        self.domain, self.values = fusion.fuse(
            planner.domain, planner.values, self._points, self.room.rates
        )
        self.nodes = [self.domain[n] for n in self.values]
        self.axes = tuple(a for a in ranked if extents[a] > 1 and a != self.partition)
        self.plans: dict[Slots, LoopPlan] = {}
        self.order = self._order(ranked)
        if self.order is not None:
            self.moved_ns, self.busiest_ns = self._costs(self.order)

    def plan(self, slots: Slots) -> LoopPlan | None:
        """The plan (one object per `slots`), or None when no loop order can compute it."""
        if self.order is not None and slots not in self.plans:
            self.plans[slots] = self._plan(self.order, slots)
        return self.plans.get(slots)

    def _plan(self, order: IterDims, slots: Slots) -> LoopPlan:
        moved, busiest = self.moved_ns, self.busiest_ns
        return LoopPlan(
            domain=self.domain,
            values=self.values,
            partition=self.partition,
            axes=self.axes,
            extents=self.extents,
            order=order,
            slots=slots,
            cost=max(moved, busiest) + _SLOTS[slots] * min(moved, busiest),
        )

    def _points(self, value: Value) -> int:
        """Elements per partition of a value in a tile."""
        return math.prod([self.extents[a] for a in value.iter_dims if a != self.partition])

    # loop order

    def _order(self, ranked: Sequence[int]) -> IterDims | None:
        """Looped iter dims, outermost first: what a sum runs over, before it the partitions."""
        looped = [a for a in ranked if self._is_looped(a)]
        looped.sort(key=lambda a: a == self.partition)
        before: dict[int, set[int]] = {a: set() for a in looped}
        for value in self.nodes:
            for iter_dim in value.over:
                if iter_dim in before:
                    before[iter_dim] |= {a for a in value.iter_dims if a in before}
            for outer, inner in itertools.pairwise(
                a for a in value.attrs.get("order", ()) if a in before
            ):
                before[inner].add(outer)
        for made in self.domain.splits.values():
            # The tail shortens the minor iter dim, so it must be known before that is walked.
            if made.tail and made.minor in before and made.major in before:
                before[made.minor].add(made.major)
        order: list[int] = []
        while len(order) < len(looped):
            free = [a for a in looped if a not in order and before[a] <= set(order)]
            if not free:
                return None
            order.append(free[0])
        return tuple(order) if self._sums_nest(order) else None

    def _is_looped(self, iter_dim: int) -> bool:
        parts = pieces(
            self.sizes[iter_dim], self.extents[iter_dim], self.domain.splits.get(iter_dim)
        )
        return len(parts) > 1 or parts[0].trip > 1

    def _sums_nest(self, order: Sequence[int]) -> bool:
        """No loop that a sum does not run over lies between its loops and its result."""
        found = depths(self.domain, self.values, order)
        for n in self.values:
            at = found[n]
            if not set(order[at.result : at.run]) <= self.domain[n].over:
                return False
        return True

    # cost

    def _costs(self, order: Sequence[int]) -> tuple[float, float]:
        """(nanoseconds of transfers, of computation)."""
        found = depths(self.domain, self.values, order)
        trips = [math.ceil(self.sizes[a] / self.extents[a]) for a in order]
        moved = 0.0
        computed = dict.fromkeys((Engine.VECTOR, Engine.SCALAR), 0.0)
        for n, value in zip(self.values, self.nodes, strict=True):
            runs = math.prod(trips[: found[n].run])
            if value.map and value.map.tensor >= 0:
                moved += self._transfer_ns(value, value.map, runs)
            elif value.op not in CODELESS:
                engine = fusion.engine_of(value)
                computed[engine] += runs * self._compute_ns(value, engine)
        # What both engines do alternates within a tile: a part of the shorter work shows.
        busiest = max(computed.values()) + _ALTERNATING * min(computed.values())
        return moved, busiest

    def _transfer_ns(self, value: Value, access: AccessMap, runs: int) -> float:
        spanned = [a for a in self.axes if access.stride(a)]
        item = self.room.tensors[access.tensor].dtype.bytes
        run = contiguous_run(self.domain, access, spanned, self.extents) * item
        elements = math.prod(self.extents[a] for a in spanned)
        # Values that do not span the partition iter dim are loaded onto every partition, but stored
        # once.
        is_store = value.op == "store" and not access.stride(self.partition)
        rows = 1 if is_store or self.partition is None else self.extents[self.partition]
        return runs * self.room.rates.transfer_ns(elements * rows * item, run, rows)

    def _compute_ns(self, value: Value, engine: Engine) -> float:
        cycles = max(MIN_CYCLES, fusion.cycles(self.domain, value, self._points))
        if self.partition in value.over:
            cycles *= 4
        return self.room.rates.engine_ns(engine, cycles)
