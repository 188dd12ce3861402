"""The order of work on one tile of rows, and what of it must stay in SBUF.

Values with an inner iter dim are made in passes over its loop, in blocks of columns, as many values
at a time as possible. A reduction or a transposed operand is complete only after its pass, so what
reads it belongs to a later one, and a value that a later pass reads again is kept in a row-resident
buffer. Where even that does not fit, the longest inner iter dim is blocked: packed tiles, row
buffers, transposed rows are those of a column tile of it, what adds it up is carried on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.codegen import fusion
from shardwright.compiler.codegen.builder import NO_DIM
from shardwright.compiler.codegen.contract_plan import is_natural
from shardwright.compiler.codegen.domain import CODELESS, Domain, IterDims, Numbers, OfRoots, Value
from shardwright.compiler.codegen.planning import Room
from shardwright.compiler.codegen.rows.algebra import defer_scaling, wide_products
from shardwright.compiler.codegen.rows.engines import Banks, EngineAssignment, Work
from shardwright.compiler.codegen.rows.passes import (
    BlockLoop,
    Pass,
    PassOptions,
    PassSchedule,
    Remat,
    made_in_loops,
    rematerialised,
)
from shardwright.compiler.codegen.rows.roles import Roles, inner_of, roles_for, rows_by_work
from shardwright.compiler.codegen.rows.size import size_of
from shardwright.compiler.diagnostics import CapacityError, CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import STORES
from shardwright.compiler.machine.target import Limits


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What a plan is tried with."""

    in_flight: int = field(kw_only=False)  # row tiles in flight
    newest_first: bool = False  # which group of row tiles comes first
    own_pass: bool = False  # transposes get a pass of their own
    single_buffered: bool = False  # packed tiles and sums are held once
    remat: bool = False  # values are rematerialised instead of kept
    no_overlap: bool = False  # a group ends before the next one begins
    blocked: int = NO_DIM  # the iter dim that is walked in column tiles
    length: int = 0  # points of a column tile
    tiles: int = 0  # row tiles that share what is loaded for a column tile
    online: bool = False  # fewer loops over the column tiles
    outside: bool = False  # column tiles are walked around all rows

    @property
    def pass_key(self) -> tuple[int, bool, bool, bool, bool]:
        """What decides on the passes."""
        return self.in_flight, self.own_pass, self.single_buffered, self.remat, self.online


# Tried in turn, what needs less SBUF later (our choice, by time of attention at 1024 to 8192
# positions). Sums over rows take memory, and the tensor engine has time to rematerialise values.
_FORMS = (
    _Form(2, newest_first=True, own_pass=True),
    _Form(2, own_pass=True),
    _Form(2, newest_first=True),
    _Form(4, newest_first=True),
    _Form(2, single_buffered=True),
    _Form(1, newest_first=True),
    _Form(1, newest_first=True, single_buffered=True),
    _Form(2, newest_first=True, single_buffered=True, remat=True),
    _Form(1, newest_first=True, single_buffered=True, remat=True),
    _Form(1, newest_first=True, single_buffered=True, remat=True, no_overlap=True),
)
_FORMS_OF_SUMS = (
    _Form(2, remat=True),
    _Form(4, remat=True),
    _Form(2, single_buffered=True, remat=True),
    _Form(2, newest_first=True, single_buffered=True, remat=True, no_overlap=True),
    _Form(1, newest_first=True, single_buffered=True, remat=True),
    _Form(1, newest_first=True, single_buffered=True, remat=True, no_overlap=True),
)

# More row tiles load column tiles less often, two in flight keep engines busy, an online loop saves
# one (our choice, by time of attention at 16384 and 32768 positions).
_NARROW = _Form(1, newest_first=True, single_buffered=True, no_overlap=True, length=512, tiles=4)
_BLOCKED_FORMS = (
    _Form(2, single_buffered=True, online=True, length=2048, tiles=16),
    _Form(2, single_buffered=True, online=True, length=1024, tiles=8),
    _Form(2, newest_first=True, single_buffered=True, length=2048, tiles=16),
    _Form(2, single_buffered=True, length=512, tiles=8),
    replace(_NARROW, online=True),
    _NARROW,
)

