"""Conversions in front of the transposes that they read: another form of a function.

A converted value is stored, and it lies as the conversion has it. Behind a transpose it suits a
contraction on its own, whose summed index then walks the partitions; a reduction fusion reads the
same value in runs of one element. `function.py` compares both forms.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import permutation
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.rewrite import Level
from shardwright.compiler.ir.traits import CASTS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.dce import dce


def sink_transposes(graph: Graph) -> Graph | None:
    """`graph` (loop-free) with values converted before they are transposed, each once to a type;
    None when it has no such conversion.
    """
    producers = graph.producers()
    if not any(_transpose(op, producers) for op in graph.ops):
        return None
    level = Level()
    made: dict[tuple[Value, DType], Value] = {}
    for op in graph.ops:
        op = level.update(op)
        if op.name not in CASTS:
            level.ops.append(op)
            continue
        transpose = _transpose(op, producers)
        source = level.now(transpose.operand) if transpose else op.operand
        key = source, op.result.type.dtype
        if key not in made:
            early = make_op("convert", (source,), op.attrs, loc=op.loc) if transpose else op
            level.ops.append(early)
            made[key] = early.result
        elif not transpose:
            level.replace(op.results, (made[key],))
        if transpose:
            late = Op("transpose", (made[key],), op.results, transpose.attrs, (), transpose.loc)
            level.ops.append(late)
    return dce(level.finish(graph))


def _transpose(op: Op, producers: Mapping[Value, Op]) -> Op | None:
    """The transpose that a conversion reads."""
    made = producers.get(op.operand) if op.name in CASTS else None
    return None if permutation(made) is None else made
