"""The precision policy of a strategy: types of weights where they are used, of reduced gradients,
and of what layers hand on.

The names and the meaning follow PyTorch's `MixedPrecisionPolicy`. Weights and layer boundaries are
rounded in the captured graph, before any strategy looks at it, so that gathers move the short type
by themselves; gradients are converted around the collectives that reduce them. The optimizer and
what is stored keep their types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.rewrite import with_operands, with_ops, with_regions
from shardwright.compiler.ir.traits import CASTS, CONTRACTIONS, REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.narrow import narrow
from shardwright.sharding.indices.dims import batch_labels, reached
from shardwright.sharding.indices.layers import scanned_layers, unrolled_layers
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot, all_values
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.constraints import (
    CARRYING,
    NARROWING,
    GatherUse,
    Repeating,
    gather_uses,
)

TYPES: Mapping[str, DType] = {"bfloat16": DType.BF16, "float32": DType.F32}
REPLICATING = frozenset(("dp_replicate", "dp_shard"))
"""Sums over these are gradients, metrics or norms: activations are split over them."""


def rounded_graph(graph: Graph, inputs: Sequence[Slot], settings: StrategySettings) -> Graph:
    """The captured graph with weights rounded where they meet samples (`param_dtype`) and layer
    boundaries rounded (`output_dtype`); activations that lose nothing by it are kept short.

    Raises ShardingError for a step in which there is nothing to round.
    """
    if settings.param_dtype == settings.output_dtype == "auto":
        return graph
    slots = list(zip(inputs, graph.inputs, strict=True))
    batch = {value: slot.batch_dim or 0 for slot, value in slots if slot.role == "batch"}
    samples = batch_labels(graph, batch).dims
    given = reached(graph, [value for slot, value in slots if slot.role in WEIGHT_ROLES])
    boundaries: set[Value] = set()
    if settings.output_dtype != "auto":
        boundaries = {v for v in _boundaries(graph, samples, given) if v in samples}
        if not boundaries:
            raise _nothing("output_dtype", "repeated layers, whose boundaries it rounds", "layers")
    weights = given - reached(graph, batch)
    uses = {(use.op, use.index): use for use in gather_uses(graph, samples, weights)}
    if settings.param_dtype != "auto" and not uses:
        raise _nothing("param_dtype", "weights that meet samples", "such weights")
    rounder = _Rounder(
        samples=samples,
        uses=uses,
        boundaries=boundaries,
        weight_type=TYPES.get(settings.param_dtype),
        boundary_type=TYPES.get(settings.output_dtype, DType.F32),
    )
    rounded = rounder.run(graph)
    return narrow(rounded, DType.BF16, reached(rounded, batch))


def _nothing(key: str, required: str, found: str) -> ShardingError:
    """A type of the policy that no value of the step would have."""
    return ShardingError(
        "SW_PRECISION_UNUSED",
        f"strategy.{key} requires a step with {required}, got one in which no {found} were found",
        hint="round inside of the step (x.astype(jnp.bfloat16)), and leave the key at auto",
    )


def _boundaries(graph: Graph, samples: Mapping[Value, int], given: set[Value]) -> Iterable[Value]:
    """What one layer hands to the next, in either direction."""
    for scan in scanned_layers(graph):
        body = scan.loop.regions[0]
        yield from (body.outputs[i] for i in scan.boundaries)
    for run in unrolled_layers(graph, samples, given):
        yield from (value for boundary in run.boundaries for value in boundary)


def _wider(value: Value, dtype: DType) -> bool:
    """True for floats that rounding to `dtype` makes shorter."""
    return value.type.dtype.is_float and value.type.dtype.bytes > dtype.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounder:
    """What to round in a graph, at any depth; `uses` are the operands that read weights."""

    samples: Mapping[Value, int]
    uses: Mapping[tuple[Op, int], GatherUse]
    boundaries: set[Value]
    weight_type: DType | None
    boundary_type: DType

    def run(self, graph: Graph) -> Graph:
        """`graph` with conversions; inputs and outputs keep their types."""
        level = _Level()
        for op in graph.ops:
            now = level.update(op)
            if self.weight_type is not None and self._meets(op):
                indices = range(len(op.operands))
                reads = tuple(self._read(level, op, i, self.weight_type) for i in indices)
                now = with_operands(op, reads)
            level.ops.append(with_regions(now, tuple(map(self.run, op.regions))))
            for value in op.results:
                if value in self.boundaries and _wider(value, self.boundary_type):
                    short = level.converted(value, self.boundary_type)
                    level.replace((value,), (level.converted(short, value.type.dtype),))
        return level.finish(graph)

    def _meets(self, op: Op) -> bool:
        """True for ops that compute with samples."""
        touched = any(v in self.samples for v in (*op.operands, *op.results))
        return touched and op.name not in CARRYING

    def _read(self, level: _Level, op: Op, index: int, dtype: DType) -> Value:
        """An operand as the policy wants it: short in contractions, weights rounded elsewhere."""
        value, use = op.operands[index], self.uses.get((op, index))
        now = level.now(value)
        if not _wider(value, dtype):
            return now
        if use is not None:
            now = level.converted(level.now(use.point), dtype)
            for step in (step for step in use.chain if step.name not in CASTS):
                now = level.repeated(step, now)
        elif op.name not in CONTRACTIONS:
            return now
        return level.converted(now, dtype if op.name in CONTRACTIONS else value.type.dtype)


class _Level(Repeating):
    """One level under construction, each conversion once."""

    def __init__(self) -> None:
        super().__init__()
        self._converted: dict[tuple[Value, DType], Value] = {}

    def converted(self, value: Value, dtype: DType) -> Value:
        """`value` as `dtype`."""
        if value.type.dtype is dtype:
            return value
        key = (value, dtype)
        if key not in self._converted:
            self.ops.append(make_op("convert", (value,), ConvertAttrs(dtype)))
            self._converted[key] = self.ops[-1].result
        return self._converted[key]


def with_reduce_dtype(part: PartitionedGraph, settings: StrategySettings) -> PartitionedGraph:
    """`part` with gradients reduced in `reduce_dtype`: converted in front of the collective and
    back behind it, unless the next conversion asks for that type anyway.
    """
    if settings.reduce_dtype == "auto":
        return part
    specs = dict(part.specs)
    graph = dce(_reduced(part.graph, TYPES[settings.reduce_dtype], specs))
    return replace(part, graph=graph, specs={v: specs[v] for v in all_values(graph)})


def _reduced(graph: Graph, dtype: DType, specs: dict[Value, ShardingSpec]) -> Graph:
    """One level with its regions."""
    ops: list[Op] = []
    now: dict[Value, Value] = {}  # a value as `dtype`, where a collective made it so

    def add(op: Op, like: Value) -> Value:
        specs[op.result] = specs[like]
        ops.append(op)
        return op.result

    for op in graph.ops:
        if _reduces_gradient(op, dtype):
            source, wide = op.operands[0], op.result
            if source not in now:
                now[source] = add(make_op("convert", (source,), ConvertAttrs(dtype)), source)
            short = Value(tensor_type(wide.type.shape, dtype))
            now[wide] = add(Op(op.name, (now[source],), (short,), op.attrs, (), op.loc), wide)
            add(Op("convert", (short,), (wide,), ConvertAttrs(wide.type.dtype)), wide)
            continue
        regions = tuple(_reduced(region, dtype, specs) for region in op.regions)
        read = with_operands(op, tuple(_same(now, v, dtype) for v in op.operands))
        ops.append(with_regions(read, regions))
        if op.name in NARROWING and op.operands[0] in now:
            source = now[op.operands[0]]
            if op.name not in CASTS:
                source = add(make_op(op.name, (source,), op.attrs, loc=op.loc), op.result)
            if op.name not in CASTS or op.attrs.dtype is dtype:
                now[op.result] = source
    outputs = tuple(_same(now, v, dtype) for v in graph.outputs)
    return with_ops(graph, ops, outputs)


def _same(now: Mapping[Value, Value], value: Value, dtype: DType) -> Value:
    """What stands for `value`, where its own conversion to `dtype` was left out."""
    return now[value] if value.type.dtype is dtype and value in now else value


def _reduces_gradient(op: Op, dtype: DType) -> bool:
    """True for sums of tensors over data-parallel ranks in another type than `dtype`."""
    if op.name not in REDUCTIONS_OF_RANKS or op.attrs.reduction != "add":
        return False
    kind = op.result.type
    sums = bool(REPLICATING & {*op.attrs.axes}) and kind.num_elements > 1
    return sums and kind.dtype.is_float and kind.dtype is not dtype
