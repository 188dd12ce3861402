"""Expansion: the partitioned form of a whole graph, from that of its deduplicated graph.

Every op of the whole graph gets what the partitioner made of the op that stands for its class: the
op itself, the collectives beside it, and copies of constants. What those read is found along the
same operands. Each copy must read values of exactly the type and spec it read in the answer, so the
result is locally the same as a graph the partitioner made; otherwise `ExpandError`, and the caller
partitions the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Op, Value
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot, all_values
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.prepare.dedup import ORIGIN, Deduped

REACH = 4
"""Operand steps between an op and what it reads in the answer: constraints and ops the partitioner
has dropped lie between (our choice; further away is refused)."""

Path = tuple[int, ...]


class ExpandError(Exception):
    """The answer for a deduplicated graph does not carry over to the whole graph."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a copy finds an operand: `path` leads from the node to the node that makes it; there it
    is result `result` of `op` of the answer, which is number `number` of what that node becomes.
    `op` is None for an input, and `number` -1.

    `apart` copies `op` for this reader alone.
    """

    path: Path
    op: Op | None
    number: int
    result: int
    apart: bool


def expand(
    deduped: Deduped, answer: PartitionedGraph, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> PartitionedGraph:
    """The whole graph, partitioned as `answer` partitions `deduped.graph`.

    Raises: ExpandError when a copy would not fit in its place.
    """
    return _Expander(deduped, answer, _Answer(deduped, answer)).run(tuple(inputs), tuple(outputs))


class _Answer:
    """The partitioner's answer by node: the ops made of each, and where their operands are."""

    def __init__(self, deduped: Deduped, answer: PartitionedGraph) -> None:
        self.deduped = deduped
        self.graph = answer.graph
        self.made = {v: (op, k) for op in answer.graph.ops for k, v in enumerate(op.results)}
        taken = [node for node in deduped.kept if node < deduped.nodes.first_op]
        given = [node for node in deduped.kept if node >= deduped.nodes.first_output]
        self.input_of = dict(zip(answer.graph.inputs, taken, strict=True))
        self.input_at = dict(zip(taken, answer.graph.inputs, strict=True))
        self.output_of = dict(zip(given, answer.graph.outputs, strict=True))
        self.home: dict[Op, int] = {}
        self.ops: dict[int, list[Op]] = {}
        self._place_ops()
        self.apart = {op for ops in self.ops.values() for op in self._split(ops)}
        self._sources: dict[tuple[int, Value, int], _Source] = {}

    def _place_ops(self) -> None:
        """An op belongs to the node its location names, or to the next op's: what the importer
        added stands before its reader.
        """
        node = -1
        for op in reversed(self.graph.ops):
            node = op.loc.line if op.loc.file == ORIGIN else node
            if node < 0:
                raise ExpandError(f"{op.name} at the end of the graph belongs to no op")
            self.home[op] = node
            self.ops.setdefault(node, []).insert(0, op)

    def _split(self, ops: Sequence[Op]) -> Iterator[Op]:
        """Ops that the partitioner repeated, one per reader, and constants it added."""
        own = self.deduped.nodes.op(self.home[ops[0]])
        repeated = own is not None and sum(op.name == own.name for op in ops) > 1
        return (op for op in ops if repeated or (not op.operands and op.loc.file != ORIGIN))

    def source(self, node: int, value: Value, position: int) -> _Source:
        """Where an op made of kept `node` finds `value`. `position` is the operand of the node it
        comes by, -1 when any.
        """
        key = (node, value, position)
        if key not in self._sources:
            self._sources[key] = self._find(node, value, position)
        return self._sources[key]

    def _find(self, node: int, value: Value, position: int) -> _Source:
        op, result = self.made.get(value, (None, 0))
        home = self.input_of[value] if op is None else self.home[op]
        number = -1 if op is None else self.ops[home].index(op)
        apart = op in self.apart
        if home == node:
            return _Source((), op, number, result, apart)
        paths = list(self._paths(node, home, position))
        if not paths and op is not None and not op.operands:
            return _Source((), op, number, result, True)
        if len(paths) != 1:
            what = f"{'no' if not paths else 'more than one'} way to what it reads"
            raise ExpandError(f"node {node} has {what} (node {home})")
        return _Source(paths[0], op, number, result, apart)

    def _paths(self, node: int, home: int, position: int) -> Iterator[Path]:
        """The shortest ways from `node` to `home` along operands."""
        frontier: list[tuple[Path, int]] = [((), node)]
        for _ in range(REACH):
            steps = []
            for path, at in frontier:
                for k, (producer, _) in enumerate(self.deduped.joined[at]):
                    if path or position in (-1, k):
                        steps.append(((*path, k), producer))
            found = {self._end(node, path): path for path, at in steps if at == home}
            if found:
                yield from found.values()
                return
            frontier = steps

    def _end(self, node: int, path: Path) -> int:
        """Where `path` from `node` leads in the whole graph."""
        for k in path:
            node = self.deduped.nodes.reads[node][k][0]
        return node


