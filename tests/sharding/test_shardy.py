"""Partitioning: textbook FSDP and HSDP, values against the unsharded graph and XLA, and every way
it can refuse.
"""

from __future__ import annotations

import dataclasses
import functools
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import tests.support.xla_spmd as xla_spmd
from shardwright.compiler.diagnostics import ExecutionError, Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ScatterAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.orchestrator.models import decoder, leaves
from shardwright.orchestrator.models.config_task import train_task
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import How
from shardwright.sharding.partition import partitioner, shardy
from shardwright.sharding.partition.findings import collectives, unexpected, with_findings
from shardwright.sharding.partition.mesh import Mesh, make_mesh
from shardwright.sharding.partition.partitioned import (
    PartitionedGraph,
    Slot,
    all_values,
    decode_partitioned,
    encode_partitioned,
)
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.shardy_import import mesh_of_atoms
from shardwright.sharding.partition.spec import ShardingSpec, sharded
from shardwright.sharding.strategies import INPUT, OUTPUT, Recipe
from shardwright.sim_cluster.values.result import distance
from tests.models import flax_decoder, prime_model
from tests.support.partitioned import partition_here, run_global, run_sharded, traffic_bytes
from tests.support.road import captured_graph, fsdp
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import random_inputs
from tests.support.whole_runs import run_whole

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}
LAYER_WEIGHTS = 9
OUTER_WEIGHTS = 3
FSDP8 = make_mesh({"dp_shard": 8})
HSDP = make_mesh({"dp_replicate": 2, "dp_shard": 4})
HSDP4 = make_mesh({"dp_replicate": 2, "dp_shard": 2})


@dataclasses.dataclass(frozen=True)
class Road:
    graph: Graph
    inputs: tuple[Slot, ...]
    recipe: Recipe
    part: PartitionedGraph


def make_task(name: str) -> TrainTask:
    match name:
        case "flax":
            return flax_decoder.train_task(width=32, num_layers=2, seq_len=8, vocab=64)
        case "prime":
            return prime_model.train_task(num_blocks=1)
    family, dtype, remat = name.split("-")
    assert family == "llama"
    return train_task(SIZES, seq_len=8, dtype=dtype, remat=remat)


@functools.cache
def captured(name: str) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    return captured_graph(make_task(name), 8)


@functools.cache
def road(name: str, mesh: Mesh) -> Road:
    graph, inputs, outputs = captured(name)
    recipe = fsdp(graph, inputs, outputs, mesh)
    part = partition_here(recipe.graph, mesh, recipe.specs, inputs, outputs)
    part = with_findings(rewrite(part), recipe)
    verify(part.graph)
    return Road(graph, inputs, recipe, part)


def counts(graph: Graph) -> Counter:
    return Counter((op.name, op.attrs.axes) for op in collectives(graph))


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_scanned_fsdp_is_the_textbook(remat: str) -> None:
    """One gather per weight and pass, one reduce-scatter per weight gradient, two scalars."""
    part = road(f"llama-f32-{remat}", FSDP8).part
    forward, backward = (op.regions[0] for op in part.graph.ops if op.name == "loop")
    axes = ("dp_shard",)
    assert counts(forward) == {("all_gather", axes): LAYER_WEIGHTS}
    assert counts(backward) == {
        ("all_gather", axes): LAYER_WEIGHTS,
        ("reduce_scatter", axes): LAYER_WEIGHTS,
    }
    outside = counts(part.graph) - counts(forward) - counts(backward)
    assert outside == {
        ("all_gather", axes): OUTER_WEIGHTS,
        ("reduce_scatter", axes): OUTER_WEIGHTS,
        ("all_reduce", axes): 2,
    }
    scalars = [op for op in part.graph.ops if op.name == "all_reduce"]
    assert all(op.result.type.shape == () for op in scalars), "loss and global norm"
    assert part.findings == ()


def test_weights_are_gathered_and_gradients_reduced_in_the_compute_type() -> None:
    part = road("llama-bf16-full", FSDP8).part
    moved = [op for op in collectives(part.graph) if op.result.type.rank]
    assert {op.result.type.dtype for op in moved} == {DType.BF16}


