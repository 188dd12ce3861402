"""Bytes of arguments against two sources of our own bar: XLA's memory analysis of the partitioned
step, and the bytes per parameter of the ZeRO paper.

Source of the second: Rajbhandari et al. 2020, section 3.1: mixed-precision Adam needs 2 bytes of
weight, 2 of gradient and 12 of optimizer state (fp32 weight and both moments) per parameter;
section 5: stage 1 splits the 12, stage 2 the gradients too, stage 3 everything.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import pytest

from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.registry import recipe_of
from tests.models import mixed_adam
from tests.support import xla_spmd
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import (
    DISTRIBUTIONS,
    EXPERT_DISTRIBUTIONS,
    SAMPLES,
    SEQUENCE_DISTRIBUTIONS,
    model_graph,
)

POINTER_BYTES = 8
"""XLA's CPU client returns results as a tuple: one pointer each."""

EIGHT = [
    ("tied gpt", "fsdp tp 8"),
    *(("gqa", name) for name in ("hsdp 8", "zero-1 8", "zero-2 hybrid 8", "tp zero-1 8")),
    *(("bert", "zero-1 8"), ("vit", "hsdp 8"), ("flax", "hsdp 8"), ("moe", "fsdp ep 8")),
    *(("gqa", "fsdp cp 8"), ("moe", "fsdp ep tp 8"), ("tied gpt", "fsdp cp tp 8")),
]
ALL = {**DISTRIBUTIONS, **SEQUENCE_DISTRIBUTIONS, **EXPERT_DISTRIBUTIONS}


MATRIX = [
    ("gqa", "zero-1 8"),
    ("vit", "hsdp 8"),
    ("moe", "fsdp ep 8"),
    ("tied gpt", "fsdp cp tp 8"),
]


@pytest.mark.parametrize(
    ("model", "name"),
    long_in_matrix(EIGHT, MATRIX, [c for c in EIGHT if c not in (EIGHT[0], *MATRIX)]),
)
def test_arguments_are_xlas(model: str, name: str) -> None:
    """Every byte XLA counts as an argument or a result of a core is one of our named buffers."""
    captured, inputs, outputs = model_graph(model)
    graph, how = run(captured, step_passes(DEFAULTS)), ALL[name]
    recipe = recipe_of(graph, inputs, outputs, how.mesh, how.settings)
    stats = xla_spmd.XlaStep(recipe, recipe.mesh).program.get_compiled_memory_stats()
    plan = planned(graph, inputs, outputs, how.settings, dict(how.axes))
    given, made = (sum(local_bytes(plan, s) for s in slots) for slots in (inputs, outputs))
    print(f"{model}, {name}: arguments {given}, results {made}")
    assert given == stats.argument_size_in_bytes
    assert made == stats.output_size_in_bytes - POINTER_BYTES * len(outputs)


def local_bytes(plan: Plan, slot: Slot) -> int:
    return plan.step.buffers[slot.name].local_type.num_bytes


def planned(
    graph: Graph,
    inputs: tuple[Slot, ...],
    outputs: tuple[Slot, ...],
    settings: StrategySettings,
    axes: dict[str, int],
    num_microbatches: int = 1,
) -> Plan:
    return build_plan(
        graph,
        inputs,
        outputs,
        make_mesh(axes),
        settings=settings,
        num_microbatches=num_microbatches,
        unit=answer_request,
    )


WAYS = 4


@functools.cache
def mixed() -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    """A model whose every leaf divides by the cores."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 48,
        "head_dim": 8,
    }
    graph, inputs, outputs = captured_graph(
        mixed_adam.train_task(architecture_of(config), 16), SAMPLES
    )
    return run(graph, step_passes(DEFAULTS)), inputs, outputs


def bytes_per_parameter(plan: Plan) -> tuple[Fraction, ...]:
    """(parameters, gradients, optimizer), the optimizer without its step count."""
    buffers = plan.step.buffers.values()
    params = sum(b.global_type.num_elements for b in buffers if b.role == "parameter")
    counts = [b for b in buffers if b.role == "optimizer" and not b.local_type.rank]
    found = plan.footprint.argument_bytes
    optimizer = found["optimizer"] - sum(b.local_type.num_bytes for b in counts)
    sizes = (found["parameters"], found["gradients"], optimizer)
    return tuple(Fraction(size, params) for size in sizes)


N = WAYS
PAPER = {
    ("generic", 0): (2, 2, 12),
    ("generic", 2): (2, Fraction(2, N), Fraction(12, N)),
    ("fsdp", 3): (Fraction(2, N), Fraction(2, N), Fraction(12, N)),
}


@pytest.mark.parametrize(("name", "zero"), PAPER)
def test_zero_stages_need_the_papers_bytes(name: str, zero: int) -> None:
    plan = planned(*mixed(), StrategySettings(name=name, zero=zero), {"dp_shard": WAYS})
    assert bytes_per_parameter(plan) == PAPER[name, zero]
    assert plan.findings == ()


def test_stage_1_scatters_gradients_already() -> None:
    """The paper keeps gradients whole in stage 1; ours are scattered where they are made."""
    plan = planned(*mixed(), StrategySettings(name="generic", zero=1), {"dp_shard": WAYS})
    parameters, gradients, optimizer = bytes_per_parameter(plan)
    assert (parameters, optimizer) == (2, Fraction(12, N))
    assert gradients == Fraction(2, N) <= 2


def test_accumulated_gradients_are_fp32() -> None:
    """With micro-batches the 2 bytes of gradient become 4: sums are kept in fp32."""
    settings = StrategySettings(name="fsdp")
    plan = planned(*mixed(), settings, {"dp_shard": WAYS}, num_microbatches=2)
    assert bytes_per_parameter(plan) == (Fraction(2, N), Fraction(4, N), Fraction(12, N))
