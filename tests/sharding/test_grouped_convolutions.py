"""Networks with depthwise and grouped convolutions under FSDP: values, and what is sent."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.findings import collectives
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.strategies.registry import recipe_of
from tests.support.partitioned import partition_here
from tests.support.road import leaf_error
from tests.support.strategy_cells import distribution, model_graph, random_inputs
from tests.support.whole_runs import run_whole


@pytest.mark.parametrize("cores", [8, pytest.param(32, marks=pytest.mark.matrix)])
def test_fsdp_keeps_the_values_and_sends_weights_alone(cores: int) -> None:
    """One training step: outputs, gradients and state equal those of one core; images stay."""
    graph, inputs, outputs = model_graph("image groups", cores)
    graph = run(graph, step_passes(DEFAULTS))
    grouped = [op.attrs for op in graph.walk() if op.name == "convolution"]
    assert sum(a.feature_groups > 1 for a in grouped) >= 3 + 2, "forward, and back to the images"
    assert sum(a.batch_groups > 1 for a in grouped) == 3, "gradients of filters"
    how = distribution("fsdp", dp_shard=cores)
    recipe = recipe_of(graph, inputs, outputs, how.mesh, how.settings)
    part = rewrite(
        partition_here(recipe.graph, recipe.mesh, recipe.specs, inputs, outputs, recipe.tied)
    )
    given = zip(inputs, graph.inputs, strict=True)
    largest = max(v.type.num_elements for slot, v in given if slot.role != "batch")
    assert max(op.result.type.num_elements for op in collectives(part.graph)) <= largest
    arrays = random_inputs(graph, inputs)
    wanted = evaluate(graph, arrays)
    found = run_whole(part, arrays, how.settings.context)
    errors = {s.name: leaf_error(g, w) for s, g, w in zip(outputs, found, wanted, strict=True)}
    assert np.max([*errors.values()]) <= 1e-5, errors