def test_hsdp_reduces_the_shard_over_replicas() -> None:
    """reduce_scatter(dp_shard) of every gradient, then all_reduce(dp_replicate) of its shard, in
    bytes per axis.
    """
    result = road("llama-f32-full", HSDP)
    part = result.part
    made = {v: op for op in part.graph.walk() for v in op.results}
    for op in collectives(part.graph):
        if op.attrs.axes == ("dp_replicate",):
            source = made[op.operands[0]]
            assert (source.name, source.attrs.axes) == ("reduce_scatter", ("dp_shard",))
            assert part.specs[op.result].axes == ("dp_shard",)
    gradient_bytes = sum(
        v.type.num_bytes
        for s, v in zip(result.inputs, result.graph.inputs, strict=True)
        if s.role == "parameter"
    )
    traffic = traffic_bytes(part)
    assert traffic.pop(("reduce_scatter", ("dp_shard",))) == gradient_bytes
    assert traffic.pop(("all_reduce", ("dp_replicate",))) == gradient_bytes // 4
    layers = sum(
        v.type.num_bytes
        for s, v in zip(result.inputs, result.graph.inputs, strict=True)
        if s.name.startswith("params/layers/")
    )
    assert traffic.pop(("all_gather", ("dp_shard",))) == gradient_bytes + layers
    assert traffic == {
        ("all_reduce", ("dp_replicate", "dp_shard")): 4,
        ("all_reduce", ("dp_shard",)): 4,
    }


@pytest.mark.parametrize("mesh", [FSDP8, HSDP], ids=str)
@pytest.mark.parametrize("name", ["llama-f32-none", "llama-bf16-full", "flax", "prime"])
def test_no_collective_is_a_surprise(name: str, mesh: Mesh) -> None:
    result = road(name, mesh)
    assert unexpected(result.part.graph, result.recipe.predicted, mesh) == []
    predicted = Counter({(p.kind, p.axes): 0 for p in result.recipe.predicted})
    for item, number in result.recipe.predicted.items():
        predicted[(item.kind, item.axes)] += number if item.type.rank else 0
    shaped = Counter(
        (op.name, op.attrs.axes) for op in collectives(result.part.graph) if op.result.type.rank
    )
    tied = 1 if name == "flax" else 0  # the recipe predicts both gradients of the tied embedding
    for kind in ("reduce_scatter", "all_reduce"):
        for key in [k for k in predicted if k[0] == kind and predicted[k]]:
            predicted[key] -= tied
    assert +predicted == shaped


def test_unrolled_weights_are_gathered_once_each() -> None:
    """Without rematerialisation forward and backward share the gathered value until the step is
    cut.
    """
    result = road("flax", FSDP8)
    weights = [s for s in result.inputs if s.role == "parameter"]
    number = counts(result.part.graph)
    assert number[("all_gather", ("dp_shard",))] == len(weights)
    assert number[("reduce_scatter", ("dp_shard",))] == len(weights), "the tied embedding once too"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama-f32-full", HSDP4),
        ("llama-f32-none", make_mesh({"dp_shard": 4})),
        ("flax", HSDP4),
        ("prime", HSDP4),
    ],
    ids=lambda v: str(v),
)
def test_values_equal_the_unsharded_graph(name: str, mesh: Mesh) -> None:
    result = road(name, mesh)
    inputs = random_inputs(result.graph, result.inputs)
    given = run_whole(result.part, inputs)
    wanted = evaluate(result.graph, inputs)
    worst = max(distance(g, w) for g, w in zip(given, wanted, strict=True))
    assert worst <= 1e-5


