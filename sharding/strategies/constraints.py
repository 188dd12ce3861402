"""Sharding constraints in the graph: where a weight is gathered, where a gradient is reduced.

A weight stays sharded through everything that only weights are in, and is gathered where it meets a
batch value, at the narrowest point of the code that leads there. A gradient is reduced where the
batch dim disappears. Both become `sharding_constraint` ops, so that the partitioner has nothing
left to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import ShardingConstraintAttrs
from shardwright.compiler.ir.rewrite import Level, with_operands, with_regions
from shardwright.compiler.ir.traits import CASTS, VIEWS, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.partition.spec import ShardingSpec

NARROWING = VIEWS | CASTS
CARRYING = of(Kind.CONTROL, Kind.IDENTITY)
REDUCING = of(Kind.CONTRACTION, Kind.REDUCTION) | of(Kind.INDEXED, combines=True)
CUTTING = of(Kind.PART, Kind.JOIN, Kind.UPDATE) | of(Kind.INDEXED, combines=False) | {"reshape"}


@dataclass(frozen=True, slots=True)
class GatherUse:
    """Operand `index` of `op` must be whole: gather `points`, then repeat `chain` on the gathered
    values. `spec` is their layout then; None is the one each is used in.
    """

    op: Op
    index: int
    points: tuple[Value, ...]
    chain: tuple[Op, ...] = ()
    spec: ShardingSpec | None = None

    @property
    def point(self) -> Value:
        """The one value that is gathered."""
        (point,) = self.points
        return point

    @property
    def num_bytes(self) -> int:
        """Bytes of what is gathered."""
        return sum(point.type.num_bytes for point in self.points)


def gather_uses(
    graph: Graph, batch: Mapping[Value, int], weights: set[Value], *, in_parts: bool = False
) -> list[GatherUse]:
    """Every operand, at any depth, where a value of `weights` meets a value with a batch label;
    `in_parts`: gathered before it is combined of weights that are fewer bytes.
    """
    made = _makers(graph)
    parts = _Parts(made, weights)
    uses = (
        _narrowest(op, i, v, made)
        for op in graph.walk()
        if op.name not in CARRYING and any(v in batch for v in (*op.operands, *op.results))
        for i, v in enumerate(op.operands)
        if v in weights and v not in batch and v.type.rank
    )
    return [parts.of(use) if in_parts else use for use in uses]


def _makers(graph: Graph) -> dict[Value, Op]:
    """Who makes each value, at any depth."""
    return {value: op for op in graph.walk() for value in op.results}


def layout_boundaries(
    graph: Graph, batch: Mapping[Value, int], spec_of: Callable[[Value], ShardingSpec | None]
) -> Iterator[tuple[list[GatherUse], list[Value]]]:
    """Ops without batch values that end or begin a weight's layout: (operands to gather, results to
    lay out).

    They cut, join or split the sharded dim itself, so the layout has no continuation on the other
    side.
    """
    made = _makers(graph)
    for op in graph.walk():
        if op.name not in CUTTING or any(v in batch for v in (*op.operands, *op.results)):
            continue
        shaped = [(i, v, spec_of(v)) for i, v in enumerate(op.operands) if v.type.rank]
        after = [spec_of(v) for v in op.results]
        if not any(after):
            yield [_narrowest(op, i, v, made) for i, v, spec in shaped if spec is not None], []
        elif not all(spec for _, _, spec in shaped):
            yield [], list(op.results)


def _narrowest(op: Op, index: int, value: Value, made: Mapping[Value, Op]) -> GatherUse:
    """Walk back from `value` through unary ops to the earliest point with the fewest bytes."""
    path: list[Op] = []
    point, best = value, 0
    while (step := made.get(value)) is not None and step.name in NARROWING:
        value = step.operands[0]
        path.append(step)
        if value.type.num_bytes <= point.type.num_bytes:
            point, best = value, len(path)
    return GatherUse(op, index, (point,), tuple(reversed(path[:best])))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Weights that are made element by element of fewer bytes: of the integers and scales of a
    quantised one.
    """

    made: Mapping[Value, Op]
    weights: set[Value]
    known: dict[Value, GatherUse | None] = field(default_factory=dict)

    def of(self, use: GatherUse) -> GatherUse:
        """`use` with the parts of its point gathered, where it has some."""
        if use.point not in self.known:
            self.known[use.point] = None  # until it is found
            self.known[use.point] = self._found(use.point)
        if (found := self.known[use.point]) is None:
            return use
        return replace(found, op=use.op, index=use.index, chain=(*found.chain, *use.chain))

    def _found(self, point: Value) -> GatherUse | None:
        value, path = point, list[Op]()
        while (step := self.made.get(value)) is not None and step.name in NARROWING:
            path.append(step)
            value = step.operands[0]
        if step is None or not OPS[step.name].elementwise:
            return None
        operands = [v for v in step.operands if v in self.weights and v.type.rank]
        uses = [self.of(_narrowest(step, i, v, self.made)) for i, v in enumerate(operands)]
        chain = dict.fromkeys(op for use in uses for op in use.chain)
        points = dict.fromkeys(v for use in uses for v in use.points)
        found = GatherUse(step, 0, tuple(points), (*chain, step, *reversed(path)))
        return found if found.num_bytes < point.type.num_bytes else None


