"""The order of work on one tile of rows, and what of it must stay in SBUF.

Values with an inner atom are made in sweeps: one pass over the atom in blocks of columns, as many
values at a time as possible. A reduction or a transposed operand is complete only after its sweep,
so what reads it belongs to a later one, and a value that a later sweep reads again is kept as a
whole strip. Next: `nest.py` emits the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from compiler.codegen import fusion
from compiler.codegen.rates import Rates
from compiler.codegen.rows.algebra import defer_scaling
from compiler.codegen.rows.balance import balance
from compiler.codegen.rows.roles import Roles, best_row, inner_of, roles_for
from compiler.codegen.search import Room
from compiler.codegen.space import SINKS, SPLATS, Space, Value, normalise
from compiler.diagnostics import CapacityError, CompileError
from compiler.dtypes import DType
from compiler.isa.limits import Limits
from compiler.isa.region import RegionProgram, Tensor
from compiler.target import nominal_machine


class _Form(NamedTuple):
    """Row tiles in flight, slots of what rotates with their loop, whether transposes get a sweep of
    their own, and which group comes first.
    """

    ways: int
    slots: int
    apart: bool
    young_first: bool


# Tried in turn, the last ones because they need less SBUF (our choice: engines wait least in the
# first two, the first with sums over rows and the second without).
_FORMS = (
    _Form(2, 1, True, True),
    _Form(2, 1, True, False),
    _Form(2, 1, False, True),
    _Form(4, 1, False, True),
    _Form(1, 1, False, True),
)


# Bytes per partition of an operand that is loaded for all rows (our choice).
_WHOLE_BYTES = 16384
# Of SBUF: the estimate leaves out what allocation rounds up (our choice).
BUDGET_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Stage:
    """Work on one row tile: a sweep over `inner`, or single columns when it is None."""

    level: int
    inner: int | None
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How a row region runs.

    `run` is the level of the stage a value is made in. `strips` are kept whole for later stages.
    `turned` maps a value that contractions need transposed to the element type they need. `order`
    are the parallel loops, outermost first. `fold` neighbours of an inner atom share a partition of
    panels. `whole` operands are loaded transposed for all rows, like panels. GpSimd computes
    `gpsimd`. `ways` row tiles are in flight, and tiles rotate over `slots`. `young_first` sets the
    order of groups (see `nest.py`).
    """

    space: Space
    roles: Roles
    run: dict[int, int]
    stages: tuple[Stage, ...]
    strips: frozenset[int]
    turned: dict[int, DType]
    order: tuple[int, ...]
    fold: dict[int, int]
    whole: frozenset[int]
    gpsimd: frozenset[int]
    ways: int
    slots: int
    young_first: bool

    def inner(self, number: int) -> int | None:
        """The inner atom a row value spans."""
        return inner_of(self.roles, self.space.values[number])

    @property
    def read_whole(self) -> frozenset[int]:
        """Strips that a sum reads whole while it is swept along another atom."""
        levels = _Levels(self.space, self.roles, self.whole)
        levels.run = self.run
        return frozenset(
            i
            for n in self.roles.sums
            for i in self.space.values[n].inputs
            if i in self.strips and self.inner(i) != levels.driver(n)
        )


def operand_type(space: Space, number: int) -> DType:
    """Element type both operands of contraction `number` have in SBUF."""
    types = [space.values[i].dtype for i in space.values[number].inputs]
    return DType.F32 if DType.F32 in types else types[0]


def plan_rows(space: Space, sinks: Iterable[int], room: Room) -> list[RowPlan]:
    """Plans for everything `sinks` need, the one with most row tiles in flight first.

    Raises: CompileError when the region is no row region, CapacityError when nothing fits.
    """
    space, sinks = defer_scaling(space, sinks)
    roles = best_row(space, sinks)
    space, values = _fused(space, sinks, roles, room)
    roles = roles_for(space, [n for n in values if space.values[n].op in SINKS], roles.row)
    swept = {apart: _swept(space, roles, apart, room) for apart in (False, True)}
    plans = [_formed(swept[form.apart], form, room.limits) for form in _FORMS]
    sizes = [_size(plan, room.limits) for plan in plans]
    fitting = [p for p, size in zip(plans, sizes, strict=True) if size.total <= room.budget]
    if not fitting:
        raise _overflow(plans[-1], sizes[-1], room)
    return fitting


