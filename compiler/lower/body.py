"""A function graph as tasks and views: what must be computed, and what is only another way to look
at memory.

Views (reshape, transpose, broadcast, slices with affine starts) and everything made of constants
and counts alone never become tasks. Updates of a part of a tensor become writes into ranges of
memory. Storage is decided next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.facts import is_constant_like, keeps_order, places_of, takes_at
from shardwright.compiler.ir.ops import DynamicSliceAttrs, ScatterAttrs, SliceAttrs, UnfoldAttrs
from shardwright.compiler.ir.ops.host import STORE
from shardwright.compiler.ir.rewrite import reading
from shardwright.compiler.ir.traits import ALIASING, IDENTITIES, LITERALS, WRITES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.lower import registry
from shardwright.compiler.lower.task import (
    ALLOC,
    ALONE,
    COLLECTIVE,
    COPY,
    LOOP,
    REGISTER,
    WRITE,
    RegisterAttrs,
    Task,
    Window,
    unsupported,
)
from shardwright.compiler.passes.scalars import Known, known_scalars, parameter
from shardwright.compiler.support.intervals import Interval

if TYPE_CHECKING:
    from shardwright.compiler.lower.positions import Positions

UPDATES = WRITES | {STORE}


class Body:
    """The tasks of one function.

    `parameters` are the counter inputs, `donated` the inputs that an output may overwrite by
    updates in place, `forced` the values that get memory of their own because strides cannot
    express one of their uses, `dense` those that get it because their readers walk it better. With
    `excess_precision`, short floats may keep fp32 where nobody sees them (`excess_precision.py`).
    `positions` are masks that numbers in memory decide: those go into registers, and masks are
    rematerialised.
    """

    def __init__(
        self,
        graph: Graph,
        parameters: Mapping[Value, Known],
        positions: Positions,
        donated: Collection[Value] = (),
        forced: Collection[Value] = (),
        dense: Collection[Value] = (),
        excess_precision: bool = False,
    ) -> None:
        self.graph = graph
        self.excess_precision = excess_precision
        self.known = known_scalars(graph, parameters)
        self.num_parameters = self.num_registers = len(parameters)
        self.tasks: list[Task] = []
        self.producer: dict[Value, Task] = {}
        self.views: dict[Value, Op] = {}
        self.windows: dict[Value, Window] = {}
        self.constants: dict[Value, Op] = {}
        self.made: dict[Value, Op] = {}
        self.register_task: dict[int, Task] = {}
        self._rematerialised: set[Value] = set(parameters)
        self._masks = positions.wanted
        self._numbers = {v: positions.ranges[v] for v in positions.numbers}
        self._moved_by: dict[Value, frozenset[int]] = {}
        self._root: dict[Value, Value] = {}
        self._forced = {*forced, *dense}
        self._dense = dense
        self._forced_copy: dict[Value, Value] = {}
        self._stored_copy: dict[Value, Value] = {}
        self._registers: dict[tuple[Value, Interval, tuple[str, ...] | None], int] = {}
        self._in_place = _in_place_updates(graph, donated)
        self._uses = Counter(v for op in graph.ops for v in op.operands)
        self._uses.update(graph.outputs)
        for op in graph.ops:
            self.add(op)

    @cached_property
    def readers(self) -> dict[Value, list[Task]]:
        """Tasks that read each base value, through views or not."""
        found: dict[Value, list[Task]] = {}
        for task in self.tasks:
            for base in dict.fromkeys(self.base(v) for v in task.data):
                found.setdefault(base, []).append(task)
        return found

    def add(self, op: Op) -> None:
        """Sort one op into rematerialised values, constants, views and tasks; it reads the copies
        of forced values.
        """
        op = reading(op, self._forced_copy)
        if len(op.results) == 1 and self._makes_rematerialised(op):
            self._add_rematerialised(op)
        elif op.name in LITERALS:
            self.constants[op.result] = op
        elif op.name in ALIASING:
            self._add_view(op)
        else:
            self._add_tasks(op)
        for value in op.results:
            if value in self._forced:
                self._forced_copy[value] = copy = self.copy(value, op)
                self.producer[copy].fusable = value not in self._dense

    def _makes_rematerialised(self, op: Op) -> bool:
        if op.result in self.known:
            return True
        if not is_constant_like(op):
            return False
        numbers = self._numbers if op.result in self._masks else ()
        if any(v not in self.known and v not in numbers for v in places_of(op)):
            return False
        return all(self.is_rematerialised(v) or v in numbers for v in op.operands)

    def _add_rematerialised(self, op: Op) -> None:
        """Note how the result is made, and load the numbers that it depends on."""
        self._rematerialised.add(op.result)
        self.made[op.result] = op
        moved = self.registers_of(*op.operands)
        if starts := places_of(op):
            at = self.starts(op, op.operands[0], op.attrs.sizes, starts)
            moved |= {register for start in at for register, _ in start.terms}
        elif op.result in self._masks:
            moved |= {
                self._load_number(op, v) for v in op.operands if not self.is_rematerialised(v)
            }
        if moved:
            self._moved_by[op.result] = moved

    def _load_number(self, op: Op, value: Value) -> int:
        """The register of a number, which is known from here on."""
        low, high = self._numbers[value]
        register = self._load_register(op, value, (low, high))
        self.known[value] = parameter(register, low, high)
        return register

    def registers_of(self, *values: Value) -> frozenset[int]:
        """The registers with loaded numbers that rematerialised values depend on."""
        return frozenset[int]().union(*(self._moved_by.get(v, ()) for v in values))

    def _add_view(self, op: Op) -> None:
        """Note where each result looks; a slice at a start that is data gets memory to look at."""
        source = op.operands[0]
        if isinstance(op.attrs, UnfoldAttrs):
            source = self.stored(source, op)
        elif isinstance(op.attrs, SliceAttrs):
            starts = tuple(Affine(s) for s in op.attrs.start)
            self.windows[op.result] = Window(starts, op.result.type.shape, op.attrs.stride)
        elif takes_at(op):
            source = self.stored(source, op)
            starts = self.starts(op, source, op.attrs.sizes, places_of(op))
            self.windows[op.result] = Window(starts, op.attrs.sizes, (1,) * source.type.rank)
        sources = op.operands if op.name in IDENTITIES else (source,)
        for result, seen in zip(op.results, sources, strict=True):
            self.look_through(result, seen, op)

    def look_through(self, result: Value, source: Value, op: Op) -> None:
        """Make `result` the view `op` of `source`."""
        view = Op(op.name, (source,), (result,), op.attrs, loc=op.loc)
        if self.is_rematerialised(source):
            self._add_rematerialised(view)
        else:
            self.views[result] = view

    def _add_tasks(self, op: Op) -> None:
        make = registry.maker_of(op.name)
        if make is None:
            hint = "replace it by supported operators (see list-operators)"
            raise unsupported(op, "has no lowering for this target", hint)
        make(self, op)

    def add_task(
        self, op: Op, kind: str, data: Sequence[Value], target: Value | None = None
    ) -> Task:
        """Append a task; the memory of `target` becomes that of the result."""
        task = Task(op, kind, len(self.tasks), tuple(data), target)
        self.tasks.append(task)
        self.producer[op.result] = task
        if target is not None:
            self._root[op.result] = self.root(target)
        return task

    def now(self, value: Value) -> Value:
        """The copy that stands for a forced value, else the value."""
        return self._forced_copy.get(value, value)

    def root(self, value: Value) -> Value:
        """The first version of the memory `value` lives in."""
        return self._root.get(value, value)

    def base(self, value: Value) -> Value:
        """The value behind the views."""
        return self.path(value)[0]

    def maker(self, value: Value) -> Task | None:
        """The task that makes what `value` is a view of."""
        return self.producer.get(self.base(value))

    def path(self, value: Value) -> tuple[Value, list[Value]]:
        """(the value behind the views, the view results from there outward)."""
        chain: list[Value] = []
        while value in self.views:
            chain.append(value)
            value = self.views[value].operand
        return value, chain[::-1]

    def loc_of(self, value: Value) -> Loc:
        """Where the op that makes `value` comes from."""
        task = self.producer.get(value)
        op = self.made.get(value) or self.views.get(value) or self.constants.get(value)
        return task.op.loc if task else op.loc if op else UNKNOWN_LOC

    def is_rematerialised(self, value: Value) -> bool:
        """True when kernels rematerialise the value instead of loading it."""
        return value in self._rematerialised

    def stored(self, value: Value, op: Op) -> Value:
        """`value`, or a copy of it in memory when it is rematerialised; `op` is the user."""
        if not self.is_rematerialised(value):
            return value
        if value not in self._stored_copy:
            self._stored_copy[value] = self.copy(value, op)
        return self._stored_copy[value]

    def copy(self, value: Value, op: Op) -> Value:
        """A new value with the elements of `value` and memory of its own; `op` is who asks."""
        result = Value(value.type)
        self.add_task(Op(COPY, (value,), (result,), loc=op.loc), LOOP, (value,))
        return result

    def allocate(self, like: Value) -> Value:
        """Memory of the type of `like` without elements yet."""
        memory = Value(like.type)
        self.made[memory] = Op(ALLOC, (), (memory,))
        return memory

    def write(
        self, target: Value, update: Value, window: Window, op: Op, result: Value | None = None
    ) -> Value:
        """A new version of `target` with `update` written into a window."""
        result = Value(target.type) if result is None else result
        write = Op(WRITE, (target, update), (result,), loc=op.loc)
        self.add_task(write, LOOP, (update,), target).fill(window)
        return result

    def land(self, target: Value, update: Value, window: Window, result: Value) -> bool:
        """Let the collective that brings `update` put it into a window of `target` itself, if
        nothing else reads it (`landing.py`). Not where a task has filled another part before: the
        collective would start behind that, and a copy of its result does not.
        """
        base, chain = self.path(update)
        task = self.producer.get(base)
        if target in self.producer:
            return False
        if task is None or task.kind != COLLECTIVE or task.target is not None:
            return False
        if any(self._uses[v] > 1 or not keeps_order(self.views[v]) for v in chain):
            return False
        if self._uses[base] > 1 or not window.is_run_of(target.type.shape):
            return False
        task.target, task.version = target, result
        task.fill(window)
        self.producer[result] = self.producer.pop(base)
        self._root[result] = self.root(target)
        return True

    def owned(self, op: Op, value: Value) -> Value:
        """Memory with the elements of `value` that `op` may overwrite: its own, or a copy."""
        base, chain = self.path(value)
        plain = all(self.views[v].name in IDENTITIES for v in chain)
        mutable = not self.is_rematerialised(value) and base not in self.constants
        if plain and mutable and op.result in self._in_place:
            return base
        return self.copy(value, op)

    def starts(
        self, op: Op, operand: Value, sizes: Sequence[int], starts: Sequence[Value]
    ) -> tuple[Affine, ...]:
        """Affine starts of a window, clamped as StableHLO says; unknown scalars are registers."""
        shape = operand.type.shape
        return tuple(
            self._start(op, start, length - size)
            for size, length, start in zip(sizes, shape, starts, strict=True)
        )

    def _start(self, op: Op, start: Value, limit: int) -> Affine:
        known = self.known.get(start)
        if limit == 0 or (known is not None and known.high <= 0):
            return Affine()
        if known is not None and known.low >= limit:
            return Affine(limit)
        if known is not None and known.low >= 0 and known.high <= limit:
            return known.value
        return Affine(0, ((self._load_register(op, start, (0, limit)), 1),))

    def _load_register(self, op: Op, start: Value, range: Interval) -> int:
        """The register of an integer that is data, clamped to a range."""
        watched = isinstance(op.attrs, DynamicSliceAttrs) and op.attrs.looked_up
        replicated = op.attrs.replicated if watched else None
        key = (start, range, replicated)
        if key not in self._registers:
            stored = self.stored(start, op)
            self._registers[key] = register = self.num_registers
            self.num_registers += 1
            attrs = RegisterAttrs(register, *range, replicated)
            load = Op(REGISTER, (start,), (Value(start.type),), attrs, (), op.loc)
            self.register_task[register] = self.add_task(load, ALONE, (stored,))
        return self._registers[key]


def _in_place_updates(graph: Graph, donated: Collection[Value]) -> set[Value]:
    """Results of updates that may overwrite their target: nothing computed from the result reads
    it.

    A graph input is only overwritten on the path to the output that owns its memory (`donated`
    results). Reading a view counts as reading what it looks at.
    """
    base: dict[Value, Value] = {}
    readers: dict[Value, list[Op]] = {}
    for op in graph.ops:
        if op.name in ALIASING:
            sources = op.operands if op.name in IDENTITIES else op.operands[:1] * len(op.results)
            base.update({r: base.get(v, v) for r, v in zip(op.results, sources, strict=True)})
        read = op.operands[1:] if op.name in ALIASING - IDENTITIES else op.operands
        if op.name not in IDENTITIES:
            for value in dict.fromkeys(base.get(v, v) for v in read):
                readers.setdefault(value, []).append(op)
    kept = {base.get(v, v) for v in graph.outputs}
    inputs = set(graph.inputs)
    found: set[Value] = set()
    for op in graph.ops:
        if op.name not in UPDATES:
            continue
        target = base.get(op.operands[0], op.operands[0])
        if target in kept or (target in inputs and op.result not in donated):
            continue
        if isinstance(op.attrs, ScatterAttrs) and any(
            base.get(v, v) is target for v in op.operands[1:]
        ):
            continue  # rows are read in another order than they are written
        others = [u for u in readers[target] if u is not op]
        updated = any(
            base.get(u.operands[0], u.operands[0]) is target for u in others if u.name in UPDATES
        )
        if not updated and not _depend(graph, op.result, others):
            found.add(op.result)
    return found


def _depend(graph: Graph, value: Value, ops: Sequence[Op]) -> bool:
    """True when one of `ops` is computed from `value`, or starts behind a collective that is."""
    reached, waiting, crossed = {value}, set(ops), False
    for op in graph.ops if ops else ():
        crosses = is_cross_stage(op)
        if any(v in reached for v in op.operands) or (crosses and crossed):
            crossed |= crosses
            reached.update(op.results)
            if op in waiting:
                return True
    return False
