"""The arithmetic of every kind of op, counted by hand, and that of a decoder from its formula."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import flops, is_light
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops.convolution import ConvolutionAttrs
from shardwright.compiler.ir.ops.elementwise import ConvertAttrs
from shardwright.compiler.ir.ops.gather import ScatterAttrs
from shardwright.compiler.ir.ops.sort import SortAttrs
from shardwright.compiler.ir.ops.window import ReduceWindowAttrs, SelectAndScatterAttrs
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.orchestrator.models import config_task
from tests.support.building import Builder
from tests.support.road import captured_graph
from tests.support.small_job import SIZES

F32 = DType.F32


def op(name: str, *shapes: tuple[int, ...], attrs: Any = None, dtype: DType = F32) -> Op:
    return make_op(name, [Value(tensor_type(shape, dtype)) for shape in shapes], attrs)


def counted(one: Op) -> int:
    found = OPS[one.name].flops(one)
    assert flops(Graph(one.operands, (one,), one.results)) == found
    return found


def graph(build: Any) -> Graph:
    b = Builder()
    result: Graph = b.finish(build(b))
    return result


def test_a_product_is_a_multiplication_and_an_addition_per_element_of_the_sum() -> None:
    """3 batches of 4 x 6 results, each a sum of 5 x 7 products: 2 x 72 x 35."""
    found = graph(
        lambda b: b.dot(
            b.input((3, 4, 5, 7)), b.input((7, 3, 5, 6)), ((2, 3), (2, 0)), ((0,), (1,))
        )
    )
    assert flops(found) == flops(found, CONTRACTIONS) == 2 * 72 * 35 == 5040


CONVOLUTION: dict[str, Any] = {
    "lhs": (0, 1, 2),
    "rhs": (0, 1, 2),
    "out": (0, 1, 2),
    "strides": (2,),
    "low": (1,),
    "high": (1,),
    "lhs_dilation": (1,),
    "rhs_dilation": (1,),
    "feature_groups": 1,
    "batch_groups": 1,
    "dtype": F32,
}


@pytest.mark.parametrize(
    ("image", "kernel", "attrs", "count"),
    [
        # (9 + 2 - 3) // 2 + 1 = 5 windows; 2 images x 8 features x 5 results of 6 x 3 products
        ((2, 6, 9), (8, 6, 3), {}, 2 * (2 * 8 * 5) * (6 * 3)),
        # two groups of 3 features each
        ((2, 6, 9), (8, 3, 3), {"feature_groups": 2}, 2 * (2 * 8 * 5) * (3 * 3)),
        # 9 elements and 8 zeros between: (17 + 2 - 3) // 1 + 1 = 17 results, half of them zeros
        (
            (2, 6, 9),
            (8, 6, 3),
            {"lhs_dilation": (2,), "strides": (1,)},
            2 * (2 * 8 * 17) * (6 * 3) // 2,
        ),
        # holes in the kernel: (9 + 2 - 5) // 2 + 1 = 4 windows of 3 taps
        ((2, 6, 9), (8, 6, 3), {"rhs_dilation": (2,)}, 2 * (2 * 8 * 4) * (6 * 3)),
    ],
)
def test_a_convolution_counts_products_with_elements(
    image: tuple[int, ...], kernel: tuple[int, ...], attrs: dict[str, Any], count: int
) -> None:
    found = op("convolution", image, kernel, attrs=ConvolutionAttrs(**(CONVOLUTION | attrs)))
    assert counted(found) == count


def test_the_dims_of_a_kernel_are_found_by_their_parts() -> None:
    """Taps, input, output: 3 x 6 products per result wherever they stand."""
    attrs = ConvolutionAttrs(**(CONVOLUTION | {"rhs": (2, 1, 0)}))
    assert counted(op("convolution", (2, 6, 9), (3, 6, 8), attrs=attrs)) == 2 * 80 * 18


@pytest.mark.parametrize(
    ("dims", "count"),
    [((0,), 30 * 3), ((0, 1), 6 * 19), ((0, 1, 2), 119), ((), 0)],
)
def test_a_reduction_takes_one_operation_less_than_elements(
    dims: tuple[int, ...], count: int
) -> None:
    """4 x 5 x 6 elements: over 4, 30 results of 3 additions; over 4 x 5, 6 results of 19."""
    found = graph(lambda b: b.reduce(b.input((4, 5, 6)), "add", dims))
    assert flops(found) == count


def test_a_reduction_of_nothing_takes_no_operation() -> None:
    assert flops(graph(lambda b: b.reduce(b.input((0, 5)), "add", (0,)))) == 0


@pytest.mark.parametrize("name", ["add", "multiply", "divide", "maximum", "power"])
def test_elementwise_ops_take_one_operation_per_element(name: str) -> None:
    assert counted(op(name, (3, 7), (3, 7))) == 21


def test_functions_comparisons_and_conversions_count_once() -> None:
    assert flops(graph(lambda b: b.compare(b.input((3, 7)), b.input((3, 7)), "LT"))) == 21
    assert counted(op("exponential", (3, 7))) == counted(op("gelu", (3, 7))) == 21
    assert counted(op("convert", (3, 7), attrs=ConvertAttrs(DType.BF16))) == 21


def test_what_moves_data_takes_none() -> None:
    b = Builder()
    x, y = b.input((4, 6)), b.input((4, 6))
    moved = b.transpose(b.reshape(b.concatenate([x, y], 0), (6, 8)), (1, 0))
    row = b.slice(b.broadcast(b.reverse(moved, (0,)), (2, 8, 6), (1, 2)), (0, 0, 0), (1, 8, 6))
    zero = b.constant(0, DType.I32)
    part = b.dynamic_slice(row, [zero, zero, zero], (1, 4, 6))
    (kept,) = b.barrier(b.all_gather(part, 0, ("tp",), 4))
    assert flops(b.finish(kept, b.iota((4,), 0))) == 0


def test_a_sort_compares_each_element_log2_times() -> None:
    """3 rows of 9: 27 elements, 4 comparisons each, as 2^4 is the least power above 9 - 1; of 8 it
    is 3; of 1 none."""
    attrs = SortAttrs(1, ((0, "LT", "total"),))
    assert counted(op("sort", (3, 9), attrs=attrs)) == 27 * 4
    assert counted(op("sort", (3, 8), attrs=attrs)) == 24 * 3
    assert counted(op("sort", (3, 1), attrs=attrs)) == 0


def test_windows_take_one_operation_per_element() -> None:
    """(10 - 4) // 3 + 1 = 3 windows of 4 x 2, 5 pairs of rows: 15 windows of 8."""
    sizes: tuple[Any, ...] = ((2, 4), (2, 3), (0, 0), (0, 0))
    assert counted(op("reduce_window", (10, 10), attrs=ReduceWindowAttrs("max", *sizes))) == 120
    attrs = SelectAndScatterAttrs("GE", *sizes)
    assert counted(op("select_and_scatter", (10, 10), (5, 3), attrs=attrs)) == 120


