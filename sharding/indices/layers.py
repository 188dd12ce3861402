"""The layers of a model, found by structure alone: loops over stacked weights, and repeats of
unrolled code.

Nothing here reads names or compares sizes with those of a known model. A scanned layer is the body
of a loop that slices weights by its counter; an unrolled layer is one period of the sequence of
weight uses, compared by hashes of the code that leads to each use. Boundaries are the values that
connect one layer to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.build import subgraph
from shardwright.compiler.ir.facts import places_of, takes_at
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.traits import CONTRACTIONS, IDENTITIES, UPDATES, WRITES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.dims import reached


@dataclass(frozen=True, slots=True)
class ScannedLayers:
    """A loop whose body is a layer.

    `boundaries` are the carries that connect iterations, `weights` maps a carry that is only read
    to the dim its slices walk along, `stacks` maps a carry written slice by slice (saved
    activations, gradients) to that dim.
    """

    loop: Op
    boundaries: tuple[int, ...]
    weights: Mapping[int, int]
    stacks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class UnrolledLayers:
    """Repeats of one sub-graph at one level; `boundaries[i]` joins repeats `i` and `i + 1`."""

    repeats: tuple[tuple[Op, ...], ...]
    boundaries: tuple[tuple[Value, ...], ...]


def scanned_layers(graph: Graph) -> list[ScannedLayers]:
    """Every loop, at any depth, whose body contracts and slices something by the counter."""
    loops = (op for op in graph.walk() if op.regions)
    found = (scan_of(op) for op in loops if _contracts(op.regions[0]))
    return [scan for scan in found if scan.weights or scan.stacks]


def _contracts(body: Graph) -> bool:
    """True when some op of `body`, at any depth, is a contraction."""
    return any(op.name in CONTRACTIONS for op in body.walk())


def scan_of(loop: Op) -> ScannedLayers:
    """The carries of `loop` by what the body does with them."""
    body = loop.regions[0]
    counted = reached(body, [body.inputs[loop.attrs.induction]])
    read_only = set(invariant_carries(loop))
    carry_of = {v: i for i, v in enumerate(body.inputs)}
    weights: dict[int, int] = {}
    stacks: dict[int, int] = {}
    for op in body.ops:
        target = carry_of.get(op.operands[0]) if op.operands else None
        if target is None or (dim := _walked_dim(op, counted)) is None:
            continue
        if takes_at(op) and target in read_only:
            weights[target] = dim
        elif op.name in UPDATES:
            stacks[target] = dim
    skipped = read_only | stacks.keys() | _written(body) | {loop.attrs.induction}
    boundaries = tuple(i for i in range(len(body.inputs)) if i not in skipped)
    return ScannedLayers(loop, boundaries, weights, stacks)


def _written(body: Graph) -> set[int]:
    """Carries of which an iteration writes a part and hands on the rest: sums by a number that is
    data are no more what a layer hands to the next than stacks are.
    """
    made = body.producers()
    ends = (made.get(value) for value in body.outputs)
    return {
        i
        for i, op in enumerate(ends)
        if op is not None and op.name in WRITES and op.operands[0] is body.inputs[i]
    }


def _walked_dim(op: Op, counted: set[Value]) -> int | None:
    """The dim along which a slice of size 1 moves with the counter, if any."""
    if not (takes_at(op) or op.name in UPDATES):
        return None
    window = op.operands[1] if op.name in UPDATES else op.result
    for dim, start in enumerate(places_of(op)):
        if start in counted and window.type.shape[dim] == 1:
            return dim
    return None


def visited_layers(loop: Op, start: Value) -> np.ndarray | None:
    """`start`, a scalar of the body, in every iteration; None when more than the counter decides
    it.
    """
    body = loop.regions[0]
    counter = body.inputs[loop.attrs.induction]
    needed: dict[Op, None] = {}
    made = body.producers()
    todo = [start]
    while todo:
        op = made.get(value := todo.pop())
        if op is None and value is not counter:
            return None
        if op is not None and op not in needed:
            needed[op] = None
            todo.extend(op.operands)
    cone = subgraph([counter], (op for op in body.ops if op in needed), [start])
    dtype = counter.type.dtype.numpy
    found = [evaluate(cone, [np.asarray(i, dtype)])[0] for i in range(loop.attrs.trip)]
    return np.asarray(found, np.int64)


def unrolled_layers(
    graph: Graph, batch: Mapping[Value, int], weights: set[Value]
) -> list[UnrolledLayers]:
    """Runs of isomorphic repeats among the ops of one level.

    `batch` holds the values with a batch label, `weights` every value that depends on a parameter.
    A weight use is an op that meets a batch value with a weight; repeats are runs of equal periods
    in the sequence of weight uses.
    """
    uses = [op for op in graph.ops if _is_weight_use(op, batch, weights)]
    tokens, placed = _tokens(graph, uses, batch)

    found = sorted(_runs(tokens, 0, len(tokens)))
    rotations = ([_unrolled(placed, {*uses}, run, batch) for run in runs] for runs in found)
    return [min(layers, key=_boundary_bytes) for layers in rotations]


@dataclass(frozen=True, slots=True)
class _Token:
    """A weight use: `shape` hashes the op alone, `cone` the code since the use `base`."""

    shape: int
    cone: int
    base: int


def _is_weight_use(op: Op, batch: Mapping[Value, int], weights: set[Value]) -> bool:
    """True when `op` combines a batch value with a value that only weights made."""
    if op.regions or op.name in IDENTITIES:
        return False
    meets = any(v in batch for v in op.operands) and any(v in batch for v in op.results)
    return meets and any(v in weights and v not in batch and v.type.rank for v in op.operands)


def _tokens(
    graph: Graph, uses: Sequence[Op], batch: Mapping[Value, int]
) -> tuple[list[_Token], list[tuple[Op, int]]]:
    """One token per weight use, whose cone ends at values that an earlier use made; and the ops
    that make batch values, each with the number of the last weight use it depends on.
    """
    number = {op: i for i, op in enumerate(uses)}
    position: dict[Value, int] = {}
    digest: dict[Value, int] = {}
    tokens, placed = [], []
    for op in graph.ops:
        base = max((position.get(v, -1) for v in op.operands), default=-1)
        operands = tuple(
            digest[v] if v in digest and position[v] == base else hash(v.type) for v in op.operands
        )
        shape = hash((op.name, op.attrs, tuple(v.type for v in (*op.operands, *op.results))))
        code = hash((shape, operands))
        if op in number:
            tokens.append(_Token(shape, code, base))
        made = [(i, v) for i, v in enumerate(op.results) if v in batch]
        if made:
            placed.append((op, number.get(op, base)))
        for i, value in made:
            position[value] = number.get(op, base)
            digest[value] = hash(value.type) if op in number else hash((code, i))
    return tokens, placed


Run = tuple[int, int, int]


def _runs(tokens: Sequence[_Token], start: int, end: int) -> Iterator[list[Run]]:
    """Runs that cover most uses, with their equally long rotations; then those of what lies beside
    them.
    """
    best: list[Run] = []
    covered = 0
    shapes = np.array([token.shape for token in tokens], np.int64)
    for period in range(2, (end - start) // 2 + 1):
        for run in _periodic(shapes, start, end, period):
            longer = period * run[2] > covered
            equal = best and run[1:] == best[0][1:]
            if (longer or equal) and _isomorphic(tokens, run):
                best, covered = [run] if longer else [*best, run], period * run[2]
    if not best:
        return
    _, period, repeats = best[0]
    first = best[0][0]
    best = [run for run in best if run[0] < first + period]
    yield best
    yield from _runs(tokens, start, first)
    yield from _runs(tokens, best[-1][0] + period * repeats, end)


def _periodic(shapes: np.ndarray, start: int, end: int, period: int) -> Iterator[Run]:
    """Stretches whose tokens repeat after `period` uses, at least twice, from each possible first
    use.

    Periods begin at 2: single ops that look alike are not layers.
    """
    for first, matched in stretches(shapes[start:end], period, period):
        for skipped in range(min(period, matched - period + 1)):
            yield start + first + skipped, period, (matched - skipped) // period + 1


def stretches(tokens: np.ndarray, period: int, least: int) -> Iterator[tuple[int, int]]:
    """Maximal stretches, of `least` tokens or more, that equal those `period` later: (first,
    length).
    """
    differs = np.flatnonzero(tokens[period:] != tokens[:-period])
    bounds = np.concatenate(([-1], differs, [len(tokens) - period]))
    lengths = np.diff(bounds) - 1
    for at in np.flatnonzero(lengths >= least):
        yield int(bounds[at]) + 1, int(lengths[at])


def _isomorphic(tokens: Sequence[_Token], run: Run) -> bool:
    """True when the cones repeat too, but for uses of the first repeat that begin outside of the
    run.
    """
    first, period, repeats = run
    return all(
        tokens[i].cone == tokens[i + period].cone or tokens[i].base < first
        for i in range(first, first + period * (repeats - 1))
    )


def _unrolled(
    placed: Sequence[tuple[Op, int]], uses: set[Op], run: Run, batch: Mapping[Value, int]
) -> UnrolledLayers:
    """Ops and boundaries of one run."""
    first, period, repeats = run
    groups: list[list[Op]] = [[] for _ in range(repeats)]
    for op, at in placed:
        if first <= at < first + period * repeats:
            groups[(at - first) // period].append(op)
    ends = [{*groups[i]} for i in range(repeats)]
    boundaries = tuple(_boundaries(groups[i], ends[i + 1], uses, batch) for i in range(repeats - 1))
    return UnrolledLayers(tuple(tuple(g) for g in groups), boundaries)


def _boundary_bytes(layers: UnrolledLayers) -> int:
    """Bytes of all boundaries: of the rotations of a run, the one with the fewest is taken."""
    return sum(v.type.num_bytes for boundary in layers.boundaries for v in boundary)


def _boundaries(
    before: Sequence[Op], after: set[Op], uses: set[Op], batch: Mapping[Value, int]
) -> tuple[Value, ...]:
    """Values of `before` that `after` reads, without those that follow from another boundary by
    weightless code.
    """
    made = {v: op for op in before for v in op.results}
    read = {v for op in after for v in op.operands if v in made}

    follows: set[Value] = set()  # values that are computed from other boundaries alone
    for op in before:
        sources = [v for v in op.operands if v in batch]
        known = all(v in made and (v in read or v in follows) for v in sources)
        if op not in uses and sources and known:
            follows.update(op.results)
    return tuple(v for op in before for v in op.results if v in read and v not in follows)
