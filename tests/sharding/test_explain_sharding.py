"""`--explain sharding`: who decided each tensor, and what every collective is there for."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.sharding.explain import Explanation, explain_sharding
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Prepared, prepare
from shardwright.sharding.settings import StrategySettings
from tests.sharding.test_manual import MESH, step
from tests.sharding.test_strategy_matrix import captured
from tests.support.partitioned import partition_here
from tests.support.strategy_cells import Distribution, distribution

TENSOR = distribution("llm-training", dp_shard=2, tp=8)


@functools.cache
def ready(model: str, how: Distribution) -> Prepared:
    return prepare(*captured(model), how.mesh, how.settings)


@functools.cache
def told(model: str, how: Distribution) -> Explanation:
    return explain_sharding(ready(model, how), answer_request)


@functools.cache
def told_by_user() -> Explanation:
    graph, inputs, outputs, user = step("arguments")
    settings = StrategySettings(name="manual")
    return explain_sharding(prepare(graph, inputs, outputs, MESH, settings, user), answer_request)


def test_leaves_come_with_the_recipes_reason() -> None:
    by_name = {t.name: t for t in told("gqa", TENSOR).leaves().tensors}
    gate = by_name["params/layers/w_gate"]
    assert gate.layout == "[-, -, tp]" and gate.decided == "recipe, zero=1 keeps weights"
    moment = by_name["opt_state/1/0/mu/layers/w_gate"]
    assert "tp" in moment.layout and "dp_shard" in moment.layout
    assert moment.decided == "recipe, follows params/layers/w_gate"


def test_parts_of_an_axis_are_shown_under_its_name() -> None:
    """Two key-value heads take two of eight ranks: atoms have no names of their own."""
    explanation = told("gqa", TENSOR)
    assert "tp_0" in ready("gqa", TENSOR).mesh.names
    texts = [t.layout for t in explanation.tensors] + [m.axes for m in explanation.collectives]
    assert not any("tp_" in text for text in texts)
    assert any("tp(2 of 8)" in text for text in texts)


def test_every_collective_of_the_step_is_explained() -> None:
    prepared, explanation = ready("gqa", TENSOR), told("gqa", TENSOR)
    recipe = prepared.recipe
    part = partition_here(
        recipe.graph, recipe.mesh, recipe.specs, prepared.inputs, prepared.outputs
    )
    there = [op for op in localize(rewrite(part)).graph.walk() if op.name in TRAFFIC]
    assert Counter(m.kind for m in explanation.collectives) == Counter(op.name for op in there)
    assert all(m.loc.file and m.loc.line and m.cause for m in explanation.collectives)
    assert all(m.num_bytes > 0 and m.group_size > 1 for m in explanation.collectives)
    assert all(m.predicted for m in explanation.collectives)
    assert {m.times for m in explanation.collectives} == {1, 2}, "two layers"


def test_causes_name_the_sum_and_the_reader() -> None:
    explanation = told("gqa", TENSOR)
    scattered = [
        m for m in explanation.collectives if m.kind == "reduce_scatter" and m.axes == "tp"
    ]
    assert any("dot_general at" in m.cause and "sums over" in m.cause for m in scattered)
    stored = [m for m in explanation.collectives if m.leaf == "params/layers/w_gate"]
    assert [(m.kind, m.axes) for m in stored] == [("all_gather", "dp_shard")]
    gathered = told("gqa", distribution("fsdp", dp_shard=8)).about("params/lm_head")
    assert [t.name for t in gathered.tensors if t.name.startswith("params/")] == ["params/lm_head"]
    (first, *_) = gathered.collectives
    assert first.kind == "all_gather" and first.cause.endswith("params/lm_head")


def test_surprises_are_marked() -> None:
    prepared = ready("gqa", TENSOR)
    blind = dataclasses.replace(prepared.recipe, predicted=Counter())
    explanation = explain_sharding(dataclasses.replace(prepared, recipe=blind), answer_request)
    large = [m for m in explanation.collectives if m.num_bytes > 4]
    assert large and not any(m.predicted for m in large)


def test_the_user_and_propagation_are_told_apart() -> None:
    found = told_by_user()
    deciders = {t.name: t.decided for t in found.tensors if not t.loc.file}
    assert deciders["batch/x"] == "user, argument"
    assert deciders["params/up"] == "propagation"
    constraints = [t for t in found.tensors if t.name == "sharding_constraint"]
    assert constraints and {t.decided for t in constraints} == {"user"}
    products = [t for t in found.tensors if t.name == "dot_general"]
    assert products and {t.decided for t in products} == {"propagation"}
    assert any(t.layout == "[data, model]" for t in products)


def test_a_place_names_its_tensors_and_collectives() -> None:
    found = told_by_user()
    loc = next(m.loc for m in found.collectives if m.axes == "model")
    here = found.about(f"annotated.py:{loc.line}")
    assert {t.loc.line for t in here.tensors} == {loc.line} and here.collectives
    assert not found.about("no such tensor").tensors
    assert Mesh(MESH.axes).shown(("data", "model")) == "data+model"
