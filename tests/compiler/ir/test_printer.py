"""Printed StableHLO: MLIR parses it, XLA computes what `evaluate` computes, shardings and ids
arrive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import AllGatherAttrs, ShardingConstraintAttrs
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value, tensor_type
from tests.support import xla
from tests.support.building import Builder
from tests.support.graphs import layer_stack, stack_inputs


@dataclass(frozen=True)
class Sharding:
    dims: tuple[tuple[str, ...], ...]


def assert_xla_agrees(graph: Graph, inputs: list[np.ndarray], rtol: float = 5e-6) -> None:
    theirs = xla.run(to_stablehlo(graph), inputs)
    for ours, other in zip(evaluate(graph, inputs), theirs, strict=True):
        assert ours.dtype == other.dtype
        a, b = ours.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_loop_runs_the_same_in_xla() -> None:
    assert_xla_agrees(layer_stack(), stack_inputs())


def test_bf16_loop_runs_the_same_in_xla() -> None:
    assert_xla_agrees(layer_stack(DType.BF16), stack_inputs(), rtol=1e-2)


@pytest.mark.parametrize("trip", [0, 1, 5])
@pytest.mark.parametrize("dtype", [DType.I32, DType.U32, DType.I64])
def test_nested_loops(trip: int, dtype: DType) -> None:
    b = Builder()
    x = b.input((3,))

    def inner_body(level: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        return (level.add(carries[0], level.full((3,), 1.0)),)

    def outer_body(level: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        (h,) = level.loop(2, carries, inner_body, dtype)
        count = level.broadcast(level.convert(i, DType.F32), (3,))
        return (level.multiply(h, count),)

    (y,) = b.loop(trip, [x], outer_body, dtype)
    assert_xla_agrees(b.finish(y), [np.arange(3, dtype=np.float32)])


def test_graph_without_inputs_and_with_repeated_outputs() -> None:
    b = Builder()
    c = b.constant(np.arange(6).reshape(2, 3), DType.I32)
    assert_xla_agrees(b.finish(c, c, b.iota((2, 3), 1)), [])


def test_text_is_deterministic() -> None:
    assert to_stablehlo(layer_stack(), ids=True) == to_stablehlo(layer_stack(), ids=True)


def test_ids_are_ordinals_of_the_walk() -> None:
    graph = layer_stack()
    text = xla.parse(to_stablehlo(graph, ids=True))
    ids = [int(m) for m in re.findall(r"shardwright\.id = (\d+)", text)]
    assert sorted(ids) == list(range(len(list(graph.walk()))))
    names = {i: op.name for i, op in enumerate(graph.walk())}
    for i, name in names.items():
        lines = [x for x in text.splitlines() if re.search(rf"shardwright\.id = {i} :", x)]
        spelled = "while" if name == "loop" else name
        assert any(f"stablehlo.{spelled}" in line for line in lines), (i, name)


def test_locations_carry_the_ordinal() -> None:
    text = to_stablehlo(layer_stack(), locs=True)
    count = len(list(layer_stack().walk()))
    assert [int(n) for n in re.findall(r'loc\("op:(\d+)"\)', text)] != []
    assert len(set(re.findall(r'loc\("op:(\d+)"\)', text))) == count
    xla.parse(text)


def test_shardings_on_arguments_results_ops_and_carries() -> None:
    graph = layer_stack()
    loop = next(op for op in graph.ops if op.name == "loop")
    region = loop.regions[0]
    dot = next(op for op in region.ops if op.name == "dot_general")
    rows, stacked = Sharding((("dp",), ())), Sharding(((), ("tp", "dp"), ()))
    specs = {
        graph.inputs[0]: rows,
        graph.inputs[1]: stacked,
        graph.outputs[0]: rows,
        dot.result: rows,
        region.inputs[1]: rows,
    }
    text = to_stablehlo(graph, mesh={"dp": 4, "tp": 2}, specs=specs)
    parsed = xla.parse(text)
    assert 'sdy.mesh @mesh = <["dp"=4, "tp"=2]>' in parsed
    head = next(line for line in parsed.splitlines() if "func.func" in line)
    assert head.count("sdy.sharding =") == 3
    assert '<@mesh, [{}, {"tp", "dp"}, {}]>' in head
    # The loop's result, the dot, and the carry of the body; slices ask for whole dims besides.
    asked = [line for line in parsed.splitlines() if "sdy.sharding_constraint" in line]
    assert sum('{"dp"}' in line for line in asked) == 3
    body = parsed[parsed.index("do {") :]
    carry = re.search(r"(%\w+) = sdy.sharding_constraint %iterArg_\w+ ", body)
    assert carry, "the constraint of the carry comes first in the body"
    uses = body.count(carry.group(1))
    assert uses >= 2, "later uses read the constrained carry"


def constrained() -> Graph:
    b = Builder()
    attrs = ShardingConstraintAttrs((("dp",), ()), open_dims=(1,))
    return b.finish(b.op("sharding_constraint", b.input((4, 6)), attrs=attrs))


def test_users_constraints_are_printed() -> None:
    parsed = xla.parse(to_stablehlo(constrained(), mesh={"dp": 4}, ids=True))
    assert '<@mesh, [{"dp"}, {?}]>' in parsed


def test_constraint_needs_a_mesh() -> None:
    with pytest.raises(CompileError, match="requires a mesh, got none"):
        to_stablehlo(constrained())


def test_global_collectives_are_refused() -> None:
    b = Builder()
    graph = b.finish(b.all_gather(b.input((4, 6)), 0, ("dp",)))
    with pytest.raises(CompileError, match="requires local types over a mesh with a group of 1"):
        to_stablehlo(graph, mesh={"dp": 4})


def test_buckets_are_refused() -> None:
    """StableHLO has no collective of several parts; as one flat tensor it would mean another."""
    flat = Value(tensor_type((6,), DType.F32))
    bucket = AllGatherAttrs(0, ("dp",), 2, parts=((1, 2, 1), (2, 2, 1)))
    op = make_op("all_gather", (flat,), bucket)
    with pytest.raises(CompileError, match="requires one tensor, got a bucket of 2") as caught:
        to_stablehlo(Graph((flat,), (op,), op.results), mesh={"dp": 2})
    assert caught.value.code == "SW_EXPORT"
