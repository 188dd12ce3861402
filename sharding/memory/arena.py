"""What one program holds besides named buffers: before compiling an estimate from the liveness of
values, after it what the linked program's own calls say.

Both give an `Arena`: its size, a timeline with loop bodies once, and the tensors at its peak. The
estimate knows a simple fusion model (an elementwise value with one reader stays on the chip), so it
is an upper one; loops hold their carries once and their body once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.analysis import invariant_carries, liveness
from shardwright.compiler.ir.facts import permutation
from shardwright.compiler.ir.memories import host_values
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.ops import AllGatherAttrs, SliceAttrs
from shardwright.compiler.ir.traits import IDENTITIES, LITERALS, UPDATES, VIEWS, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.linking.residency import Residency
from shardwright.compiler.program import StepProgram

_ABSORBING = of(Kind.CONTRACTION, Kind.UPDATE, Kind.REDUCTION) | of(Kind.WINDOW, combines=True)


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor in memory at the peak."""

    name: str
    category: str
    num_bytes: int
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True)
class Moment:
    """Live bytes by category while one position of a program runs: an op, or a call once it is
    compiled.

    Bodies of loops appear once; `repeats` says how often they run.
    """

    program: str
    position: int
    what: str
    repeats: int
    categories: Mapping[str, int]

    @property
    def live_bytes(self) -> int:
        """All categories."""
        return sum(self.categories.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Memory of one program. `num_bytes` is what is reserved; `held` is live at the peak."""

    program: str
    num_bytes: int
    timeline: tuple[Moment, ...]
    held: tuple[Holding, ...]


def compiled_arena(residency: Residency) -> Arena:
    """The arena of a linked program."""
    program = residency.program
    default = _default_category(program.name)
    return _arena(
        program.name,
        program.arena_bytes,
        (
            (m.function, m.repeats, _split(m.live_bytes, m.gathered_bytes, default))
            for m in residency.moments
        ),
        (
            Holding(r.name, "gathered" if r.gathered else default, r.num_bytes, r.loc)
            for r in residency.at_peak()
        ),
    )


def _split(live: int, gathered: int, default: str) -> dict[str, int]:
    """What is live at a call, by category."""
    return {default: live - gathered, "gathered": gathered}


def estimated_arena(program: StepProgram) -> Arena:
    """An upper estimate: inputs and outputs live in named buffers, the rest here."""
    graph = program.graph
    free = {*graph.inputs, *graph.outputs, *host_values(graph)}
    sweep = _sweep(_Level(graph, program.name, _default_category(program.name), free))
    return _arena(program.name, sweep.peak_bytes, sweep.moments, sweep.held)


def _arena(
    program: str,
    num_bytes: int,
    moments: Iterable[tuple[str, int, Mapping[str, int]]],
    held: Iterable[Holding],
) -> Arena:
    timeline = tuple(Moment(program, i, *m) for i, m in enumerate(moments))
    return Arena(program=program, num_bytes=num_bytes, timeline=timeline, held=tuple(held))


def _default_category(program: str) -> str:
    """What values of a program are, unless a gather made them; stages number their programs."""
    return "scratch" if program.partition(".")[0] == "update" else "activations"


@dataclass(slots=True)
class _Sweep:
    """Live bytes along one level: (what, repeats, bytes by category) per position, and what the
    peak holds."""

    peak_bytes: int = 0
    held: list[Holding] = field(default_factory=list)
    moments: list[tuple[str, int, Counter[str]]] = field(default_factory=list)


@dataclass(slots=True)
class _Level:
    """How one level occupies memory: values that are free here, and the others' category."""

    graph: Graph
    program: str
    default: str
    free: set[Value]
    users: dict[Value, list[Op]] = field(init=False)
    categories: dict[Value, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.users = self.graph.uses()
        for op in self.graph.ops:
            kind = "gathered" if isinstance(op.attrs, AllGatherAttrs) else self.default
            self.categories.update(dict.fromkeys(op.results, kind))
            if op.regions:  # a carry stays what it starts as
                starts = (self.categories.get(v, self.default) for v in op.operands)
                self.categories.update(zip(op.results, starts, strict=True))

    def cost(self, op: Op, value: Value) -> int:
        """Arena bytes of a result of `op`."""
        if value in self.free or _is_named(op) or self._is_fused(op, value):
            return 0
        if op.regions and op.results.index(value) in invariant_carries(op):
            return 0  # the body only reads it: the operand's memory serves
        return value.type.num_bytes

    def _is_fused(self, op: Op, value: Value) -> bool:
        """An elementwise value with one reader that takes it tile by tile never reaches memory."""
        users = self.users.get(value, [])
        if not OPS[op.name].elementwise or len(users) != 1:
            return False
        return OPS[users[0].name].elementwise or users[0].name in _ABSORBING


def _is_named(op: Op) -> bool:
    """Another name for what there is, or for what code holds; a transpose is stored."""
    if op.name in VIEWS:
        return permutation(op) is None
    return op.name in LITERALS | IDENTITIES or isinstance(op.attrs, SliceAttrs)


def _sweep(level: _Level) -> _Sweep:
    """Add what each op makes, subtract what nobody reads any more, note the highest point."""
    ends = defaultdict[int, list[Value]](list)
    for value, position in _ends(level).items():
        ends[position].append(value)
    born: dict[Value, tuple[Op, int]] = {}
    gone: dict[Value, int] = {}  # the first position without the value
    live: dict[Value, int] = {}
    total, peak, at_peak, sweep = Counter[str](), -1, _Sweep(), _Sweep()
    for position, op in enumerate(level.graph.ops):
        inner = _inside(op, level)
        for value in _taken_over(op, live.keys() & ends[position]):
            total[level.categories[value]] -= live.pop(value)
            gone[value] = position
        for value in op.results:
            if size := level.cost(op, value):
                born[value], live[value] = (op, position), size
                total[level.categories[value]] += size
        if (here := total.total() + inner.peak_bytes) > sweep.peak_bytes:
            sweep.peak_bytes, peak, at_peak = here, position, inner
        sweep.moments += _moments(op, total, inner)
        for value in ends[position]:
            if value in live:
                total[level.categories[value]] -= live.pop(value)
                gone[value] = position + 1
    there = ((v, op) for v, (op, at) in born.items() if at <= peak < gone.get(v, peak + 1))
    own = (
        Holding(f"{level.program}: {op.name} {v.type}", level.categories[v], size, op.loc)
        for v, op in there
        if (size := level.cost(op, v))
    )
    sweep.held = [*own, *at_peak.held]
    return sweep


def _moments(op: Op, total: Counter[str], inner: _Sweep) -> Iterator[tuple[str, int, Counter[str]]]:
    """The positions of one op: those of its body on top of what is around it, or itself."""
    if not inner.moments:
        yield op.name, 1, total.copy()
    for what, repeats, size in inner.moments:
        yield what, repeats * op.attrs.trip, total + size


def _ends(level: _Level) -> dict[Value, int]:
    """Where each value is last needed; what a fused value or a view reads lives as long."""
    ends = {v: max(i.start, i.end) for v, i in liveness(level.graph).items()}
    for op in reversed(level.graph.ops):
        for value in op.results:
            if value not in level.free and not level.cost(op, value):
                ends.update((v, max(ends[v], ends[value])) for v in op.operands)
    return ends


def _taken_over(op: Op, dying: Set[Value]) -> list[Value]:
    """Operands that die here whose memory the results of an op in place use."""
    if op.name in UPDATES:
        return [v for v in op.operands[:1] if v in dying]
    if not op.regions:
        return []
    kept = {op.operands[i] for i in invariant_carries(op)}
    return [v for v in dict.fromkeys(op.operands) if v in dying and v not in kept]


def _inside(op: Op, level: _Level) -> _Sweep:
    """What the body of a loop needs beside its carries, those updated in place included."""
    if not op.regions:
        return _Sweep()
    (body,) = op.regions
    free = {*body.inputs, *_updated_in_place(body), *host_values(body)}
    return _sweep(_Level(body, level.program, level.default, free))


def _updated_in_place(body: Graph) -> Iterator[Value]:
    """The next values of carries that writes of slices make, and what is between two writes."""
    made, users = body.producers(), body.uses()
    for value in body.outputs:
        chain: list[Value] = []
        while (op := made.get(value)) is not None and op.name in UPDATES:
            chain.append(value)
            value = op.operands[0]
        if value in body.inputs and all(len(users[v]) == 1 for v in chain[1:]):
            yield from chain
