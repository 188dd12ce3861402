"""Published runs: how rows are read and chosen, how estimates compose, three tiny runs end
to end.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from collectives.cost import collective_time
from collectives.ops import CollectiveKind
from compiler.diagnostics import UsageError
from compiler.target import load_target
from orchestrator import cli, validate
from orchestrator.config import JobConfig
from orchestrator.estimate import RankTime, compose, split_ends
from orchestrator.job import unit_service
from orchestrator.published import COLUMNS, PublishedRun, read_runs
from sim_cluster.network import Network

BERT = {
    "id": "B1",
    "primary": "yes",
    "model": "Tiny BERT pre-training",
    "layers": "2",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "4",
    "ffn": "128",
    "vocab": "96",
    "seq_len": "32",
    "matmul_params_b": "0.0001",
    "framework": "test",
    "tp": "1",
    "pp": "1",
    "dp": "32",
    "zero1": "no",
    "microbatch": "2",
    "microbatches_per_step_per_replica": "4",
    "precision": "FP32",
    "activation_checkpointing": "none",
    "sequence_parallel": "n/a",
    "nodes": "1",
    "instance": "trn1.32xlarge/trn1n.32xlarge",
    "step_time_s": "0.5",
}
GPT = BERT | {
    "id": "G1",
    "model": "tiny GPT3",
    "tp": "4",
    "dp": "8",
    "microbatch": "1",
    "precision": "BF16 weights and optimizer math, stochastic rounding (autocast)",
    "activation_checkpointing": "full, 1 layer",
    "sequence_parallel": "no (unverified)",
}
LLAMA = GPT | {
    "id": "L1",
    "model": "Llama2-tiny",
    "layers": "4",
    "pp": "2",
    "dp": "4",
    "zero1": "yes",
    "precision": "BF16 compute, FP32 master weights/optimizer",
    "activation_checkpointing": "selective (core attention)",
    "sequence_parallel": "yes",
}


def write_csv(path: Path, *rows: dict[str, str], drop: str = "") -> Path:
    names = [n for n in ("primary", *COLUMNS) if n != drop]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def parsed(tmp_path: Path, row: dict[str, str]) -> PublishedRun:
    return read_runs(write_csv(tmp_path / "one.csv", row))[0]


def refusal(tmp_path: Path, row: dict[str, str], **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_runs(write_csv(tmp_path / "bad.csv", BERT, row, **options))
    return caught.value


def test_columns_become_a_run(tmp_path: Path) -> None:
    run = parsed(tmp_path, LLAMA)
    assert (run.family, run.layout, run.cores, run.target) == (
        "llama",
        "pipeline",
        32,
        "trn1.32xlarge",
    )
    assert run.zero1 and run.sequence_parallel and run.remat == "selective"
    assert dataclasses.astuple(run.storage) == ("bf16", "bf16", "f32")
    assert not run.unsupported()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("FP32", ("f32", "f32", "f32")),
        ("BF16", ("bf16", "bf16", "bf16")),
        ("BF16 autocast, FP32 weights", ("f32", "bf16", "f32")),
        ("BF16 + stochastic rounding", ("bf16", "bf16", "bf16")),
    ],
)
def test_precision_column(tmp_path: Path, precision: str, expected: tuple[str, ...]) -> None:
    run = parsed(tmp_path, BERT | {"precision": precision})
    assert dataclasses.astuple(run.storage) == expected


def test_a_published_script_overrules_the_recomputation_column(tmp_path: Path) -> None:
    assert parsed(tmp_path, GPT).remat == "full"
    script = {"framework": "AWS reference Megatron-LM (XLA)"}
    assert parsed(tmp_path, GPT | script).remat == "none"


def test_bad_files_are_refused_with_place_and_value(tmp_path: Path) -> None:
    error = refusal(tmp_path, BERT | {"heads": "four"})
    assert "heads requires a number, got 'four'" in str(error) and error.loc and error.loc.line == 3
    assert "layers requires a whole number" in str(refusal(tmp_path, BERT | {"layers": "2.5"}))
    assert "step_time_s requires more than 0" in str(refusal(tmp_path, BERT | {"step_time_s": ""}))
    assert "requires columns vocab" in str(refusal(tmp_path, BERT, drop="vocab"))
    with pytest.raises(UsageError, match="cannot read"):
        read_runs(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "ViT-Base"}, "BERT|bert"),
        ({"dp": "16"}, "requires 32 cores"),
        ({"vocab": ""}, "positive sizes"),
        ({"heads": "5"}, "positive sizes"),
    ],
)
def test_runs_that_cannot_be_predicted_say_why(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    run = parsed(tmp_path, BERT | change)
    with pytest.raises(UsageError, match=reason):
        validate.select([run], [run.id])


def test_default_rows_are_the_smallest_primary_of_each_layout(tmp_path: Path) -> None:
    big = BERT | {"id": "B0", "nodes": "2", "dp": "64"}
    other = BERT | {"id": "B2", "primary": "", "matmul_params_b": "0.00001"}
    vit = BERT | {"id": "V", "model": "ViT", "matmul_params_b": "0"}
    runs = read_runs(write_csv(tmp_path / "f.csv", vit, LLAMA, big, other, BERT, GPT))
    assert [run.id for run in validate.select(runs, [])] == ["B1", "G1", "L1"]
    assert [run.id for run in validate.select(runs, ["L1", "B0"])] == ["L1", "B0"]
    assert len(validate.select(runs, ["all"])) == 5
    with pytest.raises(UsageError, match="got X9"):
        validate.select(runs, ["X9"])


def test_baseline_is_one_mfu_for_all_rows(tmp_path: Path) -> None:
    run = parsed(tmp_path, BERT)
    twice = dataclasses.replace(run, id="slow", step_time_s=run.step_time_s * 4)
    fitted, errors = validate.baseline([run, twice])
    assert errors["B1"] == pytest.approx(1.0) and errors["slow"] == pytest.approx(-0.5)
    sequences, peak = 32 * 2 * 4, 95e12 * 32
    flops = sequences * (6 * 32 * 1e5 + 12 * 2 * 64 * 32**2)
    assert fitted == pytest.approx(flops / peak / run.step_time_s / 2)
    assert validate.baseline([run])[1]["B1"] == pytest.approx(0.0)


def network(run: PublishedRun) -> Network:
    mesh = {"pp": run.pp, "dp_replicate": run.dp, "tp": run.tp}
    return Network(load_target(run.target), run.nodes, mesh, "nominal")


def priced(run: PublishedRun, kind: str, axis: str, size: int, width: int, **options: Any) -> int:
    net = network(run)
    groups = net.groups((axis,))
    return collective_time(
        CollectiveKind(kind), net.topology, groups, size, width, net.costs, **options
    ).total_ps


RANK = RankTime(layers_ps=7_000_000_000, ends_ps=2_000_000_000, update_ps=8_000_000_000)


def test_tensor_parallel_step_by_hand(tmp_path: Path) -> None:
    run = parsed(tmp_path, GPT | {"activation_checkpointing": "none"})
    estimate = compose(run, RANK, network(run), 1000)
    reduce_ps = priced(run, "all_reduce", "tp", 32 * 64 * 2, 2)
    scores_ps = priced(run, "all_reduce", "tp", 32 * 4, 4)
    assert estimate.parts_ps["compute"] == 4 * 9_000_000_000
    assert estimate.parts_ps["tensor"] == 4 * ((2 * 4 + 2) * reduce_ps + 3 * scores_ps)
    assert estimate.parts_ps["gradients"] == priced(run, "all_reduce", "dp_replicate", 2000, 2)
    assert estimate.parts_ps["bubble"] == estimate.parts_ps["send"] == 0
    assert estimate.step_time_ps == sum(estimate.parts_ps.values())
    full = compose(dataclasses.replace(run, remat="full"), RANK, network(run), 1000)
    assert full.parts_ps["tensor"] - estimate.parts_ps["tensor"] == 4 * 2 * 2 * reduce_ps


def test_pipeline_step_by_hand(tmp_path: Path) -> None:
    run = parsed(tmp_path, LLAMA)
    parts = compose(run, RANK, network(run), 1000).parts_ps
    gather = priced(run, "all_gather", "tp", 32 * 64 * 2, 2)
    scatter = priced(run, "reduce_scatter", "tp", 32 * 64 * 2, 2)
    send = 2 * priced(run, "collective_permute", "pp", 32 * 64 * 2 // 4, 2, pairs=[(0, 1)])
    layers = 2 * (6 * gather + 4 * scatter)
    assert parts["compute"] == 4 * 9_000_000_000
    assert parts["send"] == 4 * send > 0
    # Filling and draining: the one stage that is not the slowest, once.
    assert parts["bubble"] == 7_000_000_000 + layers + send
    assert parts["optimizer"] == 8_000_000_000 // 4
    reduced = priced(run, "reduce_scatter", "dp_replicate", 4000, 4)
    assert parts["gradients"] == reduced + priced(run, "all_gather", "dp_replicate", 2000, 2)


def test_time_of_a_rank_is_linear_in_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    run = parsed(tmp_path, LLAMA)
    with unit_service(JobConfig(), None) as service:
        built = [validate.build_rank(run, service, validate.REPLICAS, n) for n in (2, 4, 6)]
    times = [validate.rank_time(b, "nominal") for b in built]
    first, second = (split_ends(a, b) for a, b in pairwise(times))
    assert first.layers_ps == pytest.approx(second.layers_ps, rel=0.1)  # partial tiles
    assert 0 < first.ends_ps < times[0].layers_ps


def test_layers_and_ends_are_told_apart() -> None:
    once, twice = (RankTime(layers_ps=p, ends_ps=0, update_ps=5) for p in (130, 250))
    assert split_ends(once, twice) == RankTime(layers_ps=120, ends_ps=10, update_ps=5)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("validate")
    path = write_csv(folder / "runs.csv", BERT, GPT, LLAMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_COMPILE_CACHE_URL", str(folder / "cache"))
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *text, **_: printed.append(str(text[0])))
        code = cli.main(["validate", "--training", str(path), "--json"])
    assert code == 0, printed
    result: dict[str, Any] = json.loads(printed[-1])
    return result


def test_three_tiny_runs_end_to_end(report: dict[str, Any]) -> None:
    rows = {row["id"]: row for row in report["rows"]}
    assert [r["kind"] for r in rows.values()] == ["simulated", "estimate", "estimate"]
    for row in rows.values():
        low, high = row["band_s"]
        assert 0 < low <= row["predicted_s"] <= high
        assert row["error"] == pytest.approx(row["predicted_s"] / 0.5 - 1)
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert 0 < row["busy"]["tensor"] < 1
    assert "collective_dp_replicate" in rows["B1"]["shares"]
    assert rows["L1"]["shares"].keys() >= {"compute", "tensor", "bubble", "send", "gradients"}
    assert report["median_error"] == sorted(abs(r["error"]) for r in rows.values())[1]


def test_screen_names_estimates(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    validate.show(report)
    text = capsys.readouterr().out
    assert "estimate: one rank's compiled program" in text and "simulated:" in text
    assert "fitted on the same rows" in text
    validate.show(report | {"rows": report["rows"][:1]})
    assert "estimate:" not in capsys.readouterr().out


def test_a_rank_holds_its_share_of_the_model(tmp_path: Path) -> None:
    from compiler.frontend.capture import abstract_state

    run = parsed(tmp_path, LLAMA | {"kv_heads": "2"})
    params = abstract_state(validate.rank_task(run, 2))[0]
    shapes = {name: leaf.shape for name, leaf in params["layers"].items()}
    assert shapes["wq"] == (2, 64, 16) and shapes["wk"] == (2, 64, 16)
    assert shapes["w_up"] == (2, 64, 32) and params["lm_head"].shape == (64, 24)
    assert str(params["embed"].dtype) == "bfloat16"


def test_band_covers_what_lies_between_the_profiles(tmp_path: Path) -> None:
    run = parsed(tmp_path, BERT)
    options: Any = {"run": run, "kind": "estimate", "shares": {}, "busy": {}}
    inside = {"conservative": 0.6, "nominal": 0.55, "peak": 0.4}
    assert validate.Prediction(seconds=inside, **options).band_covers
    assert not validate.Prediction(seconds=inside | {"peak": 0.51}, **options).band_covers
    assert validate.Prediction(seconds=inside, **options).error == pytest.approx(0.1)
