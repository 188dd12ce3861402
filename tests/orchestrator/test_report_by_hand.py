"""Every figure of a report against arithmetic that stands here: numbers in, the expected number
worked out beside it from what docs/report.md says, nothing of the product in between."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.goodput_keys import GoodputConfig
from shardwright.orchestrator.report import report
from shardwright.orchestrator.report.goodput import Failures, goodput_section
from shardwright.orchestrator.report.leaf_roles import role_rows
from shardwright.orchestrator.report.limits import asked, confidence
from shardwright.orchestrator.report.rates import product_types, step_flops
from shardwright.orchestrator.road.timing import Timings
from shardwright.sharding.cut.pipeline.schedules import bubble
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.prepare.reroll import Rerolled
from shardwright.sim_cluster.timing.actors import CollectiveDuration, CollectiveUse
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.step_parts import StepParts
from tests.support.invented_job import buffer, invented, machine, product, programs, timing

EXACT = 1e-12
SECOND = 10**12  # picoseconds


def close(number: float) -> Any:
    return pytest.approx(number, rel=EXACT)


def section(built: Any = None, **fields: Any) -> dict[str, Any]:
    """The timing section of a step of 0.02 s; the band is from 0.018 to 0.025 s."""
    step = timing(20_000_000_000, **fields)
    band = {
        "conservative": timing(25_000_000_000),
        "nominal": step,
        "peak": timing(18_000_000_000),
    }
    built = built or invented()
    about = asked(built.job, built.layout.target, built.layout.mesh.sizes)
    return report.timing_section(built, step, band, confidence(about))


# Rates


def test_tokens_per_second() -> None:
    """48 samples of 7 tokens are 336 tokens, in 0.02 s."""
    assert section()["tokens_per_s"] == close(336 / 0.02) == close(16_800.0)


def test_step_time_and_band() -> None:
    found = section()
    assert found["step_time_ps"] == 20_000_000_000
    assert found["step_time_s"] == close(0.02)
    assert found["band_s"] == [close(0.018), close(0.025)]


def test_mfu_is_three_forward_passes_over_the_published_peak() -> None:
    """The loss of the captured step of 16 samples takes 2 x 40 x 20 x 32 = 51,200 FLOP of products;
    the additions beside them do not count. Three times that for three times the samples: 460,800.
    The peak is 64 x 1e6 FLOP/s, 1,280,000 in 0.02 s.

    Source: PaLM, appendix B: a training step is three times its forward pass.
    """
    own = programs(forward=product(10, 20, 30), backward=product(50, 60, 70))
    schedule = ((("forward", "backward"), 3),)
    built = invented(programs=own, schedules=(schedule,))
    assert step_flops(built).model == 51_200 * 3 * 3 == 460_800
    found = section(built)
    assert found["peak_flops_per_s"] == 64e6
    assert found["mfu"] == found["mfu_causal"] == close(460_800 / 1_280_000) == close(0.36)
    assert found["attention"] == "none" and found["published"] is None


def test_copies_are_no_part_of_the_model() -> None:
    """The step of 16 samples has 2 x 40 x 20 x 32 FLOP of products and 800 weights, that of the
    model half: 2 x 40 x 20 x 16 = 25,600, nine times for three passes of 48 samples."""
    own = programs(forward=product(10, 20, 30), backward=product(50, 60, 70))
    graph = product(40, 20, 16)
    graph = Graph(graph.inputs, graph.ops, (graph.inputs[0], *graph.outputs), graph.name)
    inputs = (Slot("x", "batch", 0), Slot("w", "parameter"), Slot("z", "batch", 0))
    outputs = (Slot("x", "optimizer"), Slot("metrics/loss", "metric"))
    model = Rerolled(graph=graph, inputs=inputs, outputs=outputs)
    buffers = (buffer("w", "parameter", 640),)
    schedule = ((("forward", "backward"), 3),)
    built = invented(programs=own, schedules=(schedule,), buffers=buffers, model=model)
    counts = step_flops(built)
    assert counts.model == 25_600 * 3 * 3
    assert counts.captured == 25_600 * 3
    assert counts.executed == step_flops(invented(programs=own, schedules=(schedule,))).executed
    assert report.graph_section(built)["params"] == 20 * 16


def test_hfu_is_every_product_that_runs_over_the_same_peak() -> None:
    """A core runs 2 x 10 x 20 x 30 = 12,000 and 2 x 50 x 60 x 70 = 420,000 FLOP of products per
    micro-batch, three times on 64 cores: 82,944,000 FLOP in 0.02 s of 64 x 1e6 FLOP/s."""
    own = programs(forward=product(10, 20, 30), backward=product(50, 60, 70))
    built = invented(programs=own, schedules=(((("forward", "backward"), 3),),))
    assert step_flops(built).executed == 432_000 * 3 * 64 == 82_944_000
    assert section(built)["hfu"] == close(82_944_000 / 1_280_000) == close(64.8)
    assert step_flops(built).captured == 51_200 * 3


def test_cores_of_a_stage_run_its_programs() -> None:
    """Each stage is on 32 of 64 cores: (12,000 + 2 x 4 x 5 x 6 = 240) x 3 x 32."""
    own = programs(forward0=product(10, 20, 30), forward1=product(4, 5, 6))
    schedules = (((("forward0",), 3),), ((("forward1",), 3),))
    built = invented(programs=own, stages=2, schedules=schedules)
    assert step_flops(built).executed == 12_240 * 3 * 32 == 1_175_040


def test_what_the_model_needs_is_no_more_than_what_runs() -> None:
    """12,000 x 3 micro-batches x 64 cores are 2,304,000; a step without a backward pass of its own,
    of 2 x 2 x 3 x 5 = 60 on 64 cores, runs 11,520 of the 460,800 that three passes would be."""
    own = programs(step=product(10, 20, 30))
    built = invented(programs=own, schedules=(((("step",), 3),),))
    assert (step_flops(built).model, step_flops(built).executed) == (460_800, 2_304_000)
    small = invented(programs=programs(step=product(2, 3, 5)), schedules=(((("step",), 3),),))
    counts = step_flops(small)
    assert counts.model == counts.executed == 60 * 3 * 64 == 11_520
    assert section(small)["mfu"] == section(small)["hfu"]


def test_types_of_products_are_shares_of_their_flops() -> None:
    """2 x 4 x 8 x 2 = 128 FLOP in bf16, and 2 x 6 x 8 x 4 = 384 in fp32."""
    b = Builder()
    short = b.dot(b.input((4, 8), DType.BF16), b.input((8, 2), DType.BF16))
    wide = b.dot(b.input((6, 8)), b.input((8, 4)))
    assert product_types(b.finish(short, wide)) == {"f32": close(0.75), "bf16": close(0.25)}


def test_arithmetic_of_every_op_is_counted_beside_it() -> None:
    """51,200 of products and 40 x 32 = 1,280 additions; three times as many samples in a step."""
    assert invented().flops_per_step == (51_200 + 1_280) * 3 == 157_440


def test_arithmetic_of_a_step_is_rounded_down_to_a_whole_number() -> None:
    """52,480 x 48 samples of a step / 9 captured samples = 279,893.3."""
    assert invented(traced_samples=9).flops_per_step == 279_893


def test_engines_are_busy_a_share_of_all_physical_cores() -> None:
    """Busy 15 ms of a step of 20 ms on a core of one; of two, each half of it."""
    busy = {"tensor": 15_000_000_000}
    assert section(engines_ps=busy)["engines"]["tensor"]["share"] == close(0.75)
    two = invented(machine(lnc=2))
    assert section(two, engines_ps=busy)["engines"]["tensor"] == {
        "busy_ps": 15_000_000_000,
        "share": close(0.375),
    }


def test_breakdowns_are_those_of_the_step_and_of_every_stage() -> None:
    parts = {"compute": 12_000_000_000, "bubble": 8_000_000_000}
    other = {"compute": 20_000_000_000}
    found = section(breakdown_ps=parts, stages_ps=(parts, other), hidden_ps={"collective_tp": 5})
    assert found["breakdown_ps"] == parts and found["hidden_ps"] == {"collective_tp": 5}
    assert found["per_stage"] == [
        {"stage": 0, "step_time_ps": 20_000_000_000, "breakdown_ps": parts},
        {"stage": 1, "step_time_ps": 20_000_000_000, "breakdown_ps": other},
    ]


def test_faults_are_a_factor_of_the_healthy_step() -> None:
    """30 ms against 24: 1.25 times."""
    slow = timing(30_000_000_000, rank_classes=4)
    parts = StepParts(functions=(), runs=(), timelines=())
    told = Timings(chosen=slow, parts=parts, band={}, healthy=timing(24_000_000_000))
    found = report.fault_section(invented(), told)["faults"]
    assert found["slowdown"] == close(1.25) and found["rank_classes"] == 4
    assert found["healthy_step_time_ps"] == 24_000_000_000
    assert report.fault_section(invented(), replace(told, healthy=None)) == {}


# Sizes


def test_parameters_are_counted_once_whatever_their_shards() -> None:
    own = (buffer("w", "parameter", 800), buffer("v", "parameter", 80), buffer("m", "optimizer", 8))
    found = report.graph_section(invented(buffers=own))
    assert (found["params"], found["flops_per_step"]) == (880, 157_440)
    assert found["ops"] == {"add": 1, "dot_general": 1}
    assert (found["name"], found["repeats"]) == ("invented", [])


def test_types_of_products_are_those_of_the_precision_policy() -> None:
    """What is captured in fp32 and multiplied in bf16 by `strategy.param_dtype`."""
    b = Builder()
    short = b.dot(b.input((40, 20), DType.BF16), b.input((20, 32), DType.BF16))
    prepared = SimpleNamespace(recipe=SimpleNamespace(graph=b.finish(short)))
    found = report.graph_section(invented(prepared=prepared))
    assert found["product_types"] == {"bf16": 1.0}


def test_batch_and_logical_cores() -> None:
    assert report.batch_section(invented()) == {
        "global_batch": 48,
        "micro_batch": JobConfig().strategy.micro_batch,
        "num_microbatches": 3,
        "tokens_per_sample": 7,
    }
    found = report.logical_cores(invented(), timing(SECOND, lone_ps=77))
    assert (found["lnc"], found["per_instance"], found["alone_ps"]) == (1, 32, 77)
    assert found["hbm_bytes"] == 16 * 2**30 and not found["hypothetical"]
    assert (found["kernels_cut"], found["kernels_alone"]) == (0, 0)
    assert report.logical_cores(invented(machine(lnc=2)), timing(SECOND))["hypothetical"]


@pytest.mark.parametrize(
    ("stages", "parts", "count", "share"),
    [
        (4, 4, 8, 3 / 11),  # (p - 1) / (m + p - 1)
        (4, 8, 8, 3 / 19),  # two parts per stage: (p - 1) / (2 m + p - 1)
        (8, 8, 128, 7 / 135),
    ],
)
def test_the_bubble_of_equal_stages(stages: int, parts: int, count: int, share: float) -> None:
    """Source: Narayanan et al. 2021, section 2.2: the share of the whole step."""
    assert bubble(stages, parts, count) == close(share)


@pytest.mark.parametrize(("count", "told"), [(3, True), (4, False)])
def test_fewer_than_two_micro_batches_per_stage_are_worth_a_note(count: int, told: bool) -> None:
    """3 for 2 stages: (2 - 1) / (3 + 2 - 1) = 25 % is bubble; with 4, 8, 16 micro-batches of 16
    samples 1/5, 1/9 and 1/17."""
    built = invented(stages=2)
    layout = replace(built.layout, num_microbatches=count)
    built = replace(built, layout=layout)
    built.plan.parts = (("forward0",), ("forward1",))
    notes = list(report._idle_stages(built))
    assert len(notes) == told
    for note in notes:
        assert (
            "3 micro-batches keep 2 stages waiting for each other 25 % of the step" in note.message
        )
        assert note.hint == "set strategy.global_batch: 64 for 20 %, 128 for 11 %, 256 for 5.9 %"


def test_one_micro_batch_keeps_stages_waiting() -> None:
    """(2 - 1) / (1 + 2 - 1) = 50 %."""
    built = invented(stages=2)
    built = replace(built, layout=replace(built.layout, num_microbatches=1))
    built.plan.parts = (("forward0",), ("forward1",))
    (note,) = report._idle_stages(built)
    assert note.message.startswith("1 micro-batch keeps 2 stages waiting for each other 50 % of")


def test_the_pipeline_of_a_report() -> None:
    """2 stages of one part, 3 micro-batches: a bubble of 1 / (3 + 1)."""
    built = invented(stages=2)
    assert report.pipeline_section(built) == {}
    built.plan.parts = (SimpleNamespace(), SimpleNamespace())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "by_stage", lambda found, count: [len(found), count])
        found = report.pipeline_section(built)
    assert found == {
        "schedule": JobConfig().strategy.schedule,
        "balance": JobConfig().strategy.stage_balance,
        "num_microbatches": 3,
        "bubble_of_equal_stages": close(0.25),
        "stages": [2, 2],
    }


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("trn1.2xlarge", 190 / 2),
        ("trn1.32xlarge", 190 / 2),
        ("trn1n.32xlarge", 190 / 2),
        ("trn2.48xlarge", 667 / 8),
        ("trn2-ultraserver", 667 / 8),
        ("trn3-gen1-ultraserver", 671 / 8),
        ("trn3-gen2-ultraserver", 671 / 8),
        ("inf2.xlarge", 190 / 2),
        ("inf2.8xlarge", 190 / 2),
        ("inf2.24xlarge", 190 / 2),
        ("inf2.48xlarge", 190 / 2),
        ("inf1.xlarge", 64 / 4),
        ("inf1.2xlarge", 64 / 4),
        ("inf1.6xlarge", 64 / 4),
        ("inf1.24xlarge", 64 / 4),
    ],
)
def test_published_peaks(name: str, tflops: float) -> None:
    """bf16 TFLOPS of a chip over its cores. Source: device pages of the Neuron documentation."""
    found = load_target(name)
    assert found.published_flops_per_s_per_core == close(tflops * 1e12)


# Goodput


def test_goodput_of_an_interval() -> None:
    """Daly 2006: T / (M e^(R/M) (e^((T + d)/M) - 1)) with T 200, d 20, M 1000, R 100 seconds:
    200 / (1000 x 1.1051709180756477 x 0.24607673058738084) = 0.7354107931."""
    failures = Failures(mtbf_s=1000.0, checkpoint_s=20.0, restart_s=100.0)
    assert failures.goodput(200.0) == pytest.approx(0.7354107931100423, rel=1e-13)


def test_the_best_interval_and_youngs() -> None:
    """x = 0.186894884786884 solves (1 - x) e^(x + 0.02) = 1; Young: sqrt(2 x 20 x 1000) = 200."""
    failures = Failures(mtbf_s=1000.0, checkpoint_s=20.0, restart_s=100.0)
    assert failures.best_interval_s() == pytest.approx(186.894884786884, rel=1e-9)
    assert failures.young_interval_s() == close(200.0)


def test_no_work_between_checkpoints_that_take_no_time_loses_nothing() -> None:
    assert Failures(mtbf_s=1e5, checkpoint_s=0.0, restart_s=9.0).goodput(0.0) == 1.0


def test_what_no_float_can_hold_is_no_goodput() -> None:
    """e^700 is about the largest; e^701 and e^(400 + 301) are told without it."""
    for work, restart in ((701.0, 0.0), (400.0, 301.0)):
        failures = Failures(mtbf_s=1.0, checkpoint_s=0.0, restart_s=restart)
        assert failures.goodput(work) == 0.0
    assert Failures(mtbf_s=1.0, checkpoint_s=0.0, restart_s=0.0).goodput(699.0) > 0


SAVED = (
    buffer("w", "parameter", 8_000_000_000, DType.BF16),  # 16 GB
    buffer("m", "optimizer", 4_000_000_000),  # 16 GB
    buffer("r", "rng", 1_000_000_000),  # 4 GB
    buffer("x", "batch", 8_000_000_000),
    buffer("g", "gradient", 8_000_000_000),
)


def goodput(**keys: float) -> dict[str, Any]:
    given = {"instance_mtbf_hours": 10.0, "restart_s": 300.0, "storage_gb_per_s": 0.5} | keys
    built = invented(buffers=SAVED, goodput=GoodputConfig(**given))
    return goodput_section(built, timing(2 * SECOND))


def test_what_a_checkpoint_holds_and_takes() -> None:
    """Parameters, optimizer and random state: 16 + 16 + 4 GB, at 0.5 GB/s on each of 2 instances
    36 s; a failure of one of two instances of 10 hours every 18,000 s."""
    found = goodput()
    assert found["checkpoint_bytes"] == 36_000_000_000
    assert found["checkpoint_s"] == close(36.0)
    assert found["mtbf_s"] == close(18_000.0) and found["restart_s"] == 300.0
    assert found["young_interval_s"] == close(math.sqrt(2 * 36 * 18_000))  # 1,138.4 s
    assert goodput(checkpoint_s=5.0)["checkpoint_s"] == 5.0


def test_goodput_of_whole_steps() -> None:
    """1,001 s are 500.5 steps of 2 s, 500 in whole ones (to even); with M = 18,000 s the goodput is
    1000/18000 / (e^(300/18000) (e^(1036/18000) - 1)) = 0.0555556 / (1.0168063 x 0.0592443); saving
    takes 36 s of every 1000, failures the rest; 336 tokens take 2 s."""
    found = goodput(checkpoint_interval_s=1001.0)
    wanted = (1000 / 18_000) / (math.exp(300 / 18_000) * math.expm1(1036 / 18_000))
    assert wanted == pytest.approx(0.92224016, abs=1e-8)
    assert (found["interval_steps"], found["interval_s"]) == (500, 1000.0)
    assert found["goodput"] == close(wanted)
    assert found["lost_to_checkpoints"] == close(wanted * 36 / 1000)
    assert found["lost_to_failures"] == close(1 - wanted * 1.036)
    assert found["tokens_per_s"] == close(wanted * 168)


def test_an_interval_is_one_step_at_least() -> None:
    assert goodput(checkpoint_interval_s=0.5)["interval_steps"] == 1


def test_an_interval_in_steps_is_taken_as_it_is() -> None:
    """500 steps of 2 s, as 1,001 s are."""
    in_steps = goodput(checkpoint_interval_steps=500)
    assert (in_steps["interval_steps"], in_steps["interval_s"]) == (500, 1000.0)
    assert in_steps == goodput(checkpoint_interval_s=1001.0)
    assert goodput(checkpoint_interval_steps=10**9)["goodput"] == 0.0


def test_without_an_interval_the_best_one_is_taken() -> None:
    """x = 0.06191930664 solves (1 - x) e^(x + 36/18000) = 1: 1,114.5475 s, 557 steps of 2 s."""
    found = goodput()
    assert found["best_interval_s"] == pytest.approx(1114.5475195, rel=1e-9)
    assert (found["interval_steps"], found["interval_s"]) == (557, 1114.0)


def test_defaults_of_goodput_are_those_of_the_page() -> None:
    """docs/report.md: 6,300 hours (419 interruptions of 2,048 hosts in 54 days), 600 s, 1 GB/s."""
    keys = GoodputConfig()
    assert keys.instance_mtbf_hours == 6300.0 == round(2048 * 54 * 24 / 419, -2)
    assert (keys.restart_s, keys.storage_gb_per_s) == (600.0, 1.0)


# Collectives

GATHER = CollectiveCall("all_gather", ("dp_shard",), DType.BF16, (1, 8, 1), stream=0)
BUCKET = CollectiveCall(
    "all_reduce", ("tp",), DType.F32, (1, 8, 1), "add", stream=1, parts=((1, 4, 1), (1, 4, 1))
)


def use(call: CollectiveCall, count: int, total_ps: int, exposed_ps: int) -> CollectiveUse:
    cost = CollectiveDuration(100, Demand(0.5), "ring", "because", 4096, 8)
    return CollectiveUse(call, cost, count, total_ps, exposed_ps)


def test_rows_of_collectives_and_streams() -> None:
    mesh = make_mesh({"dp_shard": 8, "tp": 8})
    step = timing(1000, collectives=(use(GATHER, 3, 300, 40), use(BUCKET, 2, 500, 60)))
    rows = report.collective_rows(step, mesh)
    assert [r["kind"] for r in rows] == ["all_gather", "all_reduce"]
    assert [(r["axis"], r["group_size"], r["count"], r["bytes"]) for r in rows] == [
        ("dp_shard", 8, 3, 4096),
        ("tp", 8, 2, 4096),
    ]
    assert [(r["parts"], r["stream"], r["time_ps"], r["exposed_ps"]) for r in rows] == [
        (1, 0, 300, 40),
        (2, 1, 500, 60),
    ]
    assert rows[1] == {
        "kind": "all_reduce",
        "axis": "tp",
        "group_size": 8,
        "count": 2,
        "parts": 2,
        "stream": 1,
        "bytes": 4096,
        "algorithm": "ring",
        "time_ps": 500,
        "exposed_ps": 60,
        "why": "because",
    }
    found = report.stream_section(invented(), step)
    assert [(r["stream"], r["count"], r["time_ps"], r["exposed_ps"]) for r in found["streams"]] == [
        (0, 3, 300, 40),
        (1, 2, 500, 60),
    ]


def test_collectives_of_a_stream_add_up() -> None:
    """Two kinds of three on stream 1, one of them twice; streams are in order of their numbers."""
    mesh = make_mesh({"dp_shard": 8, "tp": 8})
    moved = replace(GATHER, stream=1)
    uses = (use(BUCKET, 2, 500, 60), use(moved, 3, 300, 40), use(GATHER, 1, 7, 0))
    step = timing(1000, collectives=(*uses, use(replace(moved, source_shape=(1, 2, 1)), 4, 9, 8)))
    built = invented()
    built.plan.mesh = mesh
    found = report.stream_section(built, step)
    assert found["compute_packet_bytes"] == 4096
    assert found["streams"] == [
        {
            "stream": 0,
            "packet_bytes": 65_536,
            "collectives": ["all_gather dp_shard"],
            "count": 1,
            "time_ps": 7,
            "exposed_ps": 0,
        },
        {
            "stream": 1,
            "packet_bytes": 65_536,
            "collectives": ["all_reduce tp", "all_gather dp_shard"],
            "count": 9,
            "time_ps": 809,
            "exposed_ps": 108,
        },
    ]


def test_the_fewest_paths_that_tell_roles_apart() -> None:
    given = {
        "state/params/a/w": "parameter",
        "state/params/b/w": "parameter",
        "state/opt/mu/a/w": "optimizer",
        "state/step": "optimizer",
        "key": "rng",
        "batch/x": "batch",
    }
    rows = role_rows([buffer(name, role, 6) for name, role in given.items()])
    assert rows == [
        {"role": "parameter", "paths": ["state/params"], "leaves": 2, "elements": 12},
        {"role": "optimizer", "paths": ["state/opt", "state/step"], "leaves": 2, "elements": 12},
        {"role": "rng", "paths": ["key"], "leaves": 1, "elements": 6},
    ]


def test_ours_beside_the_best_that_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.3 of the peak where somebody has 0.2; nothing of a machine without a published run."""
    asked: list[tuple[Any, ...]] = []
    told = {"id": "T9", "model": "M", "cores": 64, "release": "2.18.0", "source": "a page"}
    best = SimpleNamespace(mfu=lambda peak: peak / 5e6, machines=("a", "b"), **told)
    monkeypatch.setattr(report, "best_run", lambda *given: asked.append(given) or best)
    found = report.published_section(machine(), "causal", 0.3)
    assert found == told | {"mfu": 0.2, "times": close(1.5), "machines": ["a", "b"]}
    assert asked == [(machine(), "causal")]
    monkeypatch.setattr(report, "best_run", lambda *given: None)
    assert report.published_section(machine(), "causal", 0.3) is None
