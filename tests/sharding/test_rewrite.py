"""Each rewrite on a small graph: what it leaves, and that the values over ranks stay those of the
whole graph.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.ir.verify import verify
from shardwright.sharding.partition.findings import collectives
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, all_values
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.spec import ShardingSpec, replicated
from tests.support.building import Builder
from tests.support.whole_runs import run_whole

A, B = "dp_replicate", "dp_shard"
BOTH = (A, B)
MESH = make_mesh({A: 2, B: 4})
IDENTITIES = ("all_gather", "all_reduce", "all_slice", "reduce_scatter")


class Sketch(Builder):
    """A builder that notes the spec of what it makes: that of the first operand's dims unless
    given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[Value, ShardingSpec] = {}

    def at(self, value: Value, *dims: tuple[str, ...]) -> Value:
        """`value` laid out as `dims`."""
        self.specs[value] = ShardingSpec(dims)
        return value

    def part(self, *outputs: Value, mesh: Mesh = MESH) -> PartitionedGraph:
        """The graph as a partitioned one; values without a spec are replicated."""
        graph = self.finish(*outputs)
        specs = {v: self.specs.get(v, replicated(v.type.rank)) for v in all_values(graph)}
        return PartitionedGraph(graph=graph, specs=specs, mesh=mesh, inputs=(), outputs=())