def _swept(space: Space, roles: Roles, apart: bool, room: Room) -> RowPlan:
    """The plan for one row tile; `apart` gives transposes a sweep of their own."""
    space = replace(space, values=list(space.values))
    whole = _whole_operands(space, roles)
    turned = _turned(space, roles, whole)
    levels = _Levels(space, roles, whole, frozenset(turned if apart else ()))
    run = levels.found()
    return RowPlan(
        space=space,
        roles=roles,
        run=run,
        stages=_stages(levels),
        strips=_strips(levels),
        turned=turned,
        order=_parallel_order(space, roles),
        fold={},
        whole=whole,
        gpsimd=balance(space, roles, run, room),
        ways=1,
        slots=1,
        young_first=True,
    )


def _formed(plan: RowPlan, form: _Form, limits: Limits) -> RowPlan:
    """The plan with `ways` row tiles to a group, whose columns are folded as many times: groups of
    masked rows then begin and end with a folded block.
    """
    ways = form.ways
    block = limits.contraction_max * ways
    sizes = {a: plan.space.sizes[a] for a in plan.roles.inner}
    fold = {a: ways for a, size in sizes.items() if ways > 1 and size % block == 0}
    return replace(plan, ways=ways, slots=form.slots, young_first=form.young_first, fold=fold)


def _overflow(plan: RowPlan, size: _Size, room: Room) -> CapacityError:
    return CapacityError(
        "SW_SBUF_CAPACITY",
        f"region {plan.space.name}: one tile of {room.limits.partitions} rows requires"
        f" {size.total} bytes of SBUF per partition ({size.largest_name}: {size.largest}), the"
        f" planner may fill {room.budget}",
        hint="a shorter sequence, more shards of it, or attention = 'fused' fits",
    )


def fits(program: RegionProgram, tensors: Sequence[Tensor], limits: Limits) -> bool:
    """Whether the contractions of `program` and what lies around them run as one row region.

    Plans only; no code is generated.
    """
    space = normalise(program)
    sinks = [s for s in space.sinks if any(_is_contract(space, n) for n in space.slice([s]))]
    rates = Rates(nominal_machine(limits.generation).core)
    budget = int(BUDGET_SHARE * limits.sbuf_bytes)
    try:
        plan_rows(space, sinks, Room(limits, rates, tensors, budget))
    except (CompileError, CapacityError):
        return False
    return True


def _is_contract(space: Space, number: int) -> bool:
    return space.values[number].op == "contract"


def _fused(
    space: Space, sinks: Sequence[int], roles: Roles, room: Room
) -> tuple[Space, tuple[int, ...]]:
    def points(value: Value) -> int:
        return math.prod(
            min(space.sizes[a], room.limits.moving_max) for a in value.atoms & roles.inner
        )

    return fusion.fuse(space, space.slice(sinks), points, room.rates)