@pytest.mark.parametrize("mesh", [pytest.param(FSDP8, marks=pytest.mark.matrix), HSDP], ids=str)
def test_xla_partitions_the_same_way(mesh: Mesh) -> None:
    """Gathers: equal counts and elements over the step. Gradients: all reduced. Equal values."""
    result = road("llama-f32-full", mesh)
    step = xla_spmd.XlaStep(result.recipe, mesh)
    theirs = {key: n for key, n in step.collectives().items() if key[1] > 1}
    assert {kind for kind, _, _ in theirs} == {"all-gather", "all-reduce"}
    ours = executed(result.part.graph)
    for kind, mine in (("all-gather", "all_gather"), ("all-reduce", "reduce_scatter")):
        found = [(k, n) for k, n in theirs.items() if k[0] == kind]
        count, elements = sum(k == mine for k, _ in ours), sum(n for k, n in ours if k == mine)
        trips = SIZES["num_hidden_layers"]
        their_elements = sum(n * k[1] * (trips if k[2] else 1) for k, n in found)
        their_count = sum(n for _, n in found)
        # Under HSDP XLA also reduces shards over the replicas, but small gradients in one go.
        extra = mesh is HSDP and kind == "all-reduce"
        shards = elements // mesh.sizes["dp_shard"] if extra else 0
        assert count <= their_count <= count * (2 if extra else 1)
        assert elements <= their_elements <= elements + shards
    inputs = random_inputs(result.graph, result.inputs)
    outputs = run_whole(result.part, inputs)
    for i, parts in enumerate(step.run(inputs)):
        value, spec = result.part.graph.outputs[i], result.recipe.specs[(OUTPUT, i)]
        local = spec.local_shape(value.type.shape, mesh.sizes)
        assert all(part.shape == local for part in parts)
        whole = xla_spmd.join(parts, spec, value.type.shape, mesh)
        assert distance(outputs[i], whole) <= 1e-5, i


def executed(graph: Graph, times: int = 1) -> list[tuple[str, int]]:
    """(kind, elements moved over the step) of every collective that is not scalar."""
    found = []
    for op in graph.ops:
        for region in op.regions:
            found += executed(region, times * op.attrs.trip)
    level = [op for op in graph.ops if op.name in TRAFFIC and op.result.type.rank]
    return found + [(op.name, times * op.result.type.num_elements) for op in level]


def awkward_graph() -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """Weights whose sharded dim is split by a reshape, cut by a slice, or joined by a pad."""
    b = Builder(loc=Loc("model.py", 5, "step"))
    split, cut, x = b.input((7, 8)), b.input((8, 7)), b.input((8, 7))
    heads = b.reshape(split, (7, 2, 4))
    y = b.dot(x, heads)
    row = b.slice(cut, (0, 0), (1, 7))
    scaled = b.multiply(x, b.broadcast(b.reshape(row, (7,)), (8, 7), (1,)))
    split_grad = b.reshape(b.dot(x, y, ((0,), (0,))), (7, 8))
    row_grad = b.reshape(b.reduce(scaled, "add", (0,)), (1, 7))
    cut_grad = b.concatenate([row_grad, b.full((7, 7), 0.0)], 0)
    loss = b.add(b.reduce(y, "add", (0, 1, 2)), b.reduce(scaled, "add", (0, 1)))
    graph = b.finish(b.add(split, split_grad), b.add(cut, cut_grad), loss)
    weights = (Slot("params/split", "parameter"), Slot("params/cut", "parameter"))
    return (
        graph,
        (*weights, Slot("batch/x", "batch", 0)),
        (*weights, Slot("metrics/loss", "metric")),
    )


@pytest.mark.parametrize("mesh", [FSDP8, HSDP], ids=str)
def test_layouts_that_a_reshape_or_a_slice_would_break(mesh: Mesh) -> None:
    """Shards of 1 x 8 cannot live in 2 x 4 heads or in one row: gathered before, laid out after."""
    graph, inputs, outputs = awkward_graph()
    recipe = fsdp(graph, inputs, outputs, mesh)
    assert recipe.specs[(INPUT, 0)].dims == ((), ("dp_shard",))
    assert recipe.specs[(INPUT, 1)].dims == (("dp_shard",), ())
    part = partition_here(recipe.graph, mesh, recipe.specs, inputs, outputs)
    part = with_findings(rewrite(part), recipe)
    assert part.findings == ()
    inputs_whole = random_inputs(graph, inputs)
    wanted = evaluate(graph, inputs_whole)
    for given, whole in zip(run_whole(part, inputs_whole), wanted, strict=True):
        assert distance(given, whole) <= 1e-6
    scattered = [op for op in collectives(part.graph) if op.name == "reduce_scatter"]
    assert [op.result.type.shape for op in scattered] == [(7, 8)]


