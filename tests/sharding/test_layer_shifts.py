"""Collectives that move across layers: values and traffic stay, programs and memory change.

The step as it is cut is the oracle: every shift gives the same bits on all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.driver import in_programs
from shardwright.orchestrator.models import config_task
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.overlap.layers import overlap
from shardwright.sharding.cut.rewrites import SUMMED
from shardwright.sharding.memory.footprint import footprint
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import traffic
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, worst
from tests.support.small_job import SIZES
from tests.support.staged_runs import cut_step, plan_of, state_after, step_errors
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import (
    DISTRIBUTIONS,
    EXPERT_DISTRIBUTIONS,
    distribution,
    model_graph,
)

BOUND = 1e-5
LAYERS = 5
WRITTEN = 9  # stacks of gradients, one of each weight of a layer
MESHES = {"fsdp": {"dp_shard": 4}, "hsdp": {"dp_replicate": 2, "dp_shard": 2}}
Captured = tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]


def _deep_task() -> TrainTask:
    return config_task.train_task({**SIZES, "num_hidden_layers": LAYERS}, seq_len=8, dtype="f32")


@cache
def _deep() -> Captured:
    """A scanned decoder of some layers."""
    return captured_graph(_deep_task(), 4)


@cache
def _step(mesh: str) -> StepPlan:
    """The step as it is cut, nothing moved."""
    return cut_step(_deep(), make_mesh(MESHES[mesh]), 2)


@cache
def _state(mesh: str) -> dict[str, bytes]:
    return state_after(_step(mesh), _deep())


def _loops(step: StepPlan, name: str) -> list[Op]:
    graph = next(p.graph for p in step.programs if p.name == name)
    return [op for op in graph.ops if op.name == "loop"]


def _count(graph: Graph, name: str) -> int:
    return sum(op.name == name for op in graph.ops)


SHIFTS = [(0, 0), (1, 0), (0, 1), (1, 2), (2, 1), (3, 3), (LAYERS, LAYERS), (9, 9)]
SHIFTED = [(mesh, shifts) for shifts in SHIFTS for mesh in MESHES]
QUICK = [("fsdp", (0, 1)), ("hsdp", (1, 2)), ("fsdp", (LAYERS, LAYERS))]


@pytest.mark.parametrize(
    ("mesh", "shifts"), long_in_matrix(SHIFTED, [c for c in SHIFTED if c not in QUICK]), ids=str
)
def test_shifts_change_no_bit_and_no_traffic(mesh: str, shifts: tuple[int, int]) -> None:
    assert state_after(overlap(_step(mesh), Shifts(*shifts)), _deep()) == _state(mesh)
    moved = sorted(traffic(overlap(_step(mesh), Shifts(*shifts))), key=repr)
    assert moved == sorted(traffic(_step(mesh)), key=repr)


@pytest.mark.parametrize(
    ("mesh", "shifts"),
    long_in_matrix(
        [c for c in SHIFTED if c[1] in ((0, 0), (0, 1), (1, 2), (LAYERS, LAYERS))],
        [c for c in SHIFTED if c[1] == (0, 0)],
        [("hsdp", (0, 1)), ("hsdp", (LAYERS, LAYERS))],
    ),
    ids=str,
)
def test_accumulators_in_the_loop_move_with_what_is_added(
    mesh: str, shifts: tuple[int, int]
) -> None:
    """They change no bit, and no reduction stays where it was because of them."""
    within = in_programs(_step(mesh), SUMMED, least_bytes=0)
    assert [len(_loops(s, "backward")) for s in (within, _step(mesh))] == [1, 1]
    moved = [overlap(step, Shifts(*shifts)) for step in (within, _step(mesh))]
    trips = [[loop.attrs.trip for loop in _loops(step, "backward")] for step in moved]
    assert trips[0] == trips[1]
    assert state_after(moved[0], _deep()) == _state(mesh)


def test_gathers_of_the_next_layer_are_carried() -> None:
    """The first layer's weights are gathered before the loop, the last iteration gathers none."""
    step = overlap(_step("fsdp"), Shifts(gather=1))
    (whole,) = _loops(_step("fsdp"), "forward")
    gathers = _count(whole.regions[0], "all_gather")
    main, last = _loops(step, "forward")
    assert (main.attrs.trip, last.attrs.trip) == (LAYERS - 1, 1)
    assert _count(main.regions[0], "all_gather") == gathers
    assert _count(last.regions[0], "all_gather") == 0
    forward = next(p.graph for p in step.programs if p.name == "forward")
    before = forward.ops[: forward.ops.index(main)]
    assert sum(op.name == "all_gather" for op in before) == gathers + 1  # and the embedding
    body = main.regions[0]
    made = body.producers()
    carried = [v for v in body.outputs if v in made and made[v].name == "all_gather"]
    assert len(carried) == gathers


