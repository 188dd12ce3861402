"""What the used layout implies at each op: sums of parts, and sequences to bring whole.

A dim that is summed over while it is split leaves partial sums: an all_reduce, or a reduce_scatter
when the result is split over the same axes. A sequence that one operand has split over axes which
the rest of the op uses otherwise is gathered first. Nothing else is predicted, so that it becomes a
finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwright.compiler.ir.types import Graph, Op
from shardwright.sharding.indices.dims import Dim, Factor, factors
from shardwright.sharding.indices.tensor_parallel import contracted, cut
from shardwright.sharding.strategies import Predicted
from shardwright.sharding.strategies.constraints import GatherUse
from shardwright.sharding.strategies.layout import UsedLayout


def reductions(graph: Graph, layout: UsedLayout) -> Counter[Predicted]:
    """The sums over split indices, of ops that keep samples; loop bodies once."""
    found: Counter[Predicted] = Counter()
    for op in graph.walk() if layout.split or layout.sequence_axes else ():
        if not op.regions and any(v in layout.samples for v in op.results):
            found.update(_sums(op, layout))
    return found


def _sums(op: Op, layout: UsedLayout) -> Iterator[Predicted]:
    """Partial sums over the axes of the dims an op contracts."""
    axes = partial_axes(op, layout)
    for result in op.results if axes else ():
        scattered = tuple(a for a in axes if a in layout.of(result).axes)
        if scattered:
            yield Predicted("reduce_scatter", scattered, result.type)
        rest = tuple(a for a in axes if a not in scattered)
        if rest:
            yield Predicted("all_reduce", rest, result.type)


def partial_axes(op: Op, layout: UsedLayout) -> tuple[str, ...]:
    """The axes over which the results of `op` are partial sums."""
    return tuple(dict.fromkeys(a for v, d in contracted(op) for a in layout.of(v).dims[d]))


def ended_axes(op: Op, layout: UsedLayout) -> tuple[str, ...]:
    """The axes of the operand dims that no result of `op` has: what its results are sums over."""
    kept = {dim for f in factors(op) for dim in f if any(v in op.results for v, _ in f)}
    dims = ((v, d) for v in op.operands for d in range(v.type.rank))
    axes = (a for v, d in dims if (v, d) not in kept for a in layout.of(v).dims[d])
    return tuple(dict.fromkeys(axes))


def sequence_uses(graph: Graph, layout: UsedLayout) -> Iterator[GatherUse]:
    """Operands, at any depth, that must be gathered along their sequence before the op."""
    axes = {*layout.sequence_axes, *layout.sequence_parallel_axes}
    for op in graph.walk() if axes else ():
        if op.regions or not any(axes & {*layout.of(v).axes} for v in op.operands):
            continue
        kept: dict[Dim, set[str]] = {dim: set() for dim in cut(op)}
        kept |= {dim: axes for factor in factors(op) for dim, axes in _shared(op, factor, layout)}
        for index, value in enumerate(op.operands):
            spec, dim = layout.of(value), layout.sequence_dim(value)
            if dim is None or (value, dim) not in kept:
                continue
            whole = spec.with_dim(dim, (a for a in spec.dims[dim] if a in kept[value, dim]))
            if whole != spec:
                yield GatherUse(op, index, (value,), spec=whole)


def expert_uses(graph: Graph, layout: UsedLayout) -> Iterator[GatherUse]:
    """Operands that lie by expert where the op's result lies by sample again: sent back first."""
    for op in graph.walk() if layout.experts else ():
        leaves = any(v in layout.samples and v not in layout.rows for v in op.results)
        for index, value in enumerate(op.operands if leaves and not op.regions else ()):
            if value in layout.rows:
                yield GatherUse(op, index, (value,), spec=layout.by_sample(value))


def sends_rows(op: Op, layout: UsedLayout) -> bool:
    """True when the results of `op` lie by expert and what it reads does not."""
    read = [v for v in op.operands if v in layout.samples]
    return not any(v in layout.rows for v in read)


def _shared(op: Op, factor: Factor, layout: UsedLayout) -> Iterator[tuple[Dim, set[str]]]:
    """Operand dims of one index, with the axes that its results (or, where there are none, all its
    operands) have.
    """
    results = [dim for dim in factor if dim[0] in op.results]
    partners = results or [dim for dim in factor if dim[0] in layout.samples]
    axes = [{*layout.of(v).dims[d]} for v, d in partners]
    if axes:
        yield from (((v, d), set.intersection(*axes)) for v, d in factor if v in op.operands)
