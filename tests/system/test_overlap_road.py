"""Overlap knobs through compiled programs: same bits, other programs, other times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.linking.residency import Residency
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.models import config_task
from shardwright.orchestrator.road.timing import step_of
from shardwright.sharding.plan import Traffic
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.timing.step_time import StepTiming, time_step
from shardwright.sim_cluster.values.result import distance
from tests.support.cells import long_in_matrix
from tests.support.small_job import SIZES, Steps, build_on, bundle_of, run_steps

LAYERS = 4
L0_BOUND = 1e-5
LAST_BOUND = 1e-6  # fp32 sums in another order
MICRO_BATCHES = 2
OUTSIDE = 3  # weights outside of layers: embedding, last norm, head
MESH = {"dp_replicate": 2, "dp_shard": 2}
LAST = "reduced once"
BUCKETS = "buckets"
GROUPS = "groups of two layers, of another group"
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "gathers one layer early": {"early_all_gather_shift": 1},
    "reductions one layer late": {"late_reduce_scatter_shift": 1},
    "both": {"early_all_gather_shift": 2, "late_reduce_scatter_shift": 1},
    "four streams": {"cc_streams": 4},
    BUCKETS: {"bucket_mb": 1},
    "buckets of another layer": {
        "bucket_mb": 1,
        "early_all_gather_shift": 1,
        "late_reduce_scatter_shift": 1,
    },
    GROUPS: {
        "layers_per_group": 2,
        "early_all_gather_shift": 1,
        "late_reduce_scatter_shift": 1,
    },
    LAST: {"reduce_gradients": "last"},
}
ALONE = (
    "gathers one layer early",
    "reductions one layer late",
    "buckets of another layer",
    "four streams",
    GROUPS,
)
"""In no quick test: `both` and `BUCKETS` have most of what they do."""
REST = ("buckets of another layer", GROUPS)
IN_MATRIX = ("both", *(name for name in ALONE if name not in REST))


def _task() -> TrainTask:
    return config_task.train_task({**SIZES, "num_hidden_layers": LAYERS}, seq_len=8, dtype="f32")


@dataclass(frozen=True)
class Ready:
    bundle: Bundle
    steps: Steps
    timing: StepTiming
    traffic: tuple[Traffic, ...]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ready]:
    """Bundles with a step run and timed, by knobs, each built once."""
    path = tmp_path_factory.mktemp("overlap")

    @cache
    def build(name: str) -> Ready:
        road = build_on(_task(), MESH, settings=StrategySettings(**KNOBS[name]))
        bundle = bundle_of(road, path / name)
        step = step_of(road.built, bundle.programs)
        # Under the profile whose collectives take longest: beside a model this small, steps of
        # two microseconds are hidden whatever the knobs say.
        timing = time_step(step, "conservative")
        steps = run_steps(bundle, _task(), road.built.layout.global_batch)
        return Ready(bundle, steps, timing, road.built.plan.traffic)

    return build


@pytest.mark.parametrize(
    "name", long_in_matrix((n for n in KNOBS if n not in ("none", LAST)), IN_MATRIX, REST)
)
def test_a_knob_changes_programs_and_times_but_no_value(
    name: str, ready: Callable[[str], Ready]
) -> None:
    plain, given = ready("none"), ready(name)
    assert given.steps.losses == plain.steps.losses
    expected = {n: a.tobytes() for n, a in plain.steps.after_one.items()}
    assert {n: a.tobytes() for n, a in given.steps.after_one.items()} == expected
    checks = given.steps.run.result.l0
    assert max(check.distance for check in checks.values()) <= L0_BOUND
    digests = given.bundle.manifest.programs
    assert digests["backward"] != plain.bundle.manifest.programs["backward"]
    late_only = set(KNOBS[name]) == {"late_reduce_scatter_shift"}
    assert (digests["forward"] == plain.bundle.manifest.programs["forward"]) == late_only
    assert given.timing.step_time_ps != plain.timing.step_time_ps
    counts = [sum(u.count for u in r.timing.collectives) for r in (plain, given)]
    joined = {"bucket_mb", "layers_per_group"} & {*KNOBS[name]}
    assert counts[1] < counts[0] / 4 if joined else counts[1] == counts[0]


@pytest.mark.parametrize("name", long_in_matrix(KNOBS, ALONE))
def test_arenas_meet_the_bound(name: str, ready: Callable[[str], Ready]) -> None:
    """What rotating carries hold is planned like everything else."""
    for program in ready(name).bundle.programs.values():
        assert program.arena_bytes <= 1.02 * Residency(program).bound_bytes + 4096


def test_streams_by_what_waits(ready: Callable[[str], Ready]) -> None:
    """Gathers of weights, reductions of gradients and sums over copies are told apart."""
    found = {
        (call.kind, call.axes): call.stream
        for program in ready("four streams").bundle.programs.values()
        for function in program.functions
        for call in function.collectives
    }
    assert found["all_gather", ("dp_shard",)] == 1
    assert found["reduce_scatter", ("dp_shard",)] == 2
    assert found["all_reduce", ("dp_replicate",)] == 3
    plain = ready("none").bundle.programs.values()
    calls = [c for program in plain for f in program.functions for c in f.collectives]
    assert calls
    assert {c.stream for c in calls} == {0}


def test_gradients_reduced_once(ready: Callable[[str], Ready]) -> None:
    """Two micro-batches, one reduction: fewer collectives, the same step but for the order of
    sums."""
    plain, given = ready("none"), ready(LAST)
    leaves = plain.steps.after_one
    errors = {n: distance(given.steps.after_one[n], leaf) for n, leaf in leaves.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= LAST_BOUND, worst
    checks = given.steps.run.result.l0
    assert max(check.distance for check in checks.values()) <= L0_BOUND
    counts = [
        sum(u.count for u in r.timing.collectives if u.call.kind == "reduce_scatter")
        for r in (plain, given)
    ]
    assert counts[1] * MICRO_BATCHES < counts[0]
    assert given.timing.step_time_ps != plain.timing.step_time_ps


def test_buckets_save_launches_and_move_the_same(ready: Callable[[str], Ready]) -> None:
    """Time on the wire goes down with the number of collectives, bytes stay."""
    plain, given = ready("none").timing, ready(BUCKETS).timing
    sizes = [sum(u.count * u.cost.size_bytes for u in t.collectives) for t in (plain, given)]
    spent = [sum(u.total_ps for u in t.collectives) for t in (plain, given)]
    assert sizes[0] == sizes[1]
    assert spent[1] < spent[0] / 2
    assert given.step_time_ps < plain.step_time_ps


@pytest.mark.matrix
def test_files_run_the_collectives_of_the_plan(ready: Callable[[str], Ready]) -> None:
    """In groups of two layers one gather per group and pass, one reduction, one sum over copies."""
    for knobs in ("none", GROUPS):
        found, planned = Counter[tuple[str, tuple[str, ...]]](), Counter[Any]()
        for use in ready(knobs).timing.collectives:
            found[use.call.kind, use.call.axes] += use.count
        for row in ready(knobs).traffic:
            planned[row.kind, row.axes] += row.count
        assert found == planned
    assert found["reduce_scatter", ("dp_shard",)] == MICRO_BATCHES * (LAYERS // 2 + OUTSIDE)


def test_what_fills_a_bucket_writes_there(ready: Callable[[str], Ready]) -> None:
    """Contractions of backward store gradients in the bucket that is sent, and read weights where
    they arrived: neither is copied."""
    program = ready(BUCKETS).bundle.programs["backward"]
    (body,) = (f for f in program.functions if f.name == "backward.loop")
    ends = {
        kernel.program.attrs["collective"]: kernel.program.attrs
        for kernel in body.kernels
        if kernel.program.kind == "collective_start"
    }
    kinds = {call.kind: ends[number] for number, call in enumerate(body.collectives)}
    for kind, end, stores in (
        ("all_gather", "target", "load"),
        ("reduce_scatter", "source", "store"),
    ):
        tensor = kinds[kind][end]
        touching = [
            kernel.program
            for kernel in body.kernels
            if any(
                n.op == stores and n.attrs["view"].tensor == tensor for n in kernel.program.nodes
            )
        ]
        contractions = [p for p in touching if "dot_general" in p.name]
        assert len(contractions) >= 7
        assert not [p for p in touching if p.name in ("copy", "write")]
