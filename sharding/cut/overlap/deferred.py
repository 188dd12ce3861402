"""Gradients that are reduced once per step instead of once per micro-batch.

A reduction inside of a layer loop stands in the way: what the loop stacks are reduced gradients.
`hoisted` moves it behind the loop, past the ops that only bring a layer's gradient into its stack,
so that the step can be cut in front of it (`stages.py`) and accumulators hold what is not reduced
yet. Reductions are linear: only the order of sums changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.ir.facts import behind, resized, resized_dim, splat
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    ConstantAttrs,
    ConvertAttrs,
    ReduceAttrs,
    ReshapeAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CASTS, REDUCTIONS_OF_RANKS, UPDATES
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type

_TAKING = CASTS | {name for name, op in OPS.items() if op.passes == slice(0, 1)}
"""Ops whose result has only elements of their first operand: a core's share of zeros is zeros."""


def hoisted(graph: Graph, in_own_type: bool = False) -> Graph:
    """`graph` with the reductions of its loops behind them, as far as nothing else reads what they
    make: in the type of the stack, or, `in_own_type`, in the one they have in the loop. Top-level
    values keep their identity.
    """
    made = graph.producers()
    ops: list[Op] = []
    for op in graph.ops:
        ops += _loop(op, made, in_own_type) if op.regions else [op]
    return with_ops(graph, ops)


@dataclass(frozen=True, slots=True)
class _Path:
    """A reduction of a body, the ops behind it up to the write into stack `carry`, in order."""

    head: Op
    between: tuple[Op, ...]
    write: Op
    carry: int


def _loop(loop: Op, made: Mapping[Value, Op], in_own_type: bool) -> list[Op]:
    """The loop without the reductions that can follow it, then those."""
    body = loop.regions[0]
    users = body.uses()
    heads = (op for op in body.ops if op.name in REDUCTIONS_OF_RANKS)
    paths = [path for op in heads if (path := _path(op, loop, users)) is not None]
    later = {op for path in paths for op in path.between}
    first = (p for p in paths if p.head not in later and _starts_empty(loop, p, made))
    moved = [m for p in first if (m := _moved(loop, p, in_own_type))]
    return _rebuilt(loop, moved) if moved else [loop]


def _path(head: Op, loop: Op, users: Mapping[Value, Sequence[Op]]) -> _Path | None:
    """What follows a sum, when it is one chain into one stack that nothing else touches."""
    body = loop.regions[0]
    if head.attrs.reduction != "add":
        return None
    between: list[Op] = []
    value = head.result
    while value not in body.outputs and len(users.get(value, ())) == 1:
        (user,) = users[value]
        if user.name in UPDATES:
            stack, update = user.operands[:2]
            if stack not in body.inputs or update is not value or user.result not in body.outputs:
                return None
            carry = body.inputs.index(stack)
            alone = users[stack] == [user] and user.result not in users
            ends = [i for i, v in enumerate(body.outputs) if v is user.result]
            return _Path(head, tuple(between), user, carry) if alone and ends == [carry] else None
        between.append(user)
        value = user.results[0]
    return None


def _starts_empty(loop: Op, path: _Path, made: Mapping[Value, Op]) -> bool:
    """True when the stack is zeros before the loop."""
    first = behind(loop.operands[path.carry], made, lambda op: op.name in _TAKING)
    held = splat(made.get(first))
    # The stored element alone: stacks of whole models are too large to be evaluated.
    return held is not None and not np.frombuffer(held.data, held.type.dtype.numpy).any()


@dataclass(frozen=True, slots=True)
class _Moved:
    """A path without its reductions: new ops in the body, and what is done to the stack."""

    path: _Path
    ops: tuple[Op, ...]
    update: Value
    stack: TensorType
    behind: tuple[Op, ...]  # on operands of their own, in order


