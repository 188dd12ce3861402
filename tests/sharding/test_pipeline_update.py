"""Where the ops of an update run: sums over stages stay partial, what is no sum is refused."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ReduceAttrs
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.sharding.cut.pipeline.partial_sums import At, Partial
from shardwright.sharding.cut.pipeline.update import Update

LINE = Loc("train.py", 31)
STAGES = 3


class Norms:
    """Gradients of one weight per stage, and something of each reduced to a scalar."""

    def __init__(self, kind: str = "add") -> None:
        self.gradients = [Value(tensor_type((4,), DType.F32)) for _ in range(STAGES)]
        self.ops: list[Op] = []
        self.scalars = [self.op("reduce", g, attrs=ReduceAttrs(kind, (0,))) for g in self.gradients]

    def op(self, name: str, *operands: Value, attrs: object = None) -> Value:
        self.ops.append(make_op(name, operands, attrs, loc=LINE))
        return self.ops[-1].result

    def chained(self, name: str) -> Value:
        total = self.scalars[0]
        for scalar in self.scalars[1:]:
            total = self.op(name, total, scalar)
        return total

    def placed(self, output: Value) -> Update:
        graph = Graph(tuple(self.gradients), tuple(self.ops), (output,))
        made = {g: frozenset((s,)) for s, g in enumerate(self.gradients)}
        update = Update(graph, STAGES, {}, made, {})
        update.run()
        return update


def reductions(update: Update) -> list[tuple[str, frozenset[int] | None]]:
    """(kind, stage) of every reduction over stages."""
    ops = [(op, stages) for op, stages in update.placed.code if op.name == "all_reduce"]
    return [(op.attrs.reduction, stages) for op, stages in ops]


@pytest.mark.parametrize(
    ("kind", "joins", "reduction"),
    [("add", "add", "add"), ("max", "maximum", "max"), ("min", "minimum", "min")],
)
def test_a_reduction_over_all_weights_is_one_all_reduce(
    kind: str, joins: str, reduction: str
) -> None:
    norms = Norms(kind)
    total = norms.chained(joins)
    root = norms.op("sqrt", total)
    update = norms.placed(root)
    assert reductions(update) == [(reduction, frozenset((s,))) for s in range(STAGES)]
    assert update.placed.placement(root) == At(frozenset(range(STAGES)))


def test_what_is_linear_stays_in_terms() -> None:
    norms = Norms()
    total = norms.op("negate", norms.chained("add"))
    update = norms.placed(total)
    assert isinstance(update.placed.placement(total), Partial)
    assert reductions(update) == []


def test_a_product_with_what_one_stage_has_needs_the_sum_whole() -> None:
    norms = Norms()
    total = norms.chained("add")
    scaled = norms.op("multiply", total, norms.op("negate", norms.scalars[0]))
    update = norms.placed(scaled)
    assert len(reductions(update)) == STAGES
    assert update.placed.placement(scaled) == At(frozenset((0,)))


@pytest.mark.parametrize("name", ["multiply", "divide", "power", "atan2"])
def test_what_joins_stages_and_is_no_sum_is_refused_with_its_line(name: str) -> None:
    norms = Norms()
    joined = norms.op(name, norms.scalars[0], norms.scalars[1])
    with pytest.raises(ShardingError, match="SW_PIPELINE_CUT") as caught:
        norms.placed(joined)
    assert f"got {name}" in str(caught.value)
    assert caught.value.diagnostic.loc == LINE


def test_a_scalar_of_one_stage_reaches_the_tensors_of_another() -> None:
    """A loss on the last stage scales a gradient on the first: a sum with one term."""
    norms = Norms()
    wide = make_op("add", (norms.gradients[0], norms.gradients[0]), loc=LINE)
    norms.ops.append(wide)
    scale = norms.scalars[2]
    chosen = norms.op("clamp", scale, wide.result, scale)
    update = norms.placed(chosen)
    assert [kind for kind, _ in reductions(update)] == ["add"] * STAGES
    assert update.placed.placement(chosen) == At(frozenset((0,)))
    zeros = [op for op, _ in update.placed.code if op.name == "constant"]
    assert [float(np.max(op.attrs.array())) for op in zeros] == [0.0, 0.0]
