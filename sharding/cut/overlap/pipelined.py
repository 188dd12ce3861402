"""A loop as a software pipeline: iterations overlap, every op runs with its own delay.

At time t an op with delay d works for iteration t - d. What is made at one delay and read at a
later one waits in a queue that the loop carries, one entry per iteration between. Times at which
the layer itself does not run (the first gathers, the last reductions) stand as straight code before
and behind the loop; times at which the same delays are active are one loop. Values are those of the
loop as it was, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.compiler.ir.build import Builder, fresh
from shardwright.compiler.ir.facts import operands_of
from shardwright.compiler.ir.rewrite import Level, with_ops, with_results
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value
from shardwright.compiler.passes.dce import dce
from shardwright.sharding.cut.overlap.assign import Delays, Shifts, delays
from shardwright.sharding.cut.overlap.streams import with_low_priority

Entry = tuple[Value, int]  # what the body calls a value, and how many times ago it was made


def shifted(graph: Graph, shifts: Shifts) -> Graph:
    """The graph of a program with its loops pipelined; the graph itself where nothing moves."""
    level = Level()
    for op in graph.ops:
        op = level.update(op)
        found = delays(op, shifts) if op.regions and op.attrs.trip else None
        if found is None:
            level.ops.append(op)
            continue
        ops, results = _Pipeline(found).build()
        level.ops += ops
        level.replace(op.results, results)
    return dce(level.finish(graph)) if level.replaced else graph


@dataclass(slots=True)
class _State:
    """What is known between two times: evolving carries, and queue entries."""

    carries: dict[Value, Value]
    queued: dict[Entry, Value] = field(default_factory=dict)


class _Scope(Builder):
    """Where ops are put: straight code, or the body of a loop; `outside` are its invariants."""

    def __init__(self, outside: Mapping[Value, Value]) -> None:
        super().__init__()
        self.outside = outside

    def plus(self, value: Value, number: int) -> Value:
        """`value + number`, of a counter."""
        return self.add(value, self.constant(number, value.type.dtype)) if number else value


class _Pipeline:
    """Builds one pipeline. Values of the body stand for what every iteration has of them."""

    def __init__(self, delays: Delays) -> None:
        self.delays, self.loop = delays, delays.loop
        self.body: Graph = delays.loop.regions[0]
        self.trip: int = delays.loop.attrs.trip
        self.made = self.body.producers()
        self.counter = self.body.inputs[self.loop.attrs.induction]
        self.evolving = self._evolving()
        self.made_at = self._made_at()
        self.depth = self._depths()

    def _evolving(self) -> dict[Value, Value]:
        """Carries that change, and what each becomes."""
        pairs = zip(self.body.inputs, self.body.outputs, strict=True)
        return {a: b for a, b in pairs if a is not b and a is not self.counter}

    def _made_at(self) -> dict[Value, int]:
        """The delay at which each value that is not free appears; a carry appears where its next
        value is made.
        """
        at: dict[Value, int] = {}
        for op, delay in self.delays.delay.items():
            at.update(dict.fromkeys(op.results, delay))
        for before, after in self.evolving.items():
            at[before] = at.get(after, self.delays.middle)
        return at

    def _depths(self) -> dict[Value, int]:
        """How long each value waits for its last reader."""
        depth: dict[Value, int] = {}
        for op, delay in self.delays.delay.items():
            for value in op.operands:
                if value not in self.delays.free:
                    depth[value] = max(depth.get(value, 0), delay - self.made_at[value])
        assert min(depth.values(), default=0) >= 0, "an op runs before what it reads"
        return {value: n for value, n in depth.items() if n}

    def build(self) -> tuple[list[Op], list[Value]]:
        """The whole pipeline, and its results."""
        given = dict(zip(self.body.inputs, self.loop.operands, strict=True))
        scope, kind = _Scope(given), self.counter.type.dtype
        state = _State({v: given[v] for v in self.evolving})
        for begin, end in pairwise(self._times()):
            active = [d for d in self.delays.distinct if d <= begin < d + self.trip]
            if self.delays.middle in active:
                state = self._repeat(scope, state, begin, end, active)
                continue
            for time in range(begin, end):
                index = {d: scope.constant(time - d, kind) for d in active}
                state = _Time(self, scope, state, index).run()
        results = given | state.carries | {self.counter: scope.constant(self.trip, kind)}
        return scope.ops, list(results.values())

    def _times(self) -> list[int]:
        """Times at which some delay starts or stops."""
        return sorted({t for d in self.delays.distinct for t in (d, d + self.trip)})

    def _repeat(
        self, scope: _Scope, state: _State, begin: int, end: int, active: Sequence[int]
    ) -> _State:
        """Times `begin` to `end` as a loop; the state behind it. Carries that no active delay
        changes stay outside, where what they start with can still be made in place.
        """
        entries = self._entries(begin, active)
        inner = _Scope({v: Value(v.type) for v in self.body.inputs})
        first = Value(self.counter.type)
        evolving = [v for v in self.evolving if self.made_at[v] in active]
        inside = _State(
            {v: inner.outside[v] for v in evolving},
            {entry: Value(entry[0].type) for entry in entries},
        )
        index = {d: inner.plus(first, begin - d) for d in active}
        after = _Time(self, inner, inside, index).run()
        invariant = [v for v in self.body.inputs if v not in self.evolving and v != self.counter]
        carried = [*evolving, *invariant]
        inputs = [first, *(inner.outside[v] for v in carried), *inside.queued.values()]
        outputs = [
            inner.plus(first, 1),
            *(after.carries.get(v, inner.outside[v]) for v in carried),
            *(after.queued.get(entry, inside.queued[entry]) for entry in entries),
        ]
        operands = [
            scope.constant(0, self.counter.type.dtype),
            *(state.carries.get(v, scope.outside[v]) for v in carried),
            *(state.queued.get(e) or _zeros(scope, e[0].type) for e in entries),
        ]
        region = with_ops(self.body, inner.ops, tuple(outputs), tuple(inputs))
        results = tuple(Value(v.type) for v in inputs)
        attrs = replace(self.loop.attrs, trip=end - begin, induction=0)
        scope.append(Op("loop", tuple(operands), results, attrs, (region,), self.loop.loc))
        where = dict(zip(inputs, results, strict=True))
        return _State(
            state.carries | {v: where[inside.carries[v]] for v in evolving},
            {entry: where[value] for entry, value in inside.queued.items()},
        )

    def _entries(self, begin: int, active: Collection[int]) -> list[Entry]:
        """Queue entries that exist before or behind times that start at `begin`, and are still
        wanted.
        """
        found = []
        for value, depth in self.depth.items():
            at = self.made_at[value]
            begun = at in active or begin >= at + self.trip
            if begun and begin < at + depth + self.trip:
                found += [(value, age) for age in range(depth)]
        return found


class _Time:
    """One time: the ops of all active delays, each for its own iteration.

    `index` holds the iteration of every active delay.
    """

    def __init__(
        self, pipeline: _Pipeline, scope: _Scope, state: _State, index: Mapping[int, Value]
    ) -> None:
        self.pipeline, self.scope, self.state, self.index = pipeline, scope, state, index
        self.now: dict[Value, Value] = {}
        self.free: dict[tuple[Value, int], Value] = {}

    def run(self) -> _State:
        """Emit the time, the layer last, and return the state behind it."""
        p = self.pipeline
        for value, current in self.state.carries.items():
            if p.made_at[value] in self.index:
                self.now[value] = current
        for delay in sorted(self.index, key=lambda d: (d == p.delays.middle, d)):
            for op, at in p.delays.delay.items():
                if at == delay:
                    self._emit(op, delay)
        return _State(self._next_carries(), self._next_queues())

    def _emit(self, op: Op, delay: int) -> None:
        """A copy of `op` for the iteration of its delay; a barrier only holds what is not free."""
        delays, held = self.pipeline.delays, op
        if op.name in IDENTITIES:
            kept = [i for i, v in enumerate(op.results) if v not in delays.free]
            held = with_results(op, kept, op.attrs, ())
        copy = fresh(held, [self._read(v, delay) for v in held.operands])
        self.scope.append(with_low_priority(copy) if op in delays.low_priority else copy)
        self.now.update(zip(held.results, copy.results, strict=True))

    def _read(self, value: Value, delay: int) -> Value:
        """What `value` is for the iteration of `delay`."""
        p = self.pipeline
        if value in p.delays.free:
            return self._compute(value, delay)
        waited = delay - p.made_at[value]
        return self.now[value] if not waited else self.state.queued[value, waited - 1]

    def _compute(self, value: Value, delay: int) -> Value:
        """A free value for the iteration of `delay`."""
        if value is self.pipeline.counter:
            return self.index[delay]
        op = self.pipeline.made.get(value)
        if op is None:
            return self.scope.outside[value]
        if (value, delay) not in self.free:
            read = tuple(self._compute(v, delay) for v in operands_of(op, value))
            copy = Op(op.name, read, (Value(value.type),), op.attrs, (), op.loc)
            (self.free[value, delay],) = self.scope.append(copy)
        return self.free[value, delay]

    def _next_carries(self) -> dict[Value, Value]:
        """The evolving carries behind this time."""
        p, after = self.pipeline, dict(self.state.carries)
        for before, value in p.evolving.items():
            at = p.made_at[before]
            if at in self.index:
                after[before] = self._read(value, at)
        return after

    def _next_queues(self) -> dict[Entry, Value]:
        """Every queue moved on by one; what is no longer made repeats its last entry."""
        after: dict[Entry, Value] = {}
        for value, depth in self.pipeline.depth.items():
            for age in range(depth):
                source = self.state.queued.get((value, max(0, age - 1)))
                if not age and self.pipeline.made_at[value] in self.index:
                    source = self.now[value]
                if source is not None:
                    after[value, age] = source
        return after


def _zeros(scope: _Scope, type: TensorType) -> Value:
    """What a queue holds before anything is in it; nothing reads it."""
    return scope.full(type.shape, 0, type.dtype)
