"""The cut between gradients and optimizer: which sums of a small step are handed over."""

from __future__ import annotations

import pytest

from compiler.ir.build import Builder
from compiler.ir.parse import parse
from compiler.ir.types import Value
from sharding.gradients import StepView, depends_on, find_cut
from sharding.linearity.labels import SUM

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


SCATTERED = """
main(%batch: tensor<2x8xf32>) {
  %sum = reduce %batch {kind=add, dims=[0]} : tensor<8xf32>
  %part = reduce_scatter %sum {dim=0, axes=[dp_shard], reduction=add, group_size=2} : tensor<4xf32>
  return %part
}
"""


@pytest.mark.parametrize(("reduce_last", "handed_over"), [(False, "part"), (True, "sum")])
def test_what_is_not_reduced_yet_is_preferred_when_reductions_come_last(
    reduce_last: bool, handed_over: str
) -> None:
    """32 bytes before the reduction, 16 behind it."""
    graph = parse(SCATTERED)
    values = dict(zip(("sum", "part"), (op.result for op in graph.ops), strict=True))
    labels = dict.fromkeys(values.values(), SUM)
    producers = {op.result: op for op in graph.ops}
    view = StepView(graph, producers, labels, {graph.inputs[0], *labels})
    found = find_cut(view, [values["part"]], accumulated=True, reduce_last=reduce_last)
    assert found == [values[handed_over]]


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
