"""Writing a lowered function out: kernels in order with their names; scratch offsets at the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor, View, tensor_of
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.lower.collective import call_of
from shardwright.compiler.lower.cost_oracle import SPARE, CostOracle, time_or_inf
from shardwright.compiler.lower.emit import Emitter
from shardwright.compiler.lower.excess_precision import keep_wide
from shardwright.compiler.lower.group import Groups
from shardwright.compiler.lower.latency import makespan_ps
from shardwright.compiler.lower.schedule import Orders, Slot
from shardwright.compiler.lower.space import index_space
from shardwright.compiler.lower.storage import Place, Storage
from shardwright.compiler.lower.task import COLLECTIVE, ORDINAL_FILE, REGISTER, NeedsCopyError, Task
from shardwright.compiler.schedule import hbm


@dataclass(slots=True, kw_only=True)
class Lowered:
    """A function before tile generation. `inputs` and `outputs` are tensor numbers; counters are
    registers 0, 1, ...

    `flights_ps` say how long each collective is expected to be in flight, `expected_ps` what code
    and collectives take together (infinite without an oracle, or without code for a kernel),
    `stalled_ps` how much of that code waits, and `makespans_ps` what they take in each of `_CASES`.
    """

    tensors: list[Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]
    num_registers: int
    kernels: list[KernelProgram]
    collectives: list[CollectiveCall]
    scratch_bytes: int
    flights_ps: Sequence[float] = ()
    expected_ps: float = math.inf
    stalled_ps: float = 0.0
    makespans_ps: tuple[float, ...] = ()

    def is_never_slower(self, other: Lowered) -> bool:
        """Whether it takes no longer in any of `_CASES`."""
        return all(a <= b for a, b in zip(self.makespans_ps, other.makespans_ps, strict=True))


_CASES = tuple(product((False, True), (1, 3, 10)))
"""What is not known of a run where code is made, as (a stream of their own for collectives of other
layers, how many times as long these take): groups may lie far apart, and share their links. The
first is what is expected; another order or cut has to be no slower in any (our choice).
"""


def write_out(groups: Groups, oracle: CostOracle | None = None) -> Lowered:
    """All kernels in order; scratch is not placed yet. With an `oracle`, in the order in which code
    waits the least for collectives, unless much more is held meanwhile.
    """
    code, orders = _Code(groups), Orders(groups)
    slots = orders.in_program()
    first = _written(code, slots)
    if oracle is None:
        return first
    times = code.times(oracle)
    _expect(first, slots, times, orders.idle)
    made, most = [first], _held_bytes(first) + oracle.limit_bytes // SPARE
    for slots in orders.hiding(times) if math.isfinite(first.expected_ps) else ():
        other = _written(code, slots)
        _expect(other, slots, times, orders.idle)
        if other.is_never_slower(first) and _held_bytes(other) <= most:
            made.append(other)
    return min(made, key=lambda lowered: lowered.expected_ps)


@dataclass(frozen=True, slots=True)
class _Code:
    """What the kernels of a function do, each worked out once."""

    groups: Groups
    known: dict[int, KernelProgram] = field(default_factory=dict)

    def of(self, kernel: int) -> KernelProgram:
        """A kernel that is no collective."""
        if kernel not in self.known:
            groups, task = self.groups, self.groups.body.tasks[kernel]
            if task.op.name == REGISTER:
                self.known[kernel] = _register_kernel(groups.storage, task)
            else:
                self.known[kernel] = kernel_program(groups, groups.parts[kernel].members)
        return self.known[kernel]

    def step(self, slot: Slot, number: int) -> KernelProgram:
        """A step of the function; `number` is that of its collective."""
        task = self.groups.body.tasks[slot.kernel]
        if slot.wait:
            name, attrs = f"wait.{task.op.name}", {"collective": number}
            return KernelProgram("collective_wait", name, attrs=attrs, loc=_ordinal(task.op))
        if task.kind == COLLECTIVE:
            return _start_kernel(self.groups.storage, task, number)
        return self.of(slot.kernel)

    def times(self, oracle: CostOracle) -> dict[int, float]:
        """What every kernel takes, or a collective in flight; where there is no code, for ever."""
        return {kernel: self._duration_ps(kernel, oracle) for kernel in self.groups.parts}

    def _duration_ps(self, kernel: int, oracle: CostOracle) -> float:
        task = self.groups.body.tasks[kernel]
        if task.kind == COLLECTIVE:
            return oracle.collective_ps(task.op)
        return time_or_inf(oracle, self.of(kernel), self.groups.storage.tensors)


def _written(code: _Code, slots: Sequence[Slot]) -> Lowered:
    """A function in the order of `slots`. Raises the errors that ask for another try: what all
    kernels need is asked for at once.
    """
    storage, body = code.groups.storage, code.groups.body
    calls: list[CollectiveCall] = []
    number_of: dict[int, int] = {}
    kernels: list[KernelProgram] = []
    needed: list[Value] = []
    for slot in slots:
        head = body.tasks[slot.kernel]
        if head.kind == COLLECTIVE and not slot.wait:
            number_of[slot.kernel] = len(calls)
            calls.append(call_of(head, len(calls)))
        try:
            kernels.append(code.step(slot, number_of.get(slot.kernel, -1)))
        except NeedsCopyError as need:
            needed += need.values
    if needed:
        raise NeedsCopyError(*dict.fromkeys(needed))
    return Lowered(
        tensors=list(storage.tensors),
        inputs=tuple(storage.inputs),
        outputs=tuple(storage.outputs),
        parameters=tuple(range(body.num_parameters)),
        num_registers=body.num_registers,
        kernels=kernels,
        collectives=calls,
        scratch_bytes=0,
    )


def _expect(
    lowered: Lowered, slots: Sequence[Slot], times: Mapping[int, float], idle: Collection[int]
) -> None:
    """Say what a function written in the order of `slots` is expected to take."""
    steps = list(zip(lowered.kernels, slots, strict=True))
    started = [slot.kernel for kernel, slot in steps if kernel.kind == "collective_start"]
    spent = [0.0 if "collective" in kernel.attrs else times[slot.kernel] for kernel, slot in steps]
    queues = [call.queue for call in lowered.collectives]
    found = []
    for is_apart, longer in _CASES:
        flights = [times[kernel] * (longer if kernel in idle else 1) for kernel in started]
        served = [(q, is_apart and k in idle) for q, k in zip(queues, started, strict=True)]
        found.append(makespan_ps(lowered.kernels, spent, flights, served))
    lowered.flights_ps = [times[kernel] for kernel in started]
    lowered.makespans_ps = tuple(found)
    lowered.expected_ps = found[0]
    lowered.stalled_ps = found[0] - sum(spent)


def kernel_program(groups: Groups, members: Collection[int]) -> KernelProgram:
    """What a compute kernel of these tasks does. Raises the errors that ask for another try."""
    tasks = groups.tasks(members)
    emitter = Emitter(
        index_space(groups.body, tasks), groups.storage, lambda t: groups.is_stored(t, members)
    )
    program = emitter.program(title(tasks), min(_ordinal(t.op) for t in tasks))
    return keep_wide(program) if groups.body.excess_precision else program


def title(tasks: Sequence[Task]) -> str:
    """Name of a kernel: its most telling ops."""
    names = [t.op.name.removeprefix("lower.") for t in tasks]
    heavy = [n for n in names if n in ("dot_general", "reduce", "gather", "scatter", "exponential")]
    shown = list(dict.fromkeys(heavy or names[-1:]))[:3]
    return "_".join(shown)


def _ordinal(op: Op) -> int:
    """The ordinal that the driver put in place of the location, -1 when there is none."""
    return op.loc.line if op.loc.file == ORDINAL_FILE else -1


def _start_kernel(storage: Storage, task: Task, number: int) -> KernelProgram:
    attrs = {
        "collective": number,
        "source": _run(storage.place(task.data[0])),
        "target": _run(storage.window(task)),
    }
    return KernelProgram(
        "collective_start", f"start.{task.op.name}", attrs=attrs, loc=_ordinal(task.op)
    )


def _run(place: Place) -> int | View:
    """A dense run in memory: a whole tensor, or what is behind an offset in it."""
    offset = place.layout.offset
    return place.tensor if offset == Affine() else View(place.tensor, offset, ())


def _register_kernel(storage: Storage, task: Task) -> KernelProgram:
    place, attrs = storage.place(task.data[0]), task.op.attrs
    view = View(place.tensor, place.layout.offset, ())
    fields = {"register": attrs.register, "view": view, "low": attrs.low, "high": attrs.high}
    if attrs.replicated is not None:
        fields["replicated"] = attrs.replicated
    return KernelProgram(
        "register_load", f"register.{attrs.register}", attrs=fields, loc=_ordinal(task.op)
    )


def place_scratch(lowered: Lowered) -> None:
    """Give scratch tensors their offsets, and the function the size of the zone."""
    scratch, lifetimes = _lifetimes(lowered)
    offsets, lowered.scratch_bytes = hbm.plan(lifetimes)
    placed = list(lowered.tensors)
    for i, offset in zip(scratch, offsets, strict=True):
        placed[i] = replace(placed[i], offset_bytes=offset)
    lowered.tensors = placed


def _held_bytes(lowered: Lowered) -> int:
    """Scratch in use at once, at most: no zone is smaller."""
    return hbm.liveness_bound(_lifetimes(lowered)[1])


def _lifetimes(lowered: Lowered) -> tuple[list[int], list[hbm.Lifetime]]:
    """The scratch tensors by number, and when they are in use."""
    spans, tensors = tensor_spans(lowered.kernels), lowered.tensors
    scratch = [i for i, t in enumerate(tensors) if t.kind == "scratch"]
    return scratch, [hbm.Lifetime(tensors[i].num_bytes, *spans.get(i, (0, 0))) for i in scratch]


def tensor_spans(kernels: Sequence[KernelProgram]) -> dict[int, tuple[int, int]]:
    """First and last kernel that touches each tensor, collectives until they are awaited."""
    spans: dict[int, tuple[int, int]] = {}
    flying: dict[int, list[int]] = {}
    for at, kernel in enumerate(kernels):
        touched = [n.attrs["view"].tensor for n in kernel.nodes if "view" in n.attrs]
        ends = (kernel.attrs[name] for name in ("view", "source", "target") if name in kernel.attrs)
        touched += map(tensor_of, ends)
        if kernel.kind == "collective_start":
            flying[kernel.attrs["collective"]] = touched
        elif kernel.kind == "collective_wait":
            touched = flying.pop(kernel.attrs["collective"])
        for tensor in touched:
            spans[tensor] = (min(spans.get(tensor, (at, at))[0], at), at)
    return spans
