"""Structural deduplication: a smaller graph that partitions like the whole one.

Ops that look alike up to a radius of `RADIUS` edges (op, attributes, types, constraints, readers
and what they read) are partitioned alike, wherever they stand: layers of an unrolled model, updates
of equal weights, terms of a norm. `dedup` keeps a few ops of each class and joins their loose ends
to kept values of the same class; it knows neither layers nor chains. `expand.py` carries the answer
back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies import INPUT, OUTPUT, ValueId, value_ids

RADIUS = 4
"""Edges that a class looks at. A larger one keeps more ops of both ends of a chain; a smaller one
tells less apart. Four edges span the constraints and casts between an op and its neighbours (our
choice; design note 0003 has the measurements)."""
OWN = 16
"""Weights keep their own code up to this many nodes behind a kept reader (our choice)."""
WORTH = 2
"""A deduplicated graph is used when it has at most one in `WORTH` of the ops (our choice)."""
ORIGIN = "node"  # file name of the locations that say which node an op of a deduplicated graph is

Colours = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Nodes:
    """A graph as numbered nodes: inputs, then ops of the top level, then outputs.

    `reads` holds per node (producer, result number) of each operand, `users` the reading nodes,
    `classes` the structural class of each node.
    """

    graph: Graph
    reads: Sequence[Sequence[tuple[int, int]]]
    users: Sequence[Sequence[int]]
    classes: Sequence[int]

    @property
    def first_op(self) -> int:
        """The number of the first op."""
        return len(self.graph.inputs)

    @property
    def first_output(self) -> int:
        """The number of the first output."""
        return len(self.graph.inputs) + len(self.graph.ops)

    def op(self, node: int) -> Op | None:
        """The op that is `node`; None for inputs and outputs."""
        inside = self.first_op <= node < self.first_output
        return self.graph.ops[node - self.first_op] if inside else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deduped:
    """A deduplicated graph.

    `graph` keeps inputs, ops and outputs of the whole graph (their nodes are `kept`, in order); the
    location of each op says which node it is. `joined` holds what its kept nodes read, as nodes of
    the whole graph; `standing` names for each class the kept node that stands for it.
    """

    nodes: Nodes
    graph: Graph
    kept: Sequence[int]
    joined: Mapping[int, Sequence[tuple[int, int]]]
    standing: Mapping[int, int]
    specs: Mapping[ValueId, ShardingSpec]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


def dedup(
    graph: Graph,
    specs: Mapping[ValueId, ShardingSpec],
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
) -> Deduped | None:
    """The deduplicated form of `graph`; None when repeats are too few to pay for it."""
    nodes = number_nodes(graph, specs, inputs, outputs)
    if len(nodes.classes) < WORTH * len(set(nodes.classes)):
        return None
    choice = _Choice(nodes)
    choice.run()
    kept = sorted(choice.kept)
    if len(nodes.classes) < WORTH * len(kept):
        return None
    standing = {nodes.classes[node]: node for node in reversed(kept)}
    return _build(nodes, kept, choice.joined, standing, specs, (inputs, outputs))


def number_nodes(
    graph: Graph,
    specs: Mapping[ValueId, ShardingSpec],
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
) -> Nodes:
    """The nodes of `graph` with their classes."""
    constrained = {value: specs[key] for key, value in value_ids(graph) if key in specs}
    place: dict[Value, tuple[int, int]] = {v: (i, 0) for i, v in enumerate(graph.inputs)}
    reads: list[Sequence[tuple[int, int]]] = [()] * len(graph.inputs)
    own: list[Hashable] = [
        ("input", v.type, constrained.get(v), slot.role)
        for v, slot in zip(graph.inputs, inputs, strict=True)
    ]
    for node, op in enumerate(graph.ops, len(own)):
        reads.append([place[v] for v in op.operands])
        for k, value in enumerate(op.results):
            place[value] = (node, k)
        own.append(_look(op, constrained, node))
    for i, (value, slot) in enumerate(zip(graph.outputs, outputs, strict=True)):
        reads.append([place[value]])
        own.append(("output", value.type, specs.get((OUTPUT, i)), slot.role))
    users: list[list[int]] = [[] for _ in own]
    for node, sources in enumerate(reads):
        for source, _ in sources:
            if not (readers := users[source]) or readers[-1] != node:
                readers.append(node)
    return Nodes(graph, reads, users, _classes(own, reads))


def _look(op: Op, constrained: Mapping[Value, ShardingSpec], node: int) -> Hashable:
    """What tells an op from others but for its neighbours; one with regions is like no other."""
    if op.regions:
        return node
    types = [v.type for v in op.operands]
    made = [(v.type, constrained.get(v)) for v in op.results]
    return op.name, op.attrs, *types, *made


def _classes(own: Sequence[Hashable], reads: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Classes by colour refinement: in each round a node's colour takes in those of what it reads,
    by position, and of its readers, as a multiset.
    """
    table: dict[Hashable, int] = {}
    first = [table.setdefault(entry, len(table)) for entry in own]
    colours = _mix(np.array(first, np.uint64))
    degrees = [len(sources) for sources in reads]
    node = np.repeat(np.arange(len(own)), degrees)
    if len(node):
        edges = np.array([place for sources in reads for place in sources], np.int64)
        position = np.concatenate([np.arange(degree) for degree in degrees])
        source, label = edges[:, 0], ((position << 8) + edges[:, 1]).astype(np.uint64)
        up = _mix(label * np.uint64(2))
        down = _mix(label * np.uint64(2) + np.uint64(1))
        for _ in range(RADIUS):
            after = _mix(colours)
            np.add.at(after, node, _mix(colours[source] + up))
            np.add.at(after, source, _mix(colours[node] + down))
            colours = _mix(after)
    numbers: list[int] = np.unique(colours, return_inverse=True)[1].tolist()
    return numbers


