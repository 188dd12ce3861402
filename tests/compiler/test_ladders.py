"""What the compiler does with a graph takes as many calls as the graph is large: no walk over
operands, users or regions takes every path, and none needs a stack of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.settings import StrategySettings
from tests.support.cells import diagonals, long_in_matrix
from tests.support.compiled import link
from tests.support.ladders import BATCH, COUNTED, LOSS, PARAMETER, RUNGS, check_grows, ladder
from tests.support.step_plans import build_plan


def imported(graph: Graph) -> None:
    import_module(to_stablehlo(graph))


def planned(graph: Graph) -> None:
    """Everything that sharding asks of a step under FSDP."""
    slots = (PARAMETER, BATCH), (PARAMETER, LOSS)
    settings = StrategySettings()
    mesh = make_mesh({"dp_shard": 4})
    build_plan(graph, *slots, mesh, num_microbatches=1, unit=answer_request, settings=settings)


STAGES: dict[str, Callable[[Graph], object]] = {
    "import": imported,
    "passes": lambda graph: run(graph, PASSES),
    "plan": planned,
}


KINDS = (*RUNGS, *COUNTED)
KINDS_COUNTED = [kind for kind in KINDS if kind != "product"]
SOME = ("gathered",)
REST = [kind for kind in KINDS_COUNTED if kind not in SOME]


def check_linear(stage: str, kind: str, rungs: int, most: int) -> None:
    """Ladders of half the rungs and of all of them."""
    check_grows(lambda n: partial(STAGES[stage], ladder(kind, n)), rungs // 2, most)


@pytest.mark.parametrize("rungs", [60, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["import", "passes", "plan"])
def test_calls_of_a_stage_grow_with_the_graph(stage: str, kind: str, rungs: int) -> None:
    check_linear(stage, kind, rungs, 20_000_000)


@pytest.mark.parametrize("kind", [*COUNTED, *diagonals(list(RUNGS), 3)])
def test_a_compilation_ends_and_needs_no_stack_of_calls(kind: str) -> None:
    """Outline, lowering and code; masks and positions are made again inside of kernels."""
    link(ladder(kind, 200))


ROUNDS = pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="a round of `activations` replaces the first twelve functions of a chain of them",
)
"""Twice the rungs are twice the rounds, each of which looks at every rung: four times the calls."""


@pytest.mark.parametrize(
    "kind",
    [
        *long_in_matrix(KINDS_COUNTED, SOME, REST),
        pytest.param("product", marks=(pytest.mark.exhaustive, ROUNDS)),
    ],
)
def test_calls_of_a_compilation_grow_with_the_graph(kind: str) -> None:
    """From 120 rungs on, where kernels are as large as their tiles let them."""
    check_grows(lambda n: partial(link, ladder(kind, n)), 120, 200_000_000)