def _moved(loop: Op, path: _Path, in_own_type: bool) -> _Moved | None:
    """The path for values that are not reduced, None when an op on it is not local in the dims.
    `in_own_type`, casts follow the reductions.
    """
    scale = _Scale(path.head)
    value = path.head.operands[0]
    ops: list[Op] = []
    reductions = [path.head]
    for op in path.between:
        if op.name in REDUCTIONS_OF_RANKS:
            if resized_dim(op) is not None or op.attrs.reduction != "add":
                return None
            reductions.append(op)
            continue
        if in_own_type and op.name in CASTS:
            continue
        made = scale.through(op, value)
        if made is None:
            return None
        ops.append(made)
        value = made.result
    whole = loop.operands[path.carry].type
    stack = tensor_type(scale.grown(whole.shape), value.type.dtype)
    if value.type.rank != whole.rank or not (in_own_type or stack.dtype is whole.dtype):
        return None
    source = Value(stack)
    behind: list[Op] = []
    for op in reductions:
        attrs = op.attrs if resized_dim(op) is None else replace(op.attrs, dim=scale.dim)
        behind.append(make_op(op.name, (source,), attrs, loc=op.loc))
        source = behind[-1].result
    if source.type.dtype is not whole.dtype:
        behind.append(make_op("convert", (source,), ConvertAttrs(whole.dtype), loc=path.head.loc))
    return _Moved(path, tuple(ops), value, stack, tuple(behind))


class _Scale:
    """Where the dim that a reduction divides lies, from op to op, and by how much."""

    def __init__(self, head: Op) -> None:
        dim = resized_dim(head)
        self.dim, self.ways = (-1, 1) if dim is None else (dim, int(head.attrs.group_size))

    def grown(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape behind the reduction as it is without it."""
        return tuple(n * self.ways if d == self.dim else n for d, n in enumerate(shape))

    def through(self, op: Op, value: Value) -> Op | None:
        """`op` on a value that is not reduced; `dim` is then that of its result."""
        if len(op.operands) != 1 or len(op.results) != 1:
            return None
        before, shape = op.operand.type.shape, op.result.type.shape
        match op.attrs:
            case ConvertAttrs():
                pass
            case TransposeAttrs(permutation):
                self._move(permutation.index)
            case BroadcastInDimAttrs(dims):
                is_larger = op.result.type.num_elements != op.operand.type.num_elements
                if is_larger or [shape[d] for d in dims] != list(before):
                    return None
                self._move(dims.__getitem__)
            case ReshapeAttrs():
                places = _same_dims(before, shape)
                if places is None or (self.dim >= 0 and self.dim not in places):
                    return None
                self._move(places.__getitem__)
            case ReduceAttrs("add", dims):
                if any(before[d] != 1 or d == self.dim for d in dims):
                    return None
                self._move(lambda dim: dim - sum(d < dim for d in dims))
            case _:
                return None
        return make_op(op.name, (value,), resized(op, self.grown(shape)), loc=op.loc)

    def _move(self, place: Callable[[int], int]) -> None:
        if self.dim >= 0:
            self.dim = place(self.dim)


def _same_dims(before: Sequence[int], after: Sequence[int]) -> dict[int, int] | None:
    """Dim -> dim of a reshape that only adds or drops dims of size 1."""
    source = [d for d, n in enumerate(before) if n != 1]
    target = [d for d, n in enumerate(after) if n != 1]
    if [before[d] for d in source] != [after[d] for d in target]:
        return None
    return dict(zip(source, target, strict=True))


def _rebuilt(loop: Op, moved: Sequence[_Moved]) -> list[Op]:
    """The loop with stacks of what is not reduced, and the reductions behind it."""
    body = loop.regions[0]
    inputs, operands, results = list(body.inputs), list(loop.operands), list(loop.results)
    gone: dict[Op, _Moved] = {}
    before: list[Op] = []
    behind: list[Op] = []
    for one in moved:
        gone |= dict.fromkeys((one.path.head, *one.path.between, one.path.write), one)
        carry = one.path.carry
        before.append(make_op("constant", (), ConstantAttrs.full(0, one.stack)))
        operands[carry] = before[-1].result
        inputs[carry], results[carry] = Value(one.stack), one.behind[0].operands[0]
        *others, last = one.behind
        ended = Op(last.name, last.operands, (loop.results[carry],), last.attrs, (), last.loc)
        behind += [*others, ended]
    ops: list[Op] = []
    outputs = list(body.outputs)
    for op in body.ops:
        found = gone.get(op)
        if found is None:
            ops.append(op)
        elif op is found.path.write:
            carry, starts = found.path.carry, op.operands[2:]
            write = (inputs[carry], found.update, *starts)
            ops += [*found.ops, make_op(op.name, write, op.attrs, loc=op.loc)]
            outputs[carry] = ops[-1].result
    region = with_ops(body, ops, tuple(outputs), tuple(inputs))
    again = Op("loop", tuple(operands), tuple(results), loop.attrs, (region,), loop.loc)
    return [*before, again, *behind]
