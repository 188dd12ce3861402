"""Bytes per core by category, and the peak over a step, before anything is compiled.

Named buffers stay for the whole step and are exact; one arena is shared by all programs, and its
peak follows from the liveness of values, loops included. Without a compiler the arena is an upper
estimate under a simple fusion model; pass the compiled sizes when they are known. `check_limit`
turns a plan that does not fit into an error that says what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from compiler.diagnostics import UNKNOWN_LOC, CapacityError, Loc
from compiler.ir.analysis import invariant_carries, liveness
from compiler.ir.opdef import OPS
from compiler.ir.types import Graph, Op, Value
from compiler.program import BufferInfo, StepPlan, StepProgram

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "scratch",
    "other",
)
_OF_ROLE = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "residual": "activations",
}
_VIEWS = frozenset(("broadcast_in_dim", "constant", "iota", "reshape", "optimization_barrier"))
_ABSORBING = frozenset(
    ("convolution", "dot_general", "dynamic_update_slice", "reduce", "reduce_window")
)
_NUM_LARGEST = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor in memory at the peak."""

    name: str
    category: str
    num_bytes: int
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True)
class Moment:
    """Live arena bytes after one top-level op of a program."""

    program: str
    position: int
    arena_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one core over a step.

    Units: bytes. `categories` are those at the peak and sum to `peak_bytes`; `argument_bytes` are
    the exact named buffers by category; `arena_bytes` is the peak per program; `largest` the
    largest tensors at the peak.
    """

    categories: Mapping[str, int]
    peak_bytes: int
    argument_bytes: Mapping[str, int]
    arena_bytes: Mapping[str, int]
    timeline: tuple[Moment, ...]
    largest: tuple[Holding, ...]
    estimated: bool = True


def footprint(plan: StepPlan, compiled_arena_bytes: Mapping[str, int] | None = None) -> Footprint:
    """The memory of one core.

    `compiled_arena_bytes` gives the arena of every program once it is compiled, in place of the
    estimate.
    """
    arguments = {category: 0 for category in CATEGORIES}
    holdings = []
    for info in plan.buffers.values():
        holding = Holding(info.name, _category(info), buffer_bytes(plan, info))
        arguments[holding.category] += holding.num_bytes
        holdings.append(holding)
    sweeps = {p.name: _sweep_program(p) for p in plan.programs}
    known = compiled_arena_bytes or {}
    arena = {name: known.get(name, sweep.peak_bytes) for name, sweep in sweeps.items()}
    worst = max(arena, key=lambda name: arena[name])
    at_peak = _scaled(sweeps[worst].at_peak, arena[worst])
    categories = {c: arguments[c] + at_peak.get(c, 0) for c in CATEGORIES}
    holdings += _values_at_peak(plan, worst, sweeps[worst])
    return Footprint(
        categories=categories,
        peak_bytes=sum(categories.values()),
        argument_bytes=arguments,
        arena_bytes=arena,
        timeline=tuple(m for name, sweep in sweeps.items() for m in sweep.moments(name)),
        largest=tuple(sorted(holdings, key=lambda h: -h.num_bytes)[:_NUM_LARGEST]),
        estimated=not set(arena) <= set(known),
    )


def buffer_bytes(plan: StepPlan, info: BufferInfo) -> int:
    """Bytes of a named buffer; a batch buffer holds every micro-batch of the step."""
    copies = plan.num_microbatches if info.role == "batch" else 1
    return info.local_type.num_bytes * copies


def _category(info: BufferInfo) -> str:
    """The category of a named buffer."""
    return _OF_ROLE.get(info.role, "other")


def _scaled(at_peak: Mapping[str, int], total: int) -> dict[str, int]:
    """The estimate's shares of a known total; rounding goes to the largest."""
    estimate = sum(at_peak.values())
    if estimate == total:
        return dict(at_peak)
    if not estimate:
        return {"scratch": total}
    shares = {c: n * total // estimate for c, n in at_peak.items()}
    largest = max(shares, key=lambda c: shares[c])
    shares[largest] += total - sum(shares.values())
    return shares


@dataclass(slots=True)
class _Sweep:
    """Live bytes along one level: the peak, what it is made of, and where it is."""

    peak_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)
    position: int = -1
    live: list[int] = field(default_factory=list)

    def moments(self, program: str) -> Iterator[Moment]:
        """The timeline of a program."""
        return (Moment(program, i, n) for i, n in enumerate(self.live))


@dataclass(slots=True)
class _Level:
    """How one level occupies memory: values that are free here, and the others' category."""

    graph: Graph
    default: str
    free: set[Value]
    users: dict[Value, list[Op]] = field(init=False)

    def __post_init__(self) -> None:
        self.users = self.graph.uses()

    def cost(self, op: Op, value: Value) -> int:
        """Arena bytes of a result of `op`."""
        if value in self.free or op.name in _VIEWS or self._is_fused(op, value):
            return 0
        if op.name == "loop" and op.results.index(value) in invariant_carries(op):
            return 0  # the body only reads it: the operand's memory serves
        return value.type.num_bytes

    def _is_fused(self, op: Op, value: Value) -> bool:
        """An elementwise value with one reader that takes it tile by tile never reaches memory."""
        users = self.users.get(value, [])
        if not OPS[op.name].elementwise or len(users) != 1:
            return False
        return OPS[users[0].name].elementwise or users[0].name in _ABSORBING

    def category(self, op: Op) -> str:
        """The category of what `op` makes."""
        return "gathered" if op.name == "all_gather" else self.default