@dataclass(frozen=True, slots=True)
class Users:
    """Who reads each value of a level; what leaves the level has no single user."""

    ops: Mapping[Value, list[Op]]
    outputs: frozenset[Value]

    @classmethod
    def of(cls, graph: Graph) -> Users:
        """The users of values at any depth."""
        levels = [graph, *(region for op in graph.walk() for region in op.regions)]
        ops = {value: users for level in levels for value, users in level.uses().items()}
        return cls(ops, frozenset(v for level in levels for v in level.outputs))

    def chain(self, value: Value) -> Iterator[Value]:
        """What `value` becomes while its only reader is a shape or type change."""
        while len(readers := self.ops.get(value, [])) == 1 and value not in self.outputs:
            if readers[0].name not in NARROWING:
                return
            value = readers[0].result
            yield value


def reduction_ops(graph: Graph, batch: Mapping[Value, int]) -> Iterator[Op]:
    """Ops, at any depth, that read a batch value and give none."""
    for op in graph.walk():
        reads = any(v in batch for v in op.operands)
        if reads and op.name not in CARRYING and not any(v in batch for v in op.results):
            yield op


@dataclass(slots=True)
class Annotator:
    """Builds the graph with constraints; values that are not touched stay the same objects.

    `layouts` says which values get a constraint, and what it is; `used` where a gathered value is.
    `specs` collects the spec of every constraint's result, `points` the constraints that gather.
    """

    gathers: Mapping[tuple[Op, int], GatherUse]
    layouts: Mapping[Value, ShardingSpec]
    used: Callable[[Value], ShardingSpec]
    specs: dict[Value, ShardingSpec] = field(default_factory=dict)
    points: list[Op] = field(default_factory=list)

    def run(self, graph: Graph) -> Graph:
        """`graph` with a constraint at each gather point and at each reduction target."""
        level = _Level(self, graph)
        for op in graph.ops:
            level.copy(op)
        return level.finish(graph)


class Repeating(Level):
    """A level under construction on which ops are repeated on other operands, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._repeated: dict[tuple[str, object, tuple[Value, ...]], Value] = {}

    def repeated(self, step: Op, *operands: Value) -> Value:
        """The result of `step` on `operands`."""
        key = (step.name, step.attrs, operands)
        if key not in self._repeated:
            self.ops.append(make_op(step.name, operands, step.attrs, loc=step.loc))
            self._repeated[key] = self.ops[-1].result
        return self._repeated[key]


class _Level(Repeating):
    """One level under construction, and what has been gathered on it."""

    def __init__(self, owner: Annotator, graph: Graph) -> None:
        super().__init__()
        self.owner = owner
        self.made = graph.producers()
        self.whole: dict[object, Value] = {}

    def copy(self, op: Op) -> None:
        """Append `op` on gathered and constrained operands, then constrain its results."""
        operands = tuple([self._operand(op, i, v) for i, v in enumerate(op.operands)])
        regions = tuple(self.owner.run(r) for r in op.regions)
        self.ops.append(with_regions(with_operands(op, operands), regions))
        for value in op.results:
            if (spec := self.owner.layouts.get(value)) is not None:
                self.replace((value,), self._constrained(value, spec, op.loc).results)

    def _constrained(self, value: Value, spec: ShardingSpec, loc: Loc) -> Op:
        """A constraint on `value`."""
        op = make_op("sharding_constraint", (value,), ShardingConstraintAttrs(spec.dims), loc=loc)
        self.ops.append(op)
        self.owner.specs[op.result] = spec
        return op

    def _operand(self, op: Op, index: int, value: Value) -> Value:
        """What `op` reads as operand `index`."""
        use = self.owner.gathers.get((op, index))
        if use is None:
            return self.now(value)
        whole = {point: self._whole_point(use, point) for point in use.points}
        for step in use.chain:
            operands = [whole.get(v) or self.now(v) for v in step.operands]
            whole[step.result] = self.repeated(step, *operands)
        return whole[value]

    def _whole_point(self, use: GatherUse, point: Value) -> Value:
        """A gathered point of the use, once per level and content."""
        spec = use.spec or self.owner.used(point)
        key = (self._content(point), spec)
        if key not in self.whole:
            op = self._constrained(self.now(point), spec, use.op.loc)
            self.owner.points.append(op)
            self.whole[key] = op.result
        return self.whole[key]

    def _content(self, value: Value) -> object:
        """Equal for values that are the same unary ops of the same value."""
        op = self.made.get(value)
        if op is None or op.name not in NARROWING:
            return value
        return (op.name, op.attrs, self._content(op.operands[0]))
