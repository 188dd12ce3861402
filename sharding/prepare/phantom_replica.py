"""A phantom replica: one sample per micro-batch on one data rank is traced as two on two ranks.

Traced with one sample, sums over samples may be no operations any more, so that there is nothing to
cut the step at, and the sample dim is lost in reshapes: values that are split by `tp` or along the
sequence are laid out otherwise around them, with collectives that no strategy predicts. So a
phantom replica of the only data rank has the second sample until the step is localized; then its
axis is dropped. What was reduced over it stays a part of the sum: accumulators add parts of
micro-batches up as they would add their sums, and the mean is taken over pairs of micro-batches.
That is right for a step that takes the mean over its samples, which `check_means` proves. A value
that mixes samples before that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.ops import AllReduceAttrs, AxisIndexAttrs, ConstantAttrs
from shardwright.compiler.ir.rewrite import Level, with_regions
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.cut.gradients import StepView
from shardwright.sharding.cut.overlap.deferred import hoisted
from shardwright.sharding.localize import Localized
from shardwright.sharding.partition.mesh import DATA_AXES, Mesh, make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.prepare.sample_means import scaled_output
from shardwright.sharding.settings import StrategySettings

PHANTOM_AXIS = "dp_replicate"  # no state is spread over it, and one data rank leaves it free
TRACED_SAMPLES = 2
PROOF_SAMPLES = 4  # of the trace that the one of two samples is compared with
MIXED_SAMPLES = "SW_ONE_SAMPLE"


def needs_phantom(
    mesh: Mesh, settings: StrategySettings, samples: int, num_microbatches: int
) -> bool:
    """True for a step that is asked to be traced with one sample in all, and has to be cut (several
    micro-batches, or stages) or split otherwise than by samples. The meshes of strategy manual are
    the user's.
    """
    needs_samples = num_microbatches > 1 or mesh.num_cores > 1
    is_alone = samples == 1 and mesh.size(DATA_AXES) == 1
    return is_alone and needs_samples and settings.name != "manual"


def with_phantom(mesh: Mesh) -> Mesh:
    """`mesh`, of one data rank, with a phantom replica of every rank."""
    return make_mesh({**mesh.sizes, PHANTOM_AXIS: TRACED_SAMPLES})


@dataclass(frozen=True, slots=True)
class MeanProof:
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
                f"a phantom replica requires the proven step, {TRACED_SAMPLES} samples of it and"
                f" one data rank, got {'it' if graph is self.traced else 'another'}, samples"
                f" {sorted(samples)} and {ranks} data ranks",
                hint="trace the step with two samples, and pass what `check_means` returns for it",
            )


def check_means(two: Graph, four: Graph) -> MeanProof:
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
    return MeanProof(two)


def without_phantom(local: Localized) -> tuple[Localized, frozenset[Value]]:
    """The step of the ranks that exist, and its values that hold a part of a sum.

    Raises: ShardingError SW_ONE_SAMPLE at an op that moves or folds samples in another way than
    adding them up.
    """
    level, partial = Level(), set[Value]()
    graph = _dropped(hoisted(local.graph), level, partial)
    values = {whole: level.now(own) for whole, own in local.values.items()}
    return Localized(graph, values, _source(local.source)), frozenset(partial)


def _dropped(graph: Graph, level: Level, partial: set[Value] | None) -> Graph:
    """`graph` without the axis, built on `level`; where sums over it may be left out, at the top,
    `partial` takes the values that hold a part.
    """
    for op in graph.ops:
        now, attrs = level.update(op), op.attrs
        if PHANTOM_AXIS not in getattr(attrs, "axes", ()):
            regions = (_dropped(region, Level(), None) for region in op.regions)
            level.ops.append(with_regions(now, tuple(regions)))
        elif isinstance(attrs, AxisIndexAttrs):
            level.ops.append(_index(op))
        elif partial is None or not isinstance(attrs, AllReduceAttrs) or attrs.reduction != "add":
            raise _mixing(op)
        elif axes := _real(attrs.axes):  # a sum over the ranks that exist
            partial.add(op.result)
            attrs = replace(attrs, axes=axes, group_size=attrs.group_size // TRACED_SAMPLES)
            level.ops.append(Op(op.name, now.operands, op.results, attrs, (), op.loc))
        else:  # the phantom was the only other one
            partial.add(now.operands[0])
            level.replace(op.results, now.operands)
    return level.finish(graph)


def _real(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != PHANTOM_AXIS)


def _index(op: Op) -> Op:
    """A position among the ranks that exist, which are the first ones along the axis."""
    if axes := _real(op.attrs.axes):
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
    mesh = Mesh(tuple(pair for pair in part.mesh.axes if pair[0] != PHANTOM_AXIS))
    origins = tuple(part.mesh.origin(name) for name in mesh.names) if part.mesh.origins else ()
    specs = {
        value: ShardingSpec(tuple(map(_real, spec.dims)), _real(spec.unreduced))
        for value, spec in part.specs.items()
    }
    inputs = tuple(
        _of_one(slot, value, part.specs)
        for slot, value in zip(part.inputs, part.graph.inputs, strict=True)
    )
    return replace(part, specs=specs, mesh=replace(mesh, origins=origins), inputs=inputs)


def _of_one(slot: Slot, value: Value, specs: Mapping[Value, ShardingSpec]) -> Slot:
    """A batch input in the shape of one sample."""
    if slot.role != "batch":
        return slot
    pairs = zip(slot.shape or value.type.shape, specs[value].dims, strict=True)
    shape = tuple(n // TRACED_SAMPLES if PHANTOM_AXIS in axes else n for n, axes in pairs)
    return replace(slot, shape=shape)