def _sweep_program(program: StepProgram) -> _Sweep:
    """The arena of a program: inputs and outputs live in named buffers."""
    graph = program.graph
    default = "scratch" if program.name == "update" else "activations"
    return _sweep(_Level(graph, default, set(graph.inputs) | set(graph.outputs)))


def _sweep(level: _Level) -> _Sweep:
    """Add what each op makes, subtract what nobody reads any more, note the highest point."""
    graph = level.graph
    ends = _by_position(_ends(level))
    costs: dict[Value, tuple[str, int]] = {}
    live: Counter[str] = Counter()
    sweep = _Sweep()
    for position, op in enumerate(graph.ops):
        inner = _inside(op, level)
        taken_over = _taken_over(op, position, ends, costs)
        for value in taken_over:
            category, size = costs.pop(value)
            live[category] -= size
        for value in op.results:
            costs[value] = (level.category(op), level.cost(op, value))
            live[costs[value][0]] += costs[value][1]
        total = sum(live.values()) + inner.peak_bytes
        if total > sweep.peak_bytes:
            sweep.peak_bytes, sweep.position = total, position
            sweep.at_peak = live + Counter(inner.at_peak)
        for value in ends.get(position, ()):
            category, size = costs.pop(value, ("", 0))
            live[category] -= size
        sweep.live.append(sum(live.values()))
    return sweep


def _ends(level: _Level) -> dict[Value, int]:
    """Where each value is last needed; what a fused value or a view reads lives as long."""
    ends = {v: max(i.start, i.end) for v, i in liveness(level.graph).items()}
    for op in reversed(level.graph.ops):
        for value in op.results:
            if value not in level.free and not level.cost(op, value):
                ends.update((v, max(ends[v], ends[value])) for v in op.operands)
    return ends


def _by_position(ends: Mapping[Value, int]) -> dict[int, list[Value]]:
    """Values by the position after which they are dead."""
    dying: dict[int, list[Value]] = {}
    for value, position in ends.items():
        dying.setdefault(position, []).append(value)
    return dying


def _taken_over(
    op: Op, position: int, ends: Mapping[int, list[Value]], costs: Mapping[Value, object]
) -> list[Value]:
    """Operands whose memory the results of an op in place use."""
    if op.name == "dynamic_update_slice":
        candidates = op.operands[:1]
    elif op.name == "loop":
        candidates = op.operands
    else:
        return []
    dying = set(ends.get(position, ()))
    same = invariant_carries(op) if op.name == "loop" else ()
    kept = {op.operands[i] for i in same}
    return [v for v in dict.fromkeys(candidates) if v in dying and v in costs and v not in kept]


def _inside(op: Op, level: _Level) -> _Sweep:
    """What the body of a loop needs beside its carries, those updated in place included."""
    if op.name != "loop":
        return _Sweep()
    (body,) = op.regions
    free = set(body.inputs)
    in_place = {
        inner.result
        for inner in body.ops
        if inner.name == "dynamic_update_slice" and inner.operands[0] in free
    }
    return _sweep(_Level(body, level.default, free | (in_place & set(body.outputs))))


def _values_at_peak(plan: StepPlan, program: str, sweep: _Sweep) -> list[Holding]:
    """The arena values of `program` that are live at its peak; a loop stands for what its body
    holds.
    """
    graph = next(p.graph for p in plan.programs if p.name == program)
    if sweep.position < 0:
        return []
    default = "scratch" if program == "update" else "activations"
    level = _Level(graph, default, set(graph.inputs) | set(graph.outputs))
    ends = _ends(level)
    found = []
    for op in graph.ops[: sweep.position + 1]:
        for value in op.results:
            if ends[value] >= sweep.position and (size := level.cost(op, value)):
                name = f"{program}: {op.name} {value.type}"
                found.append(Holding(name, level.category(op), size, op.loc))
    return found


def check_limit(memory: Footprint, limit_bytes: int, plan: StepPlan) -> None:
    """Raises CapacityError when the peak is above `limit_bytes`: the largest tensors, both numbers,
    what to change.
    """
    if memory.peak_bytes <= limit_bytes:
        return
    lines = [f"{h.name} ({h.category}) {_gib(h.num_bytes)}" for h in memory.largest[:5]]
    largest = memory.largest[0].loc if memory.largest else UNKNOWN_LOC
    raise CapacityError(
        "SW_CAPACITY",
        f"memory per core requires {_gib(memory.peak_bytes)} ({memory.peak_bytes} bytes), "
        f"the limit is {_gib(limit_bytes)} ({limit_bytes} bytes); largest: {'; '.join(lines)}",
        largest,
        _advice(memory, plan),
    )


def _advice(memory: Footprint, plan: StepPlan) -> str:
    """What to change, by the largest category."""
    largest = max(CATEGORIES, key=lambda c: memory.categories[c])
    if largest in ("parameters", "gradients", "optimizer"):
        ways = plan.mesh.get("dp_shard", 1)
        return f"shard the state over more cores: mesh.dp_shard is {ways}"
    if largest == "gathered":
        return "gather less at a time: scan over layers, or set strategy.reshard_after_forward"
    return "use a smaller strategy.micro_batch, more micro-batches, or strategy.remat = full"


def _gib(num_bytes: int) -> str:
    """Bytes as GiB."""
    return f"{num_bytes / 2**30:.3f} GiB"
