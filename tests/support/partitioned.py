"""Hand-made partitioned graphs: specs by value, and what they mean with and without sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from shardwright.collectives.ops import axis_strides
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.sharding.localize import localize
from shardwright.sharding.localize.coordinates import coordinate_name, hoist_coordinates
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot, all_values
from shardwright.sharding.partition.shardy import answer_request, partition
from shardwright.sharding.partition.spec import ShardingSpec, replicated
from tests.support.reference_ranks import ReferenceRanks

Dims = Sequence[Sequence[str]]


def partitioned(
    graph: Graph,
    mesh: Mesh,
    dims: Mapping[Value, Dims] | None = None,
    inputs: Sequence[Slot] = (),
    outputs: Sequence[Slot] = (),
) -> PartitionedGraph:
    """`graph` with the given axes per dim; every other value is replicated."""
    given = dims or {}
    specs = {
        v: ShardingSpec(tuple(tuple(axes) for axes in given[v]))
        if v in given
        else replicated(v.type.rank)
        for v in all_values(graph)
    }
    return PartitionedGraph(
        graph=graph,
        specs=specs,
        mesh=mesh,
        inputs=tuple(inputs)
        or tuple(Slot(f"in/{i}", "parameter") for i in range(len(graph.inputs))),
        outputs=tuple(outputs)
        or tuple(Slot(f"out/{i}", "metric") for i in range(len(graph.outputs))),
    )


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Index of `rank` along every axis."""
    strides = axis_strides(mesh.sizes)
    return {name: rank // strides[name] % size for name, size in mesh.axes}


partition_here = partial(partition, unit=answer_request)
"""`partition` without a child process; loads jaxlib, and native code may end the process."""


def run_global(graph: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the graph means without sharding: on whole values collectives change nothing."""
    same = dict.fromkeys(TRAFFIC | {"all_slice"}, lambda op, args: args)
    return evaluate(graph, list(inputs), same)


def run_sharded(part: PartitionedGraph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of the localized graph, put together from all ranks."""
    plan = as_plan(part)
    state = {slot.name: x for slot, x in zip(part.inputs, inputs, strict=True)}
    ranks = ReferenceRanks(plan, state)
    ranks.run_step([{}])
    return [ranks.gather(slot.name) for slot in part.outputs]


def as_plan(part: PartitionedGraph) -> StepPlan:
    """The localized graph as a step of one program, without any cut."""
    graph, coordinates = hoist_coordinates(localize(part).graph)
    names = [slot.name for slot in part.inputs] + [coordinate_name(a) for a in coordinates]
    wholes = zip(
        (*part.inputs, *part.outputs),
        (*part.graph.inputs, *part.graph.outputs),
        (*graph.inputs[: len(part.inputs)], *graph.outputs),
        strict=True,
    )
    first = len(part.inputs)
    buffers = {
        slot.name: BufferInfo(
            name=slot.name,
            role=slot.role,
            local_type=local.type,
            global_type=whole.type,
            axes=part.specs[whole].dims,
            initial="given" if i < first else "computed",
        )
        for i, (slot, whole, local) in enumerate(wholes)
    }
    for axes, value in zip(coordinates, graph.inputs[first:], strict=True):
        buffers[coordinate_name(axes)] = BufferInfo(
            name=coordinate_name(axes),
            role="coordinate",
            local_type=value.type,
            global_type=value.type,
            axes=(axes,),
        )
    outputs = tuple(slot.name for slot in part.outputs)
    program = StepProgram(name="step", graph=graph, inputs=tuple(names), outputs=outputs)
    return StepPlan(
        mesh=part.mesh.sizes,
        buffers=buffers,
        programs=(program,),
        schedules=(((("step",), 1),),),
    )


def traffic_bytes(part: PartitionedGraph) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes per core of the larger side of each collective, by (kind, axes), loops multiplied by
    their trips.

    Units: bytes; the larger of operand and result as they are on one core.
    """
    totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    _add_traffic(part, part.graph, 1, totals)
    return dict(totals)


def _add_traffic(
    part: PartitionedGraph,
    graph: Graph,
    times: int,
    totals: Counter[tuple[str, tuple[str, ...]]],
) -> None:
    """Add the collectives of one level, run `times` times."""
    sizes = part.mesh.sizes
    for op in graph.ops:
        for region in op.regions:
            _add_traffic(part, region, times * op.attrs.trip, totals)
        if op.name in TRAFFIC:
            sides = (*op.operands, *op.results)
            ways = min(part.mesh.size(part.specs[v].axes) for v in sides)
            assert all(axis in sizes for axis in op.attrs.axes)
            totals[(op.name, op.attrs.axes)] += times * op.result.type.num_bytes // ways
