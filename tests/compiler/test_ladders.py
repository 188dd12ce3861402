"""What the compiler does with a graph takes as many calls as the graph is large: no walk over
operands, users or regions takes every path, and none needs a stack of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from compiler.frontend.stablehlo import import_module
from compiler.ir.printer import to_stablehlo
from compiler.ir.types import Graph
from compiler.passes.pipeline import run
from sharding.mesh import make_mesh
from sharding.plan import build_plan
from sharding.settings import StrategySettings
from sharding.shardy import answer_request
from tests.support.compiled import link
from tests.support.ladders import BATCH, COUNTED, LOSS, PARAMETER, RUNGS, check_grows, ladder

RUNGS_OF_A_LADDER = 200


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
    "passes": run,
    "plan": planned,
    "compile": link,
}


def check_linear(stage: str, kind: str, most: int) -> None:
    """Ladders of half the rungs and of all of them."""
    check_grows(lambda n: partial(STAGES[stage], ladder(kind, n)), RUNGS_OF_A_LADDER // 2, most)


@pytest.mark.parametrize("kind", [*RUNGS, *COUNTED])
@pytest.mark.parametrize("stage", ["import", "passes", "plan"])
def test_calls_of_a_stage_grow_with_the_graph(stage: str, kind: str) -> None:
    check_linear(stage, kind, 3_000_000)


@pytest.mark.parametrize("kind", [*COUNTED])
def test_what_is_known_is_made_again_without_a_stack_of_calls(kind: str) -> None:
    """Masks and positions are made inside of regions from what they follow from."""
    link(ladder(kind, RUNGS_OF_A_LADDER))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*RUNGS, *COUNTED])
def test_calls_of_a_compilation_grow_with_the_graph(kind: str) -> None:
    """Outline, lowering, code and memory of one program."""
    check_linear("compile", kind, 300_000_000)
