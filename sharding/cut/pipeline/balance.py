"""How layers are shared out over the parts of a pipeline: contiguous shares whose longest part is
shortest.

A layer costs what its operations take on one core of the first machine, forward and backward; what
runs in front of the layers (an embedding) goes with the first one, what follows them (head and
loss) with the last one before it. Only ratios matter, so that axes which split every layer alike
change nothing. `assignment.py` asks, the report shows the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.traits import CONTRACTIONS, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.machine.target import FIRST_TARGET, load_target
from shardwright.sharding.cut.gradients import ancestors, depends_on
from shardwright.sharding.indices.dims import batch_labels
from shardwright.sharding.indices.layers import ScannedLayers, UnrolledLayers
from shardwright.sharding.partition.partitioned import Slot

Layers = ScannedLayers | UnrolledLayers
_COMPUTES = of(Kind.ELEMENTWISE, Kind.CAST, Kind.REDUCTION, Kind.WINDOW)
_MOVES = of(Kind.JOIN, Kind.UPDATE, Kind.INDEXED, Kind.SORT)
_PASSES = 3  # of ops outside of layers: forward, and the gradients of both operands
_STEPS = 100  # per mean layer: smaller differences do not move layers


@dataclass(frozen=True, slots=True)
class PartShare:
    """Layers of a part, and what they and the ends beside them take of all parts together."""

    layers: int
    cost: float


def by_stage(parts: Sequence[PartShare], num_stages: int) -> list[dict[str, object]]:
    """Per stage the layers of its parts, and its share of the cost, as reports show them."""
    return [
        {
            "stage": stage,
            "layers": [part.layers for part in parts[stage::num_stages]],
            "cost_share": sum(part.cost for part in parts[stage::num_stages]),
        }
        for stage in range(num_stages if parts else 0)
    ]


REST = 0
"""The size of a part that takes the layers which are left."""


def stage_sizes(text: str) -> tuple[int, ...]:
    """`strategy.stage_layers` as numbers, `REST` for a `*` at the end. Raises ShardingError
    (SW_PIPELINE_LAYERS)."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    last = (REST,) if words[-1:] == ["*"] else ()
    words = words[: len(words) - len(last)]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ShardingError(
            "SW_PIPELINE_LAYERS",
            f"strategy.stage_layers requires numbers of layers, got {text!r}",
            hint="one for every part of the pipeline: 8, 8, 9, 7",
        )
    return (*map(int, words), *last)


def shares(costs: Sequence[float], num_parts: int) -> list[int]:
    """Layers per part, such that the longest part is as short as it can be, and among such shares
    the parts as equal as they can be; what remains equal goes to the first parts.
    """
    mean = sum(costs) / len(costs) or 1.0
    ends = [0]
    for cost in costs:
        ends.append(ends[-1] + round(_STEPS * cost / mean))
    longest = _longest(ends, num_parts)
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for part in range(1, num_parts + 1):
        for end in range(part, len(ends)):
            for start in range(end - 1, part - 2, -1):
                size = ends[end] - ends[start]
                before = best.get((part - 1, start))
                if before is None or size > longest:
                    continue
                total = before[0] + size**2
                if (part, end) not in best or total < best[part, end][0]:
                    best[part, end] = (total, start)
    found, end = [], len(costs)
    for part in range(num_parts, 0, -1):
        _, start = best[part, end]
        found.append(end - start)
        end = start
    return found[::-1]


def _longest(ends: Sequence[int], num_parts: int) -> int:
    """The length of the longest part in the best shares; every part has a layer."""
    best = [0, *([ends[-1] + 1] * (len(ends) - 1))]
    for part in range(1, num_parts + 1):
        best = [
            min(
                (max(best[j], ends[i] - ends[j]) for j in range(part - 1, i)),
                default=ends[-1] + 1,
            )
            for i in range(len(ends))
        ]
    return best[-1]


