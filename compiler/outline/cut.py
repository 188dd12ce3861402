"""Cutting a program's graph: loops, and the pieces of straight-line code between them.

Every level of the graph (the program, then each loop body) is cut at its loops; what lies between
is cut further where it repeats (`pieces.py`). Views, constants and everything made of them and of
loop counters are cloned into each function that uses them, so only real tensors cross. Which memory
those live in is decided by `buffers.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from shardwright.compiler.ir.analysis import structure
from shardwright.compiler.ir.build import cloned, subgraph
from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.facts import operands_of, places_of
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import ConstantAttrs, ReshapeAttrs
from shardwright.compiler.ir.ops.host import EMPTY
from shardwright.compiler.ir.traits import ALIASING, IDENTITIES, LITERALS, UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.lower.positions import Positions
from shardwright.compiler.outline import pieces
from shardwright.compiler.outline.live_ranges import shrink_live_ranges
from shardwright.compiler.outline.overwritten import Slices, is_read, slices_of, written
from shardwright.compiler.outline.sink import sink_invariants
from shardwright.compiler.passes.ranges import integer_ranges
from shardwright.compiler.passes.scalars import Known, known_scalars, parameter
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.compiler.rewriting.specs import NO_RANKS
from shardwright.compiler.support.intervals import Interval
from shardwright.compiler.support.walks import answered

BITCASTS = IDENTITIES | {"reshape"}
_PURE = LITERALS | ALIASING | {EMPTY}
_OWN = -1
"""The register of a loop's counter where only its own iterations are looked at."""


@dataclass(slots=True, eq=False)
class Piece:
    """A call to be: ops, and the values that cross its boundary (bases, not views). `scalars` are
    its register inputs, `ranges` what those of its inputs stay in that masks depend on.
    """

    ops: list[Op]
    inputs: list[Value]
    outputs: list[Value]
    scalars: list[tuple[Value, Known]] = field(default_factory=list)
    graph: Graph | None = None
    name: str = ""
    ranges: dict[Value, Interval] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class LoopStep:
    """A loop: `invariant` carries pass through, `carried` ones own memory, `counter` is the program
    register.
    """

    op: Op
    level: Level
    counter: int
    invariant: list[int]
    carried: list[int]
    operands: dict[int, Value]  # carry -> base of its operand (invariant and carried ones)
    makers: dict[int, Piece | None]
    """Carries whose first value is made of constants: how to make it in place, None when nothing
    reads it."""

    @property
    def inputs(self) -> list[Value]:
        """What it reads of the level."""
        return list(self.operands.values())

    @property
    def outputs(self) -> list[Value]:
        """What it makes."""
        return [self.op.results[i] for i in self.carried]


Step = Piece | LoopStep


@dataclass(slots=True, eq=False)
class Level:
    """One graph level, cut: steps in order, bases of the inputs and outputs; whether it is the body
    of a loop.
    """

    graph: Graph
    steps: list[Step]
    outputs: list[Value]
    known: dict[Value, Known]
    is_body: bool


SINK_INVARIANTS = Rewrite(
    "sink_invariants",
    sink_invariants,
    "light constants that a loop only reads are made inside of it",
    keeps=(NO_RANKS,),
)

SHRINK_LIVE_RANGES = Rewrite(
    "shrink_live_ranges",
    shrink_live_ranges,
    "less waits in memory while a loop inside a loop runs",
)


def cut_program(graph: Graph, name: str, numbers: Mapping[Value, Interval]) -> Level:
    """Cut a program; functions are named after it, those of its loops `name.loop`. `numbers` are
    what inputs stay in.
    """
    sunk = SHRINK_LIVE_RANGES(SINK_INVARIANTS(graph, integer_ranges(graph, numbers)))
    return _Cutter(sunk, {}, integer_ranges(sunk, numbers), count(), name).level()


