"""Random graphs with random aliases lower to what they mean, whatever kernels are formed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.lower.rule import Budget
from tests.support.kernel_reference import check_lowering

SIZES = (1, 2, 3, 4, 6)


class Grower:
    """Adds random ops to a graph; every draw comes from hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.b = Builder()
        self.values: list[Value] = []

    def shape(self) -> tuple[int, ...]:
        return tuple(self.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))

    def pick(self) -> Value:
        return self.draw(st.sampled_from(self.values))

    def like(self, value: Value) -> Value:
        same = [v for v in self.values if v.type == value.type]
        return self.draw(st.sampled_from(same))

    def grow(self) -> None:
        kinds = (
            "unary",
            "binary",
            "reduce",
            "broadcast",
            "transpose",
            "reshape",
            "slice",
            "concatenate",
            "update",
            "dot",
            "mask",
        )
        made = getattr(self, self.draw(st.sampled_from(kinds)))(self.pick())
        if made.type.num_elements <= 300:
            self.values.append(made)

    def unary(self, x: Value) -> Value:
        return self.b.op(self.draw(st.sampled_from(("tanh", "negate", "abs", "logistic"))), x)

    def binary(self, x: Value) -> Value:
        name = self.draw(st.sampled_from(("add", "multiply", "maximum", "subtract")))
        return self.b.op(name, x, self.like(x))

    def reduce(self, x: Value) -> Value:
        dims = self.draw(st.sets(st.integers(0, x.type.rank - 1))) if x.type.rank else set()
        kind = self.draw(st.sampled_from(("add", "max", "min")))
        return self.b.reduce(x, kind, tuple(sorted(dims)))

    def broadcast(self, x: Value) -> Value:
        at = self.draw(st.integers(0, x.type.rank))
        size = self.draw(st.sampled_from(SIZES))
        shape = (*x.type.shape[:at], size, *x.type.shape[at:])
        return self.b.broadcast(x, shape, [d + (d >= at) for d in range(x.type.rank)])

    def transpose(self, x: Value) -> Value:
        return self.b.transpose(x, self.draw(st.permutations(range(x.type.rank))))

    def reshape(self, x: Value) -> Value:
        size = x.type.num_elements
        first = self.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        return self.b.reshape(x, (first, size // first))

    def slice(self, x: Value) -> Value:
        start = [self.draw(st.integers(0, n - 1)) for n in x.type.shape]
        limit = [self.draw(st.integers(s + 1, n)) for s, n in zip(start, x.type.shape, strict=True)]
        stride = [self.draw(st.sampled_from((1, 1, 2))) for _ in start]
        return self.b.slice(x, start, limit, stride)

    def concatenate(self, x: Value) -> Value:
        if not x.type.rank:
            return self.unary(x)
        dim = self.draw(st.integers(0, x.type.rank - 1))
        return self.b.concatenate((x, self.like(x)), dim)

    def update(self, x: Value) -> Value:
        starts = [self.draw(st.integers(-1, n)) for n in x.type.shape]
        return self.b.dynamic_update_slice(
            x, self.slice(x), [self.b.constant(s, DType.I32) for s in starts]
        )

    def dot(self, x: Value) -> Value:
        y = self.like(x)
        if x.type.rank < 2:
            return self.binary(x)
        dim = self.draw(st.integers(0, x.type.rank - 1))
        batch = self.draw(st.sampled_from([d for d in range(x.type.rank) if d != dim]))
        return self.b.dot(x, y, ((dim,), (dim,)), ((batch,), (batch,)))

    def mask(self, x: Value) -> Value:
        if not x.type.rank:
            return self.unary(x)
        dims = [self.draw(st.integers(0, x.type.rank - 1)) for _ in range(2)]
        a, b = (self.b.iota(x.type.shape, d) for d in dims)
        return self.b.op("select", self.b.compare(a, b, "GE"), x, self.b.full(x.type.shape, -2.0))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), loop_bytes=st.sampled_from((64, 96 * 1024)))
def test_random_graphs(data: st.DataObject, loop_bytes: int) -> None:
    grower = Grower(data)
    shapes = [grower.shape() for _ in range(data.draw(st.integers(1, 3)))]
    grower.values = [grower.b.input(s) for s in shapes]
    for _ in range(data.draw(st.integers(1, 12))):
        grower.grow()
    outputs = data.draw(st.lists(st.sampled_from(grower.values), min_size=1, max_size=4))
    aliases: list[tuple[int, int]] = []
    free = list(range(len(shapes)))
    for k, value in enumerate(outputs):
        fits = [i for i in free if grower.b.inputs[i].type == value.type]
        if fits and data.draw(st.booleans()):
            aliases.append((k, data.draw(st.sampled_from(fits))))
            free.remove(aliases[-1][1])
    rng = np.random.default_rng(len(shapes))
    inputs = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    signature = Signature(aliases=tuple(aliases))
    check_lowering(
        grower.b.finish(*outputs),
        inputs,
        signature,
        tolerance=1e-5,
        budget=Budget(loop_bytes, loop_bytes, 192),
    )