def layer_costs(
    graph: Graph, inputs: Sequence[Slot], outputs: Sequence[Slot], layers: Sequence[Layers]
) -> list[float]:
    """What every layer takes of a step, in program order, ends included; in seconds of one core."""
    pairs = zip(inputs, graph.inputs, strict=True)
    batch = {value: slot.batch_dim or 0 for slot, value in pairs if slot.role == "batch"}
    counted = batch_labels(graph, batch).dims
    forward = _forward(graph, outputs, layers)
    inside = {op for one in layers for op in _ops(one)}
    own = [_own(one, counted) for one in layers]
    extra = _ends(graph, [op for op in graph.ops if op in forward - inside], layers, counted)
    total = _seconds(graph.ops, counted)
    once = sum(sum(costs) for costs in own) or 1.0
    rest = total - _PASSES * sum(extra)
    scale = rest / once if forward and rest > once else float(_PASSES)
    found = [[scale * cost for cost in costs] for costs in own]
    found[0][0] += _PASSES * extra[0]
    for costs, behind in zip(found, extra[1:], strict=True):
        costs[-1] += _PASSES * behind
    return [cost for costs in found for cost in costs]


def _ops(layers: Layers) -> list[Op]:
    if isinstance(layers, ScannedLayers):
        return [layers.loop]
    return [op for ops in layers.repeats for op in ops]


def _own(layers: Layers, counted: Collection[Value]) -> list[float]:
    """The cost of every layer of a loop or of repeats, forward."""
    if isinstance(layers, ScannedLayers):
        once = _seconds(layers.loop.regions[0].ops, counted)
        return [once] * int(layers.loop.attrs.trip)
    return [_seconds(ops, counted) for ops in layers.repeats]


def _forward(graph: Graph, outputs: Sequence[Slot], layers: Sequence[Layers]) -> set[Op]:
    """The ops some metric needs, of the metric that needs least and still every layer; none when
    there is no such metric.
    """
    last = {_ops(one)[-1] for one in layers}
    pairs = zip(outputs, graph.outputs, strict=True)
    needed = ({*ancestors(graph, [value])} for slot, value in pairs if slot.role == "metric")
    return min((ops for ops in needed if last <= ops), key=len, default=set())


def _ends(
    graph: Graph, ops: Sequence[Op], layers: Sequence[Layers], counted: Collection[Value]
) -> list[float]:
    """What runs in front of all layers, and behind each loop or run of repeats."""
    behind = [depends_on(graph, _ops(one)[-1].results) for one in layers]
    found = [0.0] * (1 + len(layers))
    for op in ops:
        place = max((n for n, v in enumerate(behind, 1) if op.results[0] in v), default=0)
        found[place] += _seconds((op,), counted)
    return found


def _seconds(ops: Sequence[Op], counted: Collection[Value]) -> float:
    """The time of ops that work on samples: each on the resource it is bound by."""
    total = 0.0
    for op in ops:
        if op.regions:
            total += op.attrs.trip * sum(_seconds(r.ops, counted) for r in op.regions)
        elif any(v in counted for v in (*op.operands, *op.results)):
            total += _of_op(op)
    return total


def _of_op(op: Op) -> float:
    rates = _rates()
    if op.name in CONTRACTIONS:
        return OPS[op.name].flops(op) / rates["flops"]
    if op.name in _MOVES:
        return max(v.type.num_bytes for v in op.results) / rates["bytes"]
    if op.name in _COMPUTES:
        return max(v.type.num_elements for v in (*op.operands, *op.results)) / rates["elements"]
    return 0.0


@cache
def _rates() -> Mapping[str, float]:
    """Per second, of one core of the first machine: FLOPs of the tensor engine, elements of the
    vector and the scalar engine, which share elementwise work, bytes of HBM.

    Source: `compiler/machine/targets`, each figure with its own.
    """
    target = load_target(FIRST_TARGET)
    core = target.core
    clocks = core.clock_hz["vector"] + core.clock_hz["scalar"]
    return {
        "flops": core.peak_bf16_flops_per_s,
        "elements": float(core.limits.partitions * clocks),
        "bytes": target.hbm_bytes_per_s_per_core,
    }