class _Levels:
    """The level of the stage every row value and sum is made in."""

    def __init__(
        self,
        space: Space,
        roles: Roles,
        whole: frozenset[int],
        apart: frozenset[int] = frozenset(),
    ) -> None:
        self.space, self.roles, self.whole, self.apart = space, roles, whole, apart
        self.run: dict[int, int] = {}
        self.numbers = self._needed()

    def _needed(self) -> list[int]:
        """Rows and sums, without what only operands that are loaded whole need."""
        mine = {*self.roles.rows, *self.roles.sums}
        wanted = {n for n in mine if n in self.roles.sums or self.space.values[n].op in SINKS}
        for n in sorted(mine, reverse=True):
            if n in wanted:
                wanted.update(i for i in self.space.values[n].inputs if not self._is_whole(n, i))
        return sorted(wanted & mine)

    def _is_whole(self, n: int, i: int) -> bool:
        return n in self.roles.panels and i in self.whole

    def found(self) -> dict[int, int]:
        for n in self.numbers:
            value = self.space.values[n]
            read = [i for i in value.inputs if i in self.run and not self._is_whole(n, i)]
            self.run[n] = max((self._earliest(n, i) for i in read), default=0)
        self._delay_loads()
        return self.run

    def _inner(self, number: int) -> int | None:
        return inner_of(self.roles, self.space.values[number])

    def _home(self, number: int) -> int | None:
        """The inner atom of the sweep a value is made in."""
        value = self.space.values[number]
        if number in self.roles.sums:
            return self.driver(number)
        if value.op == "reduce":
            return self._inner(value.inputs[0])
        return self._inner(number)

    def driver(self, number: int) -> int | None:
        """The inner atom a sum is swept along: that of the operand that is ready last."""
        inputs = [i for i in self.space.values[number].inputs if self._inner(i) is not None]
        if not inputs:
            return None
        size = self.space.sizes
        return self._inner(max(inputs, key=lambda i: (self.run[i], size[self._inner(i) or 0])))

    def _earliest(self, n: int, i: int) -> int:
        """First level at which `n` can read `i`."""
        level = self.run[i] + (self.space.values[i].op == "reduce")
        inner = self._inner(i)
        in_step = inner is None or (inner == self._home(n) and n not in self.roles.panels)
        return level if in_step and not self._waits(n, i) else level + 1

    def _waits(self, n: int, i: int) -> bool:
        """Whether `n` is read transposed and made from `i` alone, which costs one more strip: the
        sweep that makes `i` then has no part in the transposes.
        """
        if n not in self.apart or self._is_source(i) or i in self.roles.panels:
            return False
        return [m for m in self.space.values[n].inputs if self._inner(m) is not None] == [i]

    def _delay_loads(self) -> None:
        """Values made from loads alone move to the stage that reads them first."""
        early = [n for n in self.numbers if self._is_source(n)]
        users = self.space.users(self.numbers)
        for n in reversed(early):
            readers = [u for u in users.get(n, ()) if not self._is_whole(u, n)]
            if readers and not any(u in self.roles.panels for u in readers):
                step = {u: self._earliest(u, n) - self.run[n] for u in readers}
                self.run[n] = min(self.run[u] - step[u] for u in readers)

    def _is_source(self, number: int) -> bool:
        ops = {self.space.values[m].op for m in self.space.slice([number])}
        return not ops & {"reduce", "contract", *SINKS}


def _stages(levels: _Levels) -> tuple[Stage, ...]:
    """Levels in order; within one, single columns first, as sweeps of the level read them."""
    space, run = levels.space, levels.run
    found: dict[tuple[int, int], list[int]] = {}
    for n in sorted(run):
        home = levels._home(n)
        found.setdefault((run[n], -1 if home is None else home), []).append(n)
    return tuple(
        Stage(level, None if inner < 0 else inner, tuple(values))
        for (level, inner), values in sorted(found.items())
        if any(space.values[n].op not in SPLATS for n in values)
    )


def _strips(levels: _Levels) -> frozenset[int]:
    """Values with an inner atom that are read outside the sweep that makes them."""
    space, roles, run = levels.space, levels.roles, levels.run
    kept = set()
    for n in run:
        if n in roles.panels:
            continue
        for i in space.values[n].inputs:
            inner = inner_of(roles, space.values[i]) if i in run else None
            if inner is not None and (run[i] != run[n] or inner != levels._home(n)):
                kept.add(i)
    return frozenset(kept)


