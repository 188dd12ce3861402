"""The cut between gradients and optimizer: which sums of a small step are handed over."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.min_cut import UNCUTTABLE
from shardwright.sharding.cut.gradients import (
    CutRefusedError,
    StepView,
    _weights,
    depends_on,
    find_cut,
    upstream,
    with_reduced,
)
from shardwright.sharding.linearity import Kind, Label
from shardwright.sharding.linearity.labels import SUM
from tests.support.building import Builder

JOINED_BEHIND_THE_LEARNING_RATE = """
main(%batch: tensor<2x4xf32>, %rate: tensor<4xf32>) {
  %first = reduce %batch {kind=add, dims=[0]} : tensor<4xf32>
  %second = reduce %batch {kind=add, dims=[0]} : tensor<4xf32>
  %a = multiply %first, %rate : tensor<4xf32>
  %b = multiply %second, %rate : tensor<4xf32>
  %both = concatenate %a, %b {dim=0} : tensor<8xf32>
  return %both
}
"""


def test_sums_are_handed_over_before_they_are_scaled_and_joined() -> None:
    """Two of 16 bytes, or 32 in one: equal bytes, so what no learning rate has scaled yet."""
    graph = parse(JOINED_BEHIND_THE_LEARNING_RATE)
    first, second, a, b, both = (op.result for op in graph.ops)
    sums = (first, second, a, b, both)
    view = StepView(
        graph,
        {op.result: op for op in graph.ops},
        dict.fromkeys(sums, SUM),
        {graph.inputs[0], *sums},
    )
    assert find_cut(view, [both], accumulated=True, reduce_last=False) == [first, second]


def summed(text: str) -> tuple[StepView, dict[str, Value]]:
    """A step all of whose values are sums over its batch, the first input, and its values by
    name."""
    graph = parse(text)
    values = dict(zip(re.findall(r"%(\w+) = ", text), (op.result for op in graph.ops), strict=True))
    labels = dict.fromkeys(values.values(), SUM)
    return StepView(graph, graph.producers(), labels, {graph.inputs[0], *labels}), values


def handed_over(text: str, last: str, **how: bool) -> list[str]:
    """The names of what is handed over to whoever reads `last`."""
    view, values = summed(text)
    found = find_cut(view, [values[last]], **{"accumulated": True, "reduce_last": False} | how)
    return [name for name, value in values.items() if value in found]


SCATTERED = """
main(%batch: tensor<2x8xf32>) {
  %sum = reduce %batch {kind=add, dims=[0]} : tensor<8xf32>
  %part = reduce_scatter %sum {dim=0, axes=[dp_shard], reduction=add, group_size=2} : tensor<4xf32>
  %same = negate %part : tensor<4xf32>
  return %same
}
"""
ADDED_UP = """
main(%batch: tensor<2x8xf32>) {
  %sum = reduce %batch {kind=add, dims=[0]} : tensor<8xf32>
  %part = all_reduce %sum {axes=[dp_shard], reduction=add, group_size=2} : tensor<8xf32>
  %same = slice %part {start=[0], limit=[2], stride=[1]} : tensor<2xf32>
  return %same
}
"""


@pytest.mark.parametrize(
    ("text", "first"), [(SCATTERED, "part"), (ADDED_UP, "same")], ids=["scattered", "added up"]
)
def test_what_is_not_reduced_yet_is_preferred_when_reductions_come_last(
    text: str, first: str
) -> None:
    """32 bytes before the reduction, 16 or 8 behind it, whatever follows it there."""
    assert handed_over(text, "same") == [first]
    assert handed_over(text, "same", reduce_last=True) == ["sum"]


def test_of_what_is_not_reduced_yet_the_smallest_is_preferred() -> None:
    """32 and 8 bytes before the reduction, 8 behind it."""
    text = """
main(%batch: tensor<2x8xf32>) {
  %all = reduce %batch {kind=add, dims=[0]} : tensor<8xf32>
  %some = slice %all {start=[0], limit=[2], stride=[1]} : tensor<2xf32>
  %last = all_reduce %some {axes=[dp_shard], reduction=add, group_size=2} : tensor<2xf32>
  return %last
}
"""
    assert handed_over(text, "last", reduce_last=True) == ["some"]
    assert handed_over(text, "last") == ["last"]


def test_what_is_reduced_in_part_is_behind_a_reduction() -> None:
    """8 bytes of both kinds together, 32 of those that are not reduced."""
    text = """
