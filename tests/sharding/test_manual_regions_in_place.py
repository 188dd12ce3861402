"""Code of one rank, put in its place in the graph of every core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import AllReduceAttrs, ManualRegionAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value, tensor_type
from shardwright.compiler.ir.verify import verify
from shardwright.sharding.cut.rewrites import MANUAL_REGIONS
from shardwright.sharding.partition.mesh import Mesh

X = tensor_type((4,), DType.F32)


def region() -> Graph:
    """A sum over an axis of four ranks, twice in a loop, and the operand."""
    b = Builder()
    x = b.input(X.shape)

    def turn(inner: Any, _: Value, carries: tuple[Value, ...]) -> list[Value]:
        return [inner.op("all_reduce", carries[0], attrs=AllReduceAttrs(("model",), "add", 4))]

    (out,) = b.loop(2, [x], turn)
    return b.finish(out, x)


def with_regions(count: int) -> Graph:
    """`count` regions one after the other, the last ones in a loop."""
    b = Builder()
    x = b.input(X.shape)
    attrs = ManualRegionAttrs(0, (X, X), (((),), ((),)))

    def through(b: Any, x: Value) -> Value:
        first, _ = b.append(make_op("manual_region", (x,), attrs))
        return first

    for _ in range(count - 1):
        x = through(b, x)
    (x,) = b.loop(3, [x], lambda b, _, carries: [through(b, carries[0])])
    return b.finish(b.op("tanh", x))


@pytest.mark.parametrize("cut", [False, True])
def test_regions_take_their_places(cut: bool) -> None:
    """Each a copy of its own, over the parts that the partitioner cut the axis into."""
    mesh = Mesh((("data", 2), ("model", 4)))
    mesh = mesh.refined("model", (2, 2)) if cut else mesh
    whole = with_regions(2)
    made = MANUAL_REGIONS(whole, (region(),), mesh)
    verify(made)
    names = [op.name for op in made.walk()]
    assert names.count("all_reduce") == 2 and "manual_region" not in names
    axes = {op.attrs.axes for op in made.walk() if op.name == "all_reduce"}
    assert axes == {("model_0", "model_1") if cut else ("model",)}
    # every sum is one over four equal ranks: 4 ** 2 in the first region, thrice that in the loop
    (found,) = evaluate(
        made,
        [np.full(4, 1e-6, np.float32)],
        {"all_reduce": lambda op, args: [args[0] * 4]},
    )
    np.testing.assert_allclose(found, np.tanh(np.full(4, 1e-6 * 4.0**8)), rtol=1e-6)
