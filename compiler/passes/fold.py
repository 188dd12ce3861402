"""Folding: constants computed ahead, identities removed, splats kept splats.

Only small results are computed (a large constant costs more than its computation); a splat counts
as one element. Loop invariants leave their loop: the loop's result is its operand, and a constant
carry becomes a constant of the body.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.build import constant_attrs
from shardwright.compiler.ir.facts import joined_dim, signs, splat, stored
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs, ConstantAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops, with_regions
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.passes.empties import of_nothing

MAX_FOLDED_ELEMENTS = 64


class _Fold(Level):
    """A level with the ops that made its values."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Value, Op] = {}

    def emit(self, op: Op) -> Op:
        """Append `op`."""
        self.ops.append(op)
        self.made.update(dict.fromkeys(op.results, op))
        return op

    def constant(self, value: Value) -> ConstantAttrs | None:
        """The constant `value` is, if it is one."""
        return stored(self.made.get(value))

    def repeated(self, value: Value) -> ConstantAttrs | None:
        """The constant `value` is, if all its elements, and it has some, are one."""
        held = splat(self.made.get(value))
        return held if held is not None and held.type.num_elements else None

    def splat(self, value: Value) -> object | None:
        """The repeated element of a constant, None when `value` is not a splat constant."""
        held = self.repeated(value)
        return None if held is None else held.element

    def make_constant(self, attrs: ConstantAttrs, loc: Loc) -> Value:
        """A new constant."""
        return self.emit(make_op("constant", (), attrs, loc=loc)).result


Rule = Callable[[_Fold, Op], Value | None]


def fold(graph: Graph) -> Graph:
    """`graph` with constants folded and identities removed, loop bodies included."""
    return _fold_level(graph, {})


def _fold_level(graph: Graph, known: dict[Value, ConstantAttrs]) -> Graph:
    """Fold one level; `known` are inputs with a constant value."""
    level = _Fold()
    for value, attrs in known.items():
        level.replace([value], [level.make_constant(attrs, Loc())])
    for op in graph.ops:
        op = level.update(op)
        if op.regions:
            _fold_loop(level, op)
            continue
        folded = _fold_op(level, op)
        if folded is None:
            level.emit(op)
        else:
            level.replace(op.results, [folded])
    return level.finish(graph)


def _fold_op(level: _Fold, op: Op) -> Value | None:
    """The value that `op` can be replaced by, if any."""
    if _is_empty(op):
        return level.make_constant(ConstantAttrs(b"", op.result.type), op.loc)
    known = of_nothing(op)
    if known is not None:
        return level.emit(known).result if isinstance(known, Op) else known
    if op.name in _RULES:
        value = _RULES[op.name](level, op)
        if value is not None:
            return value
    if op.name in _SPLAT_KEEPERS:
        return _keep_splat(level, op)
    return _compute(level, op)


def _is_empty(op: Op) -> bool:
    """True when a pure op makes one value without elements, which needs no operands."""
    single = len(op.results) == 1 and stored(op) is None and OPS[op.name].pure
    return single and not op.result.type.num_elements


def _fold_loop(level: _Fold, op: Op) -> None:
    """Results of invariant carries are their operands; constant ones are known in the body."""
    body, known = op.regions[0], {}
    for i in invariant_carries(op):
        if i == op.attrs.induction:
            continue
        level.replace([op.results[i]], [op.operands[i]])
        attrs = level.constant(op.operands[i])
        if attrs and (attrs.is_splat or attrs.type.num_elements <= MAX_FOLDED_ELEMENTS):
            known[body.inputs[i]] = attrs
    folded = _fold_level(body, known)
    outputs = [
        before if before is after else new
        for before, after, new in zip(body.inputs, body.outputs, folded.outputs, strict=True)
    ]
    region = with_ops(folded, folded.ops, tuple(outputs))
    level.emit(with_regions(op, (region,)))