def optimizer_task(transform: optax.GradientTransformation) -> TrainTask:
    """The scanned model under another optimizer."""
    base, model = train_task(SIZES, seq_len=8), architecture_of(SIZES)

    def init(key: jax.Array) -> tuple:
        params = leaves.init_params(model, key)
        return params, transform.init(params)

    def step(params: dict, state: tuple, batch: dict) -> tuple:
        value, grads = jax.value_and_grad(
            lambda p: decoder.loss(model, p, batch, How(remat="full"))
        )(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": value}

    return dataclasses.replace(base, init=init, step=step)


@pytest.mark.parametrize("name", ["lion", "lamb", "adafactor"])
def test_other_optimizers_work_on_shards(name: str) -> None:
    """Weight norms and factored moments reduce over shards; what is not scalar is reported."""
    transform = {
        "lion": lambda: optax.lion(1e-3),
        "lamb": lambda: optax.lamb(1e-3),
        "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    }[name]()
    graph, inputs, outputs = captured_graph(optimizer_task(transform), 8)
    recipe = fsdp(graph, inputs, outputs, HSDP4)
    part = partition_here(recipe.graph, HSDP4, recipe.specs, inputs, outputs)
    part = with_findings(rewrite(part), recipe)
    assert bool(part.findings) == (name == "adafactor")
    whole = random_inputs(graph, inputs)
    wanted = evaluate(graph, whole)
    worst = max(distance(g, w) for g, w in zip(run_whole(part, whole), wanted, strict=True))
    assert worst <= 1e-5


def test_a_mesh_without_axes_is_one_core() -> None:
    graph, inputs, outputs = captured("llama-f32-full")
    plan = build_plan(graph, inputs, outputs, Mesh(()), unit=shardy.answer_request)
    assert plan.mesh.num_cores == 1 and plan.mesh.axes and not plan.traffic


def test_the_answer_round_trips_and_every_value_has_a_spec() -> None:
    part = road("llama-f32-full", HSDP).part
    assert set(part.specs) == set(all_values(part.graph))
    data = encode_partitioned(part)
    again = decode_partitioned(data)
    assert encode_partitioned(again) == data
    assert again.mesh == part.mesh and again.inputs == part.inputs
    for op in again.graph.ops:
        for inner, result in zip(
            op.regions[0].inputs if op.regions else (), op.results, strict=False
        ):
            assert again.specs[inner] == again.specs[result]


def test_collectives_keep_the_users_line() -> None:
    part = road("llama-f32-full", FSDP8).part
    located = [op.loc for op in collectives(part.graph) if op.result.type.rank]
    assert all(
        loc.file.endswith(("decoder.py", "attending.py")) and loc.line > 0 for loc in located
    )
    assert all(loc.scope for loc in located)


def test_without_pins_the_surprises_are_reported_with_their_lines() -> None:
    """Only arguments annotated: what the partitioner invents must not stay silent."""
    graph, inputs, outputs = captured("llama-f32-full")
    recipe = fsdp(graph, inputs, outputs, FSDP8)
    loose = {key: spec for key, spec in recipe.specs.items() if key[0] in (INPUT, OUTPUT)}
    part = rewrite(partition_here(graph, FSDP8, loose, inputs, outputs))
    found = unexpected(part.graph, recipe.predicted, part.mesh)
    assert found
    assert all(f.code == "SW_COLLECTIVE_UNEXPECTED" and f.loc for f in found)


def small_graph(line: int = 3) -> tuple[Graph, dict]:
    b = Builder(loc=Loc("model.py", line, "step"))
    x, w = b.input((8, 4)), b.input((4, 16))
    whole = b.dot(x, w)
    graph = b.finish(whole, b.reduce(whole, "max", (0, 1)), b.reduce(whole, "add", (0,)))
    specs = {
        (INPUT, 0): sharded(2, 0, ("dp_shard",)),
        (INPUT, 1): ShardingSpec(((), ())),
        (OUTPUT, 1): ShardingSpec(()),
        (OUTPUT, 2): ShardingSpec(((),)),
    }
    return graph, specs


def test_reductions_are_named_by_what_they_reduce() -> None:
    """The partitioner does not say whether a sum or a maximum is pending; the graph does."""
    graph, specs = small_graph()
    part = rewrite(partition_here(graph, make_mesh({"dp_shard": 4}), specs))
    kinds = {op.attrs.reduction for op in collectives(part.graph)}
    assert kinds == {"max", "add"}
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
    for given, wanted in zip(run_whole(part, [x, w]), evaluate(graph, [x, w]), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-6)


def scattered_graph(start: str, kind: str = "add") -> tuple[Graph, dict]:
    """Updates split over the batch, scattered into a table that is zero or given."""
    b = Builder(loc=Loc("model.py", 8, "step"))
    rows, updates, table = b.input((8, 1), DType.I32), b.input((8, 4)), b.input((6, 4))
    target = b.full((6, 4), 0.0) if start == "zeros" else table
    attrs = ScatterAttrs(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=1,
        kind=kind,
    )
    graph = b.finish(b.op("scatter", target, rows, updates, attrs=attrs))
    split = sharded(2, 0, ("dp_shard",))
    specs = {(INPUT, 0): split, (INPUT, 1): split, (INPUT, 2): ShardingSpec(((), ()))}
    return graph, specs | {(OUTPUT, 0): ShardingSpec(((), ())), (1, 0): ShardingSpec(((), ()))}


@pytest.mark.parametrize("start", ["zeros", "table"])
def test_scattered_updates_are_summed_over_cores(start: str) -> None:
    """A table they are added to is counted on one core."""
    graph, specs = scattered_graph(start)
    part = partition_here(graph, make_mesh({"dp_shard": 4}), specs)
    assert counts(part.graph) == {("all_reduce", ("dp_shard",)): 1}
    rng = np.random.default_rng(2)
    inputs = [
        rng.integers(0, 6, (8, 1)).astype(np.int32),
        rng.standard_normal((8, 4)).astype(np.float32),
        rng.standard_normal((6, 4)).astype(np.float32),
    ]
    (given,), (wanted,) = run_whole(part, inputs), evaluate(graph, inputs)
    np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-6)


def test_replacing_updates_are_gathered_not_summed() -> None:
    graph, specs = scattered_graph("zeros", "replace")
    part = partition_here(graph, make_mesh({"dp_shard": 4}), specs)
    assert counts(part.graph) == {("all_gather", ("dp_shard",)): 2}


@pytest.mark.parametrize("kind", ["multiply", "max", "add"])
def test_a_fold_of_split_rows_is_completed(kind: str) -> None:
    b = Builder()
    graph = b.finish(b.reduce(b.input((8, 4)), kind, (0,)))
    specs = {(INPUT, 0): sharded(2, 0, ("dp_shard",)), (OUTPUT, 0): ShardingSpec(((),))}
    part = partition_here(graph, make_mesh({"dp_shard": 4}), specs)
    assert counts(part.graph) == {("all_reduce", ("dp_shard",)): 1}
    values = [np.random.default_rng(5).standard_normal((8, 4)).astype(np.float32)]
    (have,), (want,) = run_whole(part, values), evaluate(graph, values)
    np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_fold_that_no_reduction_completes_is_refused() -> None:
    graph, specs = scattered_graph("zeros", "max")
    with pytest.raises(ShardingError) as caught:
        partition_here(graph, make_mesh({"dp_shard": 4}), specs)
    assert caught.value.code == "SW_PARTITIONER_REDUCTION"
    assert caught.value.loc is not None and caught.value.loc.file == "model.py"


def split_rows(sizes: tuple[int, int]) -> Graph:
    """A vector that lies over an axis, seen as a table, summed along its rows."""
    b = Builder()
    table = b.op("tanh", b.reshape(b.input((8,)), sizes))
    return b.finish(table, b.reduce(table, "add", (1,)))


def test_parts_of_an_axis_become_axes() -> None:
    """The partitioner lays 4 x 2 over an axis of 8 as (4, 2): the mesh is cut so."""
    graph = split_rows((4, 2))
    part = partition_here(graph, FSDP8, {(INPUT, 0): sharded(1, 0, ("dp_shard",))})
    assert part.mesh.axes == (("dp_shard_0", 4), ("dp_shard_1", 2))
    assert part.mesh.shown(("dp_shard_0", "dp_shard_1")) == "dp_shard"
    assert part.mesh.shown(("dp_shard_1",)) == "dp_shard(2 of 8)"
    assert part.specs[part.graph.inputs[0]].dims == (part.mesh.names,)
    assert counts(part.graph)["all_reduce", ("dp_shard_1",)] == 1
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    for given, wanted in zip(run_whole(rewrite(part), [x]), evaluate(graph, [x]), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-6)


def test_parts_that_do_not_nest_are_refused() -> None:
    text = '[{"x":(1)2}, {"x":(2)3}], [{"x":(1)3}]'
    with pytest.raises(ShardingError, match="got 2 and 3") as caught:
        mesh_of_atoms(Mesh((("x", 6),)), text)
    assert caught.value.code == "SW_PARTITIONER_SUB_AXIS"


def test_axes_out_of_mesh_order_move_one_by_one() -> None:
    b = Builder()
    graph = b.finish(b.op("tanh", b.input((8, 8))))
    mesh = make_mesh({"dp_shard": 2, "tp": 2})
    specs = {
        (INPUT, 0): ShardingSpec((("tp", "dp_shard"), ())),
        (OUTPUT, 0): ShardingSpec(((), ("tp", "dp_shard"))),
    }
    part = partition_here(graph, mesh, specs)
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    (given,), (wanted,) = run_whole(part, [x]), evaluate(graph, [x])
    np.testing.assert_array_equal(given, wanted)


def test_functions_of_the_scalar_engine_pass_shardings_through() -> None:
    b = Builder()
    x = b.input((8, 6))
    graph = b.finish(b.op("tanh", b.op("erf", b.op("atan", b.op("tan", x)))))
    specs = {(INPUT, 0): sharded(2, 0, ("dp_shard",))}
    slots = (Slot("params/x", "parameter"),), (Slot("metrics/y", "metric"),)
    part = partition_here(graph, FSDP8, specs, *slots)
    assert [op.name for op in part.graph.ops] == ["tan", "atan", "erf", "tanh"]
    assert all(part.specs[op.result].dims[0] == ("dp_shard",) for op in part.graph.ops)
    values = [np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)]
    (want,), (have,) = run_global(graph, values), run_sharded(part, values)
    np.testing.assert_array_equal(have, want)