main(%batch: tensor<2x8xf32>) {
  %sum = reduce %batch {kind=add, dims=[0]} : tensor<8xf32>
  %part = all_reduce %sum {axes=[dp_shard], reduction=add, group_size=2} : tensor<8xf32>
  %both = add %part, %sum : tensor<8xf32>
  %same = slice %both {start=[0], limit=[2], stride=[1]} : tensor<2xf32>
  return %same
}
"""
    assert handed_over(text, "same") == ["same"]
    assert handed_over(text, "same", reduce_last=True) == ["sum"]


def test_a_reduction_in_front_of_the_sums_is_none_of_theirs() -> None:
    """A mean over cores of single samples, as of a norm: what is summed of it is not reduced."""
    b = Builder()
    batch = b.input((2, 8))
    mean = b.all_reduce(batch, ["dp"], group_size=2)
    total = b.reduce(mean, "add", (0,))
    part = b.slice(b.all_reduce(total, ["dp"], group_size=2), (0,), (2,))
    graph = b.finish(part)
    sums = [op.result for op in graph.ops[1:]]
    view = StepView(graph, graph.producers(), dict.fromkeys(sums, SUM), {batch, mean, *sums})
    assert find_cut(view, [part], accumulated=True, reduce_last=True) == [total]
    assert find_cut(view, [part], accumulated=True, reduce_last=False) == [part]


def test_what_is_only_there_reduced_is_handed_over_so() -> None:
    """Beside a count, which is not handed over however much that costs."""
    text = """
main(%batch: tensor<2x8xf32>) {
  %part = all_reduce %batch {axes=[dp_shard], reduction=add, group_size=2} : tensor<2x8xf32>
  %count = convert %part {dtype=i32} : tensor<2x8xi32>
  return %count
}
"""
    assert handed_over(text, "count", reduce_last=True) == ["part"]


@pytest.mark.parametrize("scaled", ["divide %sum, %rate", "multiply %sum, %rate", "negate %sum"])
def test_of_equal_sums_the_last_in_front_of_scalings_is_handed_over(scaled: str) -> None:
    """A cast as wide as what it casts is passed, a learning rate is not."""
    text = f"""
main(%batch: tensor<2x4xf32>, %rate: tensor<4xf32>) {{
  %sum = reduce %batch {{kind=add, dims=[0]}} : tensor<4xf32>
  %scaled = {scaled} : tensor<4xf32>
  %turned = reshape %scaled {{shape=[2, 2]}} : tensor<2x2xf32>
  return %turned
}}
"""
    assert handed_over(text, "turned") == ["sum"]
    plain = text.replace(scaled, "reshape %sum {shape=[4]}")
    assert handed_over(plain, "turned") == ["turned"]


CAST = """
main(%batch: tensor<2x4xf32>) {
  %sum = reduce %batch {kind=add, dims=[0]} : tensor<4xf32>
  %half = negate %sum : tensor<4xf32>
  %short = convert %half {dtype=bf16} : tensor<4xbf16>
  %count = convert %sum {dtype=i32} : tensor<4xi32>
  %both = add %half, %sum : tensor<4xf32>
  return %short, %count, %both
}
"""


def test_what_handing_over_costs() -> None:
    """Elements where accumulators are all of one type, bytes of their own where there are none;
    3 scalings in all, so 4 to one of size. Integers are not handed over."""
    view, values = summed(CAST)
    zone = set(values.values())
    own = dict(zip(values, _weights(view, zone, accumulated=False).values(), strict=True))
    assert own == {"sum": 64, "half": 65, "short": 33, "count": UNCUTTABLE, "both": 65}
    added = dict(zip(values, _weights(view, zone, accumulated=True).values(), strict=True))
    assert added == {"sum": 16, "half": 17, "short": 17, "count": UNCUTTABLE, "both": 17}
    assert list(_weights(view, {values["half"]}, accumulated=True).values()) == [4 * 2 + 1]


def test_a_sum_of_integers_alone_is_refused() -> None:
    text = """
