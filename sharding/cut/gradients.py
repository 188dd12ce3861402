"""Where a step may be cut between its gradients and its optimizer.

Walking back from the new state, the optimizer ends where values become sums over samples; walking
on, those sums end where single samples begin. Between the two, every value is linear in the sum, so
any cut is correct; the cheapest one to accumulate is taken. `stages.py` builds the programs on both
sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.facts import operands_of
from shardwright.compiler.ir.traits import CASTS, REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.min_cut import UNCUTTABLE, FlowNetwork
from shardwright.sharding.linearity import Kind, Label

SCALINGS = frozenset(("divide", "multiply", "negate"))


class CutRefusedError(Exception):
    """The step cannot be cut; `reason` says why, `loc` where. The caller decides whether that is
    the user's mistake.
    """

    def __init__(self, reason: str, loc: Loc = UNKNOWN_LOC) -> None:
        super().__init__(reason)
        self.reason = reason
        self.loc = loc


def depends_on(graph: Graph, sources: Iterable[Value]) -> set[Value]:
    """The top-level values that depend on `sources` of any level; carries of loops are told
    apart.
    """
    reached = set(sources)
    for op in graph.ops:
        if op.regions:
            reached.update(compress(op.results, _loop_flags(op, reached)))
        elif any(v in reached for v in op.operands):
            reached.update(r for r in op.results if not reached.isdisjoint(operands_of(op, r)))
    return reached


def ancestors(graph: Graph, targets: Iterable[Value], stop: Collection[Value] = ()) -> list[Op]:
    """The ops that `targets` need, in program order, not looking past `stop`."""
    needed = {v for v in targets if v not in stop}
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.results):
            ops.append(op)
            needed.update(v for v in op.operands if v not in stop)
    return ops[::-1]


def _loop_flags(op: Op, sources: set[Value]) -> list[bool]:
    """Which carries depend on `sources`, after any number of iterations."""
    (body,) = op.regions
    carries = [v in sources for v in op.operands]
    while True:
        inside = depends_on(body, sources.union(compress(body.inputs, carries)))
        after = [f or out in inside for f, out in zip(carries, body.outputs, strict=True)]
        if after == carries:
            return after
        carries = after


@dataclass(slots=True)
class StepView:
    """The local graph with what the cut needs to know about its values."""

    graph: Graph
    producers: Mapping[Value, Op]
    labels: Mapping[Value, Label]
    on_batch: set[Value]

    def is_sum(self, value: Value) -> bool:
        """True for values linear in a sum over samples."""
        label = self.labels.get(value)
        return label is not None and label.kind is Kind.SUM

    def is_per_sample(self, value: Value) -> bool:
        """True for batch inputs and values with sample dims."""
        label = self.labels.get(value)
        return value not in self.producers or (label is not None and label.kind is Kind.SAMPLE)

    def batch_operands(self, op: Op) -> list[Value]:
        """Operands that depend on the batch."""
        return [v for v in dict.fromkeys(op.operands) if v in self.on_batch]


def with_reduced(graph: Graph, labels: dict[Value, Label]) -> dict[Value, Label]:
    """Labels of what reductions read, and casts behind them, where only their results have one:
    sums are linear."""
    for op in reversed(graph.ops):
        if op.name in REDUCTIONS_OF_RANKS | CASTS and op.result in labels:
            labels.setdefault(op.operand, labels[op.result])
    return labels


def find_cut(
    view: StepView, outputs: Sequence[Value], accumulated: bool, reduce_last: bool
) -> list[Value]:
    """The sums over samples through which `outputs` depend on the batch, cheapest to store, in
    program order: in fp32 when micro-batches are added up, else in their own type. With
    `reduce_last` what is not reduced over cores yet is preferred.

    Raises: CutRefusedError when an output depends on single samples past every sum.
    """
    sinks = _zone_sinks(view, outputs)
    sources, edges, zone = _zone(view, sinks)
    weights = _weights(view, zone, accumulated)
    if reduce_last:
        over_cores = (op for op in view.graph.ops if op.name in REDUCTIONS_OF_RANKS)
        heads = (v for op in over_cores for v in op.results if v in zone)
        reduced = depends_on(view.graph, heads)
        dearest = sum(n for n in weights.values() if n < UNCUTTABLE)
        weights = {v: n + dearest * (v in reduced) for v, n in weights.items()}
    network = FlowNetwork(weights, edges, sources, sinks)
    try:
        return network.minimum_cut()
    except ValueError as error:
        raise CutRefusedError("the update reads a sum over samples of integers only") from error


def _zone_sinks(view: StepView, outputs: Sequence[Value]) -> list[Value]:
    """The sums the optimizer reads, found by walking back from its outputs."""
    sinks = []
    for value in upstream(view, outputs, view.is_sum):
        if view.is_sum(value):
            sinks.append(value)
        elif view.is_per_sample(value):
            raise _per_sample(view, value)
    return sinks


def upstream(
    view: StepView, values: Iterable[Value], ends: Callable[[Value], bool]
) -> Iterator[Value]:
    """What `values` depend on the batch through, each value once: on every way back as far as where
    it ends. Who comes to single samples goes no further: nothing feeds the batch.
    """
    seen: set[Value] = set()
    todo = [v for v in values if v in view.on_batch]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        if not ends(value):
            todo.extend(view.batch_operands(view.producers[value]))


def _per_sample(view: StepView, value: Value) -> CutRefusedError:
    """The refusal at a value that holds single samples."""
    op = view.producers.get(value)
    if op is None:
        return CutRefusedError("the new state reads the batch itself, not a sum over it")
    reason = f"the new state reads {op.name} of {value.type}, which holds single samples"
    return CutRefusedError(reason, op.loc)


def _zone(
    view: StepView, sinks: Sequence[Value]
) -> tuple[list[Value], list[tuple[Value, Value]], set[Value]]:
    """Sums upstream of `sinks`: those fed by single samples, edges among them, all of them."""
    sources: list[Value] = []
    edges: list[tuple[Value, Value]] = []
    walked = upstream(view, sinks, lambda value: not view.is_sum(value))
    zone = [value for value in walked if view.is_sum(value)]
    for value in zone:
        feeding = view.batch_operands(view.producers[value])
        sums = [v for v in feeding if view.is_sum(v)]
        if len(sums) < len(feeding):
            sources.append(value)
        edges.extend((v, value) for v in sums)
    return sources, edges, set(zone)


def _weights(view: StepView, zone: set[Value], accumulated: bool) -> dict[Value, int]:
    """What handing over each value of the zone costs, in program order.

    Among equal bytes a value before optimizer arithmetic (learning rate, weight of an average) is
    preferred, and of those the last: after casts and collectives.
    """
    scalings: dict[Value, int] = {}
    for op in view.graph.ops:
        for value in op.results:
            if value in zone:
                before = max(scalings.get(v, 0) for v in op.operands)
                scalings[value] = before + (op.name in SCALINGS)
    apart = 1 + sum(scalings.values())  # so that sizes always decide first

    def weight(value: Value) -> int:
        if not value.type.dtype.is_float:
            return UNCUTTABLE
        # Accumulators count as of one type, whichever it is.
        size = value.type.num_elements if accumulated else value.type.num_bytes
        return size * apart + scalings[value]

    return {value: weight(value) for value in scalings}
