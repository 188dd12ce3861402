"""What a recipe has decided so far, and the steps recipes are made of.

A strategy is a list of these steps (`fsdp.py`, `generic.py`, `llm_training.py`); a step reads roles
and index classes, never names or ops of a model. Every value has a `used` layout, the one code
computes with (`sharding/layout.py`); state may be `stored` more finely and is then gathered where
it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.diagnostics import Diagnostic, ShardingError
from compiler.ir.types import Graph, Op, TensorType, Value
from sharding.borders import borders
from sharding.dims import BatchLabels, Dim, ShardClasses, batch_labels, reached
from sharding.indices import Class, IndexClasses
from sharding.inner import broken, cover, expert_families, prices
from sharding.layers import ScannedLayers, UnrolledLayers, scanned_layers, unrolled_layers
from sharding.layout import UsedLayout, along_residual, query_dims
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
from sharding.spec import ShardingSpec
from sharding.split import rooms, spread
from sharding.strategies import INPUT, OUTPUT, Predicted, Recipe, value_ids
from sharding.strategies.expected import (
    ended_axes,
    expert_uses,
    partial_axes,
    reductions,
    sends_rows,
    sequence_uses,
)

WEIGHTS = 3
"""The ZeRO stage that spreads weights; 1 spreads the optimizer state, 2 gradients too."""
SHARD_AXES = ("dp_shard", "ep", "cp")
"""State is spread over the ranks that hold the same `used` weights (DESIGN.md section 5)."""
LARGE_REPLICATED_BYTES = 1 << 20
"""Above this a leaf that stays whole is worth a warning (our choice, not a hardware fact)."""


@dataclass(slots=True)
class Decisions:
    """A graph, its slots and mesh, and where everything lives so far.

    Recipes call the steps in the order of this class; each needs those before it.
    """

    graph: Graph
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    mesh: Mesh
    labels: BatchLabels = field(init=False)
    layout: UsedLayout = field(init=False)
    shards: ShardClasses = field(init=False)
    scans: list[ScannedLayers] = field(init=False)
    runs: list[UnrolledLayers] = field(init=False)
    zero: int = WEIGHTS
    roots: dict[Dim, str] = field(default_factory=dict)
    pins: dict[Value, ShardingSpec] = field(default_factory=dict)
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

    def slots(self, role: str) -> list[tuple[Slot, Value]]:
        """The inputs of a role."""
        pairs = zip(self.inputs, self.graph.inputs, strict=True)
        return [(slot, value) for slot, value in pairs if slot.role == role]

    def read_graph(self) -> None:
        """Follow samples through the graph, find its layers and its index classes."""
        batch = {value: slot.batch_dim or 0 for slot, value in self.slots("batch")}
        for slot, value in self.slots("batch"):
            self._check_batch(slot, value.type, batch[value])
        self.labels = batch_labels(self.graph, batch)
        self.findings += [_conflict(op) for op in dict.fromkeys(self.labels.conflicts)]
        self.shards = ShardClasses(self.graph, self.labels.dims)
        self.layout = UsedLayout(
            self.mesh, IndexClasses(self.graph), self.labels.dims, self.data_axes
        )
        self.scans = scanned_layers(self.graph)
        weights = [value for _, value in self.slots("parameter")]
        self.runs = unrolled_layers(self.graph, self.labels.dims, reached(self.graph, weights))
        found = [f"loop of {s.loop.attrs.trip} over {len(s.weights)} weights" for s in self.scans]
        found += [f"{len(run.repeats)} unrolled repeats" for run in self.runs]
        self.reasons["layers"] = "; ".join(found) or "none found"

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

    def split_sequence(self, axis: str) -> None:
        """Lay the sequence over `axis`. Raises ShardingError for a model without a sequence."""
        axes = self.real((axis,))
        if not axes:
            return
        self._find_sequence()
        if not self.layout.sequence:
            raise ShardingError(
                "SW_SEQUENCE",
                f"mesh.{axis} requires a sequence dim that crosses layers, the step has none",
                hint=f"set mesh.{axis} to 1",
            )
        self.layout = replace(self.layout, sequence_axes=axes)

    def _find_sequence(self) -> None:
        """Read what crosses the layers: the residual, and the sequence with its queries."""
        batch, weights = ([v for _, v in self.slots(role)] for role in ("batch", "parameter"))
        found = borders(
            self.scans, self.runs, self.labels.dims, self.layout.indices, batch, weights
        )
        self.layout = replace(self.layout, sequence=found.sequence, residual=found.residual)
        self.layout = replace(self.layout, queries=query_dims(self.graph, self.layout))

    def split_tensors(self, axis: str, *, sequence_parallel: bool) -> None:
        """Split the inner indices of the weights over `axis`; and the residual along its sequence,
        when asked.
        """
        ways = self.mesh.sizes.get(axis, 1)
        if ways == 1:
            return
        self._find_sequence()
        indices = self.layout.indices
        price = prices(self.graph, indices, self.labels.dims)
        weights = [v for _, v in self.slots("parameter") if self._is_matrix(v)]
        ends = broken(self.graph, indices)
        families = cover(weights, indices, price, self._inner_families(ways) - ends)
        shares = spread(indices, families, ways, price, ends)
        self.mesh = self.mesh.refined(axis, shares.atoms)
        atoms = self.mesh.atoms(axis)
        split = {
            member: tuple(atoms[i] for i in numbers) for member, numbers in shares.classes.items()
        }
        self.layout = replace(self.layout, mesh=self.mesh, split=split)
        if sequence_parallel and self.layout.sequence:
            along = along_residual(self.graph, self.layout)
            self.layout = replace(self.layout, residual_axes=atoms, spread=along)

    def split_experts(self, axis: str) -> None:
        """Give each core of `axis` some experts.

        Raises ShardingError for a model without experts, or a number that does not divide.
        """
        axes = self.real((axis,))
        if not axes:
            return
        self._find_sequence()
        indices, weights = self.layout.indices, self._weights()
        on_batch = reached(self.graph, [v for _, v in self.slots("batch")])
        ways = self.mesh.size(axes)
        found = expert_families(self.graph, indices, weights, on_batch)
        fitting = {f for f, room in rooms(indices, found, ways).items() if room == ways}
        if not fitting:
            raise ShardingError(
                "SW_EXPERTS",
                f"mesh.{axis}={ways} requires weights with an expert dim that it divides, the step"
                f" has {'other numbers of experts' if found else 'none'}",
                hint=f"set mesh.{axis} to 1 or to a divisor of the number of experts",
            )
        self.layout = replace(self.layout, experts=dict.fromkeys(fitting, axes))

    def _is_matrix(self, weight: Value) -> bool:
        """True when a weight has two dims besides those of layers."""
        layers = self._layer_families()
        kept = [
            d
            for d, family in self.layout.indices.families(weight)
            if family not in layers and weight.type.shape[d] > 1
        ]
        return len(kept) > 1

    def _layer_families(self) -> set[Class]:
        """Families of the dims that loops walk along layer by layer."""
        return {self.layout.indices.family(dim) for dim in self._walked()}

    def _walked(self) -> list[Dim]:
        """The dims that loops walk along layer by layer."""
        return [
            (scan.loop.regions[0].inputs[carry], dim)
            for scan in self.scans
            for carry, dim in (*scan.weights.items(), *scan.stacks.items())
        ]

    def _inner_families(self, ways: int) -> set[Class]:
        """Families of weight dims that may be split: not samples, sequence, layers or residual."""
        indices = self.layout.indices
        kept_whole = self._layer_families() | self.layout.residual | self.layout.sequence
        kept_whole |= {indices.family((v, d)) for v, d in self.labels.dims.items()}
        kept_whole |= self.layout.experts.keys()
        found = {f for _, v in self.slots("parameter") for _, f in indices.families(v)} - kept_whole
        return {family for family, room in rooms(indices, found, ways).items() if room > 1}

    def lay_out(self) -> None:
        """What follows from the choices above: where to gather, reduce, and pin."""
        self.place_batch()
        self.gather_weights()
        self.gather_sequences()
        self.return_rows()
        self.reduce_gradients()
        self.join_layouts()
        self.pin_activations()
        self.place_results()

    def place_batch(self) -> None:
        """Batch inputs lie where they are used; the rng is the same everywhere."""
        for slot, value in self.slots("batch"):
            self._place(slot, value, self.layout.of(value), "samples and sequence")
        for slot, value in self.slots("rng"):
            self._place(slot, value, self.layout.of(value), "rng is the same on every core")

    def place_state(self, zero: int) -> None:
        """Spread nothing over the data-parallel ranks (`zero` 0), optimizer state (1 and 2), or
        weights too (3).
        """
        self.zero = zero
        self._place_parameters()
        self._place_optimizer()

    def _place_parameters(self) -> None:
        """Choose, per weight, the largest divisible dim that is not a loop's layer dim."""
        layer_dims = {self.shards.find(dim) for dim in self._walked()}
        for slot, value in self.slots("parameter"):
            used = self.layout.of(value)
            ways = self.mesh.size(self._free_axes(used)) if self.zero else 1
            local = used.local_shape(value.type.shape, self.mesh.sizes)
            free = [d for d in range(len(local)) if self.shards.find((value, d)) not in layer_dims]
            fitting = [d for d in free if local[d] % ways == 0 and local[d]]
            if ways == 1 or not fitting:
                why = "one shard" if ways == 1 else f"no dim divides by {self._named(ways)}"
                self._replicate(slot, value, why)
                continue
            dim = max(fitting, key=lambda d: (local[d], not used.dims[d], -d))
            self.roots.setdefault(self.shards.find((value, dim)), slot.name)
            if self.zero >= WEIGHTS:
                why = f"largest dim that divides by {self._named(ways)}"
                self._place(slot, value, self._stored(value) or used, why)
            else:
                self._place(slot, value, used, f"zero={self.zero} keeps weights")

    def _named(self, ways: int) -> str:
        """The shard axes and how many ways they split."""
        return f"{'*'.join(self.shard_axes)}={ways}"

    def _free_axes(self, used: ShardingSpec) -> tuple[str, ...]:
        """The shard axes that a used layout leaves."""
        return tuple(a for a in self.shard_axes if a not in used.axes)

    def _stored(self, value: Value) -> ShardingSpec | None:
        """The layout `value` is stored in: used, and the shard axes along the dim of the one weight
        class it has; None without one.
        """
        found = self.shards.dims_of(value, self.roots)
        if len(found) != 1 or value in self.labels.dims:
            return None
        dim, used = found[0][0], self.layout.of(value)
        axes = (*used.dims[dim], *self._free_axes(used))
        if axes == used.dims[dim] or value.type.shape[dim] % self.mesh.size(axes):
            return None
        return used.with_dim(dim, axes)

    def _place_optimizer(self) -> None:
        """Optimizer leaves follow their weight: by path suffix and shape, else by what they are
        added to.
        """
        weights: dict[tuple[str, Shape], Value] = {}
        for slot, value in self.slots("parameter"):
            weights.setdefault((slot.name.partition("/")[2], value.type.shape), value)
        for slot, value in self.slots("optimizer"):
            owner = _owner(slot, value, weights)
            spec = self._stored(value if owner is None else owner[1])
            if spec is not None:
                why = "the weight it is combined with" if owner is None else f"params/{owner[0]}"
                self._place(slot, value, spec, f"follows {why}")
            elif owner is not None:
                self._place(slot, value, self.layout.of(owner[1]), f"follows params/{owner[0]}")
            else:
                self._replicate(slot, value, "belongs to no sharded weight")

    def gather_weights(self) -> None:
        """Gather a stored weight where it meets the batch, after its conversion to the compute
        type.
        """
        state = [v for role in ("parameter", "optimizer") for _, v in self.slots(role)]
        finer = [v for v in state if self.pins[v] != self.layout.of(v)]
        self.gathers += gather_uses(self.graph, self.labels.dims, reached(self.graph, finer))

    def gather_sequences(self) -> None:
        """Gather the sequence where an op needs the axes it is split over for another index."""
        self.gathers += sequence_uses(self.graph, self.layout)

    def return_rows(self) -> None:
        """Send rows back from their experts where they are read by sample."""
        self.gathers += expert_uses(self.graph, self.layout)

    def reduce_gradients(self) -> None:
        """Where the sample dim ends, reduce; the gradient of a stored weight is scattered."""
        for op, users in reduction_ops(self.graph, self.labels.dims):
            if op.name not in REDUCING:
                self.findings.append(_lost_batch(op))
                continue
            for value in op.results:
                self.pins[value] = self.layout.of(value)
                self._scatter_gradient(op, value, users)

    def _scatter_gradient(self, op: Op, value: Value, users: Users) -> None:
        """Lay out the gradient `value` like its weight, once a shape shows the weight's dim."""
        target, spec = value, self._stored(value)
        following = users.chain(value)
        between: list[Value] = []
        while spec is None and (after := next(following, None)) is not None:
            between.append(after)
            target, spec = after, self._stored(after)
        used = self.layout.of(value).axes
        summed = self.mesh.order([a for a in ended_axes(op, self.layout) if a not in used])
        if spec is None:
            self._predict("all_reduce", summed, value.type)
            return
        self.pins.update({v: self.layout.of(v) for v in between})
        self.layouts[target] = spec
        scattered = tuple(a for a in self._free_axes(self.layout.of(target)) if a in summed)
        self._predict("reduce_scatter", scattered, target.type)
        rest = tuple(a for a in summed if a not in scattered)
        self._predict("all_reduce", rest, target.type)

    def join_layouts(self) -> None:
        """Gather before, and lay out after, ops that cut the stored dim of a weight or of its
        gradient.
        """
        for uses, results in layout_borders(self.graph, self.labels.dims, self._stored):
            self.gathers += uses
            for value in results:
                spec = self._stored(value)
                if spec is not None and value not in self.layouts:
                    self.pins[value] = self.layout.of(value)
                    self.layouts[value] = spec

    def _predict(self, kind: str, axes: tuple[str, ...], type: TensorType) -> None:
        """Expect one collective."""
        if axes:
            self.predicted[Predicted(kind, axes, type)] += 1

    def pin_activations(self) -> None:
        """Every value with samples lies where it is used; loop carries of weights like their
        weight.
        """
        weights = self._weights()
        for op in self.graph.walk():
            for value in op.results:
                if value in self.labels.dims:
                    self._pin_used(op, value)
                elif op.name in CARRYING and (spec := self._carried(value, weights)) is not None:
                    self.pins[value] = spec
        self.predicted += reductions(self.graph, self.layout)

    def _carried(self, value: Value, weights: set[Value]) -> ShardingSpec | None:
        """The layout of a carry of weight class: gradients are stored, weights from stage 3 on."""
        spec = self._stored(value)
        keeps = spec is not None and self.zero < WEIGHTS and value in weights
        return self.layout.of(value) if keeps else spec

    def _moved(self, before: ShardingSpec, after: ShardingSpec) -> tuple[str, ...]:
        """The axes that go from one dim to another."""
        pairs = zip(before.dims, after.dims, strict=True)
        return self.mesh.order([a for old, new in pairs for a in new if a not in old])

    def _weights(self) -> set[Value]:
        """Values that parameters made without the batch."""
        made = reached(self.graph, [v for _, v in self.slots("parameter")])
        return made - reached(self.graph, [v for _, v in self.slots("batch")])

    def _pin_used(self, op: Op, value: Value) -> None:
        """Pin a value where it is used; partial sums are made whole before they are spread, so that
        the partitioner does not gather a table to spread what is looked up in it.
        """
        spec = self.layout.of(value)
        if partial_axes(op, self.layout) and value in self.layout.spread:
            self.pins[value] = self.layout.unspread(value)
            self.layouts[value] = spec
        elif self.layout.by_expert(value) and sends_rows(op, self.layout):
            self.pins[value] = self.layout.by_sample(value)
            self.layouts[value] = spec
            self._predict("all_to_all", self._moved(self.pins[value], spec), value.type)
        else:
            self.pins[value] = spec

    def place_results(self) -> None:
        """State results live where the state came in; metrics are whole."""
        state = {
            slot.name: self.pins[v] for slot, v in zip(self.inputs, self.graph.inputs, strict=True)
        }
        for slot, value in zip(self.outputs, self.graph.outputs, strict=True):
            spec = self.layout.of(value)
            if slot.role in ("parameter", "optimizer", "rng"):
                spec = state.get(slot.name, spec)
            if slot.role == "parameter" and self.zero < WEIGHTS and self._stored(value):
                self._predict("all_gather", self._free_axes(self.layout.of(value)), value.type)
            self.results.append(spec)

    def recipe(self) -> Recipe:
        """The annotated graph and its specs by id."""
        uses = {(use.op, use.index): use for use in self.gathers}
        annotator = Annotator(uses, self.layouts, self.layout.of)
        graph = annotator.run(self.graph)
        pins = self.pins | annotator.specs
        for point in annotator.points:
            source, whole = point.operands[0], pins[point.result]
            before = self._stored(source) or pins.get(source, self.layout.of(source))
            gathered = tuple(a for a in before.axes if a not in whole.axes)
            self._predict("all_gather", gathered, point.result.type)
            self._predict("all_to_all", self._moved(before, whole), point.result.type)
        specs = {key: pins[value] for key, value in value_ids(graph) if value in pins}
        specs |= {(OUTPUT, i): spec for i, spec in enumerate(self.results)}
        assert all((INPUT, i) in specs for i in range(len(graph.inputs)))
        return Recipe(
            graph=graph,
            mesh=self.mesh,
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
        """Keep one input as it is used on every core; say so when it is large."""
        self._place(slot, value, self.layout.of(value), why)
        if value.type.num_bytes >= LARGE_REPLICATED_BYTES and self.shard_axes:
            self.findings.append(
                Diagnostic(
                    "SW_FSDP_REPLICATED",
                    f"{slot.name} {value.type} stays whole on every core: {why}",
                    hint=f"choose a {self.shard_axes[0]} that divides one of its dims",
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