def _whole_operands(space: Space, roles: Roles) -> frozenset[int]:
    """Operands that span the rows, are made from loads alone and are short enough to be loaded for
    all rows at once: their transfers then move long runs, and well before the rows need them.
    """
    found = set()
    for n, (tall, _) in roles.panels.items():
        ops = {space.values[m].op for m in space.slice([tall])}
        (depth,) = space.values[n].over
        short = space.sizes[roles.row] * operand_type(space, n).bytes <= _WHOLE_BYTES
        chunks = -(-space.sizes[depth] // 128)
        if not ops & {"reduce", "contract"} and short and chunks == 1:
            found.add(tall)
    return frozenset(found)


def _turned(space: Space, roles: Roles, whole: frozenset[int]) -> dict[int, DType]:
    found: dict[int, DType] = {}
    for n, (tall, _) in roles.panels.items():
        if tall in whole:
            continue
        wanted = operand_type(space, n)
        found[tall] = DType.F32 if DType.F32 in (wanted, found.get(tall)) else wanted
    return found


def _parallel_order(space: Space, roles: Roles) -> tuple[int, ...]:
    """Loops over parallel atoms: those that choose other panels outside, those that sums run over
    innermost.
    """
    summed = {a for n in roles.sums for a in space.values[n].over}
    chosen = {a for _, p in roles.panels.values() for a in space.values[p].atoms}
    stores = [v.walk for v in space.values if v.op == "store" and v.walk]

    def rank(atom: int) -> tuple[bool, bool, int, int]:
        step = max((abs(w.stride(atom)) for w in stores), default=0)
        return atom in summed, atom not in chosen, -step, atom

    order = tuple(sorted(roles.parallel, key=rank))
    for n in roles.sums:
        value = space.values[n]
        inside = order[sum_depth(order, value) :]
        if not set(inside) <= value.over or not set(order) <= value.over | value.atoms:
            raise CompileError(
                "SW_CODEGEN_ROWS",
                f"region {space.name} requires sums over rows whose parallel loops nest",
                hint="lower the contractions to regions of their own",
            )
    return order


def sum_depth(order: Sequence[int], value: Value) -> int:
    """Parallel loops around the accumulator of a sum."""
    return min((order.index(a) for a in value.over if a in order), default=len(order))


@dataclass(slots=True)
class _Size:
    """SBUF bytes per partition, and the largest tile of it."""

    total: int = 0
    largest: int = 0
    largest_name: str = ""

    def add(self, name: str, size: int) -> None:
        """Count a tile."""
        self.total += size
        if size > self.largest:
            self.largest, self.largest_name = size, name


def _size(plan: RowPlan, limits: Limits) -> _Size:
    """What the tiles of a plan take, lifetimes not counted."""
    size = _Size()
    space, roles, values = plan.space, plan.roles, plan.space.values
    # A group's tiles while the next group fills its own.
    per_way = 2 * plan.ways
    for n in plan.strips:
        inner = plan.inner(n)
        width = space.sizes[inner] if inner is not None else 1
        size.add(f"strip {values[n].op}{n}", width * values[n].dtype.bytes * per_way)
    for n, dtype in plan.turned.items():
        size.add(f"transposed {values[n].op}{n}", _turned_bytes(plan, n, dtype, limits) * per_way)
    for n, (_, panel) in roles.panels.items():
        elements = math.prod(space.sizes[a] for a in values[panel].atoms & roles.inner)
        item = operand_type(space, n).bytes
        # Twice for the next panel, once for its rows before they are transposed.
        size.add(f"panel {panel}", 3 * -(-elements // limits.partitions) * item)
    for n, (tall, _) in roles.panels.items():
        if tall in plan.whole:
            size.add(f"rows {tall}", 3 * space.sizes[roles.row] * operand_type(space, n).bytes)
    for n in roles.shared:
        inner = inner_of(roles, values[n])
        width = space.sizes[inner] if inner is not None else 1
        size.add(f"vector {values[n].op}{n}", width * values[n].dtype.bytes)
    for n in roles.sums:
        elements = math.prod(space.sizes[a] for a in values[n].atoms & roles.inner)
        size.add(f"sum {n}", 2 * DType.F32.bytes * -(-elements // limits.partitions))
    size.add("blocks", max((_block_bytes(plan, s, limits) for s in plan.stages), default=0))
    return size


def _block_bytes(plan: RowPlan, stage: Stage, limits: Limits) -> int:
    """Largest number of bytes of a block's values alive at a time, twice for those that rotate."""
    values = plan.space.values
    last = {i: n for n in stage.values for i in values[n].inputs}
    alive = peak = 0
    for n in stage.values:
        alive += 2 * limits.moving_max * values[n].dtype.bytes
        peak = max(peak, alive)
        ended = [i for i in set(values[n].inputs) & set(stage.values) if last[i] == n]
        alive -= sum(2 * limits.moving_max * values[i].dtype.bytes for i in ended)
    return peak


def _turned_bytes(plan: RowPlan, number: int, dtype: DType, limits: Limits) -> int:
    inner = plan.inner(number)
    size = plan.space.sizes[inner] if inner is not None else 1
    return -(-size // limits.partitions) * limits.partitions * dtype.bytes
