"""Fully sharded data parallel (ZeRO-3), and its hybrid with replicas (HSDP).

Every weight and its optimizer leaves are sharded over `dp_shard` along one dim; the batch is split
over `dp_replicate` and `dp_shard`. A weight is gathered where the forward or backward pass uses it,
its gradient is reduced and scattered where it is made, and the optimizer works on shards. `fsdp`
below is the recipe, top to bottom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.diagnostics import Diagnostic, ShardingError
from compiler.ir.types import Graph, Op, TensorType, Value
from sharding.dims import BatchLabels, Dim, ShardClasses, batch_labels, reached
from sharding.layers import ScannedLayers, scanned_layers, unrolled_layers
from sharding.mesh import DATA_AXES, Mesh
from sharding.partitioned import Slot
from sharding.pins import (
    CARRYING,
    REDUCING,
    Annotator,
    GatherUse,
    Users,
    gather_uses,
    layout_borders,
    reduction_ops,
)
from sharding.spec import ShardingSpec, replicated, sharded
from sharding.strategies import INPUT, OUTPUT, Predicted, Recipe, value_ids

SHARD_AXIS = "dp_shard"
LARGE_REPLICATED_BYTES = 1 << 20
"""Above this a leaf that stays whole is worth a warning (our choice, not a hardware fact)."""


def fsdp(graph: Graph, inputs: Sequence[Slot], outputs: Sequence[Slot], mesh: Mesh) -> Recipe:
    """Decide where everything lives under FSDP.

    Raises: ShardingError for a mesh axis other than the data axes above 1, and for a batch that
    does not divide.
    """
    plan = _Plan(graph, inputs, outputs, mesh)
    plan.check_axes()
    plan.place_batch()
    plan.describe_layers()
    plan.place_parameters()
    plan.place_optimizer()
    plan.gather_weights()
    plan.reduce_gradients()
    plan.join_layouts()
    plan.pin_activations()
    plan.place_results()
    return plan.recipe()


@dataclass(slots=True)
class _Plan:
    """What has been decided so far."""

    graph: Graph
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    mesh: Mesh
    labels: BatchLabels = field(init=False)
    classes: ShardClasses = field(init=False)
    scans: list[ScannedLayers] = field(init=False)
    roots: dict[Dim, str] = field(default_factory=dict)
    pins: dict[Value, ShardingSpec] = field(default_factory=dict)
    results: list[ShardingSpec] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    predicted: Counter[Predicted] = field(default_factory=Counter)
    gathers: list[GatherUse] = field(default_factory=list)
    layouts: dict[Value, ShardingSpec] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes the batch is split over, without those of size 1."""
        return self._real(DATA_AXES)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes a weight is sharded over, empty when there is one shard."""
        return self._real((SHARD_AXIS,))

    def _real(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of the mesh among `axes` that are larger than 1."""
        return tuple(a for a in self.mesh.order(axes) if self.mesh.sizes[a] > 1)

    def slots(self, role: str) -> list[tuple[Slot, Value]]:
        """The inputs of a role."""
        pairs = zip(self.inputs, self.graph.inputs, strict=True)
        return [(slot, value) for slot, value in pairs if slot.role == role]

    def check_axes(self) -> None:
        """Refuse axes this recipe does not use."""
        for name, size in self.mesh.axes:
            if size > 1 and name not in DATA_AXES:
                raise ShardingError(
                    "SW_FSDP_AXIS",
                    f"strategy fsdp requires mesh.{name} = 1, got {size}",
                    hint=f"put these cores on {' or '.join(DATA_AXES)}",
                )

    def place_batch(self) -> None:
        """Split batch inputs along their sample dim, and follow that dim through the graph."""
        batch: dict[Value, int] = {}
        for slot, value in self.slots("batch"):
            dim = slot.batch_dim or 0
            self._check_batch(slot, value.type, dim)
            batch[value] = dim
            self._place(slot, value, sharded(value.type.rank, dim, self.data_axes), "batch dim")
        for slot, value in self.slots("rng"):
            self._place(slot, value, replicated(value.type.rank), "rng is the same on every core")
        self.labels = batch_labels(self.graph, batch)
        self.classes = ShardClasses(self.graph, self.labels.dims)
        self.scans = scanned_layers(self.graph)
        self.findings += [_conflict(op) for op in dict.fromkeys(self.labels.conflicts)]

    def _check_batch(self, slot: Slot, type: TensorType, dim: int) -> None:
        """Refuse a batch that does not divide."""
        ways = self.mesh.size(self.data_axes)
        given = type.shape[dim] if type.rank > dim else 0
        if not given or given % ways:
            shown = " * ".join(f"{a}={self.mesh.sizes[a]}" for a in self.data_axes)
            raise ShardingError(
                "SW_BATCH_DIVIDE",
                f"strategy.micro_batch requires a multiple of {ways} ({shown}) samples in "
                f"{slot.name}, got {given}",
                hint=f"use {-(-max(given, 1) // ways) * ways} samples, or fewer data cores",
            )

    def describe_layers(self) -> None:
        """Say which layers were found; for the user, nothing below depends on it."""
        weights = reached(self.graph, [value for _, value in self.slots("parameter")])
        runs = unrolled_layers(self.graph, self.labels.dims, weights)
        found = [f"loop of {s.loop.attrs.trip} over {len(s.weights)} weights" for s in self.scans]
        found += [f"{len(run.repeats)} unrolled repeats" for run in runs]
        self.reasons["layers"] = "; ".join(found) or "none found"

    def place_parameters(self) -> None:
        """Shard each weight along its largest divisible dim that is not a loop's layer dim."""
        layer_dims = self._layer_dims()
        ways = self.mesh.size(self.shard_axes)
        for slot, value in self.slots("parameter"):
            shape = value.type.shape
            free = [d for d in range(len(shape)) if self.classes.find((value, d)) not in layer_dims]
            fitting = [d for d in free if shape[d] % ways == 0 and shape[d]]
            if ways == 1 or not fitting:
                why = "one shard" if ways == 1 else f"no dim divides by {SHARD_AXIS}={ways}"
                self._replicate(slot, value, why)
                continue
            dim = max(fitting, key=lambda d: (shape[d], -d))
            self.roots.setdefault(self.classes.find((value, dim)), slot.name)
            why = f"largest dim that divides by {SHARD_AXIS}={ways}"
            self._place(slot, value, sharded(len(shape), dim, self.shard_axes), why)

    def _layer_dims(self) -> set[Dim]:
        """Classes of the dims that loops walk along layer by layer."""
        return {
            self.classes.find((scan.loop.regions[0].inputs[carry], dim))
            for scan in self.scans
            for carry, dim in (*scan.weights.items(), *scan.stacks.items())
        }

    def place_optimizer(self) -> None:
        """Optimizer leaves follow their weight: by path suffix and shape, else by what they are
        added to.
        """
        weights: dict[tuple[str, Shape], Value] = {}
        for slot, value in self.slots("parameter"):
            weights.setdefault((slot.name.partition("/")[2], value.type.shape), value)
        for slot, value in self.slots("optimizer"):
            owner = _owner(slot, value, weights)
            if owner is not None:
                self._place(slot, value, self.pins[owner[1]], f"follows params/{owner[0]}")
                continue
            spec = self._class_spec(value)
            if spec is not None:
                self._place(slot, value, spec, "follows the weight it is combined with")
            else:
                self._replicate(slot, value, "belongs to no sharded weight")

    def _class_spec(self, value: Value) -> ShardingSpec | None:
        """The spec `value` gets from the weight class of exactly one of its dims, if that dim
        divides.
        """
        found = self.classes.dims_of(value, self.roots)
        if len(found) != 1 or value.type.shape[found[0][0]] % self.mesh.size(self.shard_axes):
            return None
        return sharded(value.type.rank, found[0][0], self.shard_axes)

    def gather_weights(self) -> None:
        """Gather a sharded weight where it meets the batch, after its conversion to the compute
        type.
        """
        split = [v for _, v in self.slots("parameter") if self.pins[v].axes]
        split += [v for _, v in self.slots("optimizer") if self.pins[v].axes]
        weights = reached(self.graph, split)
        self.gathers = gather_uses(self.graph, self.labels.dims, weights)

    def reduce_gradients(self) -> None:
        """Where the batch dim ends, reduce; the gradient of a sharded weight is scattered."""
        for op, users in reduction_ops(self.graph, self.labels.dims):
            if op.name not in REDUCING:
                self.findings.append(_lost_batch(op))
                continue
            for value in op.results:
                self.pins[value] = replicated(value.type.rank)
                self._scatter_gradient(value, users)

    def _scatter_gradient(self, value: Value, users: Users) -> None:
        """Lay out the gradient `value` like its weight, once a shape shows the weight's dim."""
        target, spec = value, self._class_spec(value)
        following = users.chain(value)
        between: list[Value] = []
        while spec is None and (after := next(following, None)) is not None:
            between.append(after)
            target, spec = after, self._class_spec(after)
        if spec is None:
            self._predict("all_reduce", self.data_axes, value.type)
            return
        self.pins.update({v: replicated(v.type.rank) for v in between})
        self.layouts[target] = spec
        self._predict("reduce_scatter", self.shard_axes, target.type)
        extra = tuple(a for a in self.data_axes if a not in self.shard_axes)
        self._predict("all_reduce", extra, target.type)

    def join_layouts(self) -> None:
        """Gather before, and lay out after, ops that cut the sharded dim of a weight or of its
        gradient.
        """
        borders = layout_borders(self.graph, self.labels.dims, self._class_spec)
        for uses, results in borders:
            self.gathers += uses
            for value in results:
                spec = self._class_spec(value)
                if spec is not None and value not in self.layouts:
                    self.pins[value] = replicated(value.type.rank)
                    self.layouts[value] = spec

    def _predict(self, kind: str, axes: tuple[str, ...], type: TensorType) -> None:
        """Expect one collective."""
        if axes:
            self.predicted[Predicted(kind, axes, type)] += 1

    def pin_activations(self) -> None:
        """Every value with a batch dim is split along it; loop carries of weight classes like their
        weight.
        """
        ways = self.mesh.size(self.data_axes)
        for op in self.graph.walk():
            for value in op.results:
                dim = self.labels.dims.get(value)
                if dim is not None and value.type.shape[dim] % ways == 0:
                    self.pins[value] = sharded(value.type.rank, dim, self.data_axes)
                elif op.name in CARRYING and (spec := self._class_spec(value)) is not None:
                    self.pins[value] = spec

    def place_results(self) -> None:
        """State results live where the state came in; metrics are whole."""
        state = {
            slot.name: self.pins[v] for slot, v in zip(self.inputs, self.graph.inputs, strict=True)
        }
        for slot, value in zip(self.outputs, self.graph.outputs, strict=True):
            dim = self.labels.dims.get(value)
            spec = replicated(value.type.rank)
            if slot.role in ("parameter", "optimizer", "rng"):
                spec = state.get(slot.name, spec)
            elif dim is not None:
                spec = sharded(value.type.rank, dim, self.data_axes)
            self.results.append(spec)

    def recipe(self) -> Recipe:
        """The annotated graph and its specs by id."""
        uses = {(use.op, use.index): use for use in self.gathers}
        annotator = Annotator(uses, self.layouts)
        graph = annotator.run(self.graph)
        for point in annotator.points:
            spec = self._class_spec(point.operands[0])
            self._predict("all_gather", spec.axes if spec else (), point.result.type)
        pins = self.pins | annotator.specs
        specs = {key: pins[value] for key, value in value_ids(graph) if value in pins}
        specs |= {(OUTPUT, i): spec for i, spec in enumerate(self.results)}
        assert all((INPUT, i) in specs for i in range(len(graph.inputs)))
        return Recipe(
            graph=graph,
            specs=specs,
            reasons=self.reasons,
            predicted=self.predicted,
            findings=tuple(self.findings),
        )

    def _place(self, slot: Slot, value: Value, spec: ShardingSpec, why: str) -> None:
        """Decide one input."""
        self.pins[value] = spec
        self.reasons[slot.name] = f"{spec}: {why}"

    def _replicate(self, slot: Slot, value: Value, why: str) -> None:
        """Keep one input whole on every core; say so when it is large."""
        self._place(slot, value, replicated(value.type.rank), why)
        if value.type.num_bytes >= LARGE_REPLICATED_BYTES and self.shard_axes:
            self.findings.append(
                Diagnostic(
                    "SW_FSDP_REPLICATED",
                    f"{slot.name} {value.type} stays whole on every core: {why}",
                    hint=f"choose a {SHARD_AXIS} that divides one of its dims",
                    severity="warning",
                )
            )


Shape = tuple[int, ...]


def _owner(
    slot: Slot, value: Value, weights: Mapping[tuple[str, Shape], Value]
) -> tuple[str, Value] | None:
    """The weight whose path ends the leaf's path and whose shape it has; the longest path wins."""
    parts = slot.name.split("/")
    for first in range(len(parts)):
        name = "/".join(parts[first:])
        weight = weights.get((name, value.type.shape))
        if weight is not None:
            return name, weight
    return None


def _conflict(op: Op) -> Diagnostic:
    """Two operands of `op` bring different batch dims into one result."""
    return Diagnostic(
        "SW_BATCH_CONFLICT",
        f"{op.name} combines two batch dims; one of them is gathered",
        op.loc,
        severity="warning",
    )


def _lost_batch(op: Op) -> Diagnostic:
    """The batch dim ends at an op that does not reduce it."""
    return Diagnostic(
        "SW_BATCH_LOST",
        f"{op.name} ends the batch dim of its operand; its result is computed on every core",
        op.loc,
        hint="keep samples along one dim that is only merged, moved or reduced",
        severity="warning",
    )
