"""Stage assignment of layers: which of them belong to which part of a pipeline.

Layers are counted over the whole model in program order: iterations of the loops that first walk a
stack of weights, and repeats of unrolled code. How many a part gets, `balance.py` decides. Loops
that walk known layers again (the backward pass) are cut at the same layers. `unstack.py` and
`op_placement.py` read the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.pipeline.balance import REST, PartShare, layer_costs, shares
from shardwright.sharding.cut.pipeline.loops import LayerWalk
from shardwright.sharding.indices.dims import batch_labels, reached
from shardwright.sharding.indices.indices import Class, IndexClasses
from shardwright.sharding.indices.layers import (
    ScannedLayers,
    UnrolledLayers,
    scanned_layers,
    unrolled_layers,
)
from shardwright.sharding.partition.partitioned import Slot


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring layers of a stack that belong to one part."""

    first: int
    size: int
    part: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Layers by part.

    `trips` are the iterations of every layer loop, part after part in the order they run; `stacks`
    the runs of every index that layers are stacked along; `leaves` the part of a weight that only
    one unrolled layer uses, by input; `shares` what each part has of the model.
    """

    indices: IndexClasses
    trips: Mapping[Op, tuple[int, ...]]
    stacks: Mapping[Class, tuple[Run, ...]]
    leaves: Mapping[Value, int]
    shares: tuple[PartShare, ...]

    def runs(self, value: Value, dim: int) -> tuple[Run, ...]:
        """The runs of a dim; empty when no layers lie along it."""
        return self.stacks.get(self.indices.of((value, dim)), ())

    def stacked(self, value: Value) -> tuple[int, tuple[Run, ...]] | None:
        """The dim of `value` that layers lie along, and their runs."""
        found = ((d, self.runs(value, d)) for d in range(value.type.rank))
        return next(((d, runs) for d, runs in found if runs), None)


def assign(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    num_parts: int,
    balance: str = "cost",
    sizes: Sequence[int] = (),
) -> Assignment:
    """Layers of a step by part: `sizes` of them, else with `balance` by what they cost, or by their
    number alone.

    Raises: ShardingError (SW_PIPELINE_LAYERS) when the step has fewer layers than parts, other
    parts or layers than `sizes`, no part is asked for, or one has no weight of its own.
    """
    if num_parts < 1:
        raise ShardingError(
            "SW_PIPELINE_LAYERS",
            f"strategy.stage_parts requires at least 1 part per stage, got {num_parts} in all",
        )
    return _Assigner(graph, inputs, outputs, num_parts, balance, sizes).build()


@dataclass(slots=True)
class _Assigner:
    """The layers of a step in program order, then their parts."""

    graph: Graph
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    num_parts: int
    balance: str
    sizes: Sequence[int]
    indices: IndexClasses = field(init=False)
    parts_of: dict[Class, np.ndarray] = field(default_factory=dict)
    trips: dict[Op, tuple[int, ...]] = field(default_factory=dict)
    leaves: dict[Value, int] = field(default_factory=dict)
    users: dict[Value, set[int]] = field(default_factory=dict)
    """The parts of the unrolled layers that read a weight."""

    def build(self) -> Assignment:
        """The assignment."""
        self.indices = IndexClasses(self.graph)
        layers = self._layers()
        total = sum(_count(one) for one in layers)
        if total < self.num_parts:
            raise ShardingError(
                "SW_PIPELINE_LAYERS",
                f"mesh.pp requires at least {self.num_parts} layers that repeat, found {total}",
                hint="use fewer stages; layers are found where code repeats, or a scan over them",
            )
        costs = layer_costs(self.graph, self.inputs, self.outputs, layers)
        sizes = self._sizes(costs)
        parts, first = [part for part, size in enumerate(sizes) for _ in range(size)], 0
        for one in layers:
            self._place(one, parts[first : first + _count(one)])
            first += _count(one)
        self._place_returning()
        stacks = {c: tuple(_runs(of_layer)) for c, of_layer in self.parts_of.items()}
        self._check_owners(stacks)
        whole = sum(costs) or 1.0
        told = tuple(
            PartShare(size, sum(c for c, p in zip(costs, parts, strict=True) if p == part) / whole)
            for part, size in enumerate(sizes)
        )
        return Assignment(self.indices, self.trips, stacks, self.leaves, told)

    def _sizes(self, costs: Sequence[float]) -> Sequence[int]:
        """Layers of every part. Raises ShardingError for other numbers than there are."""
        if not self.sizes:
            even = [1.0] * len(costs)
            return shares(costs if self.balance == "cost" else even, self.num_parts)
        sizes = [size if size != REST else len(costs) - sum(self.sizes) for size in self.sizes]
        if len(sizes) != self.num_parts or sum(sizes) != len(costs) or min(sizes) < 1:
            given = ", ".join(str(size or "*") for size in self.sizes)
            raise ShardingError(
                "SW_PIPELINE_LAYERS",
                f"strategy.stage_layers requires {self.num_parts} parts of {len(costs)} layers in"
                f" all, got {given}: {len(sizes)} parts of {sum(self.sizes)}",
                hint="leave it out to have layers shared out by cost",
            )
        return sizes

    def _layers(self) -> list[ScannedLayers | UnrolledLayers]:
        """Layers where the model first runs them, in program order."""
        position = {op: i for i, op in enumerate(self.graph.ops)}
        found: list[tuple[int, ScannedLayers | UnrolledLayers]] = []
        seen: set[Class] = set()
        for scan in self._scans():
            classes = set(self._classes(scan)) & self._weight_classes()
            if classes and not classes & seen:
                found.append((position[scan.loop], scan))
            seen |= classes
        used: set[Value] = set()
        for run in self._unrolled():
            weights = {w for ops in run.repeats for w in self._weights(ops)}
            if weights and not weights & used:
                found.append((position[run.repeats[0][0]], run))
            used |= weights
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def _scans(self) -> list[ScannedLayers]:
        """Layer loops at the top level."""
        top = set(self.graph.ops)
        return [scan for scan in scanned_layers(self.graph) if scan.loop in top]

    def _classes(self, scan: ScannedLayers) -> dict[Class, int]:
        """The indices a loop walks along, each with a carry that has it."""
        body = scan.loop.regions[0]
        walked = {**scan.weights, **scan.stacks}
        return {self.indices.of((body.inputs[c], d)): c for c, d in walked.items()}

    def _weight_classes(self) -> set[Class]:
        """The indices of the dims of all parameters."""
        return {c for v in self._parameters() for _, c in self.indices.classes(v)}

    def _parameters(self) -> list[Value]:
        pairs = zip(self.inputs, self.graph.inputs, strict=True)
        return [value for slot, value in pairs if slot.role in WEIGHT_ROLES]

    def _unrolled(self) -> list[UnrolledLayers]:
        """Repeats of unrolled code, in program order."""
        pairs = zip(self.inputs, self.graph.inputs, strict=True)
        batch = {value: slot.batch_dim or 0 for slot, value in pairs if slot.role == "batch"}
        labels = batch_labels(self.graph, batch).dims
        weights = reached(self.graph, self._parameters())
        position = {op: i for i, op in enumerate(self.graph.ops)}
        runs = unrolled_layers(self.graph, labels, weights)
        return sorted(runs, key=lambda run: position[run.repeats[0][0]])

    def _weights(self, ops: Sequence[Op]) -> set[Value]:
        """The parameters that `ops` read, directly or converted."""
        made = self.graph.producers()
        parameters = set(self._parameters())
        inside = {v for op in ops for v in op.results}
        found: set[Value] = set()
        for operand in {v for op in ops for v in op.operands} - inside:
            while (op := made.get(operand)) is not None and len(op.operands) == 1:
                operand = op.operands[0]
            found |= {operand} & parameters
        return found

    def _place(self, layers: ScannedLayers | UnrolledLayers, parts: Sequence[int]) -> None:
        """Give layer `i` of a loop or of repeats to `parts[i]`."""
        if isinstance(layers, ScannedLayers):
            self._place_loop(layers, parts)
            return
        weights = set[Value]()
        for ops, part in zip(layers.repeats, parts, strict=True):
            read = self._weights(ops)
            weights |= read
            for weight in read:
                self.users.setdefault(weight, set()).add(part)
        own = {w: self.users[w] for w in weights}
        self.leaves |= {w: min(users) for w, users in own.items() if len(users) == 1}

    def _check_owners(self, stacks: Mapping[Class, Sequence[Run]]) -> None:
        """Every part needs a weight that it alone uses: what runs where follows from that.

        Raises ShardingError with the line where a weight of several parts is read.
        """
        owners = {*self.leaves.values(), *(run.part for runs in stacks.values() for run in runs)}
        without = [part for part in range(self.num_parts) if part not in owners]
        if not without or self.num_parts == 1:
            return
        names = {v: slot.name for slot, v in zip(self.inputs, self.graph.inputs, strict=True)}
        shared = [v for v in self.graph.inputs if len(self.users.get(v, ())) > 1]
        read = next((op for op in self.graph.ops if {*shared} & {*op.operands}), None)
        raise ShardingError(
            "SW_PIPELINE_LAYERS",
            f"mesh.pp requires weights of its own for each of {self.num_parts} parts, got none for"
            f" part {without[0]}: layers of several parts read"
            f" {', '.join(names[v] for v in shared)}",
            read.loc if read else None,
            "walk a stack of weights with jax.lax.scan, or keep those of each layer in leaves of"
            " their own; weights that all layers share allow pp = 1 only",
        )

    def _place_loop(self, scan: ScannedLayers, parts: Sequence[int]) -> None:
        """Cut a loop where its iterations change part; learn the parts of what it stacks."""
        self.trips[scan.loop] = tuple(len(list(own)) for _, own in groupby(parts))
        walk = LayerWalk.of(scan)
        for index, carry in self._classes(scan).items():
            layers = walk.layers.get(carry)
            if index not in self.parts_of and layers is not None:
                of_layer = np.empty(len(parts), np.int64)
                of_layer[layers] = parts
                self.parts_of[index] = of_layer

    def _place_returning(self) -> None:
        """Cut the loops that walk layers which have their parts already."""
        for scan in self._scans():
            known = [(i, c) for i, c in self._classes(scan).items() if i in self.parts_of]
            if scan.loop not in self.trips and known:
                index, carry = known[0]
                visited = LayerWalk.of(scan).layers[carry]
                self._place_loop(scan, [int(p) for p in self.parts_of[index][visited]])


def _count(layers: ScannedLayers | UnrolledLayers) -> int:
    """How many layers."""
    if isinstance(layers, ScannedLayers):
        return int(layers.loop.attrs.trip)
    return len(layers.repeats)


def _runs(of_layer: np.ndarray) -> Iterator[Run]:
    """Neighbouring layers of one part."""
    first = 0
    for part, own in groupby(of_layer.tolist()):
        size = len(list(own))
        yield Run(first, size, part)
        first += size