def test_an_op_without_a_rule_is_refused_with_its_line() -> None:
    from shardwright.compiler.frontend.context import make_context, parse_module

    text = """
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %y = stablehlo.custom_call @mystery(%x) {shardwright.id = 0 : i64}
          : (tensor<8xf32>) -> tensor<8xf32>
        return %y : tensor<8xf32>
      }"""
    with make_context(), pytest.raises(ShardingError) as caught:
        shardy._check_rules(parse_module(text), [Loc("model.py", 9)])
    assert caught.value.code == "SW_PARTITIONER_RULE"
    assert caught.value.loc == Loc("model.py", 9)


def test_the_child_gives_the_same_bytes_as_this_process() -> None:
    graph, specs = small_graph()
    mesh = make_mesh({"dp_shard": 4})
    child = shardy.partition(graph, mesh, specs)
    assert encode_partitioned(child) == encode_partitioned(partition_here(graph, mesh, specs))


def test_a_refusal_crosses_the_process_with_code_and_hint() -> None:
    graph, specs = scattered_graph("zeros", "max")
    with pytest.raises(ShardingError) as caught:
        shardy.partition(graph, make_mesh({"dp_shard": 4}), specs)
    assert caught.value.code == "SW_PARTITIONER_REDUCTION"
    assert caught.value.diagnostic.hint
    assert caught.value.loc == Loc("model.py", 8, "step")


