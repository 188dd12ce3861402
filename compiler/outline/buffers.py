"""Memory of a program: which HBM buffer every value between functions lives in, and when.

Updates of named buffers and of loop carries happen in place when the old value is dead by then;
otherwise the new value is made apart and copied at the end of the level. The result is calls over
numbered buffers, with lifetimes for the arena (`linking/placement.py` places them).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.ir.analysis import structure
from shardwright.compiler.ir.build import subgraph
from shardwright.compiler.ir.facts import behind
from shardwright.compiler.ir.memories import host_values
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops.host import HOST, STORE
from shardwright.compiler.ir.traits import IDENTITIES, UPDATES
from shardwright.compiler.ir.types import Graph, TensorType, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import Call, ProgramBuffer, Repeat, calls_of
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.outline.cut import Level, LoopStep, Piece, Step, cut_program
from shardwright.compiler.outline.rotation import Turn, Turns, rotation_of, substituted, turns
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.program import StepProgram
from shardwright.compiler.schedule import hbm
from shardwright.compiler.steps import within
from shardwright.compiler.support.intervals import Interval


@dataclass(slots=True, kw_only=True)
class OutlinedProgram:
    """A program as calls of units, its arena not placed yet. `functions` are keys of `units`; calls
    name them by position."""

    name: str
    functions: list[str]
    buffers: list[ProgramBuffer]
    steps: tuple[Call | Repeat, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lifetimes: dict[int, hbm.Lifetime]
    """When arena buffers are in use, by their number."""
    positions: list[int]
    """Where each call stands among them, in program order, bodies of loops once."""

    @property
    def bound_bytes(self) -> int:
        """Bytes that values between functions need: no plan needs less."""
        return hbm.liveness_bound([*self.lifetimes.values()])

    def most_beside(self, key: str) -> int:
        """The most bytes that values hold during a call of a function, beside its scratch zone."""
        number, lives = self.functions.index(key), [*self.lifetimes.values()]
        calls = zip(calls_of(self.steps), self.positions, strict=True)
        return max(hbm.live_bytes(lives, at) for call, at in calls if call.function == number)


@dataclass(slots=True)
class _Buffer:
    """A buffer under planning; positions count emitted calls."""

    name: str
    type: TensorType
    on_host: bool = False
    first: int = -1
    last: int = -1


@dataclass(slots=True)
class _Frame:
    """What is known while one level is laid out."""

    level: Level
    place: dict[Value, int]
    defined: dict[Value, int] = field(default_factory=dict)
    reads: dict[Value, list[int]] = field(default_factory=dict)
    claims: dict[Value, int] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)
    held: dict[int, list[Value]] = field(default_factory=dict)  # inputs of the level by buffer


def outline_program(
    program: StepProgram, units: dict[str, Unit], ranges: Mapping[str, Interval]
) -> OutlinedProgram:
    """Cut `program` and lay it out; new units are added to `units` by key. `ranges` are what
    integer buffers stay in.
    """
    layout = _Layout(units)
    inputs = list(zip(program.inputs, program.graph.inputs, strict=True))
    outputs = list(zip(program.outputs, program.graph.outputs, strict=True))
    numbers = {v: ranges[name] for name, v in inputs if name in ranges}
    with within(f"programs/{program.name}"):
        level = cut_program(program.graph, program.name, numbers)
    named: dict[str, int] = {}
    hosted = host_values(program.graph)
    for name, value in (*inputs, *outputs):
        if name not in named:
            named[name] = layout.new_buffer(value.type, name, value in hosted)
    place = {v: named[name] for name, v in inputs}
    steps = layout.level(level, place, [named[n] for n in program.outputs])
    return OutlinedProgram(
        name=program.name,
        functions=layout.functions,
        buffers=[_finished(buffer) for buffer in layout.buffers],
        steps=tuple(steps),
        inputs=program.inputs,
        outputs=program.outputs,
        lifetimes={
            number: hbm.Lifetime(buffer.type.num_bytes, buffer.first, buffer.last)
            for number, buffer in enumerate(layout.buffers)
            if not buffer.name and buffer.first >= 0
        },
        positions=layout.positions,
    )


def _finished(buffer: _Buffer) -> ProgramBuffer:
    kind = "arena"
    if buffer.name:
        kind = HOST if buffer.on_host else "named"
    return ProgramBuffer(buffer.name, buffer.type.shape, buffer.type.dtype, kind)


class _Layout:
    """Lays levels out: buffers, calls, lifetimes."""

    def __init__(self, units: dict[str, Unit]) -> None:
        self.units = units
        self.functions: list[str] = []
        self._numbers: dict[Hashable, int] = {}
        self.buffers: list[_Buffer] = []
        self.positions: list[int] = []  # of calls
        self._position = 0
        self._counters: dict[int, Affine] = {}

    def new_buffer(self, type: TensorType, name: str = "", on_host: bool = False) -> int:
        """Number of a new buffer; arena space when it has no name."""
        self.buffers.append(_Buffer(name, type, on_host))
        return len(self.buffers) - 1

    def level(
        self, level: Level, place: Mapping[Value, int], requests: Sequence[int | None]
    ) -> list[Call | Repeat]:
        """Calls of one level. `place` binds its inputs; `requests[k]` is where output `k` must end
        up (None: anywhere).
        """
        frame = _Frame(level, dict(place))
        _note_uses(frame)
        for value, target in zip(level.outputs, requests, strict=True):
            if target is not None:
                self._claim(frame, value, target)
        steps: list[Call | Repeat] = []
        for number, step in enumerate(level.steps):
            if isinstance(step, Piece):
                steps.append(self._piece(frame, step))
            else:
                steps += self._loop(frame, step, number)
        return steps + self._final_copies(frame, requests)

    def _claim(self, frame: _Frame, value: Value, target: int) -> None:
        """Let `value` be made in `target` if what is there before is dead by then."""
        if target not in frame.claimed and self._may_take(frame, value, target):
            frame.claimed.add(target)
            self._take(frame, value, target)

    def _may_take(self, frame: _Frame, value: Value, target: int) -> bool:
        """True when nothing reads what `target` holds after the step that makes `value`."""
        at = frame.defined.get(value)
        if at is None or value in frame.claims:
            return False
        step = frame.level.steps[at]
        operand = _first_value(step, value)
        for old in frame.held.get(target, ()):
            for read in frame.reads.get(old, ()):
                looped = read == at and isinstance(step, LoopStep)
                if read > at or (looped and not _only_carry(step, old, operand)):
                    return False
        return True

    def _take(self, frame: _Frame, value: Value, target: int) -> None:
        """Make `value` in `target`, and what is in its memory at first too, so that no copy is
        needed. In a body that goes on element by element: outside of loops equal layers are one
        function only where all of them have memory of their own, or none.
        """
        frame.claims[value] = target
        at = frame.defined[value]
        operand = _first_value(frame.level.steps[at], value, frame.level.is_body)
        if operand is None or operand in frame.held.get(target, ()):
            return
        if _dies_here(frame, operand, at) and self._may_take(frame, operand, target):
            self._take(frame, operand, target)

    def _claimed(self, frame: _Frame, value: Value) -> int:
        """Where `value` is made: in the buffer it claims, or in new space."""
        target = frame.claims.get(value)
        return self.new_buffer(value.type) if target is None else target

    def _piece(self, frame: _Frame, piece: Piece) -> Call:
        for value in piece.outputs:
            frame.place[value] = self._claimed(frame, value)
        inputs = [frame.place[v] for v in piece.inputs]
        return self._call(piece, inputs, [frame.place[v] for v in piece.outputs])

    def _call(self, piece: Piece, inputs: Sequence[int], outputs: Sequence[int]) -> Call:
        """A call of the unit of `piece`; outputs in the buffer of an input are aliases."""
        assert piece.graph is not None
        self._check_memories(piece.graph, inputs, outputs)
        aliases = tuple((k, inputs.index(b)) for k, b in enumerate(outputs) if b in inputs)
        scalars = enumerate((known for _, known in piece.scalars), len(piece.inputs))
        parameters = tuple((i, known.low, known.high) for i, known in scalars)
        numbers = [(i, v) for i, v in enumerate(piece.inputs) if v in piece.ranges]
        ranges = tuple((i, *piece.ranges[v]) for i, v in numbers)
        signature = Signature(parameters=parameters, aliases=aliases, ranges=ranges)
        unit = Unit(piece.name, piece.graph, signature)
        self._touch((*inputs, *outputs))
        values = tuple(substituted(known.value, self._counters) for _, known in piece.scalars)
        return Call(self._function(unit), tuple(inputs), tuple(outputs), values)

    def _check_memories(self, graph: Graph, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """What is on the host inside of a function is a named buffer there outside.

        Raises CompileError for residuals of a step that is not cut, and for a copy of them.
        """
        hosted = host_values(graph)
        bound = (
            *zip(graph.inputs, inputs, strict=False),
            *zip(graph.outputs, outputs, strict=True),
        )
        for value, number in bound:
            if (value in hosted) != self.buffers[number].on_host:
                raise CompileError(
                    "SW_HOST_VALUE",
                    "host memory requires what only forward writes and only backward reads, got"
                    f" {value.type} that is used otherwise",
                    hint="move residuals alone, with an offload policy of jax.checkpoint, in a step"
                    " that can be cut into forward and backward",
                )

    def _function(self, unit: Unit) -> int:
        """The number of a function of this program; of equal ones only the first is packed."""
        what = (structure(unit.graph), unit.signature)
        number = self._numbers.get(what)
        if number is None:
            self.units.setdefault(unit.key, unit)
            if unit.key not in self.functions:
                self.functions.append(unit.key)
            number = self._numbers[what] = self.functions.index(unit.key)
        return number

    def _touch(self, buffers: Sequence[int]) -> None:
        """Note that the next call uses these buffers."""
        for number in buffers:
            buffer = self.buffers[number]
            buffer.first = self._position if buffer.first < 0 else buffer.first
            buffer.last = self._position
        self.positions.append(self._position)
        self._position += 1

    def _copy(self, source: int, target: int, type: TensorType) -> Call:
        value = Value(type)
        graph = subgraph([value], [], [value])
        return self._call(Piece([], [value], [value], graph=graph, name="copy"), [source], [target])

    def _loop(self, frame: _Frame, step: LoopStep, number: int) -> list[Call | Repeat]:
        steps: list[Call | Repeat] = []
        place: dict[int, int] = {}
        for i in step.invariant:
            place[i] = self._source(frame, step.operands[i], steps)
        for i in step.carried:
            place[i] = self._start_carry(frame, step, i, number, steps)
        rotation = rotation_of(step)
        results = step.op.results
        spare = {i: self.new_buffer(results[i].type) for i in rotation.made}
        found = turns(rotation, place, spare, step.op.attrs.trip)
        start, outer = self._position, len(self.buffers)
        steps += self._turns(step, found)
        self._extend(start, outer)
        frame.place.update((results[i], found.after[i]) for i in step.carried)
        moved = {found.after[i]: results[i] for i in rotation.moved}
        frame.claims = {
            v: target for v, target in frame.claims.items() if moved.get(target, v) is v
        }  # where a carry has moved to, nothing else can be made
        return steps

    def _turns(self, step: LoopStep, found: Turns) -> list[Call | Repeat]:
        """The turns of a loop; the counter of each is where it lies in the loop."""
        steps: list[Call | Repeat] = []
        for at, turn in enumerate(found.first):
            steps += self._turn(step, turn, Affine(at))
        begin, period = len(found.first), len(found.repeated)
        if found.count:
            counter = Affine(begin, ((step.counter, period),))
            body: list[Call | Repeat] = []
            for at, turn in enumerate(found.repeated):
                body += self._turn(step, turn, counter + at)
            steps.append(Repeat(step.counter, found.count, tuple(body)))
        for at, turn in enumerate(found.last, begin + found.count * period):
            steps += self._turn(step, turn, Affine(at))
        return steps

    def _turn(self, step: LoopStep, turn: Turn, counter: Affine) -> list[Call | Repeat]:
        """One pass through the body of a loop."""
        body = step.op.regions[0]
        inner = {body.inputs[i]: turn.before[i] for i in (*step.invariant, *step.carried)}
        requests: list[int | None] = [None] * len(body.outputs)
        for i in step.carried:
            requests[i] = turn.request(i)
        self._counters[step.counter] = counter
        steps = self.level(step.level, inner, requests)
        self._position += 1
        return steps

    def _start_carry(
        self, frame: _Frame, step: LoopStep, i: int, number: int, steps: list[Call | Repeat]
    ) -> int:
        """The buffer of carry `i`, holding its first value."""
        result = step.op.results[i]
        if i in step.makers:
            target = self._claimed(frame, result)
            maker = step.makers[i]
            if maker is not None:
                steps.append(self._call(maker, [], [target]))
            return target
        source = self._source(frame, step.operands[i], steps)
        target = self._carry_buffer(frame, step, i, number, source)
        if source != target:
            steps.append(self._copy(source, target, result.type))
        return target

    def _extend(self, start: int, outer: int) -> None:
        """Buffers from outside of a loop that it touches are in use for all of it."""
        for buffer in self.buffers[:outer]:
            if buffer.last >= start:
                buffer.first = min(buffer.first, start)
                buffer.last = self._position
        self._position += 1

    def _carry_buffer(self, frame: _Frame, step: LoopStep, i: int, number: int, source: int) -> int:
        """Where a carry lives: where it must end up, where its first value already is, or new
        space.
        """
        operand, result = step.operands[i], step.op.results[i]
        mine = operand in frame.defined and operand not in frame.claims
        if result not in frame.claims and mine and _dies_here(frame, operand, number):
            return source
        return self._claimed(frame, result)

    def _source(self, frame: _Frame, value: Value, steps: list[Call | Repeat]) -> int:
        """The buffer of `value`; a counter or number that is wanted in memory is stored first."""
        if value not in frame.place:
            known = frame.level.known[value]
            scalar = Value(value.type)
            graph = subgraph([scalar], [], [scalar])
            piece = Piece([], [], [value], [(scalar, known)], graph, "counter")
            frame.place[value] = self.new_buffer(value.type)
            steps.append(self._call(piece, [], [frame.place[value]]))
        return frame.place[value]

    def _final_copies(self, frame: _Frame, requests: Sequence[int | None]) -> list[Call | Repeat]:
        """Bring outputs that were not made in place to where they belong.

        What sits in memory that another copy overwrites is saved first.
        """
        steps: list[Call | Repeat] = []
        missing: list[tuple[int, int, TensorType]] = []
        for value, target in zip(frame.level.outputs, requests, strict=True):
            if target is None:
                continue
            source = self._source(frame, value, steps)
            if source != target:
                missing.append((source, target, value.type))
        overwritten = {target for _, target, _ in missing}
        for i, (source, target, type) in enumerate(missing):
            if source in overwritten:
                saved = self.new_buffer(type)
                steps.append(self._copy(source, saved, type))
                missing[i] = (saved, target, type)
        return steps + [self._copy(*copy) for copy in missing]


def _first_value(step: Step, value: Value, in_place: bool = False) -> Value | None:
    """What is in the memory of a value of `step` at first: what a carry starts with, the tensor of
    which a piece overwrites slices, or, `in_place`, one that it makes `value` of element by
    element; None: nothing.
    """
    if isinstance(step, LoopStep):
        return step.operands.get(step.op.results.index(value))
    assert step.graph is not None
    made, at = step.graph.producers(), step.graph.outputs[step.outputs.index(value)]
    given = dict(zip(step.graph.inputs, step.inputs, strict=False))
    at = behind(at, made, lambda op: op.name in UPDATES or op.name == STORE)
    if at in given or not in_place or at not in made or not OPS[made[at].name].elementwise:
        return given.get(at)
    read = (behind(v, made, lambda op: op.name in IDENTITIES) for v in made[at].operands)
    return next((given[v] for v in read if v in given and v.type == value.type), None)


def _note_uses(frame: _Frame) -> None:
    """Where every value is made and read, and what is in memory before the first step; outputs are
    read after the last.
    """
    for value, buffer in frame.place.items():
        frame.held.setdefault(buffer, []).append(value)
    for number, step in enumerate(frame.level.steps):
        for value in step.inputs:
            frame.reads.setdefault(value, []).append(number)
        frame.defined |= dict.fromkeys(step.outputs, number)
    for value in frame.level.outputs:
        frame.reads.setdefault(value, []).append(len(frame.level.steps))


def _dies_here(frame: _Frame, value: Value, number: int) -> bool:
    """True when nothing reads `value` after step `number`, and that step reads it once."""
    reads = frame.reads.get(value, [])
    return reads.count(number) == 1 and max(reads) == number


def _only_carry(step: Step, old: Value, operand: Value | None) -> bool:
    """True when the loop reads `old` only as the first value of the carry that takes its place."""
    return old is operand and step.inputs.count(old) == 1
