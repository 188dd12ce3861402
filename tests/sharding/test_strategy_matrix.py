"""Every model under every distribution: values equal the unsharded graph, and the collectives are
the textbook's.

Graphs run on NumPy references with ring collectives, one shard per rank. The default run takes
every distribution of four cores and the plain ones of eight on one model, and every model; the
matrix has the mixed ones of eight and some of the other cells, every model and every distribution
among them, `make exhaustive` the rest.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest

from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.cut.ring import with_context
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.findings import collectives, with_findings
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.strategies.registry import recipe_of
from tests.support.cells import diagonals, long_in_matrix
from tests.support.partitioned import coordinates, partition_here
from tests.support.road import leaf_error
from tests.support.strategy_cells import (
    DISTRIBUTIONS,
    EXPERT_DISTRIBUTIONS,
    MANUAL_DISTRIBUTIONS,
    MODELS,
    SEQUENCE_DISTRIBUTIONS,
    Distribution,
    distribution,
    model_graph,
    random_inputs,
)
from tests.support.whole_runs import run_whole

ALL = {
    **DISTRIBUTIONS,
    **MANUAL_DISTRIBUTIONS,
    **SEQUENCE_DISTRIBUTIONS,
    **EXPERT_DISTRIBUTIONS,
}
SEQUENCE_MODELS = ("gqa", "bert", "tied gpt", "flax", "moe", "dropless", "grouped", "dropout")
EXPERT_MODELS = ("moe", "dropless")
CELLS = [
    *((model, name) for model in MODELS for name in (*DISTRIBUTIONS, *MANUAL_DISTRIBUTIONS)),
    *((model, name) for model in SEQUENCE_MODELS for name in SEQUENCE_DISTRIBUTIONS),
    *((model, name) for model in (*EXPERT_MODELS, "grouped") for name in EXPERT_DISTRIBUTIONS),
]


def few() -> list[tuple[str, str]]:
    """One model per distribution of up to eight cores, in turn."""
    names = [name for name in ALL if not name.endswith((" 16", " 32"))]
    fitting = ([model for model, n in CELLS if n == name] for name in names)
    return [(f[i % len(f)], name) for i, (name, f) in enumerate(zip(names, fitting, strict=True))]


FEW = few()
MIXED = (
    *("hsdp kept tp 8", "hsdp tp 8", "zero-2 hybrid 8", "tp zero-1 8"),
    *("fsdp cp gathered 8", "fsdp cp tp 8", "fsdp ep tp 8"),
)
"""Of these the parts are distributions of their own, which the default run has."""


@functools.cache
def captured(
    model: str, save_rows: bool = False
) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """The step as jobs partition it: after the step passes."""
    graph, inputs, outputs = model_graph(model)
    return run(graph, step_passes(DEFAULTS, save_rows=save_rows)), inputs, outputs


@functools.cache
def unsharded(model: str) -> list[np.ndarray]:
    graph, inputs, _ = captured(model)
    return evaluate(graph, random_inputs(graph, inputs))


@functools.cache
def partitioned(model: str, how: Distribution) -> PartitionedGraph:
    graph, inputs, outputs = captured(model, how.settings.context == "ring")
    user = how.user(graph, inputs)
    recipe = recipe_of(graph, inputs, outputs, how.mesh, how.settings, user)
    part = partition_here(recipe.graph, recipe.mesh, recipe.specs, inputs, outputs, recipe.tied)
    return with_findings(rewrite(part), recipe)


def check(model: str, name: str) -> None:
    graph, inputs, outputs = captured(model)
    how = ALL[name]
    given = run_whole(partitioned(model, how), random_inputs(graph, inputs), how.settings.context)
    errors = {
        slot.name: leaf_error(g, w)
        for slot, g, w in zip(outputs, given, unsharded(model), strict=True)
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.cells("strategies", len(CELLS))
@pytest.mark.parametrize(
    ("model", "name"), long_in_matrix(FEW, [cell for cell in FEW if cell[1] in MIXED])
)
def test_values_equal_the_unsharded_graph(model: str, name: str) -> None:
    check(model, name)


@pytest.mark.cells("strategies", len(CELLS))
@pytest.mark.parametrize(("model", "name"), diagonals([c for c in CELLS if c not in FEW], 9))
def test_values_of_every_cell(model: str, name: str) -> None:
    check(model, name)


def test_the_few_cover_models_and_distributions() -> None:
    assert {model for model, name in FEW if name not in MIXED} == set(MODELS)
    assert {name for _, name in FEW} == {n for n in ALL if not n.endswith((" 16", " 32"))}


def counts(graph: Graph, axis: str) -> Counter:
    """Kinds of the collectives over atoms of one axis, of tensors."""
    found = (op for op in collectives(graph) if all(a.startswith(axis) for a in op.attrs.axes))
    return Counter(op.name for op in found if op.result.type.rank > 2)


def loops(part: PartitionedGraph) -> list[Graph]:
    return [op.regions[0] for op in part.graph.ops if op.name == "loop"]


def test_tensor_parallel_layers_are_megatrons() -> None:
    """Two all_reduces per layer and pass; the recomputed layer repeats its first."""
    forward, backward = loops(partitioned("gqa", distribution("llm-training", sp=False, tp=2)))
    assert counts(forward, "tp") == {"all_reduce": 2}
    assert counts(backward, "tp") == {"all_reduce": 3}


def test_sequence_parallel_layers_are_megatrons() -> None:
    """all_gather and reduce_scatter where there was an all_reduce; what weight gradients read is
    gathered again.
    """
    forward, backward = loops(partitioned("gqa", distribution("llm-training", tp=2)))
    assert counts(forward, "tp") == {"all_gather": 2, "reduce_scatter": 2}
    assert counts(backward, "tp") == {"all_gather": 4, "reduce_scatter": 3}


@pytest.mark.parametrize("zero", [1, 2])
def test_a_spread_optimizer_scatters_gradients_and_gathers_weights_once(zero: int) -> None:
    part = partitioned("gqa", distribution("generic", zero=zero, dp_shard=4))
    inputs = captured("gqa")[1]
    weights = sum(slot.role == "parameter" for slot in inputs)
    moved = [op for op in collectives(part.graph) if op.result.type.num_elements > 1]
    kinds = Counter(op.name for op in moved)
    assert kinds == {"reduce_scatter": weights, "all_gather": weights}
    assert not any(op.name == "all_gather" for body in loops(part) for op in collectives(body))


@pytest.mark.parametrize("model", EXPERT_MODELS)
def test_expert_layers_exchange_rows_twice_per_pass(model: str) -> None:
    """To the experts and back, forward and backward; the recomputed layer does it again. Rows that
    are sorted and looked up travel like those that are multiplied with one-hot rows.
    """
    forward, backward = loops(partitioned(model, distribution("fsdp", dp_shard=2, ep=2)))
    assert counts(forward, "ep") == {"all_to_all": 2}
    assert counts(backward, "ep") == {"all_to_all": 4}


def test_rows_of_all_samples_stay_on_their_core() -> None:
    """One sorted list of all rows: data-parallel cores sort their own, and send nothing."""
    assert {f.code for f in partitioned("grouped", ALL["fsdp 4"]).findings} == {"SW_ROWS_SORTED"}
    for body in loops(partitioned("grouped", distribution("generic", dp_shard=4))):
        assert {op.name for op in collectives(body)} <= {"all_reduce"}
    forward, backward = loops(partitioned("grouped", distribution("fsdp", dp_shard=2, ep=2)))
    assert counts(forward, "ep") == {"all_to_all": 5}, "rows to every product and back, once"
    assert counts(backward, "ep")["all_gather"] == 0


def in_context(model: str, context: str, **axes: int) -> list[Graph]:
    """The loops over layers of one core, forward and backward."""
    part = partitioned(model, distribution("generic", context=context, **axes))
    graph = with_context(localize(part), context)[0].graph
    return [op.regions[0] for op in graph.ops if op.name == "loop"]


def moved(graph: Graph, times: int = 1) -> Counter:
    """How often collectives of activations over `cp` run, nested loops counted."""
    found: Counter = Counter()
    for op in graph.ops:
        for region in op.regions:
            found += moved(region, times * op.attrs.trip)
        if op.name in TRAFFIC and op.attrs.axes == ("cp",) and op.result.type.rank > 3:
            found[op.name] += times
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_rings_send_every_block_once_around(cp: int) -> None:
    """Keys and values forward, and again where the layer is recomputed; their gradients come home
    behind the last block. The code does not grow with the ring (numbers that happen to be equal
    are one constant).
    """
    forward, backward = in_context("gqa", "ring", cp=cp)
    assert moved(forward) == {"collective_permute": 2 * (cp - 1)}
    assert moved(backward) == {"collective_permute": 2 * 2 * (cp - 1) + 2 * cp}
    sizes = [
        sum(op.name != "constant" for op in graph.walk())
        for graph in (backward, in_context("gqa", "ring", cp=2)[1])
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("model", ["gqa", "tied gpt"])
def test_rings_hold_no_sequence(model: str) -> None:
    """Of the activations of a layer only masks reach over the whole sequence."""
    for context in ("gather", "ring"):
        wide = [
            value
            for body in in_context(model, context, cp=4)
            for op in body.walk()
            for value in op.results
            if value.type.dtype.is_float and 16 in value.type.shape and value.type.rank > 3
        ]
        assert bool(wide) == (context == "gather")


@pytest.mark.parametrize("model", ["gqa", "tied gpt"])
def test_kept_layers_are_gathered_once(model: str) -> None:
    """Forward gathers as ever; backward reads what forward gathered and only scatters gradients."""
    again, kept = (
        [Counter(op.name for op in collectives(body)) for body in loops(partitioned(model, how))]
        for how in (ALL["fsdp 4"], ALL["fsdp kept 4"])
    )
    assert kept[0] == again[0]
    assert again[1]["all_gather"] and kept[1] == {"reduce_scatter": again[1]["reduce_scatter"]}
    assert partitioned(model, ALL["fsdp kept 4"]).findings == ()


@pytest.mark.parametrize("model", EXPERT_MODELS)
def test_experts_stay_where_they_are(model: str) -> None:
    """Nothing but rows moves over `ep`: no weights, no numbers of rows; and no surprise."""
    part = partitioned(model, ALL["ep 4"])
    for body in loops(part):
        moved = {op.name for op in collectives(body) if op.attrs.axes == ("ep",)}
        assert moved - {"all_reduce"} == {"all_to_all"}
        assert all(op.result.type.dtype.is_float for op in collectives(body))
    assert part.findings == ()


def test_data_parallel_only_sums() -> None:
    part = partitioned("gqa", distribution("generic", dp_shard=4))
    assert {op.name for op in collectives(part.graph)} == {"all_reduce"}


@pytest.mark.parametrize("name", ["fsdp 4", "tp 4", "tp zero-1 8", "fsdp tp 8", "fsdp cp tp 8"])
@pytest.mark.parametrize("model", ["gqa", "tied gpt", "bert", "moe"])
def test_no_collective_is_a_surprise(model: str, name: str) -> None:
    assert partitioned(model, ALL[name]).findings == ()


def all_coordinates(mesh: Mesh) -> list[dict[str, int]]:
    return [coordinates(mesh, rank) for rank in range(mesh.num_cores)]


def test_cutting_an_axis_moves_no_rank() -> None:
    mesh = distribution("fsdp", dp_shard=2, tp=8).mesh
    refined = mesh.refined("tp", (2, 4))
    for whole, cut in zip(all_coordinates(mesh), all_coordinates(refined), strict=True):
        assert whole == {"dp_shard": cut["dp_shard"], "tp": cut["tp_0"] * 4 + cut["tp_1"]}
