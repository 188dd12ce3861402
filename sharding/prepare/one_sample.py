"""Micro-batches of one sample on one data rank: the step is traced with two samples, on two ranks
of which one exists.

Traced with one sample, sums over samples may be no operations any more, so that there is nothing to
cut the step at, and the sample dim is lost in reshapes that a split sequence has to cross. So a
twin of the only data rank has the second sample until the step is localized; then its axis is
dropped. What was reduced over it stays a part of the sum: accumulators add parts of micro-batches
up as they would add their sums, and the mean is taken over pairs of micro-batches. That is right
for a step that takes the mean over its samples, which `check_means` proves. A value that mixes
samples before that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.ops import AxisIndexAttrs, ConstantAttrs
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.neff.schedule import STAGE_AXIS
from shardwright.sharding.cut.gradients import StepView
from shardwright.sharding.cut.overlap.deferred import hoisted
from shardwright.sharding.localize import Localized
from shardwright.sharding.partition.mesh import DATA_AXES, Mesh, make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.prepare.sample_means import scaled_output
from shardwright.sharding.settings import StrategySettings

TWIN_AXIS = "dp_replicate"  # no state is spread over it, and one data rank leaves it free
TRACED_SAMPLES = 2
PROOF_SAMPLES = 4  # of the trace that the one of two samples is compared with
MIXED_SAMPLES = "SW_ONE_SAMPLE"


def is_alone(mesh: Mesh, settings: StrategySettings, samples: int, num_microbatches: int) -> bool:
    """True for a step that has to be cut and is traced with `samples` = 1: several micro-batches,
    or stages. The meshes of strategy manual are the user's.
    """
    needs_cut = num_microbatches > 1 or mesh.sizes.get(STAGE_AXIS, 1) > 1
    return samples == 1 and mesh.size(DATA_AXES) == 1 and needs_cut and settings.name != "manual"


def with_twin(mesh: Mesh) -> Mesh:
    """`mesh`, of one data rank, with a twin of every rank."""
    return make_mesh({**mesh.sizes, TWIN_AXIS: TRACED_SAMPLES})


@dataclass(frozen=True, slots=True)
class Twins:
    """A trace with `TRACED_SAMPLES`, of a step that is proven to take the mean over its samples;
    made by `check_means` alone.
    """

    traced: Graph

    def check(self, graph: Graph, inputs: Sequence[Slot], mesh: Mesh) -> None:
        """Refuse another step than the proven one, other samples, or several data ranks.

        Raises: ShardingError SW_ONE_SAMPLE.
        """
        pairs = zip(inputs, graph.inputs, strict=True)
        leaves = [(v.type.shape, s.batch_dim or 0) for s, v in pairs if s.role == "batch"]
        samples = {shape[dim] for shape, dim in leaves if shape}
        ranks = mesh.size(DATA_AXES)
        if graph is not self.traced or samples != {TRACED_SAMPLES} or ranks != 1:
            raise ShardingError(
                MIXED_SAMPLES,
                f"a twin requires the step that was proven, {TRACED_SAMPLES} samples of it and one"
                f" data rank, got {'it' if graph is self.traced else 'another'}, samples"
                f" {sorted(samples)} and {ranks} data ranks",
                hint="trace the step with two samples, and pass what `check_means` returns for it",
            )


def check_means(two: Graph, four: Graph) -> Twins:
    """The proof that a step takes the mean over its samples, from its traces with `TRACED_SAMPLES`
    and with `PROOF_SAMPLES`: a sum would come out as that of two samples.

    Raises: ShardingError SW_ONE_SAMPLE for a step that is not known to do so.
    """
    where = scaled_output(two, four)
    if where is not None:
        raise ShardingError(
            MIXED_SAMPLES,
            "micro-batches of one sample require a step whose new state and metrics are means over"
            " the samples, got one that is not known to be",
            where,
            "use strategy.micro_batch = 2, or divide sums by the number of samples",
        )
    return Twins(two)


def without_twin(local: Localized) -> tuple[Localized, frozenset[Value]]:
    """The step of the ranks that exist, and its values that hold a part of a sum.

    Raises: ShardingError SW_ONE_SAMPLE at an op that moves or folds samples in another way than
    adding them up.
    """
    dropped = _Dropped()
    graph = dropped.region(hoisted(local.graph), is_top=True)
    values = {whole: dropped.now.get(own, own) for whole, own in local.values.items()}
    return Localized(graph, values, _source(local.source)), frozenset(dropped.partial)


class _Dropped:
    """The rewrite of a graph and its regions."""

    def __init__(self) -> None:
        self.now: dict[Value, Value] = {}
        self.partial: set[Value] = set()

    def region(self, graph: Graph, *, is_top: bool = False) -> Graph:
        """`graph` without the axis; only at the top may sums over it be left out."""
        ops: list[Op] = []
        for op in graph.ops:
            axes = getattr(op.attrs, "axes", ())
            if TWIN_AXIS not in axes:
                ops.append(self._kept(op))
            elif op.name == "axis_index":
                ops.append(_index(op))
            elif is_top and op.name == "all_reduce" and op.attrs.reduction == "add":
                ops += self._part(op)
            else:
                raise _mixing(op)
        outputs = tuple(self.now.get(v, v) for v in graph.outputs)
        return with_ops(graph, ops, outputs)

    def _kept(self, op: Op) -> Op:
        operands = tuple(self.now.get(v, v) for v in op.operands)
        regions = tuple(self.region(region) for region in op.regions)
        if operands == op.operands and not regions:
            return op
        return Op(op.name, operands, op.results, op.attrs, regions, op.loc)

    def _part(self, op: Op) -> list[Op]:
        """A sum over the ranks that exist; none when the twin was the only other one."""
        (operand,) = (self.now.get(v, v) for v in op.operands)
        axes = tuple(axis for axis in op.attrs.axes if axis != TWIN_AXIS)
        if not axes:
            self.now[op.result] = operand
            self.partial.add(operand)
            return []
        size = op.attrs.group_size // TRACED_SAMPLES
        attrs = replace(op.attrs, axes=axes, group_size=size)
        self.partial.add(op.result)
        return [Op(op.name, (operand,), op.results, attrs, (), op.loc)]


def _index(op: Op) -> Op:
    """A position among the ranks that exist, which are the first ones along the axis."""
    axes = tuple(axis for axis in op.attrs.axes if axis != TWIN_AXIS)
    if axes:
        return Op(op.name, (), op.results, AxisIndexAttrs(axes), (), op.loc)
    return Op("constant", (), op.results, ConstantAttrs.full(0, op.result.type), (), op.loc)


def _mixing(op: Op) -> ShardingError:
    return ShardingError(
        MIXED_SAMPLES,
        f"micro-batches of one sample require a step that only adds samples up, got {op.name} over"
        " samples",
        op.loc,
        "use strategy.micro_batch = 2, or keep the samples of a batch apart",
    )


def check_partial(view: StepView, partial: frozenset[Value], ops: Iterable[Op]) -> None:
    """Refuse a step in which a part of a sum becomes anything but sums in `ops`, those of a
    micro-batch in order.

    Raises: ShardingError SW_ONE_SAMPLE.
    """
    tainted = set(partial)
    for op in ops:
        if tainted.isdisjoint(op.operands):
            continue
        for value in op.results:
            if value in view.labels and not view.is_sum(value):
                raise _mixing(op)
            tainted.add(value)


def _source(part: PartitionedGraph) -> PartitionedGraph:
    """The partitioned step as the ranks that exist see it; batches have the samples of one."""
    mesh = Mesh(tuple(pair for pair in part.mesh.axes if pair[0] != TWIN_AXIS))
    origins = tuple(part.mesh.origin(name) for name in mesh.names) if part.mesh.origins else ()
    specs = {value: _spec(spec) for value, spec in part.specs.items()}
    inputs = tuple(
        _of_one(slot, value, part.specs)
        for slot, value in zip(part.inputs, part.graph.inputs, strict=True)
    )
    return replace(part, specs=specs, mesh=replace(mesh, origins=origins), inputs=inputs)


def _spec(spec: ShardingSpec) -> ShardingSpec:
    def rest(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis != TWIN_AXIS)

    return ShardingSpec(tuple(rest(axes) for axes in spec.dims), rest(spec.unreduced))


def _of_one(slot: Slot, value: Value, specs: Mapping[Value, ShardingSpec]) -> Slot:
    """A batch input in the shape of one sample."""
    if slot.role != "batch":
        return slot
    pairs = zip(slot.shape or value.type.shape, specs[value].dims, strict=True)
    shape = tuple(n // TRACED_SAMPLES if TWIN_AXIS in axes else n for n, axes in pairs)
    return replace(slot, shape=shape)
