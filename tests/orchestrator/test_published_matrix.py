"""Every model family in every layout of a published run is predicted: micro-batches of one and
more, with and without dropout.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.orchestrator.validation.predict import Predictor
from shardwright.sim_cluster.profiles import fitted_profile
from tests.support.cells import diagonals
from tests.support.published_rows import BERT, parsed

MODELS = {"encoder": "BERT", "gpt": "GPT3", "vit": "ViT", "llama": "Llama2"}
LAYOUTS = ((1, 1, 32), (1, 8, 4), (2, 1, 16), (2, 4, 4), (4, 2, 4), (4, 8, 1))
"""Stages, tensor-parallel ranks, data-parallel ranks of the 32 cores of one machine."""
SIZES = {"layers": "4", "heads": "8", "kv_heads": "8", "seq_len": "16", "vocab": "64"}
MICRO_BATCHES, DROPOUTS = ("1", "2"), (0.0, 0.1)
CELLS = tuple(
    (family, layout, MICRO_BATCHES[(i + j) % 2], DROPOUTS[(i // 2 + j // 2) % 2])
    for i, family in enumerate(MODELS)
    for j, layout in enumerate(LAYOUTS)
)
"""Every pair of two settings of the four; how many micro-batches there are does not tell layouts
apart, nor dropout families."""
QUICK = tuple(cell for cell in CELLS if cell[:2] == ("llama", (2, 4, 4)))


def test_cells_are_all_pairs() -> None:
    settings = (tuple(MODELS), LAYOUTS, MICRO_BATCHES, DROPOUTS)
    for a, b in itertools.combinations(range(len(settings)), 2):
        assert {(c[a], c[b]) for c in CELLS} == set(itertools.product(settings[a], settings[b]))


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[Predictor]:
    cache = Cache(tmp_path / "cache")
    with UnitService(InlineExecutor, cache) as service:
        yield Predictor(service, cache)


@pytest.mark.parametrize(
    ("family", "layout", "micro_batch", "dropout"),
    diagonals(CELLS, 4, QUICK),
)
def test_a_run_of_any_family_and_layout_is_predicted(
    predictor: Predictor,
    tmp_path: Path,
    family: str,
    layout: tuple[int, int, int],
    micro_batch: str,
    dropout: float,
) -> None:
    pp, tp, dp = map(str, layout)
    row = BERT | SIZES | {"model": MODELS[family], "pp": pp, "tp": tp, "dp": dp}
    run = parsed(tmp_path, row | {"microbatch": micro_batch, "zero1": "yes" if dropout else "no"})
    assert run.workload.family == family and not run.unsupported()
    timed = predictor.time(
        dataclasses.replace(run.workload, dropout=dropout), fitted_profile("nominal")
    )
    assert timed.seconds > 0