def _compute(level: _Fold, op: Op) -> Value | None:
    """Run the reference of a pure op on constants; elementwise ops of splats run on one element."""
    opdef = OPS[op.name]
    constants = [held for v in op.operands if (held := level.constant(v)) is not None]
    if not op.operands or not opdef.pure or len(op.results) != 1:
        return None
    if len(constants) != len(op.operands):
        return None
    arrays = [held.array() for held in constants]
    if opdef.elementwise and all(held.is_splat for held in constants):
        scalars = [Value(tensor_type((), v.type.dtype)) for v in op.operands]
        scalar_op = make_op(op.name, scalars, op.attrs)
        (value,) = opdef.reference(scalar_op, [np.asarray(a.flat[0]) for a in arrays])
        return level.make_constant(ConstantAttrs(value.tobytes(), op.result.type), op.loc)
    sizes = [a.size for a in arrays] + [op.result.type.num_elements]
    if max(sizes) > MAX_FOLDED_ELEMENTS:
        return None
    (array,) = opdef.reference(op, arrays)
    return level.make_constant(constant_attrs(array, op.result.type.dtype), op.loc)


def _keep_splat(level: _Fold, op: Op) -> Value | None:
    """Rearranging a splat leaves a splat of the result type."""
    held = level.repeated(op.operands[0])
    if held is None:
        return _compute(level, op)
    return level.make_constant(ConstantAttrs(held.data, op.result.type), op.loc)


def _identity_element(element: int, either_side: bool) -> Rule:
    """x op element is x; with `either_side` element op x too."""

    def rule(level: _Fold, op: Op) -> Value | None:
        left, right = op.operands
        if _is_element(level, right, element):
            return left
        return right if either_side and _is_element(level, left, element) else None

    return rule


def _is_element(level: _Fold, value: Value, element: int) -> bool:
    """True for a splat constant of `element`; -1 stands for all bits set, also of i1."""
    held = level.splat(value)
    return held is not None and bool(held == np.asarray(element).astype(value.type.dtype.numpy))


def _divide(level: _Fold, op: Op) -> Value | None:
    """x / 1 is x, and 1 / (1 + exp(-x)), as JAX spells it out, is one function of the machine."""
    known = _identity_element(1, False)(level, op)
    if known is not None or not _is_element(level, op.operands[0], 1):
        return known
    total = level.made.get(op.operands[1])
    if total is None or signs(total) != (1, 1):
        return None
    terms = [v for v in total.operands if not _is_element(level, v, 1)]
    power = level.made.get(terms[0]) if len(terms) == 1 else None
    if power is None or power.name != "exponential" or not op.result.type.dtype.is_float:
        return None
    negative = level.made.get(power.operands[0])
    if negative is None or signs(negative) != (-1,):
        return None
    return level.emit(make_op("logistic", negative.operands, loc=op.loc)).result


def _same_type(level: _Fold, op: Op) -> Value | None:
    """An op that only changes the type, to the type it has."""
    return op.operands[0] if op.operands[0].type == op.result.type else None


def _reshape(level: _Fold, op: Op) -> Value | None:
    """Same shape: nothing; a reshape of a reshape: one reshape."""
    source = op.operands[0]
    if source.type == op.result.type:
        return source
    inner = level.made.get(source)
    if inner is None or inner.name != op.name:
        return None
    first = inner.operands[0]
    if first.type == op.result.type:
        return first
    return level.emit(make_op("reshape", (first,), op.attrs, loc=op.loc)).result


def _transpose(level: _Fold, op: Op) -> Value | None:
    order = op.attrs.permutation
    return op.operands[0] if order == tuple(range(len(order))) else None


def _broadcast(level: _Fold, op: Op) -> Value | None:
    """Same type with every dim in place: nothing. A broadcast of a broadcast: one broadcast."""
    source, outer = op.operands[0], op.attrs
    if source.type == op.result.type and outer.dims == tuple(range(len(outer.shape))):
        return source
    inner = level.made.get(source)
    if inner is None or inner.name != op.name:
        return None
    attrs = BroadcastInDimAttrs(tuple(outer.dims[d] for d in inner.attrs.dims), outer.shape)
    return level.emit(make_op("broadcast_in_dim", inner.operands, attrs, loc=op.loc)).result


