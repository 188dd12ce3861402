"""Collectives whose result is stored as a whole arrive where it is stored."""

from __future__ import annotations

import pytest

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.isa.kernel import Affine, KernelProgram, View
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.lower.write_out import Lowered
from tests.support.kernel_reference import lower_function

GATHERED = """main(%in0: tensor<2x4xf32>, %in1: tensor<3x4x4xf32>, %in2: tensor<i32>) {
  %0 = all_gather %in0 {dim=0, axes=[dp_shard], group_size=2} : tensor<4x4xf32>
  %1 = constant 0 : tensor<i32>
  %2 = reshape %0 {shape=[1, 4, 4]} : tensor<1x4x4xf32>
  %3 = dynamic_update_slice %in1, %2, %in2, %1, %1 : tensor<3x4x4xf32>
  %4 = add %0, %0 : tensor<4x4xf32>
  return %4, %3
}
"""
COUNTER = ((2, 0, 2),)  # input 2 counts the three layers


def lowered(text: str, aliases: tuple[tuple[int, int], ...] = ((1, 1),)) -> Lowered:
    return lower_function(parse(text), Signature(parameters=COUNTER, aliases=aliases))


def start_of(function: Lowered) -> KernelProgram:
    (start,) = (k for k in function.kernels if k.kind == "collective_start")
    return start


def stored(kernel: KernelProgram) -> list[int]:
    return [n.attrs["view"].tensor for n in kernel.nodes if n.op == "store"]


def test_a_row_of_a_stack_is_filled_by_the_collective() -> None:
    """Row r of 4 x 4 elements begins at element 16 r; one kernel is left, which reads it there."""
    function = lowered(GATHERED)
    row = start_of(function).attrs["target"]
    assert row == View(function.inputs[1], Affine(0, ((0, 16),)), ())
    assert [k.kind for k in function.kernels] == ["collective_start", "collective_wait", "compute"]
    (load,) = (n.attrs["view"] for n in function.kernels[2].nodes if n.op == "load")
    assert (load.tensor, load.offset) == (function.inputs[1], row.offset)
    assert not [t for t in function.tensors if t.kind == "scratch"]


def test_gradients_that_only_go_to_a_stack_need_no_copy() -> None:
    function = lowered(
        GATHERED.replace("add %0, %0", "add %in0, %in0").replace(
            "4x4xf32>\n  ret", "2x4xf32>\n  ret"
        )
    )
    assert isinstance(start_of(function).attrs["target"], View)
    assert not [t for t in function.tensors if t.kind == "scratch"]


TWICE = """main(%in0: tensor<2x4xf32>, %in1: tensor<6x4x4xf32>, %in2: tensor<i32>) {
  %0 = all_gather %in0 {dim=0, axes=[dp_shard], group_size=2} : tensor<4x4xf32>
  %1 = constant 0 : tensor<i32>
  %2 = constant 5 : tensor<i32>
  %3 = reshape %0 {shape=[1, 4, 4]} : tensor<1x4x4xf32>
  %4 = dynamic_update_slice %in1, %3, %in2, %1, %1 : tensor<6x4x4xf32>
  %5 = negate %in0 : tensor<2x4xf32>
  %6 = all_gather %5 {dim=0, axes=[dp_shard], group_size=2} : tensor<4x4xf32>
  %7 = reshape %6 {shape=[1, 4, 4]} : tensor<1x4x4xf32>
  %8 = dynamic_update_slice %4, %7, %2, %1, %1 : tensor<6x4x4xf32>
  return %8
}
"""


def test_of_two_rows_of_a_stack_the_second_is_copied_and_starts_beside_the_first() -> None:
    function = lowered(TWICE, ((0, 1),))
    starts = [k for k in function.kernels if k.kind == "collective_start"]
    assert [isinstance(r.attrs["target"], View) for r in starts] == [True, False]
    kinds = [k.kind for k in function.kernels]
    assert kinds.index("collective_wait") > function.kernels.index(starts[1])


@pytest.mark.parametrize(
    "text",
    [
        GATHERED.replace("return %4, %3", "return %0, %3"),
        GATHERED.replace("3x4x4", "4x3x4")
        .replace("[1, 4, 4]", "[4, 1, 4]")
        .replace("1x4x4", "4x1x4")
        .replace("%in2, %1, %1", "%1, %in2, %1"),
    ],
    ids=["result of the function", "columns"],
)
def test_what_has_another_place_is_copied(text: str) -> None:
    function = lowered(text)
    assert isinstance(start_of(function).attrs["target"], int)
    assert [k for k in function.kernels if function.inputs[1] in stored(k)]
