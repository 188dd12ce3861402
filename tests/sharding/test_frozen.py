"""Frozen weights under every strategy: the values of the unsharded step, split as weights are,
gathered as they are stored, and neither reduced nor written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest

from shardwright.compiler.frontend.roles import UNCHANGED_ROLES
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS, TRAFFIC
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.passes.dce import dce
from shardwright.sharding.memory.footprint import footprint
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from tests.models import lora_steps
from tests.models.lora_steps import INNER, LAYERS, RANK, VOCAB, WIDTH
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, run_and_compare, worst
from tests.support.step_plans import build_plan

BOUND = 1e-5
MESHES: dict[str, tuple[dict[str, int], StrategySettings]] = {
    "fsdp": ({"dp_shard": 4}, StrategySettings()),
    "fsdp kept": ({"dp_shard": 4}, StrategySettings(reshard_after_forward=False)),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, StrategySettings()),
    "fsdp tp": ({"dp_shard": 2, "tp": 2}, StrategySettings()),
    "tp": ({"tp": 4}, StrategySettings(name="llm-training")),
    "pp": ({"pp": 2, "dp_shard": 2}, StrategySettings(name="llm-training")),
    "pp tp": ({"pp": 2, "tp": 2}, StrategySettings(name="llm-training", schedule="1f1b")),
    **{
        f"zero {stage}": ({"dp_shard": 4}, StrategySettings(name="generic", zero=stage))
        for stage in (0, 1, 2)
    },
}
TASKS = {
    "float32": lora_steps.separate,
    "bfloat16": lambda: lora_steps.separate("bfloat16"),
    "int8": lambda: lora_steps.separate("int8"),
    "int8 kept": lambda: lora_steps.separate("int8", remat=False),
    "masked": lora_steps.masked,
    "buffer": lambda: replace(lora_steps.separate(), roles={"base": "buffer"}),
}
CELLS = [(task, mesh) for task in TASKS for mesh in MESHES]
QUICK = [
    ("int8", "fsdp"),
    ("bfloat16", "fsdp tp"),
    ("masked", "zero 2"),
    ("float32", "pp"),
    ("buffer", "fsdp"),
]
MATRIX = [("int8", "pp tp"), ("int8 kept", "fsdp kept"), ("bfloat16", "hsdp"), ("int8", "tp")]


@cache
def made(task: str) -> TrainTask:
    return TASKS[task]()


@cache
def planned(task: str, mesh: str) -> Plan:
    """Four micro-batches of one sample per data-parallel rank, of two where there is one rank; of
    gradients that nothing reads nothing is left, as on the road of a job."""
    sizes, settings = MESHES[mesh]
    ways = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    samples = ways if ways > 1 else 2
    graph, inputs, outputs = captured_graph(made(task), samples)
    return build_plan(
        dce(graph),
        inputs,
        outputs,
        make_mesh(sizes),
        num_microbatches=4,
        unit=answer_request,
        settings=settings,
    )


@pytest.mark.parametrize(
    ("task", "mesh"),
    long_in_matrix(CELLS, MATRIX, [cell for cell in CELLS if cell not in (*QUICK, *MATRIX)]),
)
def test_cores_make_the_step_of_one(task: str, mesh: str) -> None:
    plan = planned(task, mesh)
    errors, _ = run_and_compare(plan.step, made(task))
    assert worst(errors)[1] <= BOUND
    assert {name: error for name, error in errors.items() if "base" in name and error} == {}
    assert_nothing_of_frozen_moves_but_gathers(plan)
    assert not [f.message for f in plan.findings if f.code == "SW_COLLECTIVE_UNEXPECTED"]


def collectives(graph: Graph) -> list[Op]:
    return [op for op in graph.walk() if op.name in TRAFFIC]


def assert_nothing_of_frozen_moves_but_gathers(plan: Plan) -> None:
    """No sum over ranks of the shape of a frozen matrix or of all layers of it, no buffer for its
    gradient, and no program that writes it."""
    frozen = {b.name for b in plan.step.buffers.values() if b.role in UNCHANGED_ROLES}
    sizes = {WIDTH * INNER, VOCAB * WIDTH, LAYERS * WIDTH * INNER}
    assert frozen
    for program in plan.step.programs:
        assert frozen.isdisjoint(program.outputs)
        sums = [op for op in collectives(program.graph) if op.name in REDUCTIONS_OF_RANKS]
        assert sizes.isdisjoint(op.operand.type.num_elements for op in sums)
    assert {f"gradient/{name}" for name in frozen}.isdisjoint(plan.step.buffers)


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8"])
def test_matrices_are_gathered_as_they_are_stored(base: str) -> None:
    """Once per layer and direction; computed in bfloat16, which is no wider than what is stored
    but for float32, which is cast before it is gathered."""
    task = lora_steps.separate(base, dtype=jnp.bfloat16)
    graph, inputs, outputs = captured_graph(task, 4)
    plan = build_plan(graph, inputs, outputs, make_mesh({"dp_shard": 4}), unit=answer_request)
    gathered = {
        op.result.type.dtype.value
        for program in plan.step.programs
        for op in collectives(program.graph)
        if op.name == "all_gather" and op.result.type.num_elements == WIDTH * INNER
    }
    assert gathered == {{"float32": "bf16", "bfloat16": "bf16", "int8": "i8"}[base]}
    assert not [f.message for f in plan.findings if f.code == "SW_COLLECTIVE_UNEXPECTED"]


def bytes_by_category(base: str, mesh: str) -> dict[str, int]:
    return dict(footprint(planned(base, mesh).step).argument_bytes)


ADAPTERS = 2 * LAYERS * (WIDTH * RANK + RANK * INNER)
"""Elements of both adapters of all layers."""
COUNTS = 4 * 1
"""Bytes of the optimizer's counter, which every core has."""


