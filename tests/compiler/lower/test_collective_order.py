"""The order in which collectives of a function start: that of the code which needs them."""

from __future__ import annotations

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.lower.function import Signature
from shardwright.sharding.cut.overlap.buckets import bucketed
from tests.support.building import Builder
from tests.support.kernel_reference import lower_function

DP = ("dp_shard",)
SMALL_BYTES = 4096


def _gathered(b: Builder, rows: int, columns: int) -> Value:
    """A weight whose shard is rounded and gathered."""
    short = b.op("convert", b.input((rows, columns)), attrs=ConvertAttrs(DType.BF16))
    return b.all_gather(short, 0, DP, group_size=2)


def _layer() -> Graph:
    """Two small weights are needed before a large one."""
    b = Builder()
    value = b.input((4, 16), DType.BF16)
    for rows, columns in ((8, 16), (8, 16), (8, 512)):
        value = b.dot(value, _gathered(b, rows, columns), ((1,), (0,)))
    return b.finish(value)


def test_a_bucket_that_is_needed_first_starts_first() -> None:
    """It is put together before the larger collective behind it goes out."""
    lowered = lower_function(bucketed(_layer(), SMALL_BYTES))
    assert [len(call.parts) for call in lowered.collectives] == [2, 0]
    kinds = [kernel.kind for kernel in lowered.kernels]
    starts = [at for at, kind in enumerate(kinds) if kind == "collective_start"]
    filling = [at for at, kernel in enumerate(lowered.kernels) if "write" in kernel.name]
    assert max(filling) < starts[0]
    assert kinds.index("collective_wait") > starts[1]


def _keeping(as_rows: bool) -> tuple[Graph, Signature]:
    """Two layers of a product each, whose gathered weights are written to stacks first: to rows, or
    between the rows of other layers.
    """
    b = Builder()
    counter, value = b.input((), DType.I32), b.input((4, 16))
    stacks, zero = [], b.constant(0, DType.I32)
    for _ in range(2):
        weight = b.all_gather(b.input((8, 16)), 0, DP, group_size=2)
        shape, starts = ((1, 16, 16), (counter, zero, zero))
        if not as_rows:
            shape, starts = ((16, 1, 16), (zero, counter, zero))
        stack = b.input(tuple(3 if n == 1 else n for n in shape))
        stacks.append((stack, b.dynamic_update_slice(stack, b.reshape(weight, shape), starts)))
        value = b.dot(value, weight, ((1,), (0,)))
    graph = b.finish(value, *(after for _, after in stacks))
    owners = [(k, graph.inputs.index(stack)) for k, (stack, _) in enumerate(stacks, 1)]
    return graph, Signature(parameters=((0, 0, 2),), aliases=tuple(owners))


@pytest.mark.parametrize(("as_rows", "store"), [(False, ["write"]), (True, [])])
def test_a_store_of_what_was_gathered_waits_for_the_product_that_reads_it(
    as_rows: bool, store: list[str]
) -> None:
    """Code waits for a weight where it computes with it, not before, to copy it. What goes to a row
    needs no copy.
    """
    kernels = lower_function(*_keeping(as_rows)).kernels
    steps = [k.name for k in kernels if k.kind == "compute" or k.kind == "collective_wait"]
    assert steps == 2 * ["wait.all_gather", "dot_general", *store]
