"""How each value depends on the batch: not at all, per sample, as a sum over samples, or in another
way.

The labels decide where micro-batches may be accumulated: a sum over samples, and what is linear in
it, may be added up over micro-batches; anything else may not. The analysis follows the dims that
hold samples through every op, reads global types (where a sample dim is not yet divided down to
size 1) and is used by `stages.py`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compiler.dtypes import DType
from compiler.ir.types import Graph, Op, Value

Factor = tuple[int, bool]  # size, whether it counts samples
FactoredDim = tuple[Factor, ...]  # major to minor


class Kind(enum.Enum):
    """ZERO is known to be all zeros; FREE does not depend on the batch; SAMPLE has sample dims; SUM
    is linear in a sum over samples; MIXED depends on the batch in any other way.
    """

    ZERO = "zero"
    FREE = "free"
    SUM = "sum"
    SAMPLE = "sample"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Label:
    """A kind, and for SAMPLE the factors of every dim."""

    kind: Kind
    dims: tuple[FactoredDim, ...] = ()

    @property
    def on_batch(self) -> bool:
        """True when the value depends on the batch at all."""
        return self.kind not in (Kind.ZERO, Kind.FREE)


ZERO, FREE, SUM, MIXED = (Label(k) for k in (Kind.ZERO, Kind.FREE, Kind.SUM, Kind.MIXED))
Labels = dict[Value, Label]
Transfer = Callable[[Op, Sequence[Label], "Scope"], Label]
_TRANSFERS: dict[str, Transfer] = {}


@dataclass(slots=True)
class Scope:
    """What a transfer function may look up: labels and producers of the region at hand."""

    labels: Labels
    producers: dict[Value, Op]


def label_values(graph: Graph, batch: Mapping[Value, int]) -> Labels:
    """Label every top-level value of `graph`; `batch` gives the sample dim of each batch input."""
    inputs = [_input_label(v, batch.get(v)) for v in graph.inputs]
    return _label_region(graph, inputs)


def _input_label(value: Value, batch_dim: int | None) -> Label:
    """The label of a graph input; a scalar batch leaf is data of the whole batch."""
    if batch_dim is None:
        return FREE
    if not value.type.rank:
        return MIXED
    return _sample([((n, d == batch_dim),) for d, n in enumerate(value.type.shape)])


def _label_region(graph: Graph, inputs: Sequence[Label]) -> Labels:
    """Labels of all values of one region."""
    scope = Scope(dict(zip(graph.inputs, inputs, strict=True)), graph.producers())
    for op in graph.ops:
        operands = [scope.labels[v] for v in op.operands]
        if op.name == "loop":
            results: Sequence[Label] = _loop(op, operands)
        elif op.name == "optimization_barrier":
            results = operands
        else:
            results = [_label(op, operands, scope)] * len(op.results)
        scope.labels.update(zip(op.results, results, strict=True))
    return scope.labels


def _loop(op: Op, operands: Sequence[Label]) -> list[Label]:
    """Carries: the join over iterations, by repetition until nothing changes."""
    (body,) = op.regions
    carries = list(operands)
    while True:
        inside = _label_region(body, carries)
        after = [
            _join(carry, inside[out], out) for carry, out in zip(carries, body.outputs, strict=True)
        ]
        if after == carries:
            return after
        carries = after


def _label(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """The label of the results of an op, which are alike."""
    transfer = _TRANSFERS.get(op.name)
    if transfer is None:
        transfer = _elementwise
    label = transfer(op, operands, scope)
    if label.kind is Kind.SAMPLE:
        return _sample(_fit(label.dims, op.results[0].type.shape))
    return label


# Factored dims


def _sample(dims: Sequence[FactoredDim]) -> Label:
    """SAMPLE with these dims, or MIXED when none of them counts samples."""
    marked = any(flag for dim in dims for _, flag in dim)
    return Label(Kind.SAMPLE, tuple(dims)) if marked else MIXED


def counts_samples(dim: FactoredDim) -> bool:
    """True when some factor of `dim` counts samples."""
    return any(flag for _, flag in dim)


def _dims(label: Label, rank_shape: Sequence[int]) -> tuple[FactoredDim, ...]:
    """The factored dims of any label."""
    if label.kind is Kind.SAMPLE:
        return label.dims
    return tuple(((n, False),) for n in rank_shape)


def _fit(dims: Sequence[FactoredDim], shape: Sequence[int]) -> list[FactoredDim]:
    """`dims` with dims of another size replaced by one factor."""
    return [
        dim if math.prod(f[0] for f in dim) == n else ((n, counts_samples(dim)),)
        for dim, n in zip(dims, shape, strict=True)
    ]


def _merge_dim(a: FactoredDim, b: FactoredDim) -> FactoredDim:
    """The dim of a value computed from both."""
    if a == b or not counts_samples(b):
        return a
    if not counts_samples(a):
        return b
    return ((math.prod(f[0] for f in a), True),)


def _merge(labels: Sequence[Label], shape: Sequence[int]) -> Label:
    """SAMPLE over the union of the sample dims of operands of one shape."""
    dims: tuple[FactoredDim, ...] = tuple(((n, False),) for n in shape)
    for label in labels:
        if label.kind is Kind.SAMPLE and len(label.dims) == len(dims):
            dims = tuple(_merge_dim(a, b) for a, b in zip(label.dims, dims, strict=True))
    return _sample(dims)


def _join(a: Label, b: Label, value: Value) -> Label:
    """What a value is when it may be either."""
    if a == b:
        return a
    kinds = {a.kind, b.kind}
    if Kind.SAMPLE in kinds:
        return _merge([a, b], value.type.shape)
    if Kind.MIXED in kinds or kinds == {Kind.FREE, Kind.SUM}:
        return MIXED
    return SUM if Kind.SUM in kinds else FREE


# Transfer functions


def _transfers(*names: str) -> Callable[[Transfer], Transfer]:
    """Register a transfer function."""

    def register(fn: Transfer) -> Transfer:
        for name in names:
            _TRANSFERS[name] = fn
        return fn

    return register


def _elementwise(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Any function of elements: SAMPLE dims pass through, a SUM does not stay one."""
    if any(label.kind is Kind.SAMPLE for label in operands):
        return _merge(operands, op.results[0].type.shape)
    return MIXED if any(label.on_batch for label in operands) else FREE


