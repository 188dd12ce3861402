"""The fsdp recipe on its own: who is sharded how, what is predicted, what is refused. No
partitioner here.
"""

from __future__ import annotations

from collections import Counter

import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.orchestrator.models.config_task import train_task
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.spec import ShardingSpec, replicated
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies import INPUT, OUTPUT, Recipe
from shardwright.sharding.strategies.registry import recipe_of
from tests.models import prime_model
from tests.support.road import captured_graph, fsdp

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}


def linear_step(rows: int = 8, compute: DType = DType.F32) -> tuple[Graph, tuple, tuple]:
    """One weight (6, 8), its momentum, a batch: a gradient step by hand."""
    b = Builder()
    w, m, x = b.input((6, 8)), b.input((6, 8)), b.input((rows, 6), compute)
    y = b.op("tanh", b.dot(x, b.convert(w, compute)))
    grad = b.convert(b.dot(x, y, ((0,), (0,))), DType.F32)
    momentum = b.add(m, grad)
    loss = b.reduce(b.convert(y, DType.F32), "add", (0, 1))
    graph = b.finish(b.add(w, momentum), momentum, loss)
    inputs = (
        Slot("params/w", "parameter"),
        Slot("opt/m/w", "optimizer"),
        Slot("batch/x", "batch", 0),
    )
    outputs = (*inputs[:2], Slot("metrics/loss", "metric"))
    return graph, inputs, outputs


def predicted(recipe: Recipe) -> Counter:
    return Counter({(p.kind, p.axes, str(p.type)): n for p, n in recipe.predicted.items()})


def test_one_weight_by_hand() -> None:
    recipe = fsdp(*linear_step(compute=DType.BF16), make_mesh({"dp_replicate": 2, "dp_shard": 4}))
    verify(recipe.graph)
    shard = ShardingSpec(((), ("dp_shard",)))
    assert recipe.specs[(INPUT, 0)] == recipe.specs[(INPUT, 1)] == shard
    assert recipe.specs[(INPUT, 2)] == ShardingSpec((("dp_replicate", "dp_shard"), ()))
    assert [recipe.specs[(OUTPUT, i)] for i in range(3)] == [shard, shard, ShardingSpec(())]
    assert predicted(recipe) == {
        ("all_gather", ("dp_shard",), "tensor<6x8xbf16>"): 1,
        ("reduce_scatter", ("dp_shard",), "tensor<6x8xbf16>"): 1,
        ("all_reduce", ("dp_replicate",), "tensor<6x8xbf16>"): 1,
        ("all_reduce", ("dp_replicate", "dp_shard"), "tensor<f32>"): 1,
    }
    assert "follows params/w" in recipe.reasons["opt/m/w"]


def test_constraints_sit_after_the_conversion_and_after_the_gradient() -> None:
    recipe = fsdp(*linear_step(compute=DType.BF16), make_mesh({"dp_shard": 4}))
    made = recipe.graph.producers()
    constraints = [op for op in recipe.graph.ops if op.name == "sharding_constraint"]
    assert [made[op.operands[0]].name for op in constraints] == ["convert", "dot_general"]
    assert [op.attrs.spec for op in constraints] == [((), ()), ((), ("dp_shard",))]


def test_the_layers_found_are_told() -> None:
    graph, inputs, outputs = captured_graph(train_task(SIZES, seq_len=8), 4)
    recipe = fsdp(graph, inputs, outputs, make_mesh({"dp_shard": 4}))
    assert recipe.reasons["layers"].startswith("loop of 4 over 9 weights; loop of 4 over")
    assert fsdp(*linear_step(), make_mesh({"dp_shard": 4})).reasons["layers"] == "none found"


def test_layer_dim_of_a_scan_is_never_sharded() -> None:
    """Four layers over four shards: the layer dim divides and must not be taken."""
    graph, inputs, outputs = captured_graph(train_task(SIZES, seq_len=8), 4)
    recipe = fsdp(graph, inputs, outputs, make_mesh({"dp_shard": 4}))
    for i, slot in enumerate(inputs):
        spec = recipe.specs[(INPUT, i)]
        if slot.role == "parameter":
            assert spec.axes == ("dp_shard",), slot.name
        if "/layers/" in slot.name and slot.role in ("parameter", "optimizer"):
            assert spec.dims[0] == (), slot.name


def whole(spec: ShardingSpec) -> bool:
    return spec == replicated(len(spec.dims))