def test_a_moved_line_asks_for_nothing_new_and_is_found_in_the_answer() -> None:
    """The key of the unit is its request. jax itself moves lines: what it has traced once in a
    process keeps the place of its first caller."""
    asked: list[bytes] = []

    def unit(request: bytes) -> bytes:
        asked.append(request)
        return shardy.answer_request(request)

    for line in (3, 40):
        graph, specs = small_graph(line)
        part = shardy.partition(graph, make_mesh({"dp_shard": 4}), specs, unit=unit)
        assert {op.loc for op in part.graph.ops if op.name != "constant"} == {
            Loc("model.py", line, "step")
        }
    assert asked[0] == asked[1]


def fake_python(folder: Path, body: str) -> str:
    """An interpreter that runs `body` instead of the partitioner."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("echo LLVM ERROR: boom >&2; kill -ABRT $$", "SW_PARTITIONER_CRASH", "LLVM ERROR: boom"),
        ("sleep 5", "SW_PARTITIONER_TIMEOUT", "0.2 s"),
    ],
)
def test_a_crash_and_a_hang_become_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: str, said: str
) -> None:
    monkeypatch.setenv(partitioner.PYTHON_VARIABLE, fake_python(tmp_path, body))
    graph, specs = small_graph()
    hasty = functools.partial(partitioner.ask, timeout_s=0.2)
    with pytest.raises(ExecutionError) as caught:
        shardy.partition(graph, FSDP8, specs, unit=hasty)
    assert caught.value.code == code
    assert said in str(caught.value)


def the_waiting() -> subprocess.Popen[bytes]:
    (child,) = partitioner._waiting.values()
    return child.process


def test_a_process_waits_for_the_next_request() -> None:
    """Until it has ended, or holds much memory: then there is a new one, and no error."""
    graph, specs = small_graph()
    first = shardy.partition(graph, FSDP8, specs)
    process = the_waiting()
    assert to_text(shardy.partition(graph, FSDP8, specs).graph) == to_text(first.graph)
    assert the_waiting() is process
    process.kill()
    process.wait()
    shardy.partition(graph, FSDP8, specs)
    assert the_waiting() is not process


def test_a_process_that_holds_much_memory_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "_KEPT_BYTES", 1)
    graph, specs = small_graph()
    shardy.partition(graph, FSDP8, specs)
    assert not partitioner._waiting


FORKED = """
import os
from shardwright.compiler.ir.build import Builder
from shardwright.sharding.partition import partitioner
from shardwright.sharding.partition import shardy
from shardwright.sharding.partition.mesh import make_mesh

