"""One function: graph in, regions and tensors out.

Lowering may find that a value needs memory of its own, that an output cannot be written in place,
or that two tasks may not share a region; then it starts again with that knowledge. Every try adds a
fact, so the loop ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiler import hbm
from compiler.ir.types import Graph, Op, Value
from compiler.isa.program import CollectiveCall
from compiler.isa.region import RegionProgram, Tensor, View
from compiler.lower.body import IDENTITY, UPDATES, Body
from compiler.lower.canonical import canonical
from compiler.lower.collective import call_of, source_value
from compiler.lower.emit import ClashError, Emitter
from compiler.lower.group import Budget, Groups
from compiler.lower.scalars import parameter
from compiler.lower.schedule import Slot, schedule
from compiler.lower.space import label
from compiler.lower.storage import Storage
from compiler.lower.task import (
    COLLECTIVE,
    REGISTER,
    NeedsCopyError,
    NeedsScratchError,
    Task,
    unsupported,
)
from compiler.options import DEFAULTS, CompileOptions

ORDINAL_FILE = "#"
"""File name of locations that only hold an op ordinal: compile units carry no user locations."""

MAX_TRIES = 1000

DEFAULT_STRIP_BYTES = 96 * 1024
"""Half of an SBUF partition of NeuronCore-v2 (documented: 192 KiB); the other half is left to
double buffering (our choice).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a function is called: inputs that are registers, with their range, and outputs that take
    over an input's memory.
    """

    parameters: tuple[
        tuple[int, int, int], ...
    ] = ()  # (input number, low, high), register = position here
    aliases: tuple[tuple[int, int], ...] = ()  # (output number, input number)


@dataclass(slots=True, kw_only=True)
class Lowered:
    """A function before tile generation. `inputs` and `outputs` are tensor numbers; counters are
    registers 0, 1, ...
    """

    tensors: list[Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]
    num_registers: int
    regions: list[RegionProgram]
    collectives: list[CollectiveCall]
    scratch_bytes: int


def lower_function(
    graph: Graph,
    signature: Signature = Signature(),
    options: CompileOptions = DEFAULTS,
    strip_bytes: int = DEFAULT_STRIP_BYTES,
) -> Lowered:
    """Lower a loop-free graph. Raises CompileError for what the target cannot do, with the op's
    location.
    """
    graph = canonical(graph, options)
    _check_sizes(graph)
    forced: set[Value] = set()
    apart: set[int] = set()
    for _ in range(MAX_TRIES):
        try:
            return _attempt(graph, signature, strip_bytes, forced, apart)
        except NeedsCopyError as need:
            assert need.value not in forced, "a dense value cannot be expressed"
            forced.add(need.value)
        except NeedsScratchError as need:
            assert need.output >= 0 and need.output not in apart, "an output cannot be stored"
            apart.add(need.output)
    raise AssertionError("lowering does not settle")


def _check_sizes(graph: Graph) -> None:
    """Refuse tensors without elements."""
    for op in graph.ops:
        for value in (*op.operands, *op.results):
            if not value.type.num_elements:
                hint = "remove the empty dim from the model"
                raise unsupported(op, f"requires at least one element, got {value.type}", hint)


def _attempt(
    graph: Graph, signature: Signature, strip_bytes: int, forced: set[Value], apart: set[int]
) -> Lowered:
    counters = {
        graph.inputs[i]: parameter(r, low, high)
        for r, (i, low, high) in enumerate(signature.parameters)
    }
    aliases = {k: graph.inputs[i] for k, i in signature.aliases}
    donated = _donated(graph, {k: v for k, v in aliases.items() if k not in apart})
    body = Body(graph, counters, donated, frozenset(forced))
    inputs = [v for v in graph.inputs if v not in counters]
    storage = Storage(body, inputs, aliases, apart)
    clashes: set[tuple[int, int]] = set()
    while True:
        groups = Groups(body, storage.order, Budget(strip_bytes), storage.must_store, clashes)
        try:
            return _write_out(body, storage, groups, len(counters))
        except ClashError as clash:
            assert clash.pair not in clashes
            clashes.add(clash.pair)
            storage.reset()


def _donated(graph: Graph, aliases: Mapping[int, Value]) -> set[Value]:
    """Results of updates on the way from an input to the output that owns its memory."""
    made = graph.producers()
    found: set[Value] = set()
    for k, owner in aliases.items():
        path: list[Value] = []
        value = graph.outputs[k]
        while value is not owner and value in made and made[value].name in UPDATES | IDENTITY:
            op = made[value]
            path.append(value)
            value = op.operands[op.results.index(value)] if op.name in IDENTITY else op.operands[0]
        if value is owner:
            found.update(path)
    return found


def _write_out(body: Body, storage: Storage, groups: Groups, num_parameters: int) -> Lowered:
    """All regions in order, then scratch offsets."""
    slots = schedule(body, storage.order, groups.members)
    calls: list[CollectiveCall] = []
    number_of: dict[int, int] = {}
    regions: list[RegionProgram] = []
    for slot in slots:
        head = body.tasks[slot.region]
        if head.kind == COLLECTIVE and not slot.wait:
            number_of[slot.region] = len(calls)
            calls.append(call_of(head.op, len(calls)))
        regions.append(_region(body, storage, groups, slot, number_of))
    tensors, scratch_bytes = _place_scratch(storage.tensors, regions)
    return Lowered(
        tensors=tensors,
        inputs=tuple(storage.inputs),
        outputs=tuple(storage.outputs),
        parameters=tuple(range(num_parameters)),
        num_registers=body.num_registers,
        regions=regions,
        collectives=calls,
        scratch_bytes=scratch_bytes,
    )


def _region(
    body: Body, storage: Storage, groups: Groups, slot: Slot, number_of: Mapping[int, int]
) -> RegionProgram:
    task = body.tasks[slot.region]
    if slot.wait:
        attrs = {"collective": number_of[slot.region]}
        return RegionProgram(
            "collective_wait", f"wait.{task.op.name}", attrs=attrs, loc=_ordinal(task.op)
        )
    if task.kind == COLLECTIVE:
        return _start_region(storage, task, number_of[slot.region])
    if task.op.name == REGISTER:
        return _register_region(storage, task)
    members = groups.members[slot.region]
    emitter = Emitter(
        label(body, groups.sorted(members)), storage, lambda t: groups.is_stored(t, set(members))
    )
    return emitter.program(*_title(groups.sorted(members)))


def _title(tasks: Sequence[Task]) -> tuple[str, int]:
    """Name of a region (its most telling ops) and the location ordinal of its first op."""
    names = [t.op.name.removeprefix("lower.") for t in tasks]
    heavy = [n for n in names if n in ("dot_general", "reduce", "gather", "scatter", "exponential")]
    shown = list(dict.fromkeys(heavy or names[-1:]))[:3]
    return "_".join(shown), min(_ordinal(t.op) for t in tasks)


def _ordinal(op: Op) -> int:
    """The ordinal that the driver put in place of the location, -1 when there is none."""
    return op.loc.line if op.loc.file == ORDINAL_FILE else -1


def _start_region(storage: Storage, task: Task, number: int) -> RegionProgram:
    attrs = {
        "collective": number,
        "source": storage.place(source_value(task)).tensor,
        "target": storage.home(task.result).tensor,
    }
    return RegionProgram(
        "collective_start", f"start.{task.op.name}", attrs=attrs, loc=_ordinal(task.op)
    )


def _register_region(storage: Storage, task: Task) -> RegionProgram:
    place, attrs = storage.place(task.data[0]), task.op.attrs
    view = View(place.tensor, place.layout.offset, ())
    fields = {"register": attrs.register, "view": view, "low": attrs.low, "high": attrs.high}
    return RegionProgram(
        "register_load", f"register.{attrs.register}", attrs=fields, loc=_ordinal(task.op)
    )


def _place_scratch(
    tensors: Sequence[Tensor], regions: Sequence[RegionProgram]
) -> tuple[list[Tensor], int]:
    """Scratch tensors with offsets, and the size of the zone."""
    spans = tensor_spans(regions)
    scratch = [i for i, t in enumerate(tensors) if t.kind == "scratch"]
    lifetimes = []
    for i in scratch:
        start, end = spans.get(i, (0, 0))
        size = tensors[i].dtype.bytes * _elements(tensors[i])
        lifetimes.append(hbm.Lifetime(size, start, end))
    offsets, size = hbm.plan(lifetimes)
    problems = hbm.check(lifetimes, offsets, size)
    assert not problems, problems
    placed = list(tensors)
    for i, offset in zip(scratch, offsets, strict=True):
        placed[i] = replace(placed[i], offset_bytes=offset)
    return placed, size


def _elements(tensor: Tensor) -> int:
    count = 1
    for n in tensor.shape:
        count *= n
    return count


def tensor_spans(regions: Sequence[RegionProgram]) -> dict[int, tuple[int, int]]:
    """First and last region that touches each tensor; a collective touches its tensors until it is
    awaited.
    """
    spans: dict[int, tuple[int, int]] = {}
    flying: dict[int, tuple[int, int]] = {}
    for at, region in enumerate(regions):
        touched = [n.attrs["view"].tensor for n in region.nodes if "view" in n.attrs]
        if region.kind == "register_load":
            touched.append(region.attrs["view"].tensor)
        elif region.kind == "collective_start":
            flying[region.attrs["collective"]] = (region.attrs["source"], region.attrs["target"])
            touched += flying[region.attrs["collective"]]
        elif region.kind == "collective_wait":
            touched += flying.pop(region.attrs["collective"])
        for tensor in touched:
            spans[tensor] = (min(spans.get(tensor, (at, at))[0], at), at)
    return spans