@dataclass(slots=True)
class _Expander:
    """The whole partitioned graph under construction.

    `emitted` holds the ops made for each node; `values` maps (node, value of the answer) to the
    value made for it, `copies` the same per reader for what is copied for each.
    """

    deduped: Deduped
    given: PartitionedGraph
    answer: _Answer
    emitted: dict[int, list[Op]] = field(default_factory=dict)
    values: dict[tuple[int, int, int], Value] = field(default_factory=dict)
    copies: dict[tuple[Op, int, int], Op] = field(default_factory=dict)
    specs: dict[Value, ShardingSpec] = field(default_factory=dict)
    sources: dict[Op, list[_Source]] = field(default_factory=dict)

    def run(self, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]) -> PartitionedGraph:
        """The whole graph."""
        nodes = self.deduped.nodes
        for node in range(nodes.first_op):
            self._input(node)
        for node in range(nodes.first_op, nodes.first_output):
            self._node(node)
        ends = range(nodes.first_output, len(nodes.classes))
        results = tuple(self._output(node) for node in ends)
        ops = tuple(op for node in sorted(self.emitted) for op in self.emitted[node])
        starts = tuple(self.values[node, -1, 0] for node in range(nodes.first_op))
        graph = with_ops(nodes.graph, ops, results, starts)
        return replace(self.given, graph=graph, specs=self.specs, inputs=inputs, outputs=outputs)

    def _stands(self, node: int) -> int:
        """The kept node whose answer `node` takes."""
        classes = self.deduped.nodes.classes
        return node if node in self.deduped.joined else self.deduped.standing[classes[node]]

    def _input(self, node: int) -> None:
        """An input, laid out like the one that stands for it."""
        self.values[node, -1, 0] = self._value(self.answer.input_at[self._stands(node)])

    def _value(self, like: Value) -> Value:
        """A new value that lives as `like` does in the answer."""
        value = Value(like.type)
        self.specs[value] = self.given.specs[like]
        return value

    def _node(self, node: int) -> None:
        """The ops made for one node."""
        kept = self._stands(node)
        for number, op in enumerate(self.answer.ops.get(kept, ())):
            if op in self.answer.apart:
                continue
            made = self._copy(op, node, kept, node)
            for k, value in enumerate(made.results):
                self.values[node, number, k] = value

    def _output(self, node: int) -> Value:
        kept = self._stands(node)
        value = self.answer.output_of[kept]
        return self._operand(node, self.answer.source(kept, value, 0), value, node)

    def _copy(self, op: Op, node: int, kept: int, reader: int) -> Op:
        """`op`, which the answer has for `kept`, made for `node`."""
        operands = [
            self._operand(node, source, value, reader)
            for source, value in zip(self._sources(op, kept), op.operands, strict=True)
        ]
        results = tuple([self._value(v) for v in op.results])
        here = self.deduped.nodes.op(node)
        loc = here.loc if op.loc.file == ORIGIN and here is not None else op.loc
        for value in (v for region in op.regions for v in all_values(region)):
            assert value not in self.specs  # used as it is: an op with regions is like no other
            self.specs[value] = self.given.specs[value]
        made = Op(op.name, tuple(operands), results, op.attrs, op.regions, loc)
        self.emitted.setdefault(node, []).append(made)
        return made

    def _sources(self, op: Op, kept: int) -> list[_Source]:
        """Where copies of `op`, which the answer has for `kept`, find their operands."""
        found = self.sources.get(op)
        if found is None:
            own = self.deduped.nodes.op(kept)
            like = own is not None and own.name == op.name and len(own.operands) == len(op.operands)
            places = ((v, k if like else -1) for k, v in enumerate(op.operands))
            found = self.sources[op] = [self.answer.source(kept, v, k) for v, k in places]
        return found

    def _operand(self, node: int, source: _Source, value: Value, reader: int) -> Value:
        """What `node` reads where the answer has `value`."""
        at, reads = node, self.deduped.nodes.reads
        for k in source.path:
            at = reads[at][k][0]
        if source.apart and source.op is not None:
            return self._apart(source.op, at, reader).results[source.result]
        found = self.values.get((at, source.number, source.result))
        if found is None or found.type != value.type:
            home = self._stands(at)
            raise ExpandError(f"node {node} requires {value.type} of node {at} ({home}), got none")
        given, wanted = self.specs[found], self.given.specs[value]
        if given is not wanted and given != wanted:
            raise ExpandError(f"node {node} requires {wanted} of node {at}, got {given}")
        return found

    def _apart(self, op: Op, node: int, reader: int) -> Op:
        """A copy of `op` for one reader."""
        key = (op, node, reader)
        if key not in self.copies:
            home = self.answer.home[op]
            self.copies[key] = self._copy(op, node, home, reader)
        return self.copies[key]
