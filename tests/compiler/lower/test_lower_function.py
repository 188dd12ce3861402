"""Lowered functions compute what their graphs say, in the kernels one expects."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import AllSliceAttrs, GatherAttrs, PadAttrs, ScatterAttrs
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.lower.rule import Budget
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import unit_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.result import distance
from tests.support.building import Builder
from tests.support.kernel_reference import check_lowering, lower_function, run_lowered

RNG = np.random.default_rng(0)
IN_PLACE = Signature(aliases=((0, 0),))


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def kinds(lowered: Lowered) -> list[str]:
    return [k.kind for k in lowered.kernels]


def count(lowered: Lowered, op: str) -> int:
    return sum(n.op == op for k in lowered.kernels for n in k.nodes)


def rms_norm(b: Builder, x, gain):
    t, d = x.type.shape
    mean = b.multiply(b.reduce(b.multiply(x, x), "add", (1,)), b.full((t,), 1 / d))
    scale = b.op("rsqrt", b.add(mean, b.full((t,), 1e-5)))
    y = b.multiply(x, b.broadcast(scale, (t, d), (0,)))
    return b.multiply(y, b.broadcast(gain, (t, d), (1,)))


def softmax(b: Builder, x):
    shape, last = x.type.shape, x.type.rank - 1
    dims = tuple(range(last))
    m = b.broadcast(b.reduce(x, "max", (last,)), shape, dims)
    e = b.op("exponential", b.op("subtract", x, m))
    return b.op("divide", e, b.broadcast(b.reduce(e, "add", (last,)), shape, dims))


def test_rms_norm_is_one_kernel_that_reads_its_rows_once() -> None:
    b = Builder()
    x, gain = b.input((64, 10)), b.input((10,))
    lowered = check_lowering(b.finish(rms_norm(b, x, gain)), [normal(64, 10), normal(10)])
    assert len(lowered.kernels) == 1 and lowered.kernels[0].iter_dims == (64, 10)
    assert count(lowered, "load") == 2


def test_causal_softmax_is_one_kernel_and_remakes_its_mask() -> None:
    b = Builder()
    s = b.input((2, 40, 40))
    rows, columns = b.iota((40, 40), 0), b.iota((40, 40), 1)
    mask = b.broadcast(b.compare(rows, columns, "GE"), (2, 40, 40), (1, 2))
    x = b.op("select", mask, s, b.full((2, 40, 40), -1e9))
    lowered = check_lowering(b.finish(softmax(b, x)), [normal(2, 40, 40)])
    assert len(lowered.kernels) == 1 and lowered.scratch_bytes == 0


def test_rows_that_do_not_fit_are_split_at_reductions() -> None:
    b = Builder()
    graph = b.finish(softmax(b, b.input((64, 300))))
    lowered = check_lowering(graph, [normal(64, 300)], budget=Budget(1000, 1000, 192))
    assert len(lowered.kernels) == 3
    for kernel in lowered.kernels:
        reduced = [i for i, n in enumerate(kernel.nodes) if n.op == "reduce"]
        used = {i for n in kernel.nodes if n.op != "store" for i in n.inputs}
        assert not used & set(reduced), "a split kernel can be tiled over columns"


def test_adamw_is_one_kernel_in_place() -> None:
    b = Builder()
    p, m, v, g = (b.input((33, 7)) for _ in range(4))
    rate = b.input(())
    m2 = b.add(b.multiply(m, b.full((33, 7), 0.9)), b.multiply(g, b.full((33, 7), 0.1)))
    v2 = b.add(
        b.multiply(v, b.full((33, 7), 0.95)), b.multiply(b.multiply(g, g), b.full((33, 7), 0.05))
    )
    step = b.op("divide", m2, b.add(b.op("sqrt", v2), b.full((33, 7), 1e-8)))
    p2 = b.op("subtract", p, b.multiply(step, b.broadcast(rate, (33, 7))))
    signature = Signature(aliases=((0, 0), (1, 1), (2, 2)))
    inputs = [normal(33, 7), normal(33, 7), abs(normal(33, 7)), normal(33, 7)]
    inputs.append(np.asarray(0.01, np.float32))
    lowered = check_lowering(b.finish(p2, m2, v2), inputs, signature)
    assert len(lowered.kernels) == 1 and lowered.scratch_bytes == 0


def test_contraction_reads_any_strides_and_converts_its_result() -> None:
    b = Builder()
    q, k = b.input((2, 7, 3, 5)), b.input((2, 6, 3, 5))
    transposed = b.transpose(q, (0, 2, 1, 3)), b.transpose(k, (0, 2, 1, 3))
    scores = b.dot(*transposed, ((3,), (3,)), ((0, 1), (0, 1)))
    graph = b.finish(b.convert(scores, DType.BF16))
    lowered = check_lowering(graph, [normal(2, 7, 3, 5), normal(2, 6, 3, 5)])
    assert len(lowered.kernels) == 1
    assert not [t for t in lowered.tensors if t.kind == "scratch"]


def test_grouped_heads_need_no_repeated_keys() -> None:
    b = Builder()
    q, k = b.input((5, 4, 6)), b.input((7, 2, 6))
    wide = b.reshape(b.broadcast(k, (7, 2, 2, 6), (0, 1, 3)), (7, 4, 6))
    graph = b.finish(b.dot(q, wide, ((2,), (2,)), ((1,), (1,))))
    lowered = check_lowering(graph, [normal(5, 4, 6), normal(7, 2, 6)])
    assert len(lowered.kernels) == 1 and lowered.scratch_bytes == 0


def test_a_value_and_its_transpose_get_indices_of_their_own() -> None:
    b = Builder()
    x = b.input((6, 6))
    y = b.op("tanh", x)
    graph = b.finish(b.add(y, b.transpose(y, (1, 0))), b.add(x, b.transpose(x, (1, 0))))
    check_lowering(graph, [normal(6, 6)])


def test_stack_is_updated_in_place_at_a_counter() -> None:
    b = Builder()
    stack, x, i = b.input((4, 3, 5)), b.input((3, 5)), b.input((), DType.I32)
    zero = b.constant(0, DType.I32)
    below = b.compare(i, zero, "LT")
    wrapped = b.op("select", below, b.add(i, b.constant(4, DType.I32)), i)
    update = b.reshape(b.op("tanh", x), (1, 3, 5))
    graph = b.finish(b.dynamic_update_slice(stack, update, (wrapped, zero, zero)))
    signature = Signature(parameters=((2, 0, 3),), aliases=((0, 0),))
    lowered = check_lowering(graph, [normal(4, 3, 5), normal(3, 5)], signature, [2])
    assert len(lowered.kernels) == 1 and lowered.scratch_bytes == 0
    (store,) = [n for n in lowered.kernels[0].nodes if n.op == "store"]
    assert store.attrs["view"].offset.terms == ((0, 15),)


@pytest.mark.parametrize("start", [-3, 1, 9])
def test_data_dependent_start_goes_through_a_clamped_register(start: int) -> None:
    b = Builder()
    x, i = b.input((5, 3)), b.input((), DType.I32)
    row = b.dynamic_slice(x, (i, b.constant(0, DType.I32)), (2, 3))
    lowered = check_lowering(
        b.finish(b.op("negate", row)), [normal(5, 3), np.asarray(start, np.int32)]
    )
    assert kinds(lowered) == ["register_load", "compute"]


def test_update_whose_old_value_is_read_later_is_not_in_place() -> None:
    b = Builder()
    x, i = b.input((4, 3)), b.constant(1, DType.I32)
    new = b.dynamic_update_slice(x, b.full((1, 3), 7.0), (i, b.constant(0, DType.I32)))
    late = b.add(b.dot(new, x, ((1,), (1,))), b.full((4, 4), 1.0))
    check_lowering(b.finish(new, late), [normal(4, 3)], IN_PLACE)


def test_outputs_that_trade_places() -> None:
    b = Builder()
    x, y = b.input((4, 4)), b.input((4, 4))
    graph = b.finish(y, b.transpose(x, (1, 0)))
    check_lowering(graph, [normal(4, 4), normal(4, 4)], Signature(aliases=((0, 0), (1, 1))))


def test_transposed_update_of_an_input_uses_scratch() -> None:
    b = Builder()
    x = b.input((4, 4))
    graph = b.finish(b.add(x, b.op("tanh", b.transpose(x, (1, 0)))))
    lowered = check_lowering(graph, [normal(4, 4)], IN_PLACE)
    assert lowered.scratch_bytes > 0


def test_parts_are_written_where_they_are_computed() -> None:
    b = Builder()
    x, cos, sin = b.input((5, 2, 8)), b.input((5, 2, 4)), b.input((5, 2, 4))
    low, high = b.slice(x, (0, 0, 0), (5, 2, 4)), b.slice(x, (0, 0, 4), (5, 2, 8))
    first = b.op("subtract", b.multiply(low, cos), b.multiply(high, sin))
    second = b.add(b.multiply(high, cos), b.multiply(low, sin))
    graph = b.finish(b.concatenate((first, second), 2))
    lowered = check_lowering(graph, [normal(5, 2, 8), normal(5, 2, 4), normal(5, 2, 4)])
    assert len(lowered.kernels) == 2 and lowered.scratch_bytes == 0


def test_padding_is_filled_then_the_rest_written() -> None:
    b = Builder()
    x = b.input((5, 4))
    attrs = PadAttrs((2, -1), (-1, 3), (1, 0))
    graph = b.finish(b.op("pad", b.op("tanh", x), b.full((), 0.5), attrs=attrs))
    check_lowering(graph, [normal(5, 4)])


LABELS = GatherAttrs(
    offset_dims=(),
    collapsed_slice_dims=(0, 1),
    start_index_map=(0, 1),
    index_vector_dim=1,
    slice_sizes=(1, 1),
)


def test_label_gather_joins_the_loss_kernel_and_its_gradient() -> None:
    """logits[arange(n), labels] and its scatter-add become comparisons with a count."""
    b = Builder()
    logits, labels = b.input((40, 9)), b.input((40, 1), DType.I32)
    index = b.concatenate((b.iota((40, 1), 0), labels), 1)
    picked = b.op("gather", softmax(b, logits), index, attrs=LABELS)
    back = ScatterAttrs(
        update_window_dims=(),
        inserted_window_dims=(0, 1),
        scatter_dims_to_operand_dims=(0, 1),
        index_vector_dim=1,
        kind="add",
    )
    spread = b.op("scatter", b.full((40, 9), 0.0), index, picked, attrs=back)
    inputs = [normal(40, 9), RNG.integers(0, 9, (40, 1)).astype(np.int32)]
    lowered = check_lowering(b.finish(picked, spread), inputs)
    assert len(lowered.kernels) == 1 and count(lowered, "load_indexed") == 0


def test_collectives_start_early_and_are_awaited_late() -> None:
    b = Builder()
    w, x = b.input((3, 6)), b.input((8, 6))
    whole = b.all_gather(w, 0, ("dp_shard",), 2)
    y = b.op("tanh", b.dot(x, x, ((1,), (1,))))
    z = b.dot(b.dot(y, x), whole, ((1,), (1,)))
    lowered = lower_function(b.finish(b.reduce_scatter(z, 0, ("dp_shard",), group_size=2)))
    order = kinds(lowered)
    assert order[0] == "collective_start" and order.index("collective_wait") == 3
    assert order[-2:] == ["collective_start", "collective_wait"]
    assert [c.kind for c in lowered.collectives] == ["all_gather", "reduce_scatter"]
    assert lowered.collectives[0].source_shape == (1, 3, 6)
    given = [normal(3, 6), normal(8, 6)]

    def collective(call, source):
        if call.kind == "all_gather":
            return np.concatenate([source, source])
        return 2 * source[: source.size // 2]

    (have,) = run_lowered(lowered, given, collective=collective)
    gathered = np.concatenate([given[0], given[0]])
    inner = np.tanh(given[1] @ given[1].T) @ given[1]
    assert distance(have, 2 * (inner @ gathered.T)[:4]) <= 1e-6


def test_refusals_name_the_line() -> None:
    b = Builder(loc=Loc("model.py", 41))
    graph = b.finish(b.op("all_slice", b.input((4, 3)), attrs=AllSliceAttrs(0, ("tp",))))
    with pytest.raises(CompileError, match=r"model.py:41: error\[NCC_EVRF001\].*all_slice"):
        lower_function(graph)


def test_integer_sums_over_ranks_go_through_fp32_or_are_refused() -> None:
    for name, code in (("all_reduce", "NCC_EVRF061"), ("reduce_scatter", "NCC_EVRF063")):
        b = Builder()
        x = b.input((4,), DType.I32)
        axes = ("dp_shard",)
        reduced = (
            b.all_reduce(x, axes, group_size=2)
            if name == "all_reduce"
            else b.reduce_scatter(x, 0, axes, group_size=2)
        )
        graph = b.finish(reduced)
        (call,) = lower_function(graph).collectives
        assert call.dtype is DType.F32
        options = CompileOptions(implicit_integer_downcast="none")
        with pytest.raises(CompileError) as caught:
            run(graph, unit_passes(options))
        assert caught.value.code == code


def test_a_permuted_result_that_strides_cannot_reshape_is_copied() -> None:
    """Readers walk a contraction's result transposed; one of them regroups it across the order."""
    b = Builder()
    x, y = b.input((6, 5)), b.input((4, 5))
    z = b.dot(x, y, ((1,), (1,)))
    transposed = b.op("tanh", b.transpose(z, (1, 0)))
    again = b.op("abs", b.transpose(z, (1, 0)))
    flat = b.op("negate", b.reshape(z, (8, 3)))
    check_lowering(b.finish(transposed, again, flat), [normal(6, 5), normal(4, 5)])


def test_a_copy_stands_alone_where_its_reader_cuts_a_row_otherwise() -> None:
    """Eight pieces of 96 read as twelve of 64: heads that tensor parallelism does not divide. No
    index has both, so what makes rows of the pieces and what reads them share no kernel."""
    b = Builder()
    pieces = b.reshape(b.transpose(b.input((8, 2, 96)), (1, 0, 2)), (2, 768))
    check_lowering(b.finish(b.op("abs", b.reshape(pieces, (2, 12, 64)))), [normal(8, 2, 96)])
