"""Golden cells: what a job compiles to and how long it takes is what its golden file says.

Every graph and kernel of a cell has a text that reads back, too (docs/text-forms.md), and every
rewrite on its road keeps what it promises (`compiler/rewriting`).

A difference that is meant is written with `--update-golden`, which says what changed; a review
reads that.
"""

from __future__ import annotations

import pytest

from shardwright.compiler.steps import checked
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.road.stages import Traces
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from tests.golden.cells import CELLS, GoldenCell
from tests.golden.files import FOLDER, golden
from tests.golden.record import record, run_cell
from tests.golden.texts import check_texts
from tests.support.cells import long_in_matrix

LONG = [cell for cell in CELLS if not cell.is_quick]


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces()


@pytest.mark.parametrize("cell", long_in_matrix(CELLS, LONG), ids=str)
def test_a_cell_is_as_its_golden_file_says(
    cell: GoldenCell, traces: Traces, request: pytest.FixtureRequest
) -> None:
    with UnitService(InlineExecutor, open_cache(JobConfig().cache)) as service, checked():
        found = run_cell(cell.job, service, traces)
    graphs, kernels = check_texts(found.built)
    assert graphs > 1 and kernels > 1
    golden(f"cells/{cell.name}", record(found), request)


def test_every_golden_file_of_a_cell_has_its_cell() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert {path.stem for path in (FOLDER / "cells").glob("*.json")} == set(names)
