"""Writing a lowered function out: regions in order with their names; scratch offsets at the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.isa.region import Affine, RegionProgram, Tensor, View, tensor_of
from shardwright.compiler.lower.collective import call_of
from shardwright.compiler.lower.emit import Emitter
from shardwright.compiler.lower.excess import keep_wide
from shardwright.compiler.lower.group import Groups
from shardwright.compiler.lower.judge import SPARE, Judge, time_or_inf
from shardwright.compiler.lower.latency import makespan_ps
from shardwright.compiler.lower.schedule import Orders, Slot
from shardwright.compiler.lower.space import label
from shardwright.compiler.lower.storage import Place, Storage
from shardwright.compiler.lower.task import (
    COLLECTIVE,
    ORDINAL_FILE,
    REGISTER,
    NeedsCopyError,
    Task,
)
from shardwright.compiler.schedule import hbm


@dataclass(slots=True, kw_only=True)
class Lowered:
    """A function before tile generation. `inputs` and `outputs` are tensor numbers; counters are
    registers 0, 1, ...

    `flights_ps` say how long each collective is expected to be in flight, `expected_ps` what code
    and collectives take together (infinite without a judge, or without code for a region),
    `stalled_ps` how much of that code waits, and `makespans_ps` what they take in each of `_CASES`.
    """

    tensors: list[Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]
    num_registers: int
    regions: list[RegionProgram]
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


def write_out(groups: Groups, judge: Judge | None = None) -> Lowered:
    """All regions in order; scratch is not placed yet. With a `judge`, in the order in which code
    waits the least for collectives, unless much more is held meanwhile.
    """
    code, orders = _Code(groups), Orders(groups)
    slots = orders.in_program()
    first = _written(code, slots)
    if judge is None:
        return first
    times = code.times(judge)
    _expect(first, slots, times, orders.idle)
    made, most = [first], _held_bytes(first) + judge.limit_bytes // SPARE
    for slots in orders.hiding(times) if math.isfinite(first.expected_ps) else ():
        other = _written(code, slots)
        _expect(other, slots, times, orders.idle)
        if other.is_never_slower(first) and _held_bytes(other) <= most:
            made.append(other)
    return min(made, key=lambda lowered: lowered.expected_ps)


@dataclass(frozen=True, slots=True)
class _Code:
    """What the regions of a function do, each worked out once."""

    groups: Groups
    known: dict[int, RegionProgram] = field(default_factory=dict)

    def of(self, region: int) -> RegionProgram:
        """A region that is no collective."""
        if region not in self.known:
            groups, task = self.groups, self.groups.body.tasks[region]
            if task.op.name == REGISTER:
                self.known[region] = _register_region(groups.storage, task)
            else:
                self.known[region] = region_program(groups, groups.parts[region].members)
        return self.known[region]

    def step(self, slot: Slot, number: int) -> RegionProgram:
        """A step of the function; `number` is that of its collective."""
        task = self.groups.body.tasks[slot.region]
        if slot.wait:
            name, attrs = f"wait.{task.op.name}", {"collective": number}
            return RegionProgram("collective_wait", name, attrs=attrs, loc=_ordinal(task.op))
        if task.kind == COLLECTIVE:
            return _start_region(self.groups.storage, task, number)
        return self.of(slot.region)

    def times(self, judge: Judge) -> dict[int, float]:
        """What every region takes, or a collective in flight; where there is no code, for ever."""
        return {region: self._duration_ps(region, judge) for region in self.groups.parts}

    def _duration_ps(self, region: int, judge: Judge) -> float:
        task = self.groups.body.tasks[region]
        if task.kind == COLLECTIVE:
            return judge.collective_ps(task.op)
        return time_or_inf(judge, self.of(region), self.groups.storage.tensors)


def _written(code: _Code, slots: Sequence[Slot]) -> Lowered:
    """A function in the order of `slots`. Raises the errors that ask for another try: what all
    regions need is asked for at once.
    """
    storage, body = code.groups.storage, code.groups.body
    calls: list[CollectiveCall] = []
    number_of: dict[int, int] = {}
    regions: list[RegionProgram] = []
    needed: list[Value] = []
    for slot in slots:
        head = body.tasks[slot.region]
        if head.kind == COLLECTIVE and not slot.wait:
            number_of[slot.region] = len(calls)
            calls.append(call_of(head, len(calls)))
        try:
            regions.append(code.step(slot, number_of.get(slot.region, -1)))
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
        regions=regions,
        collectives=calls,
        scratch_bytes=0,
    )


def _expect(
    lowered: Lowered, slots: Sequence[Slot], times: Mapping[int, float], idle: Collection[int]
) -> None:
    """Say what a function written in the order of `slots` is expected to take."""
    steps = list(zip(lowered.regions, slots, strict=True))
    started = [slot.region for region, slot in steps if region.kind == "collective_start"]
    spent = [0.0 if "collective" in region.attrs else times[slot.region] for region, slot in steps]
    queues = [call.queue for call in lowered.collectives]
    found = []
    for is_apart, longer in _CASES:
        flights = [times[region] * (longer if region in idle else 1) for region in started]
        served = [(q, is_apart and r in idle) for q, r in zip(queues, started, strict=True)]
        found.append(makespan_ps(lowered.regions, spent, flights, served))
    lowered.flights_ps = [times[region] for region in started]
    lowered.makespans_ps = tuple(found)
    lowered.expected_ps = found[0]
    lowered.stalled_ps = found[0] - sum(spent)


def region_program(groups: Groups, members: Collection[int]) -> RegionProgram:
    """What a compute region of these tasks does. Raises the errors that ask for another try."""
    tasks = groups.tasks(members)
    emitter = Emitter(
        label(groups.body, tasks), groups.storage, lambda t: groups.is_stored(t, members)
    )
    program = emitter.program(title(tasks), min(_ordinal(t.op) for t in tasks))
    return keep_wide(program) if groups.body.excess else program


def title(tasks: Sequence[Task]) -> str:
    """Name of a region: its most telling ops."""
    names = [t.op.name.removeprefix("lower.") for t in tasks]
    heavy = [n for n in names if n in ("dot_general", "reduce", "gather", "scatter", "exponential")]
    shown = list(dict.fromkeys(heavy or names[-1:]))[:3]
    return "_".join(shown)


def _ordinal(op: Op) -> int:
    """The ordinal that the driver put in place of the location, -1 when there is none."""
    return op.loc.line if op.loc.file == ORDINAL_FILE else -1


def _start_region(storage: Storage, task: Task, number: int) -> RegionProgram:
    attrs = {
        "collective": number,
        "source": _run(storage.place(task.data[0])),
        "target": _run(storage.window(task)),
    }
    return RegionProgram(
        "collective_start", f"start.{task.op.name}", attrs=attrs, loc=_ordinal(task.op)
    )


def _run(place: Place) -> int | View:
    """A dense run in memory: a whole tensor, or what is behind an offset in it."""
    offset = place.layout.offset
    return place.tensor if offset == Affine() else View(place.tensor, offset, ())


def _register_region(storage: Storage, task: Task) -> RegionProgram:
    place, attrs = storage.place(task.data[0]), task.op.attrs
    view = View(place.tensor, place.layout.offset, ())
    fields = {"register": attrs.register, "view": view, "low": attrs.low, "high": attrs.high}
    return RegionProgram(
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
    spans, tensors = tensor_spans(lowered.regions), lowered.tensors
    scratch = [i for i, t in enumerate(tensors) if t.kind == "scratch"]
    return scratch, [hbm.Lifetime(tensors[i].num_bytes, *spans.get(i, (0, 0))) for i in scratch]


def tensor_spans(regions: Sequence[RegionProgram]) -> dict[int, tuple[int, int]]:
    """First and last region that touches each tensor; a collective touches its tensors until it is
    awaited.
    """
    spans: dict[int, tuple[int, int]] = {}
    flying: dict[int, list[int]] = {}
    for at, region in enumerate(regions):
        touched = [n.attrs["view"].tensor for n in region.nodes if "view" in n.attrs]
        ends = (region.attrs[name] for name in ("view", "source", "target") if name in region.attrs)
        touched += map(tensor_of, ends)
        if region.kind == "collective_start":
            flying[region.attrs["collective"]] = touched
        elif region.kind == "collective_wait":
            touched = flying.pop(region.attrs["collective"])
        for tensor in touched:
            spans[tensor] = (min(spans.get(tensor, (at, at))[0], at), at)
    return spans
