"""The verifier finds what is wrong, all of it, and nothing in sound graphs."""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import CompileError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConvertAttrs, LoopAttrs
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.ir.verify import findings, verify
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import build_graph
from tests.support.graphs import layer_stack

F32_4 = tensor_type((4,), DType.F32)
F32_5 = tensor_type((5,), DType.F32)


def test_sound_graphs_have_no_findings() -> None:
    assert not findings(layer_stack())
    assert not [c.id for c in CASES if findings(build_graph(c))]


def test_all_findings_are_raised_at_once() -> None:
    x, stray, late = Value(F32_4), Value(F32_4), Value(F32_4)
    ops = (
        Op("add", (x, stray), (Value(F32_4),), loc=Loc("m.py", 3)),
        Op("negate", (late,), (Value(F32_5),)),
        Op("frobnicate", (x,), (late,)),
        Op("convert", (x,), (Value(F32_4),), None),
        Op("negate", (x,), (x,)),
    )
    graph = Graph((x,), ops, (Value(F32_4),))
    with pytest.raises(CompileError) as caught:
        verify(graph)
    text = str(caught.value)
    for part in (
        "7 findings",
        "0:add requires operand 1 defined before it",
        "m.py:3",
        "1:negate requires operand 0 defined before it",
        "1:negate requires results tensor<4xf32>, got tensor<5xf32>",
        "requires a known op, got frobnicate",
        "convert requires attributes of class ConvertAttrs, got NoneType",
        "4:negate requires a value of its own",
        "output 0 requires a value of this graph",
    ):
        assert part in text, part
    assert caught.value.loc == Loc("m.py", 3)


def test_regions_do_not_capture() -> None:
    b = Builder()
    x, start = b.input((4,)), b.constant(0, DType.I32)
    inner = Builder("body")
    i, h = inner.input((), DType.I32), inner.input((4,))
    captured = make_op("add", (h, x))
    following = inner.add(i, inner.constant(1, DType.I32))
    inner.append(captured)
    region = inner.finish(following, captured.result)
    loop = make_op("loop", (start, x), LoopAttrs(2, 0), (region,))
    b.append(loop)
    with pytest.raises(CompileError, match="operand 1 defined before it, got a captured value"):
        verify(b.finish(loop.results[1]))


def test_attributes_and_regions_where_none_belong() -> None:
    x = Value(F32_4)
    body = Graph((), (), ())
    op = Op("negate", (x,), (Value(F32_4),), ConvertAttrs(DType.F32), (body,))
    messages = [d.message for d in findings(Graph((x,), (op,), ()))]
    assert any("requires no attributes" in m for m in messages)
    assert any("requires no regions, got 1" in m for m in messages)