class _Cutter:
    """Cuts one level.

    `registers` are inputs that are affine in program registers, `ranges` what integers of the
    program stay in; output `ignored` (a loop's own counter) is not computed; what repeats in a
    `whole` level is not cut.
    """

    def __init__(
        self,
        graph: Graph,
        registers: Mapping[Value, Known],
        ranges: Mapping[Value, Interval],
        counters: Iterator[int],
        name: str,
        ignored: int = -1,
        whole: bool = False,
    ) -> None:
        self.graph = graph
        self.whole = whole
        self.ignored = ignored
        self.name = name
        self.counters = counters
        self.known = known_scalars(graph, registers)
        self.ranges = ranges
        self.positions = Positions(graph, ranges)
        self.producers = graph.producers()
        self.users = graph.uses()
        self.through: dict[Value, Value] = {}
        self._note_loop_results()
        self.free = self._free_values()
        self.demanded = self._demanded()
        self.cheap = self._cheap_ops()
        self._bases: dict[Value, tuple[Value, ...]] = {}
        self._structures: dict[Hashable, int] = {}

    def _note_loop_results(self) -> None:
        """Results of invariant carries are their operands; the final count is a number."""
        for op in self.graph.ops:
            if not op.regions:
                continue
            body = op.regions[0]
            for i, result in enumerate(op.results):
                if i == op.attrs.induction:
                    self.known[result] = Known(Affine(op.attrs.trip), op.attrs.trip, op.attrs.trip)
                elif body.inputs[i] is body.outputs[i] or not op.attrs.trip:
                    self.through[result] = op.operands[i]

    def _demanded(self) -> set[Value]:
        """Values that must be in memory: outputs and loop operands, behind bitcasts."""
        wanted = [v for i, v in enumerate(self.graph.outputs) if i != self.ignored]
        for op in self.graph.ops:
            if op.regions:
                wanted += [v for i, v in enumerate(op.operands) if self._needs_memory(op, i)]
        return {self.bitcast_base(v) for v in wanted}

    def _needs_memory(self, op: Op, i: int) -> bool:
        """False for the counter, invariant scalars that are affine in registers, and first values
        made in place.
        """
        body = op.regions[0]
        if i == op.attrs.induction or not op.attrs.trip or _is_unused(body, i):
            return False
        known = self.known if body.inputs[i] is body.outputs[i] else self.free
        return op.operands[i] not in known

    def _free_values(self) -> set[Value]:
        """Values made of constants, counts and counters alone."""
        free: set[Value] = {v for v in self.graph.inputs if v in self.known}
        for op in self.graph.ops:
            if op.regions:
                continue
            pure = op.name in _PURE or OPS[op.name].elementwise
            if op.name in IDENTITIES:
                free.update(r for r, v in zip(op.results, op.operands, strict=True) if v in free)
            elif pure and all(v in free or v in self.known for v in op.operands):
                free.update(op.results)
        return free

    def bitcast_base(self, value: Value) -> Value:
        """The value whose bytes `value` is, through reshapes, barriers and invariant carries."""
        while True:
            op = self.producers.get(value)
            if value in self.through:
                value = self.through[value]
            elif op is not None and op.name in BITCASTS:
                value = op.operands[op.results.index(value)]
            else:
                return value

    def _cheap_ops(self) -> set[Op]:
        """Ops that are cloned into their users: views, and what makes free values and masks."""
        cheap: set[Op] = set()
        made = self.free | self.positions.wanted
        for op in self.graph.ops:
            if op.regions or any(r in self.demanded for r in op.results):
                continue
            starts = places_of(op)
            view = op.name in ALIASING and all(v in self.free or v in self.known for v in starts)
            if view or all(r in made for r in op.results):
                cheap.add(op)
        return cheap

    def bases(self, value: Value) -> tuple[Value, ...]:
        """Values computed at this level (or inputs of it) that `value` is made of through cheap
        ops.
        """
        return answered(value, self._bases, self.behind, self._find_bases)

    def behind(self, value: Value, free: Collection[Value] = ()) -> tuple[Value, ...]:
        """What a value is made of through one cheap op, or an op that makes `free` ones."""
        if value in self.known:
            return ()
        if value in self.through:
            return (self.through[value],)
        op = self.maker(value, free)
        return () if op is None else operands_of(op, value)

    def maker(self, value: Value, free: Collection[Value] = ()) -> Op | None:
        """The cheap op that makes `value`, or any op of a `free` one."""
        op = self.producers.get(value)
        return op if op in self.cheap or value in free else None

    def _find_bases(self, value: Value) -> tuple[Value, ...]:
        if value in self.known:
            return ()
        if value not in self.through and self.maker(value) is None:
            return (value,)
        return tuple(dict.fromkeys(b for v in self.behind(value) for b in self._bases[v]))

    def level(self) -> Level:
        """The cut level."""
        outputs = [self.bitcast_base(v) for v in self.graph.outputs]
        leaving = frozenset(outputs)
        parts = self._parts()
        users = self._users(parts)
        steps: list[Step] = []
        for number, part in enumerate(parts):
            if isinstance(part, Op):
                steps.append(self._loop(part))
            else:
                steps.append(self._piece(part, number, users, leaving))
        kept = [s for s in steps if isinstance(s, LoopStep) or s.outputs]
        return Level(self.graph, kept, outputs, self.known, is_body=self.ignored >= 0)

    def _parts(self) -> list[Op | list[Op]]:
        """Loops, and the pieces of the stretches between them, in order."""
        parts: list[Op | list[Op]] = []
        stretch: list[Op] = []
        for op in (*self.graph.ops, None):
            if op is not None and not op.regions:
                wanted = any(r in self.demanded for r in op.results)
                if wanted or (
                    op not in self.cheap and not all(r in self.known for r in op.results)
                ):
                    stretch.append(op)
                continue
            parts += self._split(stretch)
            stretch = []
            if op is not None and op.attrs.trip:
                parts.append(op)
        return parts

    def _split(self, stretch: Sequence[Op]) -> list[list[Op]]:
        sources = {
            op: tuple(dict.fromkeys(b for v in op.operands for b in self.bases(v)))
            for op in stretch
        }
        level = pieces.Level(sources, self.producers)
        return pieces.split(stretch, level, self._identity, self.whole)

    def _identity(self, ops: Sequence[Op]) -> int:
        """A number that equal code has, as a function of everything it reads, all results out."""
        piece = Piece(list(ops), [], [])
        self._fill(piece, {r for op in ops for r in op.results})
        assert piece.graph is not None
        return self._structures.setdefault(structure(piece.graph), len(self._structures))

    def _users(self, parts: Sequence[Op | list[Op]]) -> dict[Value, set[int]]:
        """Parts that read each base value."""
        users: dict[Value, set[int]] = {}
        for number, part in enumerate(parts):
            if isinstance(part, Op):
                read = {self.bitcast_base(v) for v in part.operands}
            else:
                read = {base for op in part for v in op.operands for base in self.bases(v)}
            for value in read:
                users.setdefault(value, set()).add(number)
        return users

    def _piece(
        self,
        ops: list[Op],
        number: int,
        users: Mapping[Value, set[int]],
        leaving: frozenset[Value],
    ) -> Piece:
        """Part `number`; its outputs are what other parts or `leaving`, the level, read, and what
        stages reduce together: a stage takes part although it reads none of it.
        """
        results = {r for op in ops for r in op.results}
        wanted = {r for r in results if r in leaving or users.get(r, set()) - {number}}
        wanted |= {r for op in ops if is_cross_stage(op) for r in op.results}
        piece = Piece(ops, [], [], name=self.name)
        self._fill(piece, wanted)
        return piece

    def _fill(self, piece: Piece, wanted: set[Value]) -> None:
        """Build the graph of a piece: cheap producers cloned in, inputs in order of first use."""
        builder = _PieceBuilder(self, piece)
        for op in piece.ops:
            builder.add(op)
        piece.outputs = [r for op in piece.ops for r in op.results if r in wanted]
        numbers = self.positions.numbers.intersection(piece.inputs)
        piece.ranges = {v: self.ranges[v] for v in piece.inputs if v in numbers}
        piece.graph = builder.finish(piece.outputs)

    def _loop(self, op: Op) -> LoopStep:
        body, counter = op.regions[0], next(self.counters)
        trip, induction = op.attrs.trip, op.attrs.induction
        registers = {body.inputs[induction]: parameter(counter, 0, trip - 1)}
        invariant: list[int] = []
        carried: list[int] = []
        for i, (before, after) in enumerate(zip(body.inputs, body.outputs, strict=True)):
            if i == induction or _is_unused(body, i):
                continue
            if before is not after:
                carried.append(i)
            elif op.operands[i] in self.known:
                registers[before] = self.known[op.operands[i]]
            else:
                invariant.append(i)
        made = [i for i in carried if not self._needs_memory(op, i)]
        operands = {
            i: self.bitcast_base(op.operands[i]) for i in (*invariant, *carried) if i not in made
        }
        name, whole = f"{self.name}.loop", op.attrs.whole
        inner = _Cutter(body, registers, self.ranges, self.counters, name, induction, whole)
        level = inner.level()
        makers = {
            i: None
            if self._is_room(op.operands[i]) or self._is_overwritten(op, i)
            else self._maker(op.operands[i])
            for i in made
        }
        return LoopStep(op, level, counter, invariant, carried, operands, makers)

    def _is_overwritten(self, loop: Op, carry: int) -> bool:
        """Whether nothing reads what `carry` starts with: the loop, and what writes to its result
        before it is read, write all of it.
        """
        if not is_read(loop.regions[0], carry):
            return bool(loop.attrs.trip > 0)
        found, value = self._written(loop, carry), loop.results[carry]
        while found is not None and not found.is_whole:
            users = self.users.get(value, ())
            if len(users) != 1 or value in self.graph.outputs:
                return False
            (user,) = users
            if user.operands.count(value) > 1:
                return False
            place = user.operands.index(value)
            more = self._written(user, place)
            found = None if more is None else found.union(more)
            value = user.results[place] if user.regions else user.result
        return found is not None

    def _written(self, op: Op, place: int) -> Slices | None:
        """What an op writes to its operand, itself or turn by turn; None if it reads it too."""
        if op.name in UPDATES and place == 0:
            return slices_of([op], 1, _OWN, self.known)
        if not op.regions:
            return None
        body, trip = op.regions[0], op.attrs.trip
        pairs = zip(body.inputs, body.outputs, op.operands, strict=True)
        scalars = {a: self.known[v] for a, b, v in pairs if a is b and v in self.known}
        scalars[body.inputs[op.attrs.induction]] = parameter(_OWN, 0, trip - 1)
        return written(body, place, trip, _OWN, known_scalars(body, scalars))

    def _is_room(self, value: Value) -> bool:
        """True for host memory that nobody reads before it is written."""
        op = self.producers.get(value)
        return op is not None and op.name == EMPTY

    def _maker(self, value: Value) -> Piece:
        """A piece that makes a free value."""
        piece = Piece([], [], [value], name=f"{self.name}.fill")
        builder = _PieceBuilder(self, piece)
        builder.value(value)
        piece.graph = builder.finish([value])
        return piece


