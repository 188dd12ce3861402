"""Tandem repeats among the ops of a step: stretches of program order that look alike again and
again.

What depends on constants, the batch and leaves of no layer alone belongs to no layer: tracing
writes it once per layer or once at all, as it happens. Such values are numbered by what they
compute, and left out. Whether a repeat really is one is decided in `sections.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.compiler.ir.analysis import is_light, structure
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.layers import stretches

MIN_REPEATS = 3
"""Two layers cost less than the loop around them (our choice)."""
MAX_MULTIPLE = 4
"""How often a layer may contain the same code (our choice)."""
CANDIDATES = 64
"""Periods that are tried; a layer's own is among the first few (our choice)."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` times `period` varying ops from number `first` on; `rest` more follow the pattern, so
    that the run may begin up to `rest` ops later.
    """

    first: int
    period: int
    count: int
    rest: int

    def multiples(self) -> Iterator[Run]:
        """The run itself, then with several repeats as one: a layer may repeat itself inside."""
        size = self.period * self.count + self.rest
        for times in range(1, MAX_MULTIPLE + 1):
            count, rest = divmod(size, self.period * times)
            if count >= MIN_REPEATS:
                yield Run(self.first, self.period * times, count, rest)


@dataclass(frozen=True, slots=True)
class Varying:
    """The ops of a step that depend on its state, in program order; what other ops make, by the
    first value that is computed the same way.
    """

    ops: Sequence[Op]
    shared: Mapping[Value, Value]


def varying_ops(graph: Graph, common: set[Value]) -> Varying:
    """Split the ops of a step by whether they depend on more than constants and `common` inputs."""
    shared: dict[Value, Value] = {v: v for v in common}
    seen: dict[Hashable, tuple[Value, ...]] = {}
    varying = []
    for op in graph.ops:
        if not all(v in shared for v in op.operands):
            varying.append(op)
            continue
        found = op.results
        if OPS[op.name].pure and not op.regions:
            read = tuple([shared[v] for v in op.operands])
            found = seen.setdefault((op.name, op.attrs, read), op.results)
        shared.update(zip(op.results, found, strict=True))
    return Varying(varying, shared)


def light_ops(graph: Graph, varying: Varying, spans: Sequence[tuple[Op, Op]]) -> frozenset[Op]:
    """Light ops that no layer owns and that bodies may repeat: those made of constants alone, and
    those that stand between the first and the last op of one of `spans`.
    """
    number = {op: i for i, op in enumerate(graph.ops)}
    ranges = [(number[first], number[last]) for first, last in spans]
    found: dict[Op, bool] = {}
    made = graph.producers()
    for op, at in number.items():
        if not is_light(op) or op.results[0] not in varying.shared:
            continue
        fixed = all(v in made and found.get(made[v], False) for v in op.operands)
        if fixed or any(first < at < last for first, last in ranges):
            found[op] = fixed
    return frozenset(found)


def look(op: Op) -> Hashable:
    """What two ops share that do the same to other values."""
    types = tuple([v.type for v in (*op.operands, *op.results)])
    return op.name, op.attrs, types, tuple([structure(region) for region in op.regions])


def repeats(ops: Sequence[Op]) -> Iterator[Run]:
    """Runs of repeats that contract something, those that cover most first."""
    numbers: dict[Hashable, int] = {}
    tokens = np.array([numbers.setdefault(look(op), len(numbers)) for op in ops], np.int64)
    heavy = np.cumsum([0, *(_contracts(op) for op in ops)])
    todo = [(0, len(tokens))]
    while todo:
        start, end = todo.pop()
        run = _longest(tokens, heavy, start, end)
        if run is not None:
            yield run
            todo += [(start, run.first), (_end(run), end)]


def _contracts(op: Op) -> bool:
    inner = (o for region in op.regions for o in region.walk())
    return op.name in CONTRACTIONS or any(o.name in CONTRACTIONS for o in inner)


def _end(run: Run) -> int:
    return run.first + run.period * run.count + run.rest


def _longest(tokens: Tokens, heavy: Tokens, start: int, end: int) -> Run | None:
    """The run between `start` and `end` that covers most; of equal ones that of the shortest
    period.
    """
    best, covered = None, 0
    for period in _periods(tokens[start:end]):
        for first, matched in stretches(tokens[start:end], period, period * (MIN_REPEATS - 1)):
            run = Run(start + first, period, matched // period + 1, matched % period)
            size = run.period * run.count
            if run.count >= MIN_REPEATS and size > covered and heavy[_end(run)] > heavy[run.first]:
                best, covered = run, size
    return best


def _periods(tokens: Tokens) -> list[int]:
    """Distances between equal tokens that may be periods, ascending: those that most ops have to
    one of the next ops like them.
    """
    order = np.argsort(tokens, kind="stable")
    found = []
    for hop in range(1, MAX_MULTIPLE + 1):
        same = tokens[order[hop:]] == tokens[order[:-hop]]
        found.append((order[hop:] - order[:-hop])[same])
    distances, counts = np.unique(np.concatenate(found), return_counts=True)
    best = np.argsort(-distances * counts, kind="stable")[:CANDIDATES]
    periods: list[int] = np.sort(distances[best]).tolist()
    return periods
