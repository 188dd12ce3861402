"""From a kernel's meaning to its code: normalise, group the stores, generate each group, place
tiles, order engines.

Stores that need no contraction become one loop nest, stores that need the same single contraction
one contraction nest, several contractions or reductions beside one a row nest, plain copies a DMA
of their own. Planners offer tilings and `search.py` picks. The result is checked against the limits
of the target before anybody else sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from shardwright.compiler.codegen import copies
from shardwright.compiler.codegen.builder import Builder
from shardwright.compiler.codegen.contraction import contraction_candidates
from shardwright.compiler.codegen.domain import Domain, Tensors
from shardwright.compiler.codegen.in_place import refuse_stale_reads
from shardwright.compiler.codegen.loop_fusion_plan import loop_candidates
from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.overlap import overlap, unroll_factors
from shardwright.compiler.codegen.planning import Candidate, Rates, Room
from shardwright.compiler.codegen.rows import reduction_candidates
from shardwright.compiler.codegen.search import Effort, effort_of, fastest, worth_trying
from shardwright.compiler.codegen.windows import has_windows, window_candidates
from shardwright.compiler.diagnostics import CapacityError, CompileError
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.limits import check_kernel, limits_for
from shardwright.compiler.isa.program import Kernel
from shardwright.compiler.machine.target import FIRST_TARGET, Limits, Target, load_target
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.schedule.allocate import allocate
from shardwright.compiler.schedule.engine_order import order_engines
from shardwright.compiler.timing.evaluate import busiest_ps, instr_costs, oracle_ps

# Share of SBUF the planners may fill, tried in turn: their estimates leave out what allocation
# rounds up.
_BUDGETS = (0.95, 0.85, 0.6, 0.4, 0.2, 0.1, 0.05)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a search chose: the share of SBUF planned for, the candidate of each nest by position,
    the unroll factor of innermost loops, and whether tiles of loads share with no others. Kernels
    of one structure have one recipe.
    """

    share: float
    positions: tuple[int, ...]
    unroll: int
    loads_apart: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The tilings of a nest that were tried, cheapest estimate first, and which one was taken."""

    kind: str
    tried: Sequence[Candidate]
    position: int


@dataclass(frozen=True, slots=True)
class Generated:
    """A kernel with code, the first register it left free, how it was chosen, notes for people."""

    kernel: Kernel
    next_register: int
    recipe: Recipe | None = None
    notes: tuple[str, ...] = ()


def generate(
    program: KernelProgram,
    tensors: Tensors,
    target: str | Limits,
    first_register: int,
    options: CompileOptions = DEFAULTS,
    recipe: Recipe | None = None,
) -> Generated:
    """Tiles and instructions for `program`.

    Loop counters are registers from `first_register` on. Kernels other than `compute` have no code.
    With a `recipe` nothing is searched: it is that of a kernel of the same structure.

    Raises: CompileError for what the engines cannot do, CapacityError when no tiling fits.
    """
    if program.kind != "compute":
        return Generated(Kernel(program), first_register)
    codes = Codes(program, tensors, target, first_register, options)
    return codes.searched() if recipe is None else codes.repeated(recipe)


class Codes:
    """The codes of one kernel that planners offer, each planned and made once: a search goes on
    from what a quick look has made. Kernels of kind `compute`; arguments as in `generate`.
    """

    def __init__(
        self,
        program: KernelProgram,
        tensors: Tensors,
        target: str | Limits,
        first_register: int,
        options: CompileOptions,
    ) -> None:
        self.program, self.tensors, self.first_register = program, tensors, first_register
        self.limits = limits_for(target)
        self.machine = load_target(target if isinstance(target, str) else FIRST_TARGET)
        self.domain = normalise(program)
        self.nests = _nests(self.domain, tensors)
        self.kinds = frozenset(_KINDS[plan] for plan, _ in self.nests)
        self.effort = effort_of(options, self.kinds)
        self._least = effort_of(replace(options, optlevel=1), self.kinds)
        self._offers: dict[tuple[float, bool], list[Sequence[Candidate]]] = {}
        self._emitted: dict[tuple[tuple[Candidate, ...], bool], Builder] = {}
        self._distinct: dict[Hashable, list[Builder]] = {}  # by size: who has code of its own
        # By builder, which `_distinct` keeps, and turns.
        self._placed: dict[Hashable, _Placed] = {}
        self._made: dict[Hashable, Generated | CapacityError] = {}
        self._times: dict[int, int] = {}  # by the identity of a kernel, which `_made` keeps alive

    def searched(self) -> Generated:
        """The fastest code with the largest share of SBUF that fits. Raises CapacityError."""
        return self._fastest(self.effort)

    def first(self) -> Generated:
        """The code with the cheapest estimate that fits. Raises CapacityError when none does."""
        return self._fastest(self._least)

    def repeated(self, recipe: Recipe) -> Generated:
        """The code that a recipe names."""
        planned = self._planned(recipe.share, self.effort)
        options_of = zip(planned, recipe.positions, strict=True)
        chosen = [tried[position] for tried, position in options_of]
        made = self._build(chosen, recipe.unroll, loads_apart=recipe.loads_apart)
        assert made is not None
        _verify(made.kernel, self.limits)
        return replace(made, recipe=recipe)

    def choices(self, recipe: Recipe) -> list[Choice]:
        """What a recipe was chosen from, nest by nest: for people."""
        tried = self._planned(recipe.share, self.effort)
        return [
            Choice(_KINDS[plan], offers, position)
            for (plan, _), offers, position in zip(self.nests, tried, recipe.positions, strict=True)
        ]

    def _fastest(self, effort: Effort) -> Generated:
        failure: CapacityError | None = None
        for share in _BUDGETS:
            tried = self._planned(share, effort)
            try:
                made, chosen, unroll = fastest(tried, effort, self._build, self.oracle_ps)
            except CapacityError as error:
                failure = error
                continue
            positions = tuple(t.index(c) for t, c in zip(tried, chosen, strict=True))
            apart = self._with_loads_apart(made, chosen, unroll, effort)
            found = apart or made
            _verify(found.kernel, self.limits)
            return replace(found, recipe=Recipe(share, positions, unroll, apart is not None))
        assert failure is not None
        raise failure

    def _with_loads_apart(
        self, made: Generated, chosen: Sequence[Candidate], unroll: int, effort: Effort
    ) -> Generated | None:
        """The same code with loads that wait for no other tile, where that is faster."""
        tried = effort.loads_apart and self.kinds & {"loop", "reduction"}
        if not tried or not self._code(tuple(chosen)).takes_over:
            return None
        taken = self.oracle_ps(made)
        try:
            apart = self._build(chosen, unroll, taken, loads_apart=True)
        except CapacityError:
            return None
        return apart if apart and self.oracle_ps(apart) < taken else None

    def _planned(self, share: float, effort: Effort) -> list[Sequence[Candidate]]:
        """Per nest what a search of `effort` tries."""
        return [worth_trying(offers, effort) for offers in self._offered(share, effort.thorough)]

    def _offered(self, share: float, thorough: bool) -> list[Sequence[Candidate]]:
        """Per nest what its planner offers."""
        key = share, thorough
        if key not in self._offers:
            budget = int(share * self.limits.sbuf_bytes)
            room = Room(self.limits, Rates(self.machine.core), self.tensors, budget, thorough)
            self._offers[key] = [plan(self.domain, roots, room) for plan, roots in self.nests]
        return self._offers[key]

    def _code(self, chosen: tuple[Candidate, ...], loads_apart: bool = False) -> Builder:
        """Code before it is laid side by side and ordered."""
        key = chosen, loads_apart
        if key not in self._emitted:
            builder = Builder(self.limits, self.tensors, self.first_register)
            builder.loads_apart = loads_apart
            for candidate in chosen:
                candidate.emit(builder)
            self._emitted[key] = self._first_alike(builder)
        return self._emitted[key]

    def _first_alike(self, builder: Builder) -> Builder:
        """The first that made the same code: what limits tilings makes many of them one."""
        alike = self._distinct.setdefault((len(builder.tiles), len(builder.body)), [])
        for other in alike:
            if other.is_alike(builder):
                return other
        alike.append(builder)
        return builder

    def _build(
        self,
        chosen: Sequence[Candidate],
        unroll: int,
        below: float = math.inf,
        loads_apart: bool = False,
    ) -> Generated | None:
        """None when an engine alone is busy for `below` ps or longer, in whatever order."""
        builder = self._code(tuple(chosen), loads_apart)
        beside = unroll_factors([*builder.prefix, *builder.body], unroll) if unroll > 1 else ()
        key = id(builder), beside if any(beside) else ()
        if key not in self._made:
            try:
                if key not in self._placed:
                    self._placed[key] = self._place(builder, unroll)
                placed = self._placed[key]
                if below < math.inf and placed.busiest_ps >= below:
                    return None
                order_engines(placed.kernel, self.tensors, self.limits)
                self._made[key] = Generated(placed.kernel, placed.next_register)
            except CapacityError as error:
                self._made[key] = error
        made, notes = self._made[key], tuple(c.note for c in chosen if c.note)
        if isinstance(made, CapacityError):
            raise made
        return made if made.notes == notes else replace(made, notes=notes)

    def _place(self, builder: Builder, unroll: int) -> _Placed:
        """Code with innermost loops unrolled by `unroll`, and addresses."""
        kernel = Kernel(self.program, *builder.code())
        if unroll > 1:
            cost = partial(instr_costs, kernel=kernel, tensors=self.tensors, target=self.machine)
            overlap(kernel, self.tensors, unroll, cost)
        allocate(kernel, self.limits)
        return _Placed(kernel, builder.next_register, self.tensors, self.machine)

    def oracle_ps(self, made: Generated) -> int:
        """How long one of its codes takes by the cost oracle."""
        key = id(made.kernel)
        if key not in self._times:
            self._times[key] = oracle_ps(made.kernel, self.tensors, self.machine)
        return self._times[key]


@dataclass(frozen=True)
class _Placed:
    """Code with addresses, before engines wait for each other."""

    kernel: Kernel
    next_register: int
    tensors: Tensors
    machine: Target

    @cached_property
    def busiest_ps(self) -> int:
        """Busy time of the busiest engine, which no order is faster than."""
        return busiest_ps(self.kernel, self.tensors, self.machine)


Plan = Callable[[Domain, list[int], Room], Sequence[Candidate]]


def _nests(domain: Domain, tensors: Tensors) -> list[tuple[Plan, list[int]]]:
    """Stores that share a nest, by first store. Raises CompileError for reads gone stale."""
    joined = _joined(domain)
    found: dict[object, tuple[Plan, list[int]]] = {}
    for root in domain.roots:
        copied = _copier(domain, root, tensors)
        key: object = ("copy", root) if copied else joined[root]
        plan = copied or _planner(domain, joined[root], root)
        found.setdefault(key, (plan, []))[1].append(root)
    nests = list(found.values())
    refuse_stale_reads(domain, tensors, [roots for _, roots in nests])
    return nests


def _copier(domain: Domain, root: int, tensors: Tensors) -> Plan | None:
    """Who plans a store that only moves data; None when it does more."""
    if copies.is_copy(domain, root, tensors):
        return copies.copy_candidates
    return copies.transpose_candidates if copies.transposes_of(domain, root, tensors) else None


def _joined(domain: Domain) -> dict[int, frozenset[int]]:
    """Per store the contractions of its nest: its own, and those of stores it shares one with."""
    joined: dict[int, frozenset[int]] = {}
    for root in domain.roots:
        nest = _folds(domain, [root])[0]
        sharing = [s for s, other in joined.items() if other & nest]
        nest = nest.union(*(joined[s] for s in sharing))
        joined |= {s: nest for s in (*sharing, root)}
    return joined


def _folds(domain: Domain, roots: Iterable[int]) -> tuple[frozenset[int], bool]:
    """(contractions, whether there is a reduction) in what `roots` need."""
    inside = domain.slice(roots)
    contracts = frozenset(n for n in inside if domain[n].op == "contract")
    return contracts, any(domain[n].op == "reduce" for n in inside)


def _planner(domain: Domain, contracts: frozenset[int], root: int) -> Plan:
    """Who plans the nest of `root` and other stores that need `contracts`."""
    if has_windows(domain, [root]):
        return window_candidates
    if not contracts:
        return loop_candidates
    roots = [n for n in domain.roots if _folds(domain, [n])[0] & contracts]
    single = len(contracts) == 1 and not _folds(domain, roots)[1]
    return contraction_candidates if single else reduction_candidates


def _verify(kernel: Kernel, limits: Limits) -> None:
    findings = check_kernel(kernel, limits)
    if findings:
        raise CompileError(
            "SW_CODEGEN_ILLEGAL",
            f"generated code breaks {len(findings)} limits, first: {findings[0]}",
            hint="this is a defect of the code generator",
        )


_KINDS: Mapping[Plan, str] = {
    copies.copy_candidates: "copy",
    copies.transpose_candidates: "copy",
    loop_candidates: "loop",
    contraction_candidates: "contraction",
    reduction_candidates: "reduction",
    window_candidates: "windows",
}