@pytest.mark.parametrize(("kind", "count"), [("add", 15), ("max", 15), ("replace", 0)])
def test_a_scatter_takes_one_operation_per_update(kind: str, count: int) -> None:
    """3 rows of 5."""
    attrs = ScatterAttrs(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=1,
        kind=kind,
    )
    types = [tensor_type((8, 5), F32), tensor_type((3, 1), DType.I32), tensor_type((3, 5), F32)]
    found = make_op("scatter", [Value(t) for t in types], attrs)
    assert counted(found) == count


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 20), (4, 30), (3, 26)])
def test_a_reduction_over_ranks_is_shared_out(size: int, count: int) -> None:
    """40 elements on each of n ranks: n - 1 additions per element, a rank does one in n of them:
    40 x 3 / 4; whole numbers, 40 x 2 / 3 = 26.7."""
    assert flops(graph(lambda b: b.all_reduce(b.input((40,)), ("tp",), size))) == count


def test_a_reduction_that_is_scattered_takes_as_many() -> None:
    found = graph(lambda b: b.reduce_scatter(b.input((40,)), 0, ("tp",), 4))
    assert flops(found) == 30


def test_a_loop_counts_its_body_as_often_as_it_runs() -> None:
    """3 times (4 of 2 x 8 x 8 x 8 FLOP, and the counter's addition), loops in loops too."""

    def body(b: Builder, _: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        (x,) = carries

        def inner(c: Builder, _: Value, own: tuple[Value, ...]) -> tuple[Value, ...]:
            return (c.dot(own[0], own[0]),)

        return b.loop(4, [x], inner)

    b = Builder()
    (result,) = b.loop(3, [b.input((8, 8))], body)
    found = b.finish(result)
    assert flops(found, CONTRACTIONS) == 3 * 4 * 1024
    assert flops(found) == 3 * (4 * (1024 + 1) + 1)
    (loop,) = (one for one in found.ops if one.name == "loop")
    assert OPS["loop"].flops(loop) == flops(found)


def test_what_is_light_may_be_repeated() -> None:
    assert is_light(op("add", (3,), (3,)))
    b = Builder()
    assert is_light(b.finish(b.reshape(b.input((4,)), (2, 2))).ops[0])
    assert not is_light(op("sort", (3,), attrs=SortAttrs(0, ((0, "LT", "total"),))))


def test_the_products_of_a_decoder_are_those_of_its_formula() -> None:
    """Per token, forward: 2 per parameter of a matrix, and 4 x sequence x width for scores and
    their use; backward twice that; 3 samples of 8 tokens. Recomputation runs the layers once more,
    but for the last matrix of each, whose result nothing in the layer reads.

    Source: PaLM, appendix B: 6 N + 12 L H Q T per token. Attention is not halved.
    """
    width, ffn, heads, kv = 32, 48, 4, 2
    assert (SIZES["hidden_size"], SIZES["intermediate_size"]) == (width, ffn)
    layer = width * width * 2 + width * (width // heads * kv) * 2 + 3 * width * ffn
    matrices = 2 * layer + width * 256
    forward = 2 * matrices + 2 * 4 * 8 * width
    tokens = 3 * 8
    plain, _, _ = captured_graph(config_task.train_task(SIZES, seq_len=8, remat="none"), 3)
    assert flops(plain, CONTRACTIONS) == 3 * forward * tokens
    full, _, _ = captured_graph(config_task.train_task(SIZES, seq_len=8, remat="full"), 3)
    again = 2 * 2 * (layer - width * ffn) + 2 * 4 * 8 * width
    assert flops(full, CONTRACTIONS) == (3 * forward + again) * tokens
