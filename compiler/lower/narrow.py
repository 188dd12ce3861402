"""64-bit integers are computed with their low 32 bits, unless a machine is asked for all of them
(`--native-int64 enabled`, from trn2 on: then this does not run).

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
from shardwright.compiler.ir.rewrite import Level
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
    level = Level()
    for op in graph.ops:
        for value in op.operands:  # wide inputs are converted where they are first read
            if value.type.dtype in NARROW and value not in level.replaced:
                level.replaced[value] = _converted(level, value, _low(value.type.dtype), op.loc)
        now = level.update(op)
        if not any(v.type.dtype in NARROW for v in (*op.operands, *op.results)):
            level.ops.append(now)
        elif op.name in CASTS and _low(op.attrs.dtype) is now.operand.type.dtype:
            level.replace(op.results, now.operands)
        else:
            level.ops.append(_RULES.get(op.name, _remade)(op, now.operands))
            level.replace(op.results, level.ops[-1].results)
    for value in dict.fromkeys(graph.outputs):
        if (narrow_ := level.now(value)).type != value.type:
            level.replaced[value] = _converted(level, narrow_, value.type.dtype, UNKNOWN_LOC)
    return level.finish(graph)


def _converted(level: Level, value: Value, dtype: DType, loc: Loc) -> Value:
    level.ops.append(make_op("convert", (value,), ConvertAttrs(dtype), loc=loc))
    return level.ops[-1].result


def _low(dtype: DType) -> DType:
    return NARROW.get(dtype, dtype)


def _remade(op: Op, operands: tuple[Value, ...]) -> Op:
    """`op` in narrow types."""
    return make_op(op.name, operands, _attrs(op), op.regions, op.loc)


def _refused(op: Op, operands: tuple[Value, ...]) -> Op:
    """What means something else with another width."""
    given = f"requires elements up to 32 bits, got {op.operands[0].type}"
    raise unsupported(op, given, "convert to a 32-bit type first")


_RULES = {"bitcast_convert": _refused, "count_leading_zeros": _refused}


def _attrs(op: Op) -> Any:
    """The attributes of `op` with every element type in them narrowed."""
    attrs = op.attrs
    if isinstance(attrs, ConstantAttrs):
        return ConstantAttrs(_constant(op, attrs), _type(attrs.type))
    changed: dict[str, object] = {}
    for field in fields(attrs) if attrs is not None else ():
        value = getattr(attrs, field.name)
        if isinstance(value, DType):
            changed[field.name] = _low(value)
        elif isinstance(value, TensorType):
            changed[field.name] = _type(value)
    return replace(attrs, **changed) if changed else attrs


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
