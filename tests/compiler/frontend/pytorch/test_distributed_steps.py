"""Modules whose code distributes them, as training steps: what the code says is what the plan has,
unit by unit and weight by weight, with the values of the unsharded step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)

from shardwright.compiler.frontend.entry import call_entry, load_task
from shardwright.compiler.frontend.pytorch.distributed_entry import from_function
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.config.importers.distributed_terms import tables_of, terms_of
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.prepare.reroll import reroll
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import captured_graph, leaf_error, worst
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import Distribution, distribution, random_inputs

FOLDER = Path(__file__).parents[3] / "models" / "torch_distributed"
SAMPLES = 8
BOUND = 1e-5


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files find each other, as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [p.stem for p in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)


def mapped(name: str, function: str = "build", world: int = 4, **changed: object) -> Distribution:
    """The distribution here of what a file says."""
    said = from_function(f"{name}:{function}", FOLDER, world, "reading")
    tables = tables_of(terms_of(said))
    strategy = {**tables["strategy"], **changed}
    for key in ("remat", "global_batch"):  # of how the step is built, and of the job
        strategy.pop(key, None)
    return distribution(
        strategy.pop("name"),
        sp=strategy.pop("sequence_parallel", True),
        **strategy,
        **tables["mesh"],
    )


@cache
def captured(entry: str = "") -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """The step of the module as jobs partition it, its four blocks a loop."""
    task = load_task(entry, FOLDER) if entry else call_entry("task:make", FOLDER, "reading")
    graph, inputs, outputs = captured_graph(task, SAMPLES)
    rolled = reroll(run(graph, step_passes(DEFAULTS, SAMPLES, False)), inputs, outputs)
    return rolled.graph, tuple(rolled.inputs), tuple(rolled.outputs)


def plan_of(how: Distribution, entry: str = "") -> Plan:
    return build_plan(*captured(entry), how.mesh, settings=how.settings, unit=answer_request)


def check_values(plan: Plan, entry: str = "") -> None:
    graph, inputs, outputs = captured(entry)
    arrays = random_inputs(graph, inputs)
    given = {slot.name: array for slot, array in zip(inputs, arrays, strict=True)}
    wanted = evaluate(graph, arrays)
    ranks = ReferenceRanks(plan.step, given)
    ranks.run_step([{s.name: given[s.name] for s in inputs if s.role == "batch"}])
    errors = {
        slot.name: leaf_error(ranks.gather(slot.name), np.asarray(value))
        for slot, value in zip(outputs, wanted, strict=True)
        if slot.role != "rng"
    }
    leaf, error = worst(errors)
    assert len(errors) > 20 and error <= BOUND, leaf


def counted(plan: Plan, axis: str = "dp_shard") -> Counter[tuple[str, str]]:
    """Collectives of weights and gradients over an axis."""
    rows = (row for row in plan.traffic if axis in row.axes and row.program != "update")
    return Counter({(r.program, r.kind): r.count for r in rows if r.total_bytes > 8 * r.count})


GATHERED, AGAIN, SCATTERED = (
    ("forward", "all_gather"),
    ("backward", "all_gather"),
    ("backward", "reduce_scatter"),
)
COUNTS = {
    ("fsdp2", "build"): {GATHERED: 5, AGAIN: 4, SCATTERED: 5},
    ("zero2", "build"): {GATHERED: 5, SCATTERED: 5},
    ("hybrid", "build"): {GATHERED: 3, AGAIN: 3, SCATTERED: 3},
    ("fsdp1", "build_grad_op"): {GATHERED: 5, SCATTERED: 5},
}
"""Four blocks and the root; blocks in pairs and the root, which this file reshards."""


@pytest.mark.parametrize(("name", "function"), COUNTS)
def test_collectives_per_unit_and_pass(name: str, function: str) -> None:
    how = mapped(name, function, 8, param_dtype="auto", reduce_dtype="auto")
    plan = plan_of(how)
    assert counted(plan) == COUNTS[name, function]
    check_values(plan)


def test_weights_lie_as_the_plan_says() -> None:
    how = mapped("titan", param_dtype="auto", reduce_dtype="auto")
    plan = plan_of(how)
    (note,) = [f.message for f in plan.findings if f.code == "SW_TENSOR_PLAN"]
    assert note.startswith("9 of 9 weights") and note.endswith("the same by itself")
    laid = {name.rpartition("layers.")[2]: why for name, why in plan.reasons.items()}
    assert laid["params/tok_embeddings.weight"].startswith("[tp, ")
    assert not any(f.severity == "error" for f in plan.findings)
    check_values(plan)


def test_what_the_user_leaves_whole_stays_whole() -> None:
    """Without the embedding in the plan, which the strategy by itself would split."""
    how = mapped("tensor")
    plan = plan_of(how)
    (note,) = [f.message for f in plan.findings if f.code == "SW_TENSOR_PLAN"]
    assert "8 of 8 weights" in note and "would split tok_embeddings.weight dim 0 too" in note
    assert "tp" not in plan.reasons["params/tok_embeddings.weight"].split("]")[0]
    check_values(plan)


def test_stages_are_cut_where_the_user_cuts() -> None:
    how = mapped("stages", world=8)
    plan = plan_of(how)
    assert [part.layers for part in plan.parts] == [3, 1]


def test_a_model_of_transformers() -> None:
    """Whose rotary frequencies are a buffer of the model's, and belong to no layer."""
    pytest.importorskip("transformers", exc_type=ImportError)
    how = mapped("llama", world=8)
    plan = plan_of(how, "llama:build")
    assert counted(plan) == COUNTS["fsdp2", "build"]
    (note,) = [f.message for f in plan.findings if f.code == "SW_TENSOR_PLAN"]
    assert note.startswith("7 of 7 weights") and "would split lm_head.weight" in note
    assert not [f for f in plan.findings if f.severity != "note"]
    check_values(plan, "llama:build")
