"""64-bit integers are computed with their low 32 bits: the machine has no wider ones.

Inputs and outputs of a function keep their type in memory; a DMA drops or extends the high bits.
Source: data-type notes of neuronx-cc (int64 through 2.26, and always on trn1 and inf2).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UNKNOWN_LOC, CompileError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConstantAttrs, ConvertAttrs
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CASTS
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.lower.task import unsupported

NARROW = {DType.I64: DType.I32, DType.U64: DType.U32}


def narrow(graph: Graph) -> Graph:
    """`graph` (loop-free) with 32-bit integers for 64-bit ones inside.

    Raises: CompileError NCC_ESFH002 for a constant that 32 bits cannot hold.
    """
    values = [v for op in graph.ops for v in (*op.operands, *op.results)]
    if not any(v.type.dtype in NARROW for v in values):
        return graph
    level = _Narrow()
    for op in graph.ops:
        level.add(op)
    outputs = tuple(level.output(v) for v in graph.outputs)
    return with_ops(graph, level.ops, outputs)


class _Narrow:
    """The new ops, and what stands for every value that changed."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.now: dict[Value, Value] = {}
        self.wide: dict[Value, Value] = {}

    def add(self, op: Op) -> None:
        """`op` on narrow operands; its wide results become new, narrow ones."""
        operands = tuple(self.operand(v, op) for v in op.operands)
        if not any(v.type.dtype in NARROW for v in (*op.operands, *op.results)):
            self.ops.append(Op(op.name, operands, op.results, op.attrs, op.regions, op.loc))
        elif op.name in CASTS and _low(op.attrs.dtype) is operands[0].type.dtype:
            self.now[op.result] = operands[0]
        else:
            self.ops.append(_remade(op, operands))
            self.now.update(zip(op.results, self.ops[-1].results, strict=True))

    def operand(self, value: Value, op: Op) -> Value:
        """What `op` reads for `value`; a wide input is converted where it is first read."""
        if value.type.dtype in NARROW and value not in self.now:
            self.now[value] = self._convert(value, NARROW[value.type.dtype], op.loc)
        return self.now.get(value, value)

    def output(self, value: Value) -> Value:
        """A result of the graph in its own type again."""
        now = self.now.get(value, value)
        if now.type == value.type:
            return now
        if value not in self.wide:
            self.wide[value] = self._convert(now, value.type.dtype, UNKNOWN_LOC)
        return self.wide[value]

    def _convert(self, value: Value, dtype: DType, loc: Loc) -> Value:
        self.ops.append(make_op("convert", (value,), ConvertAttrs(dtype), loc=loc))
        return self.ops[-1].result


def _low(dtype: DType) -> DType:
    return NARROW.get(dtype, dtype)


def _remade(op: Op, operands: tuple[Value, ...]) -> Op:
    """`op` in narrow types. Raises CompileError when its meaning depends on the width."""
    if op.name in _WIDTH_MATTERS:
        given = f"requires elements up to 32 bits, got {op.operands[0].type}"
        raise unsupported(op, given, "convert to a 32-bit type first")
    return make_op(op.name, operands, _attrs(op), op.regions, op.loc)


_WIDTH_MATTERS = frozenset(("count_leading_zeros", "bitcast_convert"))


def _attrs(op: Op) -> Any:
    """The attributes of `op` with every element type in them narrowed."""
    attrs = op.attrs
    if attrs is None:
        return None
    if isinstance(attrs, ConstantAttrs):
        return ConstantAttrs(_constant(op, attrs), _type(attrs.type))
    changed: dict[str, object] = {}
    for field in fields(attrs):
        value = getattr(attrs, field.name)
        if isinstance(value, DType):
            changed[field.name] = _low(value)
        elif isinstance(value, TensorType):
            changed[field.name] = _type(value)
    return replace(attrs, **changed)


def _type(type: TensorType) -> TensorType:
    return tensor_type(type.shape, _low(type.dtype))


def _constant(op: Op, attrs: ConstantAttrs) -> bytes:
    """The elements in 32 bits; the limits of the wide type, which stand for infinity, become those
    of the narrow one.
    """
    wide, narrow = np.iinfo(attrs.type.dtype.numpy), np.iinfo(_low(attrs.type.dtype).numpy)
    values = np.frombuffer(attrs.data, attrs.type.dtype.numpy)
    values = np.where(values == wide.max, narrow.max, values)
    values = np.where(values == wide.min, narrow.min, values)
    if values.size and not narrow.min <= values.min() <= values.max() <= narrow.max:
        bad = next(int(v) for v in values if not narrow.min <= v <= narrow.max)
        message = f"{attrs.type.dtype.value} constants require 32 bits, got {bad}"
        raise CompileError("NCC_ESFH002", message, op.loc, "use constants of 32 bits")
    return values.astype(narrow.dtype).tobytes()