def asked():
    b = Builder()
    x = b.input((4,))
    shardy.partition(b.finish(b.add(x, x)), make_mesh({"dp_shard": 2}), {})
    (child,) = partitioner._waiting.values()
    return child

first = asked()
if not (forked := os.fork()):
    assert not partitioner._waiting
    assert asked() is not first
    partitioner._end_waiting()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
assert asked() is first
"""


def test_a_fork_asks_a_process_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True)


def test_a_missing_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(partitioner.PYTHON_VARIABLE, "/no/such/python")
    graph, specs = small_graph()
    with pytest.raises(ExecutionError, match="/no/such/python") as caught:
        shardy.partition(graph, FSDP8, specs)
    assert caught.value.code == "SW_PARTITIONER_START"


def test_the_adapter_loads_no_jax_by_itself() -> None:
    code = "import sys; from shardwright.sharding.partition import shardy;"
    code += "print('jax' in sys.modules, 'jaxlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


WITHOUT_JAX = """
import sys
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import decode_partitioned
from shardwright.sharding.partition.shardy import answer_request, encode_request

text = "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> }"
request = encode_request(import_module(text), make_mesh({"dp_shard": 2}), {}, (), ())
print(len(decode_partitioned(answer_request(request)).graph.inputs), "jax" in sys.modules)
"""


def test_reading_and_partitioning_a_module_import_no_jax() -> None:
    """Half of the time of a partition unit was the import."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "False"]