def _mix(x: Colours) -> Colours:
    """The splitmix64 finaliser, element by element. Source: Steele et al., "Fast splittable
    pseudorandom number generators", OOPSLA 2014.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(slots=True)
class _Choice:
    """Which nodes are kept, and what they read: `joined` per kept node.

    A kept node stands in for dropped ones of its class, but not where little code leads to them:
    weights of two layers stay two weights, because gathers of one value become one gather.
    """

    nodes: Nodes
    kept: set[int] = field(default_factory=set)
    joined: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # the first node of each class

    def run(self) -> None:
        """Cover every class, then keep more until every kept node can be computed and is read."""
        covered: set[int] = set()
        for node, kind in enumerate(self.nodes.classes):
            self.first.setdefault(kind, node)
        for node in range(len(self.nodes.classes)):
            self._cover(node, covered)
        own = self._own_sources()
        while missing := self._join(own) or self._unread():
            self.kept.update(missing)

    def _own_sources(self) -> set[int]:
        """Nodes that at most `OWN` nodes lead to."""
        behind: list[int] = []
        for sources in self.nodes.reads:
            behind.append(min(OWN + 1, 1 + sum(behind[p] for p, _ in sources)))
        return {node for node, count in enumerate(behind) if count <= OWN}

    def _cover(self, start: int, covered: set[int]) -> None:
        """Keep nodes around `start` as far as their classes are new, so that neighbours are kept
        together.
        """
        classes, todo = self.nodes.classes, deque([start])
        while todo:
            node = todo.popleft()
            if classes[node] in covered:
                continue
            covered.add(classes[node])
            self.kept.add(node)
            todo.extend(p for p, _ in self.nodes.reads[node])
            alike = Counter(classes[u] for u in self.nodes.users[node])
            todo.extend(u for u in self.nodes.users[node] if alike[classes[u]] == 1)

    def _join(self, own: set[int]) -> list[int]:
        """Find what each kept node reads: its own operands, or the nearest of their classes before
        it. Returns nodes that must be kept too.
        """
        classes, latest = self.nodes.classes, dict[int, int]()
        missing: dict[int, None] = {}
        self.joined = {}
        for node in sorted(self.kept):
            self.joined[node] = []
            for producer, result in self.nodes.reads[node]:
                found = producer
                if producer not in self.kept:
                    found = -1 if producer in own else latest.get(classes[producer], -1)
                if found < 0:  # chains run both ways: the first of its class serves every reader
                    missing[producer if producer in own else self.first[classes[producer]]] = None
                self.joined[node].append((found, result))
            latest[classes[node]] = node
        return list(missing)

    def _unread(self) -> list[int]:
        """A reader to keep for each kept node that has readers in the whole graph and none now."""
        read = {p for sources in self.joined.values() for p, _ in sources}
        dead = (n for n in sorted(self.kept) if n not in read and self.nodes.users[n])
        return list(dict.fromkeys(self.nodes.users[n][0] for n in dead))


def _build(
    nodes: Nodes,
    kept: Sequence[int],
    joined: Mapping[int, Sequence[tuple[int, int]]],
    standing: Mapping[int, int],
    specs: Mapping[ValueId, ShardingSpec],
    slots: tuple[Sequence[Slot], Sequence[Slot]],
) -> Deduped:
    """The deduplicated graph: values are those of the whole graph, locations are node numbers."""
    whole = nodes.graph

    def value(place: tuple[int, int]) -> Value:
        op = nodes.op(place[0])
        return whole.inputs[place[0]] if op is None else op.results[place[1]]

    ops = []
    for node in kept:
        if (op := nodes.op(node)) is not None:
            operands = tuple(value(place) for place in joined[node])
            loc = Loc(ORIGIN, node)
            ops.append(Op(op.name, operands, op.results, op.attrs, op.regions, loc))
    taken = [node for node in kept if node < nodes.first_op]
    given = [node for node in kept if node >= nodes.first_output]
    inputs = tuple(whole.inputs[node] for node in taken)
    outputs = tuple(value(joined[node][0]) for node in given)
    graph = with_ops(whole, ops, outputs, inputs)
    constrained = {v: specs[key] for key, v in value_ids(whole) if key in specs}
    short = {key: constrained[v] for key, v in value_ids(graph) if v in constrained}
    for i, node in enumerate(given):
        key = (OUTPUT, node - nodes.first_output)
        if key in specs:
            short[OUTPUT, i] = specs[key]
    assert all((INPUT, i) in short for i in range(len(taken)) if (INPUT, taken[i]) in specs)
    return Deduped(
        nodes=nodes,
        graph=graph,
        kept=kept,
        joined=joined,
        standing=standing,
        specs=short,
        inputs=tuple(slots[0][node] for node in taken),
        outputs=tuple(slots[1][node - nodes.first_output] for node in given),
    )