def _is_unused(body: Graph, i: int) -> bool:
    """True when a carry only passes through a body that does not read it."""
    value = body.inputs[i]
    if body.outputs[i] is not value or body.outputs.count(value) > 1:
        return False
    return not any(value in op.operands for op in body.ops)


class _PieceBuilder:
    """The function graph of a piece under construction."""

    def __init__(self, cutter: _Cutter, piece: Piece) -> None:
        self.cutter = cutter
        self.piece = piece
        self.ops: list[Op] = []
        self.now: dict[Value, Value] = {}
        self._inputs: list[Value] = []
        self._scalars: dict[tuple[Affine, object], Value] = {}

    def add(self, op: Op) -> None:
        """Append a clone of `op` with everything cheap it needs."""
        for value in op.operands:
            if value not in self.now:
                self.value(value)
        self.ops.append(cloned(op, self.now))

    def value(self, value: Value) -> Value:
        """What `value` is in the function."""
        return answered(value, self.now, self._read, self._make)

    def _read(self, value: Value) -> tuple[Value, ...]:
        """What is cloned before `value`."""
        return self.cutter.behind(value, self.cutter.free)

    def _make(self, value: Value) -> Value:
        cutter = self.cutter
        if value in cutter.known:
            return self._scalar(value, cutter.known[value])
        if value in cutter.through:
            return self._same_bytes(value, cutter.through[value])
        op = cutter.maker(value, cutter.free)
        if op is None:
            return self._input(value)
        if op.name in IDENTITIES:
            return self._behind(op, value)
        self.add(op)
        return self.now[value]

    def _behind(self, op: Op, value: Value) -> Value:
        """What an identity passes on. It stays one, so that CSE does not undo what is computed
        again behind it.
        """
        source = self.value(op.operands[op.results.index(value)])
        return self._append(make_op(op.name, (source,), op.attrs, loc=op.loc))

    def _same_bytes(self, value: Value, source: Value) -> Value:
        made = self.value(source)
        return made if made.type == value.type else self._reshaped(made, value)

    def _reshaped(self, made: Value, like: Value) -> Value:
        return self._append(make_op("reshape", (made,), ReshapeAttrs(like.type.shape)))

    def _append(self, op: Op) -> Value:
        self.ops.append(op)
        return op.result

    def _scalar(self, value: Value, known: Known) -> Value:
        """A number becomes a constant, a counter an input; both in the shape they are used in."""
        kind = value.type
        if known.is_constant:
            return self._append(make_op("constant", (), ConstantAttrs.full(known.low, kind)))
        key = (known.value, kind.dtype)
        if key not in self._scalars:
            self._scalars[key] = Value(tensor_type((), kind.dtype))
            self.piece.scalars.append((self._scalars[key], known))
        scalar = self._scalars[key]
        return self._reshaped(scalar, value) if kind.rank else scalar

    def _input(self, value: Value) -> Value:
        self.piece.inputs.append(value)
        self._inputs.append(Value(value.type))
        return self._inputs[-1]

    def finish(self, outputs: Sequence[Value]) -> Graph:
        """The graph: tensor inputs first, then register inputs."""
        inputs = (*self._inputs, *(v for v, _ in self.piece.scalars))
        return subgraph(inputs, self.ops, (self.now[v] for v in outputs))
