"""`reshard_after_forward=False`: backward gathers no weight that forward has gathered, however the
layers are recomputed; values stay those of the unsharded step.
"""

from __future__ import annotations

from functools import cache, partial

import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator.models import config_task
from tests.support.cells import diagonals
from tests.support.road import worst
from tests.support.small_job import SIZES
from tests.support.staged_runs import plan_of, step_errors
from tests.support.strategy_cells import distribution

BOUNDS = {"f32": 1e-5, "bf16": 1e-2}
CELLS = [(remat, dtype) for remat in ("none", "selective", "full") for dtype in BOUNDS]


@cache
def task(remat: str, dtype: str) -> TrainTask:
    return config_task.train_task(SIZES, seq_len=8, dtype=dtype, remat=remat)


@pytest.mark.parametrize(("remat", "dtype"), diagonals(CELLS, 3))
def test_backward_gathers_nothing_again(remat: str, dtype: str) -> None:
    """Converted by the forward loop, all at once, or in each layer."""
    gathers, make = {}, partial(task, remat, dtype)
    for reshard in (True, False):
        how = distribution("fsdp", reshard_after_forward=reshard, dp_shard=4)
        step = plan_of(make, how, 2).step
        backward = next(p for p in step.programs if p.name == "backward")
        gathers[reshard] = sum(op.name == "all_gather" for op in backward.graph.walk())
    assert gathers[True] and not gathers[False]
    leaf, error = worst(step_errors(make, how, 2))
    assert error <= BOUNDS[dtype], leaf


@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"pp": 2, "dp_shard": 2}])
def test_a_note_counts_what_backward_gathers_again(axes: dict[str, int]) -> None:
    """Of every part of a pipeline too, whose backward passes gather what theirs need."""
    how = distribution("fsdp", reshard_after_forward=False, **axes)
    plan = plan_of(partial(task, "full", "f32"), how, 2)
    again = sum(r.count for r in plan.traffic if r.kind == "all_gather" and "back" in r.program)
    assert bool(again) == ("pp" in axes)
    noted = [f.message for f in plan.findings if f.code == "SW_RESHARD"]
    assert [f"still runs {again} all_gather" in message for message in noted] == [True] * bool(
        again
    )
