"""A step whose stacks are taken apart by stage means what it meant."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ReverseAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.cut.pipeline.unstack import Staged, stage_layers
from shardwright.sharding.partition.partitioned import Slot
from tests.support.road import leaf_error
from tests.support.strategy_cells import MODELS, model_graph, random_inputs


@functools.cache
def captured(model: str) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    graph, inputs, outputs = model_graph(model, 2)
    return run(graph, step_passes(DEFAULTS)), inputs, outputs


def taken(staged: Staged, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The inputs of the staged step from those of the whole one."""
    given = []
    for slot, value in zip(staged.inputs, staged.graph.inputs, strict=True):
        part = staged.parts.get(slot.name)
        if part is None:
            given.append(arrays[slot.name])
            continue
        rows = range(part.first, part.first + value.type.shape[part.dim])
        given.append(np.take(arrays[part.leaf], rows, axis=part.dim))
    return given


def test_an_op_that_mixes_layers_is_refused_with_its_line() -> None:
    """A stack turned around would carry layers from the last stage to the first."""
    graph, inputs, outputs = captured("gqa")
    names = [slot.name for slot in outputs]
    at = names.index("params/layers/w_up")
    line = Loc("user.py", 7)
    turned = make_op("reverse", (graph.outputs[at],), ReverseAttrs((0,)), loc=line)
    results = (*graph.outputs[:at], turned.result, *graph.outputs[at + 1 :])
    mixed = Graph(graph.inputs, (*graph.ops, turned), results)
    with pytest.raises(ShardingError, match="SW_PIPELINE_CUT") as caught:
        stage_layers(mixed, inputs, outputs, 2)
    assert "got reverse" in str(caught.value)
    assert caught.value.diagnostic.loc == line


@pytest.mark.parametrize("model", [name for name in MODELS if name != "image groups"])  # no layers
def test_the_step_keeps_its_values(model: str) -> None:
    graph, inputs, outputs = captured(model)
    arrays = random_inputs(graph, inputs)
    wanted = dict(zip((s.name for s in outputs), evaluate(graph, arrays), strict=True))
    staged = stage_layers(graph, inputs, outputs, 2)
    verify(staged.graph)
    named = dict(zip((s.name for s in inputs), arrays, strict=True))
    given = evaluate(staged.graph, taken(staged, named))
    seen = {}
    for slot, array in zip(staged.outputs, given, strict=True):
        part = staged.parts.get(slot.name)
        if part is None:
            seen[slot.name] = array
        else:
            seen.setdefault(part.leaf, []).append((part.first, array, part.dim))
    assert set(seen) == set(wanted)
    for name, found in seen.items():
        if isinstance(found, list):
            pieces = sorted(found, key=lambda piece: piece[0])
            found = np.concatenate([a for _, a, _ in pieces], axis=pieces[0][2])
        assert leaf_error(found, wanted[name]) <= 1e-6, name
    assert {0, 1} <= set(staged.homes.values())