@pytest.mark.parametrize(
    ("base", "matrix_bytes", "end_bytes", "scale_bytes"),
    [("float32", 4, 4, 0), ("bfloat16", 2, 2, 0), ("int8", 1, 2, 4)],
)
def test_memory_is_what_arithmetic_says(
    base: str, matrix_bytes: int, end_bytes: int, scale_bytes: int
) -> None:
    """Everything is split over four ranks: scales of a column too."""
    found = bytes_by_category(base, "fsdp")
    frozen = matrix_bytes * 2 * LAYERS * WIDTH * INNER + end_bytes * 2 * VOCAB * WIDTH
    frozen += scale_bytes * LAYERS * (WIDTH + INNER)
    assert found["frozen"] == frozen // 4
    assert found["parameters"] == 4 * ADAPTERS // 4
    assert found["gradients"] == 4 * ADAPTERS // 4
    assert found["optimizer"] == 2 * 4 * ADAPTERS // 4 + COUNTS


def test_a_tensor_rank_holds_its_share_of_every_matrix() -> None:
    """The half of a low-rank pair that shares the split dim is split with its matrix, the other is
    whole."""
    found = bytes_by_category("bfloat16", "fsdp tp")
    frozen = 2 * 2 * (LAYERS * WIDTH * INNER + VOCAB * WIDTH)
    assert found["frozen"] == frozen // 4
    sharing, other = LAYERS * INNER * RANK * 2, LAYERS * WIDTH * RANK * 2
    assert found["parameters"] == 4 * (sharing // 4 + other // 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_before_stage_three_frozen_weights_are_whole(stage: int) -> None:
    plan = planned("masked", "zero 2") if stage == 2 else build_zero(stage)
    found = dict(footprint(plan.step).argument_bytes)
    assert found["frozen"] == 4 * 2 * (LAYERS * WIDTH * INNER + VOCAB * WIDTH)
    assert found["parameters"] == 4 * ADAPTERS
    assert found["optimizer"] == 2 * 4 * ADAPTERS // (4 if stage else 1) + COUNTS


def test_every_rank_has_buffers_whole() -> None:
    """As FSDP leaves those of a module, which are none of its parameters."""
    plan = planned("buffer", "fsdp")
    names = {slot.name for slot in plan.step.buffers.values() if slot.role == "buffer"}
    assert len(names) == 4
    found = bytes_by_category("buffer", "fsdp")
    assert found["other"] >= 4 * 2 * (LAYERS * WIDTH * INNER + VOCAB * WIDTH)
    assert "frozen" not in found and found["parameters"] == 4 * ADAPTERS // 4
    gathered = {op.result.type for p in plan.step.programs for op in collectives(p.graph)}
    assert WIDTH * INNER not in {kind.num_elements for kind in gathered}


def build_zero(stage: int) -> Plan:
    graph, inputs, outputs = captured_graph(made("float32"), 4)
    return build_plan(
        graph,
        inputs,
        outputs,
        make_mesh({"dp_shard": 4}),
        unit=answer_request,
        settings=StrategySettings(name="generic", zero=stage),
    )
