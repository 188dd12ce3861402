"""What a recipe has decided so far about a step.

A strategy (`fsdp.py`, `generic.py`, `llm_training.py`) is a list of steps over this object; they
live in `splits.py`, `state.py`, `activations.py` and `gradients.py`, and read roles and index
classes, never names or ops of a model. Every value has a `used` layout, the one code computes with
(`layout.py`); state may be `stored` more finely and is then gathered where it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import Diagnostic, Loc, ShardingError
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.types import Graph, TensorType, Value
from shardwright.sharding.indices.dim_sets import DimSets, DimTable, shard_classes
from shardwright.sharding.indices.dims import BatchLabels, Dim, batch_labels, reached
from shardwright.sharding.indices.indices import IndexClasses
from shardwright.sharding.indices.layers import (
    ScannedLayers,
    UnrolledLayers,
    scanned_layers,
    unrolled_layers,
)
from shardwright.sharding.partition.mesh import DATA_AXES, Mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.settings import WEIGHTS
from shardwright.sharding.strategies import INPUT, OUTPUT, Predicted, Recipe, value_ids
from shardwright.sharding.strategies.constraints import Annotator, GatherUse
from shardwright.sharding.strategies.layout import UsedLayout
from shardwright.sharding.strategies.save_gathered import save_gathered

SHARD_AXES = ("dp_shard", "ep", "cp")
"""State is spread over the ranks that hold the same `used` weights."""


@dataclass(slots=True)
class Decisions:
    """A graph, its slots and mesh, and where everything lives so far.

    Steps run in the order of the recipes and of `registry.recipe_of`; each needs those before it.
    """

    graph: Graph
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    mesh: Mesh
    labels: BatchLabels = field(init=False)
    layout: UsedLayout = field(init=False)
    shards: DimSets = field(init=False)
    scans: list[ScannedLayers] = field(init=False)
    runs: list[UnrolledLayers] = field(init=False)
    zero: int = WEIGHTS
    saves_gathered: bool = False
    roots: set[Dim] = field(default_factory=set)
    constraints: dict[Value, ShardingSpec] = field(default_factory=dict)
    results: list[ShardingSpec] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    predicted: Counter[Predicted] = field(default_factory=Counter)
    gathers: list[GatherUse] = field(default_factory=list)
    layouts: dict[Value, ShardingSpec] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)

    def real(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of the mesh among `axes` that are larger than 1, in mesh order."""
        return tuple(a for a in self.mesh.order(axes) if self.mesh.sizes[a] > 1)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes samples are split over."""
        return self.real(DATA_AXES)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes state is spread over, empty when there is one shard."""
        return self.real(SHARD_AXES)

    def slots(self, *roles: str) -> list[tuple[Slot, Value]]:
        """The inputs of some roles."""
        pairs = zip(self.inputs, self.graph.inputs, strict=True)
        return [(slot, value) for slot, value in pairs if slot.role in roles]

    def values(self, *roles: str) -> list[Value]:
        """The inputs of some roles without their slots."""
        return [value for _, value in self.slots(*roles)]

    def batch_dims(self) -> dict[Value, int]:
        """The sample dim of every input that has one: batches, and caches."""
        return {value: slot.batch_dim or 0 for slot, value in self.sampled()}

    def sampled(self) -> list[tuple[Slot, Value]]:
        """The inputs with samples."""
        caches = [(s, v) for s, v in self.slots("cache") if s.batch_dim is not None]
        return [*self.slots("batch"), *caches]

    def read_graph(self) -> None:
        """Follow samples through the graph, find its layers and its index classes."""
        self._check_batch()
        self.labels = batch_labels(self.graph, self.batch_dims())
        for op in dict.fromkeys(self.labels.conflicts):
            what = f"{op.name} combines two batch dims; one of them is gathered"
            self.warn("SW_BATCH_CONFLICT", what, loc=op.loc)
        table = DimTable(self.graph)
        self.shards = shard_classes(table, self.labels.dims, self._kept_state())
        indices = IndexClasses(self.graph, table)
        self.layout = UsedLayout(self.mesh, indices, self.labels.dims, self.data_axes)
        self.scans = scanned_layers(self.graph)
        given = reached(self.graph, self.values(*WEIGHT_ROLES))
        self.runs = unrolled_layers(self.graph, self.labels.dims, given)
        found = [f"loop of {s.loop.attrs.trip} over {len(s.weights)} weights" for s in self.scans]
        found += [f"{len(run.repeats)} unrolled repeats" for run in self.runs]
        self.reasons["layers"] = "; ".join(found) or "none found"

    def _kept_state(self) -> Iterator[tuple[Value, Value]]:
        """Every leaf of state with its value after the step."""
        after = {s.name: v for s, v in zip(self.outputs, self.graph.outputs, strict=True)}
        for slot, value in zip(self.inputs, self.graph.inputs, strict=True):
            if slot.name in after and after[slot.name].type.shape == value.type.shape:
                yield value, after[slot.name]

    def _check_batch(self) -> None:
        """Refuse a batch that does not divide."""
        ways = self.mesh.size(self.data_axes)
        for slot, value in self.sampled():
            given = (*value.type.shape, 0)[min(slot.batch_dim or 0, value.type.rank)]
            if not given or given % ways:
                shown = " * ".join(f"{a}={self.mesh.sizes[a]}" for a in self.data_axes)
                raise ShardingError(
                    "SW_BATCH_DIVIDE",
                    f"strategy.micro_batch requires a multiple of {ways} ({shown}) samples in "
                    f"{slot.name}, got {given}",
                    hint=f"use {-(-max(given, 1) // ways) * ways} samples, or fewer data cores",
                )

    def walked(self) -> list[Dim]:
        """The dims that loops walk along layer by layer."""
        return [
            (scan.loop.regions[0].inputs[carry], dim)
            for scan in self.scans
            for carry, dim in (*scan.weights.items(), *scan.stacks.items())
        ]

    def free_axes(self, used: ShardingSpec) -> tuple[str, ...]:
        """The shard axes that a used layout leaves."""
        return tuple(a for a in self.shard_axes if a not in used.axes)

    def stored(self, value: Value) -> ShardingSpec | None:
        """The layout `value` is stored in: used, and the shard axes along the dim of the one weight
        class it has; None without one.
        """
        found = [d for d in range(value.type.rank) if self.shards.find((value, d)) in self.roots]
        if len(found) != 1 or value in self.labels.dims:
            return None
        (dim,), used = found, self.layout.of(value)
        axes = (*used.dims[dim], *self.free_axes(used))
        if axes == used.dims[dim] or value.type.shape[dim] % self.mesh.size(axes):
            return None
        return used.with_dim(dim, axes)

    def predict(self, kind: str, axes: tuple[str, ...], type: TensorType) -> None:
        """Expect one collective."""
        if axes:
            self.predicted[Predicted(kind, axes, type)] += 1

    def moved(self, before: ShardingSpec, after: ShardingSpec) -> tuple[str, ...]:
        """The axes that go from one dim to another."""
        pairs = zip(before.dims, after.dims, strict=True)
        return self.mesh.order([a for old, new in pairs for a in new if a not in old])

    def weights(self) -> set[Value]:
        """Values that weights made without the batch."""
        made = reached(self.graph, self.values(*WEIGHT_ROLES))
        return made - reached(self.graph, self.values("batch", "cache"))

    def recipe(self) -> Recipe:
        """The annotated graph and its specs by id."""
        uses = {(use.op, use.index): use for use in self.gathers}
        annotator = Annotator(uses, self.layouts, self.layout.of)
        graph = annotator.run(self.graph)
        constraints, points = self.constraints | annotator.specs, annotator.points
        if self.saves_gathered:
            graph, constraints, points = save_gathered(graph, points, constraints)
        for point in points:
            source, whole = point.operands[0], constraints[point.result]
            before = self.stored(source) or constraints.get(source, self.layout.of(source))
            gathered = tuple(a for a in before.axes if a not in whole.axes)
            self.predict("all_gather", gathered, point.result.type)
            self.predict("all_to_all", self.moved(before, whole), point.result.type)
        specs = {key: constraints[value] for key, value in value_ids(graph) if value in constraints}
        specs |= {(OUTPUT, i): spec for i, spec in enumerate(self.results)}
        assert all((INPUT, i) in specs for i in range(len(graph.inputs)))
        return Recipe(
            graph=graph,
            mesh=self.mesh,
            specs=specs,
            reasons=self.reasons,
            predicted=self.predicted,
            follows_samples=any(v.type.shape[d] > 1 for v, d in self.batch_dims().items()),
            findings=tuple(self.findings),
        )

    def warn(self, code: str, message: str, hint: str = "", loc: Loc | None = None) -> None:
        """Tell the user what costs more than it has to."""
        self.findings.append(Diagnostic(code, message, loc, hint, "warning"))

    def place(self, slot: Slot, value: Value, spec: ShardingSpec, why: str) -> None:
        """Decide one input."""
        self.constraints[value] = spec
        self.reasons[slot.name] = f"{spec}: {why}"