# A longer column tile loads the rows less often; values rematerialised leave room for one (our
# choice, by time of the gradients of keys and values at 32768 and 65536 positions).
_SHORT = replace(_NARROW, in_flight=2, remat=True, outside=True, tiles=8)
_OUTSIDE_FORMS = (
    *(
        _Form(2, single_buffered=True, remat=True, length=length, tiles=8, outside=True)
        for length in (8192, 4096, 2048)
    ),
    replace(_SHORT, length=1024),
    replace(_SHORT, in_flight=1, length=512, tiles=4),
)

# Row panels with columns of their own: each repeats the code (our choice).
_PANELS = 8
# Values of all panels together: ordering straight code takes long (our choice).
_VALUES = 200
# Bytes per partition of an operand that is loaded for all rows (our choice).
_WHOLE_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Blocking:
    """The row is walked in column tiles of up to `length` points of `iter_dim`; `tiles` row tiles
    share what is loaded for one. Where rows add up nothing over it, column tiles may lie `outside`
    of the rows: then all rows share it, and sums over rows are complete tile by tile.
    """

    iter_dim: int
    length: int
    tiles: int
    outside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How a reduction fusion runs."""

    domain: Domain
    roles: Roles
    run: dict[int, int]  # number of the pass every value is made in
    loops: tuple[BlockLoop, ...]  # passes in order, over column tiles where a row is blocked
    row_buffers: frozenset[int]  # row-resident: values that are kept whole for later passes
    read_whole: frozenset[int]  # those that a sum reads while it is swept along another iter dim
    vectors: Numbers  # values without the row iter dim, made once for all rows
    transposed: dict[int, DType]  # element type in which contractions need a value transposed
    order: IterDims  # parallel loops, outermost first
    fold: dict[int, int]  # neighbours of an inner iter dim that share a partition of packed tiles
    whole: frozenset[int]  # operands that are loaded transposed for all rows, like packed tiles
    engines: EngineAssignment  # who does what more than one engine can do
    bank_of: Mapping[int, int]  # the product whose PSUM bank a value takes over
    in_flight: int = 1  # row tiles in flight
    newest_first: bool = True  # of groups (see `nest.py`)
    no_overlap: bool = False  # groups do not overlap
    single_buffered: bool  # each packed tile and sum is held once, and tiles arrive in small parts
    blocked: Blocking | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of all loops."""
        return tuple(s for one in self.loops for s in one.passes)

    @property
    def most_panels(self) -> int:
        """Row panels that may have code of their own, in each column tile around them."""
        most = min(_PANELS, _VALUES // len(self.run))
        return max(1, most // 2 if self.blocked and self.blocked.outside else most)

    @property
    def online(self) -> bool:
        """Whether a loop works with what is not complete yet."""
        return any(one.running for one in self.loops)

    @property
    def row(self) -> int:
        """The row iter dim."""
        return self.roles.row

    @property
    def blocked_dim(self) -> int:
        """The blocked iter dim, or that there is none."""
        return self.blocked.iter_dim if self.blocked else NO_DIM

    def points(self, iter_dim: int) -> int:
        """Points of an iter dim that are on chip at a time."""
        size, blocked = self.domain.sizes[iter_dim], self.blocked
        return min(size, blocked.length) if blocked and blocked.iter_dim == iter_dim else size

    def points_of_sum(self, iter_dim: int) -> int:
        """Points of an iter dim that a sum over rows has on chip at a time."""
        outside = self.blocked and self.blocked.outside
        return self.points(iter_dim) if outside else self.domain.sizes[iter_dim]

    def is_blocked(self, number: int) -> bool:
        """Whether a value spans the blocked iter dim."""
        return self.blocked_dim in self.domain[number].iter_dims

    def carries(self, number: int) -> bool:
        """Whether a row value adds up the blocked iter dim, tile by tile."""
        return self.blocked_dim in self.domain[number].over

    def inner(self, number: int) -> int | None:
        """The inner iter dim a row value spans."""
        return inner_of(self.roles, self.domain[number])

    def packed_iter_dims(self, number: int, operand: int) -> IterDims:
        """What a packed tile of an operand of contraction `number` spans beside k."""
        (depth,) = self.domain[number].over
        inside = self.roles.inner | {self.roles.row}
        return tuple(self.domain[operand].iter_dims & inside - {depth})

    def is_natural(self, number: int, operand: int) -> bool:
        """Whether a packed tile arrives with k along its rows, and is transposed on the way."""
        (depth,) = self.domain[number].over
        return is_natural(self.domain, operand, depth, self.packed_iter_dims(number, operand))

    def operand_type(self, number: int) -> DType:
        """Element type both operands of contraction `number` have in SBUF."""
        return _operand_type(self.domain, number)


def _operand_type(domain: Domain, number: int) -> DType:
    types = [domain[i].dtype for i in domain[number].inputs]
    return DType.F32 if DType.F32 in types else types[0]


def plan_rows(domain: Domain, roots: Iterable[int], room: Room) -> list[RowPlan]:
    """Plans for everything `roots` need, the one with most row tiles in flight first.

    Raises: CompileError when the kernel is no reduction fusion, CapacityError when nothing fits.
    """
    failure: CapacityError | None = None
    for row_domain, last, roles in rows_by_work(*defer_scaling(domain, roots)):
        try:
            return _for_row(row_domain, last, roles, room)
        except CapacityError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _for_row(domain: Domain, last: Sequence[int], roles: Roles, room: Room) -> list[RowPlan]:
    """Plans that fit for one row iter dim; blocked ones too where no other has two row tiles in
    flight, those first that take fewer loops. Raises CapacityError when none does.
    """
    made, values = _fused(domain, last, roles, room)
    roles = roles_for(made, _roots_of(made, values), roles.row)
    forms = _FORMS_OF_SUMS if roles.sums else _FORMS
    plans = _planned(made, roles, forms, room)
    fitting = _fitting(plans, room)
    if any(p.in_flight > 1 for p in fitting):
        return fitting
    iter_dim = max(roles.inner, key=lambda a: (made.sizes[a], a))
    # Products over the blocked iter dim are added up in parts, so they are fp32.
    roots = _roots_of(made, (*roles.rows, *roles.late))
    wide, last = wide_products(made, roots, roles.row, iter_dim)
    wide_roles = roles_for(wide, last, roles.row)
    blocked = _planned(wide, wide_roles, _BLOCKED_FORMS, room, iter_dim)
    outside = [
        plan
        for a in _complete_apart(made, roles)
        for plan in _planned(made, roles, _OUTSIDE_FORMS, room, a)
    ]
    found = sorted([*fitting, *_fitting(blocked, room)], key=lambda p: not p.online)
    found = [*_fitting(outside, room), *found]
    if not found:
        raise _overflow([*plans, *blocked, *outside], room)
    return found


def _complete_apart(domain: Domain, roles: Roles) -> list[int]:
    """The longest inner iter dim of which every column tile has sums and stores of its own."""
    values = domain.values
    ends = [*roles.sums, *(n for n in roles.rows if values[n].op in STORES)]
    spanned = roles.inner.intersection(*(values[n].iter_dims for n in ends))
    added = {a for n in roles.rows if n not in roles.sums for a in values[n].over}
    order = _parallel_order(domain, roles)
    nested = len({sum_depth(order, values[n]) for n in roles.sums}) == 1
    return sorted(spanned - added, key=lambda a: -domain.sizes[a])[:1] if nested else []


def _fitting(plans: Iterable[RowPlan], room: Room) -> list[RowPlan]:
    return [p for p in plans if size_of(p, room.limits).total <= room.budget]


def _roots_of(domain: Domain, numbers: Iterable[int]) -> list[int]:
    return [n for n in numbers if domain[n].op in STORES]


def _planned(
    domain: Domain, roles: Roles, forms: Iterable[_Form], room: Room, blocked: int = NO_DIM
) -> list[RowPlan]:
    """A plan for every form."""
    forms = [replace(form, blocked=blocked) for form in forms]
    made = {
        form.pass_key: _scheduled(domain, roles, form, room)
        for form in {form.pass_key: form for form in forms}.values()
    }
    plans = [_formed(made[form.pass_key], form, room.limits) for form in forms]
    return [p for p, form in zip(plans, forms, strict=True) if p.online is form.online]


def _scheduled(domain: Domain, roles: Roles, form: _Form, room: Room) -> RowPlan:
    """The plan of a form for one row tile."""
    domain = replace(domain, values=list(domain.values))
    options = PassOptions(
        whole=frozenset() if form.single_buffered else _whole_operands(domain, roles),
        vectors=_free_vectors(domain, roles) if form.single_buffered else frozenset(),
        early=form.remat or form.blocked != NO_DIM,
        blocked=form.blocked,
        online=form.online,
    )
    if form.own_pass:
        options = replace(options, own_pass=frozenset(_transposed(domain, roles, options.whole)))
    schedule = PassSchedule(domain, roles, options)
    if form.blocked != NO_DIM:
        schedule = _rewritten(schedule, made_in_loops(schedule))
    if form.remat:
        schedule = _rewritten(schedule, rematerialised(schedule))
    domain, roles, row_buffers = schedule.domain, schedule.roles, schedule.row_buffers()
    transposed = _transposed(domain, roles, options.whole)
    over = Banks(domain, roles, schedule.run, {*row_buffers, *transposed}).reused()
    work = Work(domain, roles, schedule.run, transposed, over.pairs, form.in_flight, room)
    return RowPlan(
        domain=domain,
        roles=roles,
        run=schedule.run,
        loops=schedule.in_loops(),
        row_buffers=row_buffers,
        read_whole=schedule.read_whole(row_buffers),
        vectors=tuple(n for n in roles.shared if n not in schedule.run),
        transposed=transposed,
        order=_parallel_order(domain, roles),
        fold={},
        whole=options.whole,
        engines=work.assigned(),
        bank_of=over.bank_of,
        single_buffered=form.single_buffered,
    )


def _rewritten(schedule: PassSchedule, remat: Remat) -> PassSchedule:
    """`schedule` with values rematerialised where they would be kept."""
    ends = _roots_of(schedule.domain, (*schedule.run, *schedule.roles.late))
    roots = [remat.number[n] for n in ends]
    roles = roles_for(remat.domain, roots, schedule.roles.row)
    in_passes = bool(schedule.options.vectors)
    options = replace(
        schedule.options,
        vectors=_free_vectors(remat.domain, roles) if in_passes else frozenset(),
        own_pass=frozenset(remat.number[n] for n in schedule.options.own_pass),
        remat=remat.copies,
    )
    return PassSchedule(remat.domain, roles, options)


def _free_vectors(domain: Domain, roles: Roles) -> frozenset[int]:
    """Values without the row iter dim that follow from counts and constants: blocks of them are
    made where they are read, unless a vector that is held for all rows reads them too.
    """
    ops = {"iota", *CODELESS, "compare", "convert"}
    free = {
        n
        for n in roles.shared
        if inner_of(roles, domain[n]) is not None
        and {domain[m].op for m in domain.slice([n])} <= ops
    }
    return frozenset(free.difference(domain.slice(set(roles.shared) - free)))


def _formed(plan: RowPlan, form: _Form, limits: Limits) -> RowPlan:
    """The plan with the row tiles `in_flight` in a group, columns folded as many times: groups of
    masked rows then begin and end with a folded block. What is transposed as it arrives has its k
    in order, and so has then the other operand; so have column tiles.
    """
    in_flight, block = form.in_flight, limits.contraction_max * form.in_flight
    ordered, sizes = {*_ordered(plan), form.blocked}, plan.domain.sizes
    folded = [a for a in plan.roles.inner if a not in ordered and sizes[a] % block == 0]
    blocking = Blocking(form.blocked, form.length, form.tiles, form.outside)
    return replace(
        plan,
        in_flight=in_flight,
        fold=dict.fromkeys(folded, in_flight) if in_flight > 1 else {},
        blocked=blocking if form.blocked != NO_DIM else None,
        newest_first=form.newest_first,
        no_overlap=form.no_overlap,
    )


def _ordered(plan: RowPlan) -> set[int]:
    """Inner iter dims that a packed tile of some contraction is transposed along."""
    found: set[int] = set()
    for number, value in enumerate(plan.domain.values):
        if value.op == "contract" and value.over <= plan.roles.inner:
            packed = [n for n in value.inputs if n not in plan.transposed]
            if any(plan.is_natural(number, n) for n in packed):
                found |= value.over
    return found


def _overflow(plans: Iterable[RowPlan], room: Room) -> CapacityError:
    """What the smallest of `plans` lacks."""
    sized = [(size_of(p, room.limits), p.domain.name) for p in plans]
    size, name = min(sized, key=lambda s: s[0].total)
    return CapacityError(
        "SW_SBUF_CAPACITY",
        f"kernel {name}: one tile of {room.limits.partitions} rows requires"
        f" {size.total} bytes of SBUF per partition ({size.largest_name}: {size.largest}), the"
        f" planner may fill {room.budget}",
        hint="a shorter sequence, more shards of it, or attention = 'fused' fits",
    )


def _fused(domain: Domain, roots: Sequence[int], roles: Roles, room: Room) -> OfRoots:
    def points(value: Value) -> int:
        most = room.limits.moving_max
        return math.prod(min(domain.sizes[a], most) for a in value.iter_dims & roles.inner)

    return fusion.fuse(domain, domain.slice(roots), points, room.rates)


def _whole_operands(domain: Domain, roles: Roles) -> frozenset[int]:
    """Operands that span the rows, are made from loads alone and are short enough to be loaded for
    all rows at once: their transfers then move long runs, and well before the rows need them.
    """
    found: set[int] = set()
    for n, (tall, _) in roles.packed.items():
        ops = {domain[m].op for m in domain.slice([tall])}
        (depth,) = domain[n].over
        short = domain.sizes[roles.row] * _operand_type(domain, n).bytes <= _WHOLE_BYTES
        chunks = -(-domain.sizes[depth] // 128)
        if not ops & {"reduce", "contract"} and short and chunks == 1:
            found.add(tall)
    return frozenset(found)


def _transposed(domain: Domain, roles: Roles, whole: frozenset[int]) -> dict[int, DType]:
    found: dict[int, DType] = {}
    for n, (tall, _) in roles.packed.items():
        if tall in whole:
            continue
        wanted = _operand_type(domain, n)
        found[tall] = DType.F32 if DType.F32 in (wanted, found.get(tall)) else wanted
    return found


def _parallel_order(domain: Domain, roles: Roles) -> IterDims:
    """Parallel loops: those that choose what is packed outside, those that sums run over inside."""
    summed = {a for n in roles.sums for a in domain[n].over}
    chosen = {a for _, p in roles.packed.values() for a in domain[p].iter_dims}
    stores = [v.map for v in domain.values if v.op == "store" and v.map]

    def rank(iter_dim: int) -> tuple[bool, bool, int, int]:
        step = max((abs(w.stride(iter_dim)) for w in stores), default=0)
        return iter_dim in summed, iter_dim not in chosen, -step, iter_dim

    order = tuple(sorted(roles.parallel, key=rank))
    for n in roles.sums:
        value = domain[n]
        inside = order[sum_depth(order, value) :]
        if not set(inside) <= value.over or not set(order) <= value.over | value.iter_dims:
            raise CompileError(
                "SW_CODEGEN_ROWS",
                f"kernel {domain.name} requires sums over rows whose parallel loops nest",
                hint="lower the contractions to kernels of their own",
            )
    return order


def sum_depth(order: Sequence[int], value: Value) -> int:
    """Parallel loops around the accumulator of a sum."""
    return min((order.index(a) for a in value.over if a in order), default=len(order))
