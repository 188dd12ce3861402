"""Which changes are tried, and in which order, from reports that are written here."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.orchestrator.changes.change import changed
from shardwright.orchestrator.changes.rules import ideas
from shardwright.orchestrator.changes.situation import situation_of
from shardwright.orchestrator.config.config import load

GIB = 2**30
FITTING = "strategy.remat=auto strategy.global_batch=64 strategy.micro_batch=auto"
TWO = ("cluster.target=trn1.32xlarge", "cluster.instances=2")
EXTP = {"code": "NCC_EXTP004", "severity": "warning", "message": "", "hint": ""}


def report(**charged: int) -> dict[str, Any]:
    """A step on 32 cores, of 300 FLOP of 400 that run; Vector is its busiest engine."""
    return {
        "mesh": {"dp_shard": 32},
        "batch": {"global_batch": 64, "num_microbatches": 2},
        "graph": {"product_types": {"bf16": 1.0}, "ops": {"dot_general": 9, "xor": 40}},
        "memory": {
            "fits": True,
            "peak_bytes": GIB,
            "limit_bytes": 16 * GIB,
            "categories": {},
            "argument_bytes": {"activations": GIB // 8},
        },
        "timing": {
            "step_time_ps": sum(charged.values()),
            "breakdown_ps": charged,
            "engines": {
                "tensor": {"share": 0.2},
                "vector": {"share": 0.5},
                "gpsimd": {"share": 0.4},
                "dma_in": {"share": 0.5},
            },
            "flops": {"model": 300, "causal": 300, "captured": 400, "executed": 400},
        },
        "findings": [],
    }


def tried(one: dict[str, Any], *keys: str) -> list[str]:
    job = load(None, keys or ["model.preset=llama2-7b"])
    now = situation_of(job, one)
    return [changed(job, idea.keys).text for idea in ideas(now, one)]


def test_casts_of_fp32_products_are_first() -> None:
    one = report(compute=80, collective_dp_shard=20)
    one["graph"]["product_types"] = {"f32": 0.9, "bf16": 0.1}
    preset = "model.preset=gpt3-125m"
    assert tried(one, preset, "model.dtype=float32")[:2] == [
        "compiler.auto_cast=matmult",
        "model.dtype=bfloat16",
    ]
    cast = tried(one, preset, "model.dtype=float32", "compiler.auto_cast=matmult")
    assert "compiler.auto_cast=matmult" not in cast
    own = tried(one, "model.entry=own:task")
    assert own[0] == "compiler.auto_cast=matmult" and "model.dtype=bfloat16" not in own
    one["graph"]["product_types"] = {"f32": 0.1, "bf16": 0.9}
    assert "compiler.auto_cast=matmult" not in tried(one, preset)


def test_the_machines_generator_where_integers_keep_gpsimd_busy() -> None:
    one = report(compute=90, memory=10)
    own = "model.entry=own:task"
    assert "model.generator=rbg" not in tried(one, own)  # Vector is busier
    one["timing"]["engines"]["gpsimd"]["share"] = 0.7
    assert tried(one, own)[0] == "model.generator=rbg"
    assert "model.generator=rbg" not in tried(one, own, "model.generator=threefry2x32")
    assert "model.generator=rbg" not in tried(one)  # a preset draws nothing
    del one["graph"]["ops"]["xor"]
    assert "model.generator=rbg" not in tried(one, own)


def test_settings_are_tried_before_machines() -> None:
    """Recomputation is a quarter of what runs: 0.8 x 0.25 = 0.2, less than the 0.2 + 0.05 of
    collectives, which are first; machines of either are behind all settings."""
    one = report(compute=75, collective_tp=20, collective_dp_shard=5)
    found = tried(one, "model.preset=llama2-7b", "model.dtype=float32", *TWO)
    machines = [n for n, text in enumerate(found) if "cluster.target" in text]
    assert machines == [len(found) - 2, len(found) - 1]
    assert found.index("strategy.bucket_mb=64") < found.index("model.dtype=bfloat16")


def test_code_beside_collectives_is_tried_where_it_is_off() -> None:
    one, idea = report(compute=30, collective_tp=70), "compiler.latency_hiding=true"
    assert tried(one, "compiler.latency_hiding=false")[0] == idea
    assert idea not in tried(one)


def test_collectives_of_all_axes_are_what_limits_together() -> None:
    """19 % x 0.25 of compute, 11 + 10 + 9 % of collectives, 20 % of memory traffic."""
    one = report(compute=50, memory=20, collective_tp=11, collective_dp_shard=10, collective_cp=9)
    assert "reduce_gradients=last" in tried(one)[0]


LNC_1 = ("cluster.target=trn2.48xlarge", "cluster.lnc=1")


@pytest.mark.parametrize(
    ("keys", "mesh", "wanted"),
    [
        (LNC_1, {"dp_shard": 128}, "mesh.dp_shard=64"),
        (LNC_1, {"dp_shard": 64, "tp": 2}, "mesh.dp_shard=32 mesh.tp=2"),
        (LNC_1, {"dp_shard": 8, "ep": 16}, "mesh.dp_shard=64 mesh.ep=16"),
        (LNC_1, {"dp_shard": 3, "tp": 2}, ""),
        (LNC_1, {"dp_replicate": 4, "ep": 32}, "mesh.dp_replicate=2 mesh.ep=32 mesh.dp_shard=32"),
        (LNC_1, {"dp_shard": 1, "tp": 128}, ""),
        (("cluster.target=trn2.48xlarge", "cluster.lnc=2"), {"dp_shard": 64}, ""),
        (("cluster.target=trn2.48xlarge",), {"dp_shard": 64}, ""),
        (("cluster.target=trn1n.32xlarge", "cluster.lnc=1"), {"dp_shard": 32}, ""),
    ],
)
def test_larger_cores_where_the_machine_has_them(
    keys: tuple[str, ...], mesh: dict[str, int], wanted: str
) -> None:
    one = report(compute=100) | {"mesh": mesh}
    larger = [text for text in tried(one, *keys, "model.preset=llama2-7b") if "lnc" in text]
    assert larger == []
    one["memory"]["fits"] = False
    found = tried(one, *keys, "model.preset=llama2-7b")
    larger = [text for text in found if "lnc" in text]
    same = "strategy.global_batch=64"
    assert [set(text.split()) for text in larger] == (
        [{"cluster.lnc=2", *wanted.split(), same}] if wanted else []
    )
    if wanted:
        more = tried(one, *keys, "model.preset=llama2-7b", "strategy.remat=none")
        assert (found.index(larger[0]), more.index(larger[0])) == (0, 1)  # behind recomputation


@pytest.mark.parametrize(
    ("mesh", "wanted"),
    [
        ({"dp_shard": 24, "cp": 4}, "mesh.dp_replicate=3 mesh.dp_shard=8"),
        ({"dp_replicate": 2, "dp_shard": 40}, "mesh.dp_shard=8 mesh.dp_replicate=10"),
        ({"dp_shard": 32}, ""),
        ({"dp_shard": 15}, ""),
        ({"dp_shard": 8, "ep": 3}, ""),
    ],
)
def test_the_odd_part_of_shards_that_widths_do_not_divide_by(
    mesh: dict[str, int], wanted: str
) -> None:
    one = report(compute=100) | {"mesh": mesh}
    one["memory"]["fits"] = False
    found = [set(text.split()) for text in tried(one)]
    odd = [keys for keys in found if {"mesh.dp_shard=8"} < keys]
    assert [set(wanted.split()) <= keys for keys in odd] == ([True] if wanted else [])


@pytest.mark.parametrize(
    ("length", "mesh", "wanted"),
    [
        (131072, {"dp_shard": 512}, "mesh.dp_shard=16 mesh.cp=32"),
        (131072, {"dp_shard": 128, "cp": 4}, "mesh.dp_shard=16 mesh.cp=32"),
        (131072, {"dp_shard": 8}, "mesh.dp_shard=1 mesh.cp=8"),
        (4096, {"dp_shard": 512}, ""),
        (131072, {"dp_shard": 15}, ""),
        (131072, {"dp_shard": 4, "ep": 8}, "mesh.dp_shard=8 mesh.cp=4"),
    ],
)
def test_a_long_sequence_that_does_not_fit_is_spread_over_cores(
    length: int, mesh: dict[str, int], wanted: str
) -> None:
    """4,096 positions for each, or as many as shards divide into; 4 x 8 ranks are 32 shards, of
    which experts keep 8 together."""
    one = report(compute=100) | {"mesh": mesh}
    one["memory"]["fits"] = False
    found = [
        set(t.split()) for t in tried(one, "model.preset=llama3-8b", f"model.seq_len={length}")
    ]
    spread = [keys for keys in found if any(key.startswith("mesh.cp=") for key in keys)]
    spread = [keys for keys in spread if not any("mesh.tp" in k or "mesh.pp" in k for k in keys)]
    assert [set(wanted.split()) <= keys for keys in spread[:1]] == ([True] if wanted else [])


@pytest.mark.parametrize(("now", "other"), [("ring", "gather"), ("gather", "ring")])
def test_the_other_form_of_context_parallelism_is_tried(now: str, other: str) -> None:
    idea = f"strategy.context={other}"
    one = report(compute=80, collective_cp=20) | {"mesh": {"dp_shard": 8, "cp": 4}}
    assert idea in tried(one, f"strategy.context={now}")
    assert idea not in tried(report(compute=80, collective_cp=20), f"strategy.context={now}")


@pytest.mark.parametrize("level", [2, 3])
def test_the_cure_of_a_refusal_is_tried_before_what_is_faster(level: int) -> None:
    one = report(compute=100) | {"findings": [EXTP]}
    found = tried(one, "model.preset=llama2-7b", f"compiler.optlevel={level}")
    assert found[0] == "compiler.optlevel=1"
    assert "compiler.optlevel=1" not in tried(report(compute=100))
    kept = tried(one, "model.preset=llama2-7b", "compiler.optlevel=1", "strategy.micro_batch=2")
    assert kept[0] == "strategy.global_batch=64 strategy.micro_batch=1"


def test_latency_has_ideas_of_its_own() -> None:
    """No engine computes in 80 % of the step, and queues are busy 5 % of it."""
    one = report(compute=20, memory=80)
    one["timing"]["engines"]["dma_in"]["share"] = 0.05
    assert tried(one)[0] == FITTING


def test_what_the_memory_decides_is_one_change() -> None:
    """Recomputation and micro-batch together; not where the job leaves them to the memory already,
    is at the least, or has stages to fill."""
    one = report(compute=20, launch=80)
    assert FITTING in tried(one)
    least = tried(one, "model.preset=llama2-7b", "strategy.remat=none")
    assert "strategy.global_batch=64 strategy.micro_batch=auto" in least
    one["mesh"] = {"pp": 4, "dp_shard": 8}
    assert not any("micro_batch=auto" in text for text in tried(one))
    one["mesh"] = {"dp_shard": 32}
    one["auto"] = {"remat": "full", "micro_batch": 1}
    left = tried(one, "model.preset=llama2-7b", "strategy.remat=auto", "strategy.micro_batch=auto")
    assert left and FITTING not in left