def _all_in(labels: Sequence[Label], *kinds: Kind) -> bool:
    return all(label.kind in kinds for label in labels)


@_transfers("add", "subtract", "concatenate")
def _sum_of(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if _all_in(operands, Kind.ZERO):
        return ZERO
    if _all_in(operands, Kind.ZERO, Kind.SUM):
        return SUM
    if op.name == "concatenate":
        return _concatenate(op, operands)
    return _elementwise(op, operands, scope)


def _concatenate(op: Op, operands: Sequence[Label]) -> Label:
    """Joined along a dim: the joined dim is one factor."""
    if not any(label.kind is Kind.SAMPLE for label in operands):
        return MIXED if any(label.on_batch for label in operands) else FREE
    dims = [((n, False),) for n in op.result.type.shape]
    merged: list[FactoredDim] = list(dims)
    for label, operand in zip(operands, op.operands, strict=True):
        own = _dims(label, operand.type.shape)
        merged = [_merge_dim(a, b) for a, b in zip(own, merged, strict=True)]
    return _sample(_fit(merged, op.result.type.shape))


@_transfers("negate", "sharding_constraint", "all_gather", "all_slice", "all_to_all")
def _linear(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return operands[0]


@_transfers("reduce_scatter", "all_reduce")
def _reduction(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if op.attrs.reduction == "add" or operands[0].kind is not Kind.SUM:
        return operands[0]
    return MIXED


@_transfers("convert")
def _convert(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    to_float = op.result.type.dtype.is_float
    return operands[0] if to_float else _elementwise(op, _no_sum(operands), scope)


def _no_sum(operands: Sequence[Label]) -> list[Label]:
    """SUM read by a function that is not linear."""
    return [MIXED if label.kind is Kind.SUM else label for label in operands]


@_transfers("multiply")
def _multiply(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    kinds = sorted(label.kind.value for label in operands)
    if kinds in (["free", "sum"], ["sum", "zero"]):
        return SUM
    return ZERO if kinds == ["zero", "zero"] else _elementwise(op, operands, scope)


@_transfers("divide")
def _divide(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is Kind.SUM and operands[1].kind is Kind.FREE:
        return SUM
    return _elementwise(op, operands, scope)


@_transfers("select")
def _select(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    chosen = operands[1:]
    if operands[0].kind in (Kind.ZERO, Kind.FREE) and _all_in(chosen, Kind.ZERO, Kind.SUM):
        return SUM if any(label.kind is Kind.SUM for label in chosen) else ZERO
    return _elementwise(op, operands, scope)


@_transfers("constant")
def _constant(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return FREE if any(op.attrs.data) else ZERO


@_transfers("iota", "axis_index")
def _free(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return FREE


@_transfers("broadcast_in_dim")
def _broadcast(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    dims: list[FactoredDim] = [((n, False),) for n in op.attrs.shape]
    for i, d in enumerate(op.attrs.dims):
        dims[d] = operands[0].dims[i]
    return _sample(_fit(dims, op.attrs.shape))


@_transfers("transpose")
def _transpose(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    return _sample([operands[0].dims[d] for d in op.attrs.permutation])


@_transfers("reverse")
def _reverse(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    return operands[0]


@_transfers("slice", "dynamic_slice")
def _slice(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if any(label.on_batch for label in operands[1:]):
        return _elementwise(op, _no_sum(operands[:1]) + list(operands[1:]), scope)
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    return _sample(_fit(operands[0].dims, op.result.type.shape))


@_transfers("pad")
def _pad(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if _all_in(operands, Kind.ZERO, Kind.SUM):
        return SUM if any(label.kind is Kind.SUM for label in operands) else ZERO
    if operands[0].kind is Kind.SAMPLE:
        return _sample(_fit(operands[0].dims, op.result.type.shape))
    return MIXED if any(label.on_batch for label in operands) else FREE


@_transfers("reshape")
def _reshape(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    if operands[0].kind is not Kind.SAMPLE:
        return operands[0]
    factors = [f for dim in operands[0].dims for f in dim]
    return _sample(_regroup(factors, op.attrs.shape))


def _regroup(factors: Sequence[Factor], shape: Sequence[int]) -> list[FactoredDim]:
    """Row-major factors dealt out to dims of the given sizes; a split factor marks both halves."""
    rest = list(reversed(factors))
    dims: list[FactoredDim] = []
    for size in shape:
        dim: list[Factor] = []
        left = size
        while rest and (left > 1 or rest[-1] == (1, True)):
            n, flag = rest.pop()
            taken = math.gcd(n, left)
            if n > taken > 0 and left > taken:  # sizes interleave: no boundary left to keep
                return [((m, any(f for _, f in factors)),) for m in shape]
            if taken < n:
                rest.append((n // taken, flag))
            dim.append((taken, flag))
            left //= taken
        dims.append(tuple(dim) or ((size, False),))
    return dims


@_transfers("reduce")
def _reduce(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    label, attrs = operands[0], op.attrs
    if label.kind is Kind.SUM:
        return SUM if attrs.kind == "add" else MIXED
    if label.kind is not Kind.SAMPLE:
        return FREE if label.kind is Kind.ZERO and attrs.kind != "add" else label
    kept = [dim for d, dim in enumerate(label.dims) if d not in attrs.dims]
    return _contracted(kept, attrs.kind == "add")


def _contracted(kept: Sequence[FactoredDim], added: bool) -> Label:
    """What is left of SAMPLE when some dims are folded."""
    if any(counts_samples(dim) for dim in kept):
        return _sample(kept)
    return SUM if added else MIXED


@_transfers("dot_general")
def _dot(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    lhs, rhs = operands
    if Kind.SAMPLE not in (lhs.kind, rhs.kind):
        return _multiply_kinds(lhs, rhs)
    attrs = op.attrs
    left, right = (_dims(x, v.type.shape) for x, v in zip(operands, op.operands, strict=True))
    lhs_free, rhs_free = attrs.free_dims(len(left), len(right))
    kept = [
        _merge_dim(left[a], right[b]) for a, b in zip(attrs.lhs_batch, attrs.rhs_batch, strict=True)
    ]
    kept += [left[d] for d in lhs_free] + [right[d] for d in rhs_free]
    return _contracted(kept, True)


@_transfers("convolution")
def _convolution(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Batch and features are kept, input features and taps are summed; samples that windows or
    groups split are mixed.
    """
    lhs, rhs = operands
    if Kind.SAMPLE not in (lhs.kind, rhs.kind):
        return _multiply_kinds(lhs, rhs)
    a, shape = op.attrs, op.result.type.shape
    left, right = (_dims(x, v.type.shape) for x, v in zip(operands, op.operands, strict=True))
    mixed = [left[d] for d in a.lhs[2:]] + [right[d] for d in a.rhs[2:]]
    mixed += [left[a.lhs[0]]] if a.batch_groups > 1 else []
    mixed += [left[a.lhs[1]]] if a.feature_groups > 1 else []
    if any(counts_samples(dim) for dim in mixed):
        return MIXED
    kept: list[FactoredDim] = [((n, False),) for n in shape]
    kept[a.out[0]], kept[a.out[1]] = left[a.lhs[0]], right[a.rhs[0]]
    return _contracted(_fit(kept, shape), True)


@_transfers("reduce_window", "select_and_scatter")
def _windowed(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Per sample unless a window spans samples; a window of sums is linear in its last operand."""
    attrs = op.attrs
    if Kind.SAMPLE not in [label.kind for label in operands]:
        linear = op.name == "select_and_scatter" or attrs.kind == "add"
        if linear and not any(label.on_batch for label in operands[:-1]):
            return operands[-1]
        return MIXED if any(label.on_batch for label in operands) else FREE
    label = _merge(operands, op.operands[0].type.shape)
    rows = list(zip(attrs.sizes, attrs.strides, attrs.low, attrs.high, strict=True))
    spanned = [dim for dim, row in zip(label.dims, rows, strict=True) if row != (1, 1, 0, 0)]
    return MIXED if any(counts_samples(dim) for dim in spanned) else label


@_transfers("sort")
def _sort(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    """Rows move together; samples that are sorted are mixed."""
    label = _elementwise(op, operands, scope)
    if label.kind is Kind.SAMPLE and counts_samples(label.dims[op.attrs.dim]):
        return MIXED
    return label


def _multiply_kinds(lhs: Label, rhs: Label) -> Label:
    """A product of values without sample dims."""
    kinds = {lhs.kind, rhs.kind}
    if Kind.MIXED in kinds or kinds == {Kind.SUM}:
        return MIXED
    return SUM if Kind.SUM in kinds else FREE


@_transfers("dynamic_update_slice")
def _update_slice(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    target, update, starts = operands[0], operands[1], operands[2:]
    shape = op.result.type.shape
    moved = any(label.on_batch for label in starts)
    if Kind.SAMPLE in (target.kind, update.kind):
        if moved:
            return _sample([((n, True),) for n in shape])
        own = _fit(_dims(update, op.operands[1].type.shape), shape)
        return _merge([target, Label(Kind.SAMPLE, tuple(own))], shape)
    if moved:
        return MIXED
    return _join(target, update, op.result)


@_transfers("gather")
def _gather(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    table, indices = operands
    if not indices.on_batch and table.kind is not Kind.SAMPLE:
        return table
    if Kind.SAMPLE not in (table.kind, indices.kind):
        return MIXED
    attrs = op.attrs
    rows = _dims(indices, op.operands[1].type.shape)
    walked = iter([dim for d, dim in enumerate(rows) if d != attrs.index_vector_dim])
    columns = _dims(table, op.operands[0].type.shape)
    gone = attrs.collapsed_slice_dims + attrs.operand_batching_dims
    window = iter([dim for d, dim in enumerate(columns) if d not in gone])
    dims = [
        next(window) if d in attrs.offset_dims else next(walked) for d in range(op.result.type.rank)
    ]
    if attrs.operand_batching_dims and table.kind is Kind.SAMPLE:
        dims = _mark_batching(op, dims, columns)
    return _sample(_fit(dims, op.result.type.shape))


def _mark_batching(
    op: Op, dims: Sequence[FactoredDim], columns: Sequence[FactoredDim]
) -> list[FactoredDim]:
    """Result dims of batching dims count samples when the operand's do."""
    attrs = op.attrs
    batch = [d for d in range(len(dims)) if d not in attrs.offset_dims]
    marked = list(dims)
    for own, index in zip(
        attrs.operand_batching_dims, attrs.start_indices_batching_dims, strict=True
    ):
        d = batch[index - (index > attrs.index_vector_dim)]
        marked[d] = _merge_dim(columns[own], marked[d])
    return marked


@_transfers("scatter")
def _scatter(op: Op, operands: Sequence[Label], scope: Scope) -> Label:
    target, indices, updates = operands
    if not (indices.on_batch or updates.on_batch):
        return _join(target, updates, op.result)
    if updates.kind is Kind.SUM and not indices.on_batch and op.attrs.kind == "add":
        return _join(target, updates, op.result)
    if Kind.SAMPLE not in (target.kind, indices.kind, updates.kind):
        return MIXED
    dims = _scattered_dims(op, operands, scope)
    if any(counts_samples(dim) for dim in dims):
        return _sample(dims)
    added = op.attrs.kind == "add" and target.kind in (Kind.ZERO, Kind.SUM)
    return SUM if added else MIXED


def _scattered_dims(op: Op, operands: Sequence[Label], scope: Scope) -> list[FactoredDim]:
    """Dims of a scatter's result: those of the operand, of the window, and rows picked by position.

    Where updates of several samples are scattered, a row number computed from positions (iota)
    keeps samples apart, so that its dim still counts samples; one computed from batch data alone (a
    token id) adds samples up.
    """
    attrs, target = op.attrs, op.operands[0]
    dims = list(_dims(operands[0], target.type.shape))
    moving = _dims(operands[2], op.operands[2].type.shape)
    gone = attrs.inserted_window_dims + attrs.input_batching_dims
    kept = [d for d in range(target.type.rank) if d not in gone]
    for d, m in zip(kept, attrs.update_window_dims, strict=True):
        dims[d] = _merge_dim(moving[m], dims[d])
    batch = [d for d in range(len(moving)) if d not in attrs.update_window_dims]
    for d, index in zip(
        attrs.input_batching_dims, attrs.scatter_indices_batching_dims, strict=True
    ):
        dims[d] = _merge_dim(moving[batch[index - (index > attrs.index_vector_dim)]], dims[d])
    rows = _dims(operands[1], op.operands[1].type.shape)
    if any(counts_samples(dim) for dim in (*rows, *(moving[m] for m in batch))):
        picked = zip(attrs.scatter_dims_to_operand_dims, _row_is_data(op, scope), strict=True)
        for d, _ in (pair for pair in picked if not pair[1]):
            dims[d] = ((target.type.shape[d], True),)
    return _fit(dims, target.type.shape)


def _row_is_data(op: Op, scope: Scope) -> list[bool]:
    """Per entry of the index vector, whether it is computed from batch data alone."""
    indices, count = op.operands[1], len(op.attrs.scatter_dims_to_operand_dims)
    if count == 1:
        return [_is_data(indices, scope)]
    producer = scope.producers.get(indices)
    pieces: Sequence[Value] = ()
    if producer is not None and producer.name == "concatenate":
        pieces = producer.operands
    if len(pieces) != count:
        return [False] * count
    return [_is_data(piece, scope) for piece in pieces]


def _is_data(value: Value, scope: Scope) -> bool:
    """True when `value` depends on the batch and on no position."""
    if not scope.labels[value].on_batch:
        return False
    seen, todo = {value}, [value]
    while todo:
        op = scope.producers.get(todo.pop())
        if op is None:
            continue
        if op.name == "iota" or (op.name == "constant" and not op.attrs.is_splat):
            return False
        follow = op.name == "convert"  # a position may hide behind a float
        fresh = [v for v in op.operands if v not in seen and (follow or _is_index(v))]
        seen.update(fresh)
        todo.extend(fresh)
    return True


def _is_index(value: Value) -> bool:
    """Integers and predicates: what row numbers are computed from."""
    return value.type.dtype is DType.PRED or value.type.dtype.is_integer