def test_reductions_of_earlier_layers_are_late() -> None:
    """A gradient waits two iterations; the last two are reduced behind the loop."""
    step = overlap(_step("fsdp"), Shifts(reduce=2))
    (whole,) = _loops(_step("fsdp"), "backward")
    scatters = _count(whole.regions[0], "reduce_scatter")
    first, main = _loops(step, "backward")
    assert (first.attrs.trip, main.attrs.trip) == (2, LAYERS - 2)
    assert _count(first.regions[0], "reduce_scatter") == 0
    assert _count(main.regions[0], "reduce_scatter") == scatters
    sources = [op.operands[0] for op in main.regions[0].ops if op.name == "reduce_scatter"]
    assert set(sources) <= set(main.regions[0].inputs)
    backward = next(p.graph for p in step.programs if p.name == "backward")
    behind = backward.ops[backward.ops.index(main) :]
    assert sum(op.name == "reduce_scatter" for op in behind) == 2 * scatters + 1


@pytest.mark.parametrize("shift", [0, 1])
def test_reductions_over_copies_follow_one_layer_later(shift: int) -> None:
    """With copies a shard is reduced twice; neither waits for the other inside one iteration, and
    the second starts between what the layer beside it starts.
    """
    step = overlap(_step("hsdp"), Shifts(reduce=shift))
    main = _loops(step, "backward")[-1].regions[0]
    made = main.producers()
    found = [op for op in main.ops if op.name == "all_reduce"]
    assert len(found) == _count(_loops(_step("hsdp"), "backward")[0].regions[0], "all_reduce")
    assert all(op.operands[0] not in made and op.attrs.low_priority for op in found)
    assert not any(op.attrs.low_priority for op in main.ops if op.name == "reduce_scatter")


def test_nothing_moves_where_no_reduction_waits_for_another() -> None:
    step = _step("fsdp")
    pairs = zip(overlap(step, Shifts()).programs, step.programs, strict=True)
    assert all(one.graph is other.graph for one, other in pairs)


def test_a_loop_carries_only_what_it_changes() -> None:
    """What a gradient is written to is not in the loop that runs before the first reduction."""

    first, *_, main = _loops(overlap(_step("hsdp"), Shifts(reduce=2)), "backward")

    def stacks(loop: Op) -> int:
        (body,) = loop.regions
        return sum(v.type.shape[:1] == (LAYERS,) for v in body.inputs)

    assert stacks(main) - stacks(first) == WRITTEN


def test_prefetched_weights_show_in_the_footprint() -> None:
    peaks = [footprint(overlap(_step("fsdp"), Shifts(gather=n))) for n in (0, 1, 2)]
    gathered = [p.arena_bytes["forward"] for p in peaks]
    layer = sum(
        op.result.type.num_bytes
        for op in _loops(_step("fsdp"), "forward")[0].regions[0].ops
        if op.name == "all_gather"
    )
    assert gathered[2] - gathered[1] == layer
    assert gathered[1] > gathered[0]
    assert peaks[1].categories["gathered"] >= layer


@pytest.mark.parametrize(
    ("model", "distribution"),
    [
        pytest.param("bert", "fsdp 4", marks=pytest.mark.matrix),
        ("tied gpt", "fsdp tp 8"),
        pytest.param("gqa", "hsdp tp 8", marks=pytest.mark.matrix),
        pytest.param("moe", "fsdp ep 8", marks=pytest.mark.matrix),
    ],
)
def test_models_and_strategies_with_both_shifts(model: str, distribution: str) -> None:
    """Through the settings, on what the strategies make of other models."""
    found = (DISTRIBUTIONS | EXPERT_DISTRIBUTIONS)[distribution]
    captured = model_graph(model)
    plans = []
    for shift in (0, 1):
        settings = replace(
            found.settings, early_all_gather_shift=shift, late_reduce_scatter_shift=shift
        )
        plans.append(build_plan(*captured, found.mesh, settings=settings, unit=answer_request))
    assert state_after(plans[0].step, captured) == state_after(plans[1].step, captured)
    loops = [sum(len(_loops(p.step, q.name)) for q in p.step.programs) for p in plans]
    assert loops[1] > loops[0]


@pytest.mark.matrix
def test_stages_of_a_pipeline_overlap_too() -> None:
    """Every stage prefetches its own layers."""
    found = distribution("fsdp", pp=2, dp_shard=2)
    settings = replace(found.settings, early_all_gather_shift=1, late_reduce_scatter_shift=1)
    shifted = replace(found, settings=settings)
    leaf, error = worst(step_errors(_deep_task, shifted, 2))
    assert error <= BOUND, leaf
    programs = plan_of(_deep_task, shifted, 2).step.programs
    loops = {p.name: [op for op in p.graph.ops if op.name == "loop"] for p in programs}
    assert sum(len(found) >= 2 for found in loops.values()) >= 4  # forward and backward of each