def test_optimizer_leaves_follow_their_weight_and_scalars_are_whole() -> None:
    graph, inputs, outputs = captured_graph(train_task(SIZES, seq_len=8), 4)
    recipe = fsdp(graph, inputs, outputs, make_mesh({"dp_shard": 4}))
    specs = {s.name: recipe.specs[(INPUT, i)] for i, s in enumerate(inputs)}
    weights = {n.removeprefix("params/"): s for n, s in specs.items() if n.startswith("params/")}
    leaves = [s for s in inputs if s.role == "optimizer"]
    followers = [(s, w) for s in leaves for w in weights if s.name.endswith(f"u/{w}")]
    assert len(followers) == 2 * len(weights)
    assert all(specs[slot.name] == weights[weight] for slot, weight in followers)
    assert all(whole(specs[s.name]) for s in leaves if s.name.endswith("count"))


def test_an_optimizer_leaf_with_a_name_of_its_own_follows_by_dataflow() -> None:
    graph, inputs, outputs = linear_step()
    renamed = (inputs[0], Slot("opt/velocity", "optimizer"), inputs[2])
    recipe = fsdp(graph, renamed, outputs, make_mesh({"dp_shard": 4}))
    assert recipe.specs[(INPUT, 1)] == recipe.specs[(INPUT, 0)]
    assert "combined with" in recipe.reasons["opt/velocity"]


def test_prime_widths_stay_whole_and_their_gradients_are_all_reduced() -> None:
    graph, inputs, outputs = captured_graph(prime_model.train_task(), 4)
    recipe = fsdp(graph, inputs, outputs, make_mesh({"dp_shard": 4}))
    for i, slot in enumerate(inputs):
        if slot.role == "parameter":
            assert whole(recipe.specs[(INPUT, i)])
            assert "no dim divides by dp_shard=4" in recipe.reasons[slot.name]
    kinds = {p.kind for p in recipe.predicted}
    assert kinds == {"all_reduce"}


def test_a_large_weight_that_stays_whole_is_a_finding() -> None:
    b = Builder()
    w, x = b.input((521, 523)), b.input((8, 521))
    graph = b.finish(b.add(w, b.dot(x, b.dot(x, w), ((0,), (0,)))))
    slot = Slot("params/w", "parameter")
    recipe = fsdp(graph, (slot, Slot("batch/x", "batch", 0)), (slot,), make_mesh({"dp_shard": 4}))
    (finding,) = recipe.findings
    assert finding.code == "SW_FSDP_REPLICATED" and "params/w" in finding.message


def test_a_weight_that_nobody_asked_to_spread_is_no_finding() -> None:
    b = Builder()
    w, x = b.input((512, 512)), b.input((8, 512))
    graph = b.finish(b.add(w, b.dot(x, b.dot(x, w), ((0,), (0,)))))
    slot = Slot("params/w", "parameter")
    step = graph, (slot, Slot("batch/x", "batch", 0)), (slot,)
    recipe = recipe_of(*step, make_mesh({"dp_shard": 4}), StrategySettings(name="generic", zero=0))
    assert whole(recipe.specs[(INPUT, 0)])
    assert recipe.findings == ()


def test_a_batch_that_does_not_divide_is_refused_with_numbers() -> None:
    with pytest.raises(ShardingError) as caught:
        fsdp(*linear_step(rows=12), make_mesh({"dp_replicate": 2, "dp_shard": 4}))
    text = str(caught.value)
    assert caught.value.code == "SW_BATCH_DIVIDE"
    assert "multiple of 8 (dp_replicate=2 * dp_shard=4)" in text and "got 12" in text
    assert "strategy.micro_batch" in text and "batch/x" in text


def test_zero_stages_of_other_strategies_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"strategy\.zero = 3, got 1"):
        recipe_of(*linear_step(), make_mesh({"dp_shard": 2}), StrategySettings(zero=1))


def test_a_sequence_axis_needs_a_sequence() -> None:
    with pytest.raises(ShardingError, match=r"mesh\.cp requires a sequence dim"):
        fsdp(*linear_step(), make_mesh({"dp_shard": 2, "cp": 2}))


def test_one_core_predicts_nothing() -> None:
    recipe = fsdp(*linear_step(), make_mesh({"dp_shard": 1}))
    assert not recipe.predicted
    assert all(whole(spec) for spec in recipe.specs.values())


def test_an_op_that_ends_the_batch_dim_is_a_finding() -> None:
    b = Builder()
    w, x = b.input((6, 8)), b.input((8, 6))
    first = b.slice(x, (0, 0), (1, 6))
    graph = b.finish(b.reduce(b.dot(first, w), "add", (0, 1)))
    slots = (Slot("params/w", "parameter"), Slot("batch/x", "batch", 0))
    recipe = fsdp(graph, slots, (Slot("metrics/loss", "metric"),), make_mesh({"dp_shard": 4}))
    assert [f.code for f in recipe.findings] == ["SW_BATCH_LOST"]
