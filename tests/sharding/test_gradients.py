"""The cut between gradients and optimizer: which sums of a small step are handed over."""

from __future__ import annotations

from compiler.ir.parse import parse
from sharding.gradients import StepView, find_cut
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
