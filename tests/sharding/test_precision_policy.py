"""PyTorch's precision policy: what is rounded, what moves in which type, and that sharding it
changes nothing.

The sharded step is compared with the unsharded one under the same policy (1e-5, as everywhere) and
with the one without any (the bound of short floats, `docs/numerics.md`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models import config_task
from shardwright.orchestrator.road.numerics import BF16_BOUND
from shardwright.sharding.partition import shardy
from shardwright.sharding.partition.findings import collectives, with_findings
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.prepare.precision import rounded_graph, with_reduce_dtype
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.registry import recipe_of
from tests.sharding.test_strategy_matrix import ALL, captured, unsharded
from tests.support.cells import diagonals
from tests.support.partitioned import partition_here
from tests.support.road import captured_graph, leaf_error
from tests.support.small_job import SIZES
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import random_inputs
from tests.support.whole_runs import run_whole

BF16 = "bfloat16"
SHORT = {"param_dtype": BF16, "output_dtype": BF16}
EVERYTHING = SHORT | {"reduce_dtype": BF16, "reshard_after_forward": False}


def short(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def settings(**keys: object) -> StrategySettings:
    return dataclasses.replace(StrategySettings(), **keys)


def small(*, layered: bool) -> tuple[Graph, list[Slot]]:
    """x @ w * scale, once or in a loop of two layers that hands on what it makes."""
    b = Builder()
    x, w, scale = b.input((4, 3)), b.input((2, 3, 3)), b.input((3,))

    def layer(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        h, w, scale = carries
        zero = inner.constant(0, DType.I32)
        mine = inner.reshape(inner.dynamic_slice(w, [i, zero, zero], (1, 3, 3)), (3, 3))
        made = inner.dot(h, mine, contract=((1,), (0,)))
        return inner.multiply(made, inner.broadcast(scale, (4, 3), (1,))), w, scale

    if layered:
        h, _, _ = b.loop(2, [x, w, scale], layer)
    else:
        first = b.reshape(b.slice(w, (0, 0, 0), (1, 3, 3)), (3, 3))
        made = b.dot(x, first, contract=((1,), (0,)))
        h = b.multiply(made, b.broadcast(scale, (4, 3), (1,)))
    names = (("x", "batch", 0), ("w", "parameter", None), ("scale", "parameter", None))
    return b.finish(h), [Slot(*name) for name in names]


def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = ((4, 3), (2, 3, 3), (3,))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_weights_are_rounded_and_contractions_take_short_operands() -> None:
    graph, slots = small(layered=False)
    x, w, scale = drawn()
    (given,) = evaluate(rounded_graph(graph, slots, settings(param_dtype=BF16)), [x, w, scale])
    wanted = (short(x) @ short(w[0])) * short(scale)
    np.testing.assert_allclose(given, wanted, rtol=1e-6)
    assert np.abs(given - x @ w[0] * scale).max() > 1e-4


def test_what_a_layer_hands_on_is_rounded() -> None:
    graph, slots = small(layered=True)
    x, w, scale = drawn()
    (given,) = evaluate(rounded_graph(graph, slots, settings(output_dtype=BF16)), [x, w, scale])
    wanted = short(short((x @ w[0]) * scale) @ w[1] * scale)
    np.testing.assert_allclose(given, wanted, rtol=1e-6)


def test_no_policy_changes_nothing() -> None:
    graph, slots = small(layered=True)
    assert rounded_graph(graph, slots, settings()) is graph


@functools.cache
def road(model: str, name: str, keys: tuple[tuple[str, object], ...]) -> PartitionedGraph:
    graph, inputs, outputs = captured(model)
    how = ALL[name]
    chosen = dataclasses.replace(how.settings, **dict(keys))
    recipe = recipe_of(rounded_graph(graph, inputs, chosen), inputs, outputs, how.mesh, chosen)
    part = partition_here(recipe.graph, recipe.mesh, recipe.specs, inputs, outputs)
    return with_reduce_dtype(with_findings(rewrite(part), recipe), chosen)


def partitioned(model: str, name: str, **keys: object) -> PartitionedGraph:
    return road(model, name, tuple(keys.items()))


def moved(part: PartitionedGraph) -> Counter[tuple[str, str]]:
    """Collectives of tensors by kind and element type."""
    found = (op for op in collectives(part.graph) if op.result.type.num_elements > 1)
    return Counter((op.name, op.result.type.dtype.value) for op in found)


SMALL = (("gqa", "fsdp 4"), ("flax", "fsdp 4"))
LARGE = tuple(
    itertools.product(
        ("gqa", "bert", "tied gpt", "flax", "moe", "vit"),
        ("hsdp 8", "fsdp tp 8", "zero-1 8", "data parallel 4"),
    )
)


@pytest.mark.parametrize(("model", "name"), [*SMALL, *diagonals(LARGE, 5)])
def test_sharding_a_policy_changes_no_value(model: str, name: str) -> None:
    graph, inputs, _ = captured(model)
    arrays = random_inputs(graph, inputs)
    wanted = evaluate(rounded_graph(graph, inputs, settings(**SHORT)), arrays)
    given = run_whole(partitioned(model, name, **SHORT), arrays)
    worst = max(map(leaf_error, given, wanted))
    assert worst <= 1e-5
    assert max(map(leaf_error, given, unsharded(model))) > worst


@pytest.mark.parametrize(("model", "name"), [("tied gpt", "hsdp tp 8"), *diagonals(LARGE, 5)])
def test_the_whole_policy_stays_within_the_bound_of_short_floats(model: str, name: str) -> None:
    graph, inputs, _ = captured(model)
    given = run_whole(partitioned(model, name, **EVERYTHING), random_inputs(graph, inputs))
    errors = list(map(leaf_error, given, unsharded(model)))
    print(f"{model}, {name}: {max(errors):.1e}")
    assert 0 < max(errors) <= BF16_BOUND


def test_weights_are_gathered_in_the_short_type() -> None:
    before, after = (moved(partitioned("gqa", "fsdp 4", **k)) for k in ({}, {"param_dtype": BF16}))
    gathers = before["all_gather", "f32"]
    assert gathers and after["all_gather", "bf16"] == gathers and not after["all_gather", "f32"]
    assert after["reduce_scatter", "f32"] == before["reduce_scatter", "f32"]
    assert not partitioned("gqa", "fsdp 4", param_dtype=BF16).findings


def test_gradients_are_reduced_in_the_asked_type() -> None:
    """Shards and copies alike; the loss and the norm stay as they are."""
    before, after = (moved(partitioned("gqa", "hsdp 8", **k)) for k in ({}, {"reduce_dtype": BF16}))
    for kind in ("reduce_scatter", "all_reduce"):
        assert before[kind, "f32"] and after == {
            ("all_gather", "f32"): before["all_gather", "f32"],
            ("reduce_scatter", "bf16"): before["reduce_scatter", "f32"],
            ("all_reduce", "bf16"): before["all_reduce", "f32"],
        }


def test_short_gradients_may_be_reduced_in_full_and_stay_so() -> None:
    """A short gradient that the optimizer widens is never rounded behind the collective."""
    found, inputs, outputs = captured_graph(
        config_task.train_task(SIZES, seq_len=8, dtype="bf16"), 4
    )
    graph = run(found, step_passes(DEFAULTS))
    chosen, mesh = settings(reduce_dtype="float32"), make_mesh({"dp_shard": 4})
    recipe = recipe_of(graph, inputs, outputs, mesh, chosen)
    part = rewrite(partition_here(recipe.graph, mesh, recipe.specs, inputs, outputs))
    wide = with_reduce_dtype(part, chosen)
    assert moved(part)["reduce_scatter", "bf16"] and not moved(wide)["reduce_scatter", "bf16"]
    users = wide.graph.uses()
    scattered = [op for op in wide.graph.ops if op.name == "reduce_scatter"]
    assert scattered
    for op in scattered:
        readers = users[op.result]
        assert any(r.name != "convert" for r in readers), op.result.type


def stacked(model: str, **keys: object) -> Counter[DType]:
    """How many stacks of activations forward stores for backward, by type."""
    how = ALL["fsdp 4"]
    chosen = dataclasses.replace(how.settings, **keys)
    plan = build_plan(*captured(model), how.mesh, settings=chosen, unit=shardy.answer_request)
    held = [b.local_type for b in plan.step.buffers.values() if b.role == "residual"]
    return Counter(t.dtype for t in held if t.rank > 3)


def test_what_is_rounded_is_kept_short() -> None:
    """The inputs of layers that hand on rounded values; with `param_dtype` alone, in a model that
    computes nothing again, the rounded operands of contractions that backward reads.
    """
    assert stacked("gqa", param_dtype=BF16) == {DType.F32: 1}
    assert stacked("gqa", **SHORT) == {DType.BF16: 1}
    found = stacked("bert", param_dtype=BF16)
    assert found[DType.BF16] >= 4 and found[DType.F32]