def _slice(level: _Fold, op: Op) -> Value | None:
    """A full slice (strides other than one cannot keep a dim above size one), or one of a single
    piece of a concatenation.
    """
    source = level.made.get(op.operands[0])
    dim, first = joined_dim(source), 0
    if source is None or dim is None or not op.result.type.num_elements:
        return _same_type(level, op)
    start, end = op.attrs.start[dim], op.attrs.limit[dim]
    for piece in source.operands:
        size = piece.type.shape[dim]
        if first <= start and end <= first + size:
            cut = make_op("slice", (piece,), op.attrs.moved(dim, -first), loc=op.loc)
            return piece if cut.result.type == piece.type else level.emit(cut).result
        first += size
    return _same_type(level, op)


def _pad(level: _Fold, op: Op) -> Value | None:
    """No padding, nothing but padding, or a splat padded with its own element."""
    attrs, operand = op.attrs, op.operands[0]
    if not any(attrs.low + attrs.high + attrs.interior):
        return operand
    constant, value = level.constant(operand), level.constant(op.operands[1])
    if constant is None or value is None or constant.data != value.data:
        return None
    return level.make_constant(ConstantAttrs(value.data, op.result.type), op.loc)


def _concatenate(level: _Fold, op: Op) -> Value | None:
    """One operand, or equal splats."""
    if len(op.operands) == 1:
        return op.operands[0]
    only, *others = {held.data if held else None for held in map(level.repeated, op.operands)}
    if others or only is None:
        return None
    return level.make_constant(ConstantAttrs(only, op.result.type), op.loc)


def _select(level: _Fold, op: Op) -> Value | None:
    """A known predicate, equal branches, or the predicate spelled out."""
    pred, on_true, on_false = op.operands
    if on_true is on_false:
        return on_true
    if pred.type == on_true.type and (level.splat(on_true), level.splat(on_false)) == (True, False):
        return pred
    known = level.splat(pred)
    if known is None:
        return None
    return on_true if bool(known) else on_false


def _reduce(level: _Fold, op: Op) -> Value | None:
    """No dims: nothing. Dims of size one are for `simplify`."""
    return None if op.attrs.dims else op.operands[0]


def _multiply(level: _Fold, op: Op) -> Value | None:
    """x * 1 is x; an integer times 0 is 0."""
    value = _identity_element(1, True)(level, op)
    if value is None and not op.result.type.dtype.is_float:
        return next((v for v in op.operands if _is_element(level, v, 0)), None)
    return value


def _iota(level: _Fold, op: Op) -> Value | None:
    """An iota along a dim of size one is zero."""
    type = op.result.type
    if type.shape[op.attrs.dim] != 1 or not type.num_elements:
        return None
    return level.make_constant(ConstantAttrs.full(0, type), op.loc)


_SPLAT_KEEPERS = of(Kind.VIEW, Kind.PART) | {"gather"}
_RULES: dict[str, Rule] = {
    "add": _identity_element(0, True),
    "and": _identity_element(-1, True),
    "broadcast_in_dim": _broadcast,
    "bitcast_convert": _same_type,
    "concatenate": _concatenate,
    "convert": _same_type,
    "divide": _divide,
    "dynamic_slice": _same_type,
    "iota": _iota,
    "multiply": _multiply,
    "or": _identity_element(0, True),
    "pad": _pad,
    "reduce": _reduce,
    "reshape": _reshape,
    "select": _select,
    "shift_left": _identity_element(0, False),
    "shift_right_arithmetic": _identity_element(0, False),
    "shift_right_logical": _identity_element(0, False),
    "slice": _slice,
    "subtract": _identity_element(0, False),
    "transpose": _transpose,
    "xor": _identity_element(0, True),
}
