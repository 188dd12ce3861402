"""Which dims of an op's values are one index: the table behind batch labels and shard classes.

`factors` names, per op, the dims that walk together; a dim that is merged into or split from a
larger one is linked as its major part. Labels only steer which layout is asked for, never what is
computed, so that an op without a rule costs speed (a finding) and not correctness. `strategies/`
reads the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile

from shardwright.compiler.ir.facts import counted_dim, dim_map, moved, splat
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import BroadcastInDimAttrs, windows_of
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


NO_FACTORS = Form()


def factors(op: Op) -> list[Factor]:
    """The groups of (value, dim) of `op` that share an index; empty for an op without a rule."""
    if op.regions:
        return FACTORS[op.name](op)
    values = (*op.operands, *op.results)
    return [tuple([(values[i], d) for i, d, _ in factor]) for factor in form_of(op).factors]


def form_of(op: Op) -> Form:
    """The form of an op without regions; `NO_FACTORS` for one without a rule."""
    if op.name not in FACTORS and not OPS[op.name].elementwise:
        return NO_FACTORS
    given, made = ([v.type for v in values] for values in (op.operands, op.results))
    return _form(op.name, op.attrs, tuple(given), tuple(made))


@cache
def _form(
    name: str, attrs: object, given: tuple[TensorType, ...], made: tuple[TensorType, ...]
) -> Form:
    """What the rule of `name` says of a stand-in for all ops with these attributes and types."""
    operands, results = (tuple(Value(t) for t in types) for types in (given, made))
    place = {v: i for i, v in enumerate((*operands, *results))}
    found = FACTORS.get(name, _elementwise)(op := Op(name, operands, results, attrs))
    slots = tuple(tuple((place[v], d, v.type.shape[d]) for v, d in factor) for factor in found)
    if name in WRITES:
        return Form(slots, (_NOTHING,) * len(results))
    tied = {dim for factor in found for dim in factor}
    return Form(slots, tuple(_repeats(op) | {d for v, d in tied if v is r} for r in results))


def _elementwise(op: Op) -> list[Factor]:
    """Dims correspond by position; scalar operands (predicates, bounds) have none."""
    rank = op.result.type.rank
    values = [v for v in (*op.operands, *op.results) if v.type.rank == rank]
    return _beside(values, range(rank))


def _beside(values: Sequence[Value], dims: Iterable[int]) -> list[Factor]:
    """Values of one rank that walk along `dims` together."""
    return [tuple((v, d) for v in values) for d in dims]


def _positional(op: Op) -> list[Factor]:
    """Operand i is result i."""
    return _copies(op.operands, op.results)


def _loop(op: Op) -> list[Factor]:
    """A carry is one value at four places."""
    (body,) = op.regions
    return _copies(op.operands, body.inputs, body.outputs, op.results)


def _copies(*places: Sequence[Value]) -> list[Factor]:
    """Value i is one in all `places`."""
    values = zip(*places, strict=True)
    return [factor for same in values for factor in _beside(same, range(same[0].type.rank))]


def _mapped(op: Op) -> list[Factor]:
    (x,), y = op.operands, op.result
    return [((x, i), (y, d)) for d, i in enumerate(dim_map(op) or ()) if i is not None]


def _reshape(op: Op) -> list[Factor]:
    """Dims that begin at the same element stride from the front; the smaller is the major part of
    the larger. Dims of size 1 (one sample) are told apart as long as all in front is equal.
    """
    (x,), y = op.operands, op.result
    left, right = _starts(x.type.shape), _starts(y.type.shape)
    pairs = [(left[p], right[p]) for p in left if p in right]
    found: list[Factor] = [
        ((x, i), (y, j)) for i, j in pairs if _nested(x.type.shape[i], y.type.shape[j])
    ]
    sizes = zip(x.type.shape, y.type.shape, strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1], sizes)
    return found + [((x, d), (y, d)) for d, (size, _) in enumerate(same) if size == 1]


def _starts(shape: tuple[int, ...]) -> dict[int, int]:
    """Product of the dims in front -> dim; of dims with equal product the one larger than 1."""
    starts: dict[int, int] = {}
    front = 1
    for dim, size in enumerate(shape):
        if front not in starts or size > 1:
            starts[front] = dim
        front *= size
    return starts


def _nested(a: int, b: int) -> bool:
    """True when one size is a multiple of the other."""
    return a == b or (min(a, b) > 1 and max(a, b) % min(a, b) == 0)


def _sort(op: Op) -> list[Factor]:
    """All operands and results are reordered along one dim; the others walk together."""
    return _beside((*op.operands, *op.results), _others(op, op.attrs.dim))


def _others(op: Op, *dims: int) -> Iterator[int]:
    """The dims of the result but `dims`."""
    return (d for d in range(op.results[0].type.rank) if d not in dims)


def _reduce(op: Op) -> list[Factor]:
    (x,), y = op.operands, op.result
    kept = [d for d in range(x.type.rank) if d not in op.attrs.dims]
    return [((x, d), (y, i)) for i, d in enumerate(kept)]


def _dot_general(op: Op) -> list[Factor]:
    (lhs, rhs), y, a = op.operands, op.result, op.attrs
    lhs_free, rhs_free = a.free_dims(lhs.type.rank, rhs.type.rank)
    batch = len(a.lhs_batch)
    found: list[Factor] = [
        ((lhs, i), (rhs, j), (y, d))
        for d, (i, j) in enumerate(zip(a.lhs_batch, a.rhs_batch, strict=True))
    ]
    found += [((lhs, i), (y, batch + k)) for k, i in enumerate(lhs_free)]
    found += [((rhs, j), (y, batch + len(lhs_free) + k)) for k, j in enumerate(rhs_free)]
    contract = zip(a.lhs_contract, a.rhs_contract, strict=True)
    return found + [((lhs, i), (rhs, j)) for i, j in contract]


def _convolution(op: Op) -> list[Factor]:
    """Batch, input and output features; groups split them, so that only what no group splits is
    linked.
    """
    (lhs, rhs), y, a = op.operands, op.result, op.attrs
    found: list[Factor] = []
    if a.batch_groups == 1:
        found.append(((lhs, a.lhs[0]), (y, a.out[0])))
    if a.feature_groups == 1:
        found.append(((lhs, a.lhs[1]), (rhs, a.rhs[1])))
    return [*found, ((rhs, a.rhs[0]), (y, a.out[1]))]


def _windowed(op: Op) -> list[Factor]:
    """Dims that no window spans."""
    a = op.attrs
    rows = zip(a.sizes, a.strides, a.low, a.high, strict=True)
    whole = (d for d, row in enumerate(rows) if row == (1, 1, 0, 0))
    return _beside((*op.operands, op.result), whole)


def _same_size(x: Value, y: Value) -> list[Factor]:
    """Dims of equal rank that keep their size."""
    sizes = zip(x.type.shape, y.type.shape, strict=True)
    return _beside((x, y), (d for d, (a, b) in enumerate(sizes) if a == b))


def _dynamic_update_slice(op: Op) -> list[Factor]:
    target, update = op.operands[:2]
    return _same_size(target, op.result) + _same_size(update, op.result)


def _concatenate(op: Op) -> list[Factor]:
    return _beside((*op.operands, op.result), _others(op, op.attrs.dim))


def _pad(op: Op) -> list[Factor]:
    rows = zip(op.attrs.low, op.attrs.high, op.attrs.interior, strict=True)
    return _beside((op.operands[0], op.result), (d for d, row in enumerate(rows) if not any(row)))


def _reverse(op: Op) -> list[Factor]:
    return _beside((*op.operands, op.result), _others(op, *op.attrs.dims))


def _gather(op: Op) -> list[Factor]:
    """Batching dims, positions of the indices, and windows that are moved whole."""
    x, indices, y, rows = op.operands[0], op.operands[1], moved(op), windows_of(op.attrs)
    batch_of = dict(zip(rows.indices_batching, rows.operand_batching, strict=True))
    positions = [d for d in range(indices.type.rank) if d != rows.vector_dim]
    walking = [d for d in range(y.type.rank) if d not in rows.moving_dims]
    found: list[Factor] = []
    for i, d in zip(positions, walking, strict=True):
        dims: Factor = ((indices, i), (y, d))
        found.append((*dims, (x, batch_of[i])) if i in batch_of else dims)
    pairs = zip(rows.window_dims(x.type.rank), rows.moving_dims, strict=True)
    return found + [((x, i), (y, j)) for i, j in pairs if x.type.shape[i] == y.type.shape[j]]


def _scatter(op: Op) -> list[Factor]:
    x, y = op.operands[0], op.result
    tied = [factor + tuple((y, d) for v, d in factor if v is x) for factor in _gather(op)]
    return tied + _same_size(x, y)


FACTORS: dict[str, Callable[[Op], list[Factor]]] = {
    "broadcast_in_dim": _mapped,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": lambda op: _same_size(op.operands[0], op.result),
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "loop": _loop,
    "move_to": _positional,
    "optimization_barrier": _positional,
    "pad": _pad,
    "reduce": _reduce,
    "reduce_window": _windowed,
    "sort": _sort,
    "reshape": _reshape,
    "reverse": _reverse,
    "scatter": _scatter,
    "select_and_scatter": _windowed,
    "slice": lambda op: _same_size(op.operands[0], op.result),
    "transpose": _mapped,
}


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
            keep(op.result, _repeats(op))
        elif isinstance(op.attrs, BroadcastInDimAttrs) or not here.isdisjoint(
            (*op.operands, *op.results)
        ):
            given = tuple([found.get(v, _NOTHING) for v in op.operands])
            for value, dims in zip(op.results, _repeated(form_of(op), given), strict=False):
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


def _repeats(op: Op) -> Repeated:
    """The dims of the result of `op` along which it is the same, unless an operand has them."""
    counted = counted_dim(op)
    is_broadcast = isinstance(op.attrs, BroadcastInDimAttrs)
    if is_broadcast or splat(op) is not None or counted is not None:
        return frozenset(d for d in range(op.result.type.rank) if d != counted)
    return _NOTHING


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
