"""Layers and batch dims are found by structure, in models nobody wrote for this."""

from __future__ import annotations

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import GatherAttrs
from shardwright.compiler.ir.types import Graph
from shardwright.orchestrator.models.config_task import train_task
from shardwright.sharding.indices.dim_sets import DimTable, shard_classes
from shardwright.sharding.indices.dims import batch_labels, reached
from shardwright.sharding.indices.layers import scanned_layers, unrolled_layers
from shardwright.sharding.partition.partitioned import Slot
from tests.models import flax_decoder, prime_model
from tests.support.road import captured_graph

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}


def batch_of(graph: Graph, inputs: tuple[Slot, ...]) -> dict:
    pairs = zip(inputs, graph.inputs, strict=True)
    return batch_labels(graph, {v: s.batch_dim or 0 for s, v in pairs if s.role == "batch"}).dims


def weights_of(graph: Graph, inputs: tuple[Slot, ...]) -> set:
    pairs = zip(inputs, graph.inputs, strict=True)
    return reached(graph, [v for s, v in pairs if s.role == "parameter"])


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_scanned_layers_have_one_boundary_and_all_stacked_weights(remat: str) -> None:
    graph, inputs, _ = captured_graph(train_task(SIZES, seq_len=8, remat=remat), 4)
    forward, backward = scanned_layers(graph)
    stacked = {i.name for i in inputs if i.role == "parameter" and "/layers/" in i.name}
    for scan in (forward, backward):
        boundaries = [scan.loop.results[i].type.shape for i in scan.boundaries]
        assert (4, 8, 32) in boundaries
        assert set(scan.weights.values()) == {0}
    weights = {forward.loop.operands[i] for i in forward.weights}
    named = {s.name for s, v in zip(inputs, graph.inputs, strict=True) if v in weights}
    assert named == stacked
    assert len(forward.boundaries) == 1
    assert set(backward.stacks.values()) == {0} and len(backward.stacks) == len(stacked)


@pytest.mark.parametrize(
    ("task", "samples", "width"),
    [
        (flax_decoder.train_task(num_layers=4, seq_len=8), 4, (4, 8, 64)),
        (prime_model.train_task(num_blocks=4), 4, None),
    ],
    ids=["flax", "prime"],
)
def test_unrolled_layers_forward_and_backward(task: object, samples: int, width: object) -> None:
    graph, inputs, _ = captured_graph(task, samples)
    runs = unrolled_layers(graph, batch_of(graph, inputs), weights_of(graph, inputs))
    assert [len(run.repeats) for run in runs] == [4, 4]
    for run in runs:
        assert len({tuple(op.name for op in ops) for ops in run.repeats[:-1]}) == 1
        for boundary in run.boundaries:
            assert len(boundary) == 1, "one residual stream connects two layers"
            assert width is None or boundary[0].type.shape == width


def test_code_without_repeats_has_no_layers() -> None:
    b = Builder()
    x, w, v = b.input((4, 8)), b.input((8, 16)), b.input((16, 8))
    graph = b.finish(b.dot(b.dot(x, w), v))
    assert unrolled_layers(graph, batch_labels(graph, {x: 0}).dims, {w, v}) == []


def test_different_code_between_equal_weights_is_not_a_layer() -> None:
    """Three uses alike in shape, but each followed by different arithmetic."""
    b = Builder()
    x, w, u = b.input((4, 8)), b.input((8, 8)), b.input((8, 8))
    for step in ("tanh", "exponential", "negate", "abs", "sine", "cosine"):
        x = b.op(step, b.dot(b.op(step, b.dot(x, w)), u))
    graph = b.finish(x)
    labels = batch_labels(graph, {graph.inputs[0]: 0})
    assert unrolled_layers(graph, labels.dims, {w, u}) == []


def test_batch_dim_follows_shape_changes() -> None:
    b = Builder()
    x, w = b.input((4, 6, 8)), b.input((8, 10))
    merged = b.reshape(x, (24, 8))
    y = b.dot(merged, w)
    split = b.reshape(y, (4, 6, 2, 5))
    turned = b.transpose(split, (2, 1, 0, 3))
    wide = b.broadcast(turned, (7, 2, 6, 4, 5), (1, 2, 3, 4))
    summed = b.reduce(wide, "add", (0, 4))
    gone = b.reduce(summed, "add", (2,))
    weight = b.dot(merged, y, ((0,), (0,)))
    graph = b.finish(summed, gone, weight)
    dims = batch_labels(graph, {x: 0}).dims
    expected = {x: 0, merged: 0, y: 0, split: 0, turned: 2, wide: 3, summed: 2}
    assert dims == expected


def test_batch_dim_follows_loops_stacks_and_lookups() -> None:
    b = Builder()
    tokens, table = b.input((4, 3, 1), DType.I32), b.input((11, 8))
    looked = b.op(
        "gather",
        table,
        tokens,
        attrs=GatherAttrs(
            offset_dims=(2,),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            index_vector_dim=2,
            slice_sizes=(1, 8),
        ),
    )
    stack = b.full((5, 4, 3, 8), 0.0)

    def body(inner: Builder, index: object, carries: tuple) -> tuple:
        x, saved = carries
        zero = inner.constant(0, DType.I32)
        update = inner.reshape(x, (1, 4, 3, 8))
        saved = inner.dynamic_update_slice(saved, update, [index, zero, zero, zero])
        return inner.op("tanh", x), saved

    last, saved = b.loop(5, [looked, stack], body)
    graph = b.finish(last, saved)
    dims = batch_labels(graph, {tokens: 0}).dims
    assert dims[looked] == 0 and dims[last] == 0 and dims[saved] == 1
    assert stack not in dims and table not in dims


def test_classes_tie_a_weight_to_its_gradient_and_state_but_not_to_others() -> None:
    b = Builder()
    x, w, m, other = b.input((4, 6)), b.input((6, 8)), b.input((6, 8)), b.input((6, 8))
    y = b.dot(x, b.convert(w, DType.F32))
    grad = b.dot(x, b.op("tanh", y), ((0,), (0,)))
    new_m = b.add(m, grad)
    graph = b.finish(b.add(w, new_m), b.dot(x, other))
    classes = shard_classes(DimTable(graph), batch_labels(graph, {x: 0}).dims)
    for dim in (0, 1):
        tied = {classes.find((v, dim)) for v in (w, m, grad, new_m)}
        assert len(tied) == 1
        assert classes.find((other, dim)) not in tied