main(%batch: tensor<2x4xi32>) {
  %sum = reduce %batch {kind=add, dims=[0]} : tensor<4xi32>
  return %sum
}
"""
    for reduce_last in (False, True):
        with pytest.raises(CutRefusedError, match="of integers only"):
            handed_over(text, "sum", reduce_last=reduce_last)


def test_single_samples_are_refused_with_what_holds_them() -> None:
    """The batch itself, and what is made of it without a sum."""
    b = Builder()
    batch = b.input((2, 4))
    x = b.op("negate", batch)
    graph = b.finish(x)
    one = Label(Kind.SAMPLE)
    view = StepView(graph, graph.producers(), {x: one}, {batch, x})
    for output, text in ((x, "new state reads negate of tensor<2x4xf32>"), (batch, "batch itself")):
        with pytest.raises(CutRefusedError, match=text) as refused:
            find_cut(view, [output], accumulated=True, reduce_last=False)
        assert refused.value.reason == str(refused.value)
    unknown = StepView(graph, graph.producers(), {}, {batch, x})
    assert unknown.is_per_sample(batch) and not unknown.is_per_sample(x)
    assert not unknown.is_sum(x) and view.is_per_sample(x)


class Counted(StepView):
    """Counts how often what feeds an op is asked for."""

    asked: ClassVar[list[str]] = []

    def batch_operands(self, op: Op) -> list[Value]:
        self.asked.append(op.name)
        assert len(self.asked) < 100, "a value is looked at again and again"
        return super().batch_operands(op)


def doubled(times: int) -> Graph:
    """A value that comes from the batch on 2 ** times ways."""
    b = Builder()
    value = b.input((4,))
    for _ in range(times):
        value = b.add(b.op("tanh", value), b.op("negate", value))
    return b.finish(value)


def test_a_value_is_looked_at_once_on_however_many_ways_it_is_met() -> None:
    """30 times two ways to the same: three values each, of which the batch feeds the last one."""
    graph = doubled(30)
    view = Counted(graph, graph.producers(), {}, depends_on(graph, graph.inputs))
    Counted.asked.clear()
    found = list(upstream(view, graph.outputs, graph.inputs.__contains__))
    assert len(found) == len(set(found)) == 91 and len(Counted.asked) == 90
    assert found[0] is graph.outputs[0] and graph.inputs[0] in found
    (last,) = upstream(view, graph.outputs, lambda value: True)
    assert last is graph.outputs[0]
    apart = StepView(graph, graph.producers(), {}, set())
    assert not list(upstream(apart, graph.outputs, lambda value: True))


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
def test_what_a_reduction_reads_is_a_sum_as_what_it_makes_is(name: str) -> None:
    """Where it has no label of its own; what a gather reads is none."""
    b = Builder()
    first, second = b.input((4,)), b.input((4,))

    def done(value: Value) -> Value:
        if name == "all_reduce":
            return b.all_reduce(value, ["dp"], group_size=2)
        return getattr(b, name)(value, 0, ["dp"], group_size=2)

    x, y = done(first), done(second)
    z = done(y)
    graph = b.finish(x, z)
    mixed = Label(Kind.MIXED)
    told = {x: SUM, first: mixed, z: SUM}
    more = {} if name == "all_gather" else {y: SUM, second: SUM}
    assert with_reduced(graph, dict(told)) == told | more
    assert with_reduced(graph, {}) == {}


def test_what_a_barrier_holds_back_together_is_told_apart() -> None:
    b = Builder()
    first, second = b.input((4,)), b.input((2,))
    held = b.barrier(first, second)
    graph = b.finish(*held)
    assert depends_on(graph, [first]) == {first, held[0]}
    assert depends_on(graph, [second]) == {second, held[1]}


def test_a_carry_that_begins_as_a_source_depends_on_it() -> None:
    """`first` is the source before the first iteration only; `second` takes that in."""
    b = Builder()
    source, other = b.input((4,)), b.input((4,))

    def body(inner: Builder, _: Value, carries: tuple[Value, ...]) -> list[Value]:
        return [inner.full((4,), 1.0), inner.add(*carries)]

    first, second = b.loop(3, [source, other], body)
    assert depends_on(b.finish(first, second), [source]) == {source, first, second}


def test_carries_of_a_loop_depend_on_what_reaches_them_after_any_iteration() -> None:
    """`first` takes what `second` was, which takes in the source; `third` stays by itself."""
    b = Builder()
    source, other = b.input((4,)), b.input((4,))

    def body(inner: Builder, _: Value, carries: tuple[Value, ...]) -> list[Value]:
        _, second, third, taken = carries
        return [second, inner.add(second, taken), inner.add(third, third), taken]

    first, second, third, taken = b.loop(3, [other, other, other, source], body)
    graph = b.finish(first, second, third, taken)
    assert depends_on(graph, [source]) == {source, first, second, taken}
    assert depends_on(graph, [other]) == {other, first, second, third}


def test_what_depends_on_a_value_inside_a_loop() -> None:
    """`summed` takes in what the body makes, `counted` does not."""
    b = Builder()
    start = b.input((4,))
    inside: list[Value] = []

    def body(inner: Builder, _: Value, carries: tuple[Value, ...]) -> list[Value]:
        summed, counted = carries
        inside.append(inner.multiply(counted, counted))
        return [inner.add(summed, inside[0]), inner.add(counted, counted)]

    summed, counted = b.loop(3, [start, start], body)
    found = depends_on(b.finish(summed, counted), inside)
    assert summed in found and counted not in found
