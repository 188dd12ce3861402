"""Which dims of values are one index of the model: what batch labels and shard classes follow.

What an op walks together it says itself (`compiler/ir/factors.py`); a dim that is merged into or
split from a larger one is linked as its major part. Labels only steer which layout is asked for,
never what is computed. `strategies/` reads the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from shardwright.compiler.ir.factors import Factor as Walk
from shardwright.compiler.ir.factors import FactorKind
from shardwright.compiler.ir.facts import factors_of
from shardwright.compiler.ir.traits import IDENTITIES, LITERALS, WRITES
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value

Dim = tuple[Value, int]
Factor = tuple[Dim, ...]
Repeated = frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What all ops that look alike have in common: their factors, with (operand or result, dim,
    size) for dims (results are numbered behind operands), and per result the dims that only repeat
    something, unless an operand walks along them.
    """

    factors: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    loose: tuple[Repeated, ...] = ()
    repeats: bool = False  # whether it has dims of its own that repeat


NO_FACTORS = Form()


def factors(op: Op) -> list[Factor]:
    """The groups of (value, dim) of `op` that share an index."""
    if op.regions:
        return _carried(op)
    values = (*op.operands, *op.results)
    return [tuple([(values[i], d) for i, d, _ in factor]) for factor in form_of(op).factors]


def _carried(op: Op) -> list[Factor]:
    """A carry of a loop is one value at four places."""
    body = op.regions[0]
    carries = zip(op.operands, body.inputs, body.outputs, op.results, strict=True)
    return [tuple((v, d) for v in carry) for carry in carries for d in range(carry[0].type.rank)]


def form_of(op: Op) -> Form:
    """The form of an op without regions."""
    if op.name in LITERALS:
        return NO_FACTORS
    types = tuple([v.type for v in (*op.operands, *op.results)])
    return _form(factors_of(op), types, len(op.operands), op.name in WRITES)


@cache
def _form(
    walks: tuple[Walk, ...], types: tuple[TensorType, ...], first: int, is_write: bool
) -> Form:
    """The form of ops that walk alike; results are the values from `first` on."""
    slots = tuple(
        tuple((i, d, types[i].shape[d]) for i, d in walk.places)
        for walk in walks
        if len(walk.places) > 1
    )
    results = range(first, len(types))
    if is_write:
        return Form(slots, (_NOTHING,) * len(results))
    tied = {place for walk in walks for place in walk.places}
    loose = tuple(frozenset(d for i, d in tied if i == r) for r in results)
    return Form(slots, loose, any(walk.kind is FactorKind.REPEATED for walk in walks))


def propagate(
    graph: Graph, step: Callable[[Op], bool], bind: Callable[[Value, Value], bool]
) -> None:
    """Run `step` on every op in program order, loop bodies until their carries settle.

    `bind(source, target)` copies what is known of a carry; both return True when they learned
    something.
    """
    for op in graph.ops:
        if op.regions:
            _propagate_loop(op, step, bind)
        elif op.name in IDENTITIES:
            for source, target in zip(op.operands, op.results, strict=True):
                bind(source, target)
        else:
            step(op)


def _propagate_loop(
    op: Op, step: Callable[[Op], bool], bind: Callable[[Value, Value], bool]
) -> None:
    """Operands into the region, the region until stable, its outputs out."""
    body = op.regions[0]
    for operand, inner in zip(op.operands, body.inputs, strict=True):
        bind(operand, inner)
    learned = True
    while learned:
        propagate(body, step, bind)
        carries = list(zip(body.outputs, body.inputs, strict=True))
        learned = any([bind(output, inner) for output, inner in carries])
    for output, result in zip(body.outputs, op.results, strict=True):
        bind(output, result)


def joins(found: set[Value]) -> Callable[[Value, Value], bool]:
    """How carries and barriers pass membership of `found` on, for `propagate`."""

    def bind(source: Value, target: Value) -> bool:
        new = source in found and target not in found
        if new:
            found.add(target)
        return new

    return bind


def reached(graph: Graph, sources: Iterable[Value]) -> set[Value]:
    """Every value that depends on one of `sources`, regions included; barriers and carries count
    one by one.
    """
    found = set(sources)

    def step(op: Op) -> bool:
        if not found.isdisjoint(op.operands):
            found.update(op.results)
        return False

    propagate(graph, step, joins(found))
    return found


def repeated_dims(graph: Graph) -> list[Dim]:
    """The dims that only repeat a smaller value, and walk along no index of the model.

    A scalar that is broadcast for two weights of equal shape is one value after CSE, and so are
    their zeros; what only repeats says nothing about the index it is repeated along.
    """
    found: dict[Value, Repeated] = {}
    bound: set[Value] = set()

    def step(op: Op) -> bool:
        here = found.keys()
        if op.name in LITERALS:
            keep(op.result, frozenset(d for f in factors_of(op) for _, d in f.places))
            return False
        form = form_of(op)
        if form.repeats or not here.isdisjoint((*op.operands, *op.results)):
            given = tuple([found.get(v, _NOTHING) for v in op.operands])
            for value, dims in zip(op.results, _repeated(form, given), strict=False):
                keep(value, dims)
        return False

    def keep(value: Value, dims: Repeated) -> None:
        if dims:
            found[value] = dims
        else:
            found.pop(value, None)

    def bind(source: Value, target: Value) -> bool:
        """The first source decides; later ones say what is more than repeated after all."""
        given = found.get(source, _NOTHING)
        before = found.get(target, _NOTHING) if target in bound else given
        keep(target, before & given)
        bound.add(target)
        return before & given != before

    propagate(graph, step, bind)
    return [(value, d) for value, dims in found.items() for d in dims]


_NOTHING: Repeated = frozenset()


@cache
def _repeated(form: Form, given: tuple[Repeated, ...]) -> tuple[Repeated, ...]:
    """The dims of the results that only repeat, when those of the operands are `given`."""
    walked = {
        (i - len(given), d)
        for factor in form.factors
        if any(i < len(given) and d not in given[i] for i, d, _ in factor)
        for i, d, _ in factor
    }
    return tuple(
        frozenset(d for d in dims if (r, d) not in walked) for r, dims in enumerate(form.loose)
    )


@dataclass(slots=True)
class BatchLabels:
    """The batch dim of every value that has one, and the ops whose operands disagree about it."""

    dims: dict[Value, int]
    conflicts: list[Op] = field(default_factory=list)


def batch_labels(graph: Graph, batch_dims: Mapping[Value, int]) -> BatchLabels:
    """Follow the batch dim of the batch inputs through all ops and loops."""
    labels = BatchLabels(dict(batch_dims))
    dims = labels.dims

    def step(op: Op) -> bool:
        if dims.keys().isdisjoint(op.operands):
            return False
        for factor in factors(op):
            if any(dims.get(v) == d for v, d in factor if v in op.operands):
                for v, d in factor:
                    if v in op.results and dims.setdefault(v, d) != d:
                        labels.conflicts.append(op)
        return False

    def bind(source: Value, target: Value) -> bool:
        new = source in dims and target not in dims
        if new:
            dims[target] = dims[source]
        return new

    propagate(graph, step, bind)
    return labels