def whole_meaning(graph: Graph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The graph without its collectives: with global types they change no value."""
    same = {name: lambda op, args: tuple(args) for name in IDENTITIES}
    return evaluate(graph, inputs, overrides=same)


def check(part: PartitionedGraph, seed: int = 0) -> PartitionedGraph:
    """Rewrite, verify, and compare both graphs over ranks with the whole meaning."""
    rng = np.random.default_rng(seed)
    inputs = [
        rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in part.graph.inputs
    ]
    after = rewrite(part)
    verify(after.graph)
    assert set(after.specs) == set(all_values(after.graph))
    wanted = whole_meaning(part.graph, inputs)
    before = run_whole(part, inputs)
    for given, old, new in zip(run_whole(after, inputs), before, wanted, strict=True):
        wide = [a.astype(np.float64) for a in (given, old, new)]
        np.testing.assert_allclose(wide[0], wide[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(wide[0], wide[2], rtol=1e-5, atol=1e-5)
    return after


def names(part: PartitionedGraph) -> list[tuple[str, tuple[str, ...]]]:
    return [(op.name, op.attrs.axes) for op in collectives(part.graph)]


def gradient(b: Sketch, rows: int = 16) -> Value:
    """A weight gradient (6, 8), partial over both axes: x^T y with the batch split over both."""
    x, y = b.at(b.input((rows, 6)), BOTH, ()), b.at(b.input((rows, 8)), BOTH, ())
    return b.dot(x, y, ((0,), (0,)))


def test_all_reduce_then_slice_is_reduce_scatter_then_all_reduce_of_the_shard() -> None:
    b = Sketch()
    reduced = b.all_reduce(gradient(b), BOTH)
    after = check(b.part(b.at(b.all_slice(reduced, 1, [B]), (), (B,))))
    assert names(after) == [("reduce_scatter", (B,)), ("all_reduce", (A,))]
    scatter, rest = collectives(after.graph)
    assert after.specs[rest.result].dims == ((), (B,))
    assert after.specs[scatter.operands[0]].unreduced == (B, A)
    assert after.specs[scatter.result].unreduced == (A,)
    assert after.specs[rest.result].unreduced == ()


def test_one_axis_leaves_a_reduce_scatter_alone() -> None:
    mesh = make_mesh({B: 4})
    b = Sketch()
    x, y = b.at(b.input((16, 6)), (B,), ()), b.at(b.input((16, 8)), (B,), ())
    reduced = b.all_reduce(b.dot(x, y, ((0,), (0,))), [B])
    after = check(b.part(b.at(b.all_slice(reduced, 1, [B]), (), (B,)), mesh=mesh))
    assert names(after) == [("reduce_scatter", (B,))]


def test_shape_changes_between_reduction_and_slice_move_in_front() -> None:
    b = Sketch()
    reduced = b.all_reduce(gradient(b), BOTH)
    turned = b.transpose(b.reshape(reduced, (6, 2, 4)), (2, 0, 1))
    after = check(b.part(b.at(b.all_slice(turned, 0, [B]), (B,), (), ())))
    assert names(after) == [("reduce_scatter", (B,)), ("all_reduce", (A,))]
    assert after.graph.ops[-1].name == "all_reduce"


def test_a_reduction_that_is_also_read_whole_stays() -> None:
    b = Sketch()
    reduced = b.all_reduce(gradient(b), BOTH)
    shard = b.at(b.all_slice(reduced, 1, [B]), (), (B,))
    after = check(b.part(shard, b.op("tanh", reduced)))
    assert names(after) == [("all_reduce", BOTH)]


def test_a_slice_over_an_axis_that_is_not_reduced_stays() -> None:
    b = Sketch()
    x, y = b.at(b.input((16, 6)), (A,), ()), b.at(b.input((16, 8)), (A,), ())
    reduced = b.all_reduce(b.dot(x, y, ((0,), (0,))), [A])
    after = check(b.part(b.at(b.all_slice(reduced, 1, [B]), (), (B,))))
    assert names(after) == [("all_reduce", (A,))]


def test_a_maximum_is_scattered_as_a_maximum() -> None:
    b = Sketch()
    x = b.at(b.input((16, 8)), BOTH, ())
    reduced = b.all_reduce(b.reduce(x, "max", (0,)), BOTH, reduction="max")
    after = check(b.part(b.at(b.all_slice(reduced, 0, [B]), (B,))))
    assert [op.attrs.reduction for op in collectives(after.graph)] == ["max", "max"]


@pytest.mark.parametrize("make", ["constant", "broadcast"])
def test_gathers_of_splats_vanish(make: str) -> None:
    b = Sketch()
    x = b.input((8, 4))
    scalar = b.constant(0.0)
    zeros = b.full((8, 4), 0.0) if make == "constant" else b.broadcast(scalar, (8, 4))
    b.at(zeros, (B,), ())
    after = check(b.part(b.add(x, b.all_gather(zeros, 0, [B]))))
    assert names(after) == []


def test_what_every_core_can_count_is_not_gathered() -> None:
    b = Sketch()
    x = b.input((8, 4))
    table = b.at(b.constant(np.arange(32.0).reshape(8, 4)), (B,), ())
    scaled = b.at(b.multiply(table, table), (B,), ())
    after = check(b.part(b.add(x, b.all_gather(scaled, 0, [B]))))
    assert names(after) == []


def test_a_gather_of_an_input_stays() -> None:
    b = Sketch()
    x, y = b.input((8, 4)), b.at(b.input((8, 4)), (B,), ())
    after = check(b.part(b.add(x, b.all_gather(y, 0, [B]))))
    assert names(after) == [("all_gather", (B,))]


def norm_terms(b: Sketch, number: int, axes: tuple[str, ...] = (B,)) -> list[Value]:
    """Squared sums of sharded tensors, each reduced on its own."""
    terms = []
    for i in range(number):
        x = b.at(b.input((8, 2 + i)), axes, ())
        terms.append(b.all_reduce(b.reduce(b.at(b.multiply(x, x), axes, ()), "add", (0, 1)), axes))
    return terms


def total(b: Sketch, terms: list[Value]) -> Value:
    value = terms[0]
    for term in terms[1:]:
        value = b.add(value, term)
    return value


def test_the_terms_of_a_norm_share_one_reduction() -> None:
    b = Sketch()
    after = check(b.part(b.op("sqrt", total(b, norm_terms(b, 5)))))
    assert names(after) == [("all_reduce", (B,))]


def test_terms_that_are_whole_stay_outside_of_the_shared_reduction() -> None:
    """A replicated weight adds its square once, not once per core."""
    b = Sketch()
    terms = norm_terms(b, 2)
    whole = b.reduce(b.multiply(x := b.input((3,)), x), "add", (0,))
    after = check(b.part(b.op("sqrt", total(b, [terms[0], whole, terms[1]]))))
    assert names(after) == [("all_reduce", (B,))]


def test_terms_over_other_axes_and_terms_read_elsewhere_keep_their_reduction() -> None:
    b = Sketch()
    mine, others = norm_terms(b, 3), norm_terms(b, 1, BOTH)
    after = check(b.part(total(b, [*mine, *others]), mine[0]))
    assert Counter(names(after)) == {("all_reduce", (B,)): 2, ("all_reduce", BOTH): 1}


def test_gathers_move_the_narrower_type() -> None:
    b = Sketch()
    w = b.at(b.input((8, 4)), (B,), ())
    narrow = b.convert(b.all_gather(w, 0, [B]), DType.BF16)
    wide_in = b.at(b.input((8, 4), DType.BF16), (B,), ())
    wide = b.all_gather(b.at(b.convert(wide_in, DType.F32), (B,), ()), 0, [B])
    after = check(b.part(narrow, wide))
    assert {op.result.type.dtype for op in collectives(after.graph)} == {DType.BF16}
    assert [v.type.dtype for v in after.graph.outputs] == [DType.BF16, DType.F32]


def test_a_gather_that_is_also_read_wide_stays_wide() -> None:
    b = Sketch()
    whole = b.all_gather(b.at(b.input((8, 4)), (B,), ()), 0, [B])
    after = check(b.part(b.convert(whole, DType.BF16), b.op("tanh", whole)))
    assert [op.result.type.dtype for op in collectives(after.graph)] == [DType.F32]


@pytest.mark.parametrize("turned", [False, True])
def test_two_gradients_of_a_tied_weight_are_reduced_once(turned: bool) -> None:
    b = Sketch()

    def scattered() -> Value:
        reduced = b.all_reduce(gradient(b), BOTH)
        return b.at(b.all_slice(reduced, 1, [B]), (), (B,))

    left, right = scattered(), scattered()
    if turned:
        left = b.at(b.transpose(left, (1, 0)), (B,), ())
        left = b.at(b.transpose(left, (1, 0)), (), (B,))
    after = check(b.part(b.at(b.add(left, right), (), (B,))))
    assert names(after) == [("reduce_scatter", (B,)), ("all_reduce", (A,))]


def test_gradients_of_different_layout_are_reduced_apart() -> None:
    b = Sketch()
    first = b.at(b.all_slice(b.all_reduce(gradient(b), BOTH), 1, [B]), (), (B,))
    second = b.all_gather(
        b.at(b.all_slice(b.all_reduce(gradient(b), BOTH), 1, [B]), (), (B,)), 1, [B]
    )
    after = check(b.part(b.at(b.add(first, b.at(b.all_slice(second, 1, [B]), (), (B,))), (), (B,))))
    assert names(after).count(("reduce_scatter", (B,))) == 2


def test_loop_bodies_are_rewritten_too() -> None:
    b = Sketch()
    x, y = b.at(b.input((16, 6)), BOTH, ()), b.at(b.input((16, 8)), BOTH, ())
    start = b.at(b.full((6, 8), 0.0), (), (B,))

    def body(inner: Builder, index: Value, carries: tuple[Value, ...]) -> list[Value]:
        left, right, acc = carries
        for value in (left, right):
            b.at(value, BOTH, ())
        b.at(acc, (), (B,))
        reduced = inner.all_reduce(inner.dot(left, right, ((0,), (0,))), BOTH)
        shard = b.at(inner.all_slice(reduced, 1, [B]), (), (B,))
        return [left, right, b.at(inner.add(acc, shard), (), (B,))]

    left, right, result = b.loop(3, [x, y, start], body)
    for value in (left, right):
        b.at(value, BOTH, ())
    after = check(b.part(b.at(result, (), (B,))))
    assert names(after) == [("reduce_scatter", (B,)), ("all_reduce", (A,))]


def gathering_loop(
    reads_shard: bool = False, result_is_read: bool = False, reads_whole: bool = False
) -> PartitionedGraph:
    """Three steps that multiply by rows of a weight of which every core has a part, gathered twice
    in each; the shard may be read besides, in the loop or what the loop hands on of it, and the
    weight whole.
    """
    b = Sketch()
    weight, x = b.at(b.input((8, 8)), (B,), ()), b.input((4, 8))

    def body(inner: Builder, index: Value, carries: tuple[Value, ...]) -> list[Value]:
        held, given = carries
        b.at(held, (B,), ())
        whole, again = inner.all_gather(held, 0, [B]), inner.all_gather(held, 0, [B])
        first, second = (inner.dynamic_slice(w, [index, index], (4, 8)) for w in (whole, again))
        made = inner.multiply(inner.multiply(given, first), second)
        if reads_whole:
            made = inner.dot(made, whole, ((1,), (0,)))
        if reads_shard:
            doubled = b.at(inner.add(held, held), (B,), ())
            made = inner.add(made, inner.slice(inner.all_gather(doubled, 0, [B]), (0, 0), (4, 8)))
        return [held, made]

    held, result = b.loop(3, [weight, x], body)
    b.at(held, (B,), ())
    more = [b.at(b.add(held, held), (B,), ())] if result_is_read else []
    return b.part(result, *more)


def test_what_a_loop_gathers_alike_is_gathered_in_front_of_it() -> None:
    after = check(gathering_loop())
    assert [op.name for op in after.graph.ops if op in collectives(after.graph)] == ["all_gather"]
    assert names(after) == [("all_gather", (B,))]


@pytest.mark.parametrize("besides", ["reads_shard", "result_is_read", "reads_whole"])
def test_what_else_is_read_keeps_the_gather_inside(besides: str) -> None:
    before = gathering_loop(**{besides: True})
    after = check(before)
    assert names(after) == names(before)
    assert not any(op.name == "all_gather" for op in after.graph.ops)


def test_a_wrong_merge_would_be_noticed() -> None:
    """The comparison itself can fail: a whole term counted once per core gives another number."""
    b = Sketch()
    terms = norm_terms(b, 1)
    whole = b.reduce(b.multiply(x := b.input((3,)), x), "add", (0,))
    wrong = b.all_reduce(b.add(terms[0], whole), [B])
    with pytest.raises(AssertionError):
        check(b.part(wrong))
