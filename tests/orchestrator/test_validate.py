"""Published runs: how rows are read, set and chosen, and four tiny runs end to end."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.task import TrainTask
from shardwright.orchestrator import cli
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.models import families
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.layers import Precision
from shardwright.orchestrator.road.timing import Host, with_host
from shardwright.orchestrator.validation import calibrate, validate
from shardwright.orchestrator.validation.predict import Timed, job_of, shares_of
from shardwright.orchestrator.validation.published import (
    PublishedRun,
    Storage,
    UnreadableRun,
    Workload,
    read_runs,
)
from shardwright.orchestrator.validation.run_settings import profiles, release
from shardwright.orchestrator.validation.tasks import task_of
from shardwright.orchestrator.validation.validate_screen import show
from shardwright.sim_cluster import calibration
from shardwright.sim_cluster.timing.step_time import StepTiming
from tests.support.published_rows import BERT, GPT, LLAMA, parsed, write_csv
from tests.support.road import captured_graph


def refusal(tmp_path: Path, row: dict[str, str]) -> str:
    """Why the second of two rows cannot be read; the first can."""
    first, second = read_runs(write_csv(tmp_path / "bad.csv", BERT, row | {"id": "bad"}))
    assert isinstance(first, PublishedRun) and isinstance(second, UnreadableRun)
    assert (second.id, second.model) == ("bad", row["model"])
    return second.reason


def test_columns_become_a_run(tmp_path: Path) -> None:
    run = parsed(tmp_path, LLAMA)
    work = run.workload
    assert (work.family, work.layout, work.cores) == ("llama", "pipeline", 32)
    assert work.target == "trn1.32xlarge"
    assert work.zero1 and work.sequence_parallel and work.remat == "selective"
    assert dataclasses.astuple(work.storage) == ("bf16", "bf16", "f32", "f32", "")
    assert not run.unsupported()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("FP32", ("f32", "f32", "f32", "f32", "")),
        ("BF16", ("bf16", "bf16", "bf16", "bf16", "")),
        ("BF16 autocast, FP32 weights", ("f32", "bf16", "f32", "f32", "f32")),
        ("BF16 + stochastic rounding", ("bf16", "bf16", "bf16", "bf16", "")),
    ],
)
def test_precision_column(tmp_path: Path, precision: str, expected: tuple[str, ...]) -> None:
    run = parsed(tmp_path, BERT | {"precision": precision})
    assert dataclasses.astuple(run.workload.storage) == expected


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"framework": "NeuronX Nemo-Megatron", "neuron_version": "2.18.0"}, "nemo"),
        ({"framework": "NeuronX Nemo-Megatron", "model": "Llama2-7B"}, "nemo-llama"),
        ({"framework": "NeuronX Nemo-Megatron", "neuron_version": "2.15.0"}, "nemo-2023"),
        ({"framework": "AWS reference Megatron-LM (XLA)", "neuron_version": "2.5-2.6"}, "m-2022"),
        ({"framework": "AWS reference Megatron-LM (XLA)", "neuron_version": "2.9"}, "megatron"),
        ({"framework": "NeuronX Distributed", "model": "Llama-3.1-8B"}, "nxd-flash"),
        ({"framework": "NeuronX Distributed", "model": "Llama2-7B"}, "nxd"),
        ({"framework": "torch-neuronx dp_bert_hf_pretrain", "neuron_version": "2.26.0"}, "bert"),
        ({"framework": "torch-neuronx dp_bert_hf_pretrain"}, "bert"),
        ({"framework": "something new"}, "other"),
    ],
)
def test_settings_follow_framework_model_and_release(
    tmp_path: Path, columns: dict[str, str], name: str
) -> None:
    found = parsed(tmp_path, GPT | columns)
    assert found.settings.name == name.replace("m-", "megatron-")
    assert found.workload.attention == found.settings.attention


def test_matmuls_of_fp32_runs_are_cast_by_the_compiler(tmp_path: Path) -> None:
    """Else what products store, and what the backward pass reads again, would be bf16."""
    workload = parsed(tmp_path, BERT).workload
    assert job_of(workload).compiler.auto_cast == "matmult"
    graph, _, _ = captured_graph(task_of(workload), 32)
    dots = [op for op in graph.walk() if op.name == "dot_general"]
    assert dots and {op.result.type.dtype for op in dots} == {DType.F32}


def test_cores_wait_for_what_the_host_traces_of_their_stage(tmp_path: Path) -> None:
    read = BERT | {"framework": "torch-neuronx dp_bert_hf_pretrain", "layers": "24"}
    assert parsed(tmp_path, read).workload.host_us == 24 * 3900
    assert parsed(tmp_path, read | {"pp": "4"}).workload.host_us == 6 * 3900
    assert parsed(tmp_path, BERT).workload.host_us == 0


@pytest.mark.parametrize(
    ("date", "name"), [("2022-12-13", "2023"), ("2024-04-11", "2024"), ("", "current")]
)
def test_collectives_of_a_run_are_those_of_the_runtime_of_its_date(
    tmp_path: Path, date: str, name: str
) -> None:
    assert parsed(tmp_path, GPT | {"first_published": date}).workload.runtime == name


def test_host_time_is_beside_that_of_the_step() -> None:
    step = StepTiming(
        profile="nominal",
        step_time_ps=3 * 10**9,
        breakdown_ps={"compute": 2 * 10**9, "memory": 10**9},
        hidden_ps={},
        engines_ps={"tensor": 10**9},
        lone_ps=0,
        stages_ps=(),
        collectives=(),
        rank_classes=1,
        lnc=1,
    )
    timed = shares_of(with_host(step, Host(1000)))
    assert timed == Timed(0.004, {"compute": 0.5, "memory": 0.25, "host": 0.25}, {"tensor": 0.25})
    assert "host" not in shares_of(with_host(step, Host(0))).shares


def test_every_profile_says_where_it_is_from() -> None:
    assert all(one.source and one.attention in ("unfused", "fused", "flash") for one in profiles())
    assert not profiles()[-1].match
    assert [release(t) for t in ("2.5-2.6", "2.4 (Sep 2022)", "")] == [(2, 5), (2, 4), None]


def test_a_published_script_overrules_the_recomputation_column(tmp_path: Path) -> None:
    assert parsed(tmp_path, GPT).workload.remat == "full"
    script = {"framework": "AWS reference Megatron-LM (XLA)"}
    assert parsed(tmp_path, GPT | script).workload.remat == "none"


@pytest.mark.parametrize(
    ("column", "remat"),
    [
        ("Selective", "selective"),
        ("Full, 1 layer", "full"),
        ("FULL(uniform)", "full"),
        ("None", "none"),
        ("n/a", "none"),
        ("", "none"),
    ],
)
def test_the_recomputation_column(tmp_path: Path, column: str, remat: str) -> None:
    run = parsed(tmp_path, GPT | {"activation_checkpointing": column})
    assert run.workload.remat == remat


def test_other_words_in_the_recomputation_column_are_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, GPT | {"activation_checkpointing": "every other layer"})
    assert "activation_checkpointing requires one of selective, full, none" in error


def shape(work: Workload, *path: str) -> tuple[int, ...]:
    """Of a weight of the task of a run."""
    task = task_of(work)
    leaf, *_ = task.state or jax.eval_shape(task.init, jax.random.key(0))
    for name in path:
        leaf = leaf[name]
    return leaf.shape


def test_a_run_is_a_job_on_its_own_mesh(tmp_path: Path) -> None:
    work = parsed(tmp_path, LLAMA | {"vocab": "97"}).workload
    job, layout = job_of(work), layout_of(job_of(work))
    assert layout.mesh.sizes == {"pp": 2, "dp_shard": 4, "tp": 4}
    assert (layout.captured_batch, layout.global_batch) == (4, 16)
    assert (job.strategy.name, job.strategy.zero) == ("llm-training", 1)
    assert job.strategy.accumulate_dtype == "float32"
    assert task_of(work).tokens_per_sample == 32
    # 97 words are padded to 25 on each of four tensor-parallel ranks, as Megatron-LM pads them.
    assert shape(work, "lm_head") == (64, 100)
    # Two key-value heads of 16, or one on each of the four ranks.
    shared = dataclasses.replace(work, kv_heads=2)
    assert shape(shared, "layers", "wk") == (4, 64, 32)
    assert shape(dataclasses.replace(shared, replicated_kv=True), "layers", "wk") == (4, 64, 64)
    bert = parsed(tmp_path, BERT).workload
    assert shape(bert, "b_pool") == (bert.hidden,)  # what published checkpoints hold
    plain = job_of(bert)
    assert (plain.strategy.name, plain.strategy.accumulate_dtype) == ("generic", "auto")
    assert plain.compiler.attention == "fused"


def test_bad_cells_are_refused_row_by_row_with_line_and_value(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path, BERT | {"heads": "four"}) == "line 3: heads requires a number, got 'four'"
    )
    assert "layers requires a whole number" in refusal(tmp_path, BERT | {"layers": "2.5"})
    assert "step_time_s requires more than 0" in refusal(tmp_path, BERT | {"step_time_s": ""})
    for name, value in [("layers", "nan"), ("layers", "inf"), ("step_time_s", "nan")]:
        assert f"{name} requires a finite" in refusal(tmp_path, BERT | {name: value})
    assert "step_time_s requires a finite" in refusal(tmp_path, BERT | {"step_time_s": "inf"})
    assert "matmul_params_b requires" in refusal(tmp_path, BERT | {"matmul_params_b": "-1"})


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="requires columns vocab"):
        read_runs(write_csv(tmp_path / "bad.csv", BERT, drop="vocab"))
    with pytest.raises(UsageError, match="cannot read"):
        read_runs(tmp_path / "absent.csv")
    path = write_csv(tmp_path / "quote.csv", BERT)
    path.write_text(path.read_text() + '"' + "x" * csv.field_size_limit() + "\n")
    with pytest.raises(UsageError, match="larger than field limit"):
        read_runs(path)
    path = write_csv(tmp_path / "semicolons.csv", BERT)
    path.write_text(path.read_text().replace(",", ";"))
    with pytest.raises(UsageError, match="columns are separated by commas"):
        read_runs(path)


def test_files_of_spreadsheets_are_read(tmp_path: Path) -> None:
    """A byte order mark, short rows, rows of one id and of none: none is lost."""
    path = write_csv(tmp_path / "runs.csv", BERT, BERT, BERT | {"id": ""})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"short,of\r\n")
    runs = read_runs(path)
    assert [run.id for run in runs] == ["B1", "B1 (line 3)", "line 4", "short"]
    assert [isinstance(run, PublishedRun) for run in runs] == [True, True, True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "ResNet-50"}, "bert, vit"),
        ({"dp": "16"}, "requires 32 cores"),
        ({"vocab": ""}, "positive sizes"),
        ({"heads": "5"}, "positive sizes"),
        ({"microbatch": ""}, "batches require positive"),
        ({"microbatches_per_step_per_replica": "0"}, "batches require positive"),
        ({"instance": "p4d.24xlarge"}, "instance requires"),
    ],
)
def test_runs_that_cannot_be_predicted_say_why(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    assert reason in parsed(tmp_path, BERT | change).unsupported()


def test_rows_are_all_or_named_or_the_smallest_primary_of_each_layout(tmp_path: Path) -> None:
    big = BERT | {"id": "B0", "nodes": "2", "dp": "64"}
    other = BERT | {"id": "B2", "primary": "", "matmul_params_b": "0.00001"}
    net = BERT | {"id": "V", "model": "ResNet", "matmul_params_b": "0"}
    runs = read_runs(write_csv(tmp_path / "f.csv", net, LLAMA, big, other, BERT, GPT))
    assert [run.id for run in validate.select(runs, ["layouts"])] == ["B1", "G1", "L1"]
    assert [run.id for run in validate.select(runs, ["L1", "B0"])] == ["L1", "B0"]
    assert validate.select(runs, []) == validate.select(runs, ["all"]) == runs
    with pytest.raises(UsageError, match="got X9"):
        validate.select(runs, ["X9"])


def test_baseline_is_one_mfu_for_all_rows(tmp_path: Path) -> None:
    run = parsed(tmp_path, BERT)
    twice = dataclasses.replace(run, id="slow", step_time_s=run.step_time_s * 4)
    peaks = {"B1": 95e12 * 32, "slow": 95e12 * 32}
    fitted, errors = calibrate.baseline([run, twice], peaks)
    assert errors == pytest.approx([1.0, -0.5])
    sequences = 32 * 2 * 4
    flops = sequences * (6 * 32 * 1e5 + 12 * 2 * 64 * 32**2)
    assert fitted == pytest.approx(flops / peaks["B1"] / run.step_time_s / 2)


def surface(run: PublishedRun, streaming: float, recovery: float) -> calibrate.Surface:
    """A run that would take 1 s at (1, 0), with known powers of the two constants."""
    seconds = tuple(
        tuple(a**-streaming * (1 - recovery * b) for b in calibrate.RECOVERY_GRID)
        for a in calibrate.STREAMING_GRID
    )
    return calibrate.Surface(run, seconds)


def test_a_fit_finds_the_constants_rows_were_made_with(tmp_path: Path) -> None:
    true = calibrate.Fit(0.85, 0.5)
    made = []
    for number, (a, b) in enumerate([(0.9, 0.1), (0.3, 0.3), (0.6, 0.02)]):
        run = dataclasses.replace(parsed(tmp_path, BERT), id=f"R{number}", group=f"g{number}")
        exact = surface(run, a, b)
        run = dataclasses.replace(run, step_time_s=exact.at(true))
        made.append(dataclasses.replace(exact, run=run))
    assert made[0].at(true) == pytest.approx(0.85**-0.9 * 0.95, rel=0.02)
    assert made[1].at(calibrate.Fit(0.75, 1.0)) == pytest.approx(0.75**-0.3 * 0.7)
    found = calibrate.best_fit(made)
    assert found.streaming == pytest.approx(0.85, abs=0.006)
    assert found.stall_recovery == pytest.approx(0.5, abs=0.02)
    assert calibrate.chosen(made) == found
    left = calibrate.left_out(made)
    assert left.keys() == {"R0", "R1", "R2"} and max(map(abs, left.values())) < 0.02
    odd = dataclasses.replace(made[0].run, step_time_s=made[0].run.step_time_s * 2)
    assert calibrate.left_out([dataclasses.replace(made[0], run=odd), *made[1:]])["R0"] < -0.45


def test_documented_rates_stay_where_a_fit_does_not_carry_over(tmp_path: Path) -> None:
    """Two groups that pull in opposite directions: what fits one is worse for the other."""
    made = []
    for number, factor in enumerate((0.8, 1.25)):
        run = dataclasses.replace(parsed(tmp_path, BERT), id=f"R{number}", group=f"g{number}")
        exact = surface(run, 0.8, 0.4)
        made.append(dataclasses.replace(exact, run=dataclasses.replace(run, step_time_s=factor)))
    assert calibrate.chosen(made) == calibrate.DOCUMENTED
    assert calibrate.chosen(made[:1]) == calibrate.DOCUMENTED


def test_a_fit_is_written_with_its_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "calibration.toml"
    copy.write_text(calibration.FILE.read_text())
    monkeypatch.setattr(calibration, "FILE", copy)
    before = calibration.constants()
    try:
        calibrate.write(calibrate.Fit(0.77, 0.33), [parsed(tmp_path, BERT)], "by hand")
        now = calibration.constants()
        assert (now["streaming"].value, now["stall_recovery"].value) == (0.77, 0.33)
        assert now["streaming"].fitted_on.endswith("B1") and now["streaming"].method == "by hand"
        others = [n for n in now if n not in ("streaming", "stall_recovery")]
        assert all(now[n] == before[n] for n in others)
        calibrate.write(calibrate.DOCUMENTED, [parsed(tmp_path, BERT)], "by hand")
        assert "documented rates" in calibration.constants()["streaming"].method
        assert before["streaming"].band[0] > 0.77, "the value was outside its band"
        assert now["streaming"].band == (0.77, before["streaming"].band[1])
        assert now["stall_recovery"].band == before["stall_recovery"].band
        assert len(now) <= 3
    finally:
        calibration.constants.cache_clear()


@pytest.mark.parametrize("row", [BERT | {"primary": ""}, BERT | {"model": "ResNet"}])
def test_a_fit_without_a_usable_row_leaves_the_constants(
    row: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "calibration.toml"
    copy.write_text("as it was")
    monkeypatch.setattr(calibration, "FILE", copy)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    path = write_csv(tmp_path / "f.csv", row)
    assert cli.main(["validate", "--training", str(path), "--fit"]) == 2
    assert "--fit requires a primary row that can be predicted" in capsys.readouterr().err
    assert copy.read_text() == "as it was"


def test_a_fit_is_written_down_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "calibration.toml"
    copy.write_text(calibration.FILE.read_text())
    monkeypatch.setattr(calibration, "FILE", copy)
    run = parsed(tmp_path, BERT)
    named = [dataclasses.replace(run, id=name) for name in ("T105", "T7")]
    try:
        calibrate.write(calibrate.DOCUMENTED, [run], "by hand")
        assert "primary rows" not in validate._confidence(run).text
        calibrate.write(calibrate.Fit(0.9, 0.1), named, 'by "hand"')
        told = validate._confidence(run).text
        assert calibration.constants()["streaming"].method == 'by "hand"'
    finally:
        calibration.constants.cache_clear()
    assert told.startswith("calibrated on training.csv, primary rows T105, T7")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("validate")
    again = BERT | {"id": "B2", "primary": "", "step_time_s": "0.25"}
    odd = BERT | {"id": "X1", "model": "ResNet-50"}
    unread = BERT | {"id": "X2", "heads": "four"}
    path = write_csv(folder / "runs.csv", BERT, GPT, LLAMA, again, unread, odd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_COMPILE_CACHE_URL", str(folder / "cache"))
        first = printed(patch, "--training", str(path))
        with pytest.MonkeyPatch.context() as stored:
            stored.setattr(
                "shardwright.orchestrator.validation.predict.build_workload", None
            )  # none is needed
            second = printed(patch, "--training", str(path), "--rows", "all")
        copy = folder / "calibration.toml"
        copy.write_text(calibration.FILE.read_text())
        patch.setattr(calibration, "FILE", copy)
        fitted = printed(patch, "--training", str(path), "--rows", "B1", "--fit")
    calibration.constants.cache_clear()
    stored = [found["training"].pop("stored") for found in (first, second)]
    assert stored == [0, first["training"]["predictions"]] and stored[1] > 0
    assert first["training"].pop("stored_s") == 0 < second["training"].pop("stored_s")
    assert second == first
    first["training"] |= {"stored": 0, "stored_s": 0.0}
    assert fitted["training"]["constants"]["streaming"]["fitted_on"] == ""  # one group: no fit
    result: dict[str, Any] = first["training"]
    return result


def printed(patch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """What `validate --json` prints."""
    lines: list[str] = []
    patch.setattr("builtins.print", lambda *text, **_: lines.append(str(text[0])))
    code = cli.main(["validate", *arguments, "--json"])
    assert code == 0, lines
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.matrix
def test_tiny_runs_end_to_end(report: dict[str, Any]) -> None:
    rows = {row["id"]: row for row in report["rows"]}
    assert list(rows) == ["B1", "G1", "L1", "B2", "X2", "X1"]
    for name in ("B1", "G1", "L1", "B2"):
        row = rows[name]
        low, high = row["band_s"]
        assert 0 < low <= row["predicted_step_time_s"] <= high
        error = row["predicted_step_time_s"] / row["published_step_time_s"] - 1
        assert row["error"] == pytest.approx(error)
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert 0 < row["busy"]["tensor"] < 1
    assert "collective_dp_replicate" in rows["B1"]["shares"]
    assert "collective_tp" in rows["G1"]["shares"]
    assert "bubble" in rows["L1"]["shares"]
    assert rows["B2"]["predicted_step_time_s"] == rows["B1"]["predicted_step_time_s"]
    assert rows["X2"]["reason"] == "line 6: heads requires a number, got 'four'"
    assert rows["X2"]["layout"] is rows["X2"]["published_step_time_s"] is None
    assert rows["X1"]["error"] is None and "bert, vit" in rows["X1"]["reason"]


@pytest.mark.matrix
def test_medians_are_over_what_was_predicted(report: dict[str, Any]) -> None:
    errors = sorted(abs(r["error"]) for r in report["rows"] if r["error"] is not None)
    assert report["median_error"] == pytest.approx((errors[1] + errors[2]) / 2)
    assert report["max_error"] == errors[-1] and report["refused"] == 2
    assert set(report["constants"]) >= {"streaming", "stall_recovery"}
    primary = report["primary"]
    assert primary["rows"] == ["B1", "G1", "L1"]
    assert primary["leave_one_group_out_max_error"] > 0


@pytest.mark.matrix
def test_screen_shows_rows_and_refusals(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show({"training": report}, "shardwright validate --fresh")
    text = capsys.readouterr().out
    assert "X1  not predicted: model requires" in text
    assert "X2  not predicted: line 6: heads requires" in text
    assert "fitted on the same rows" in text and "one group left out" in text


def test_nothing_asked_is_refused() -> None:
    with pytest.raises(UsageError, match="one of --training"):
        validate.run(validate.Asked())


def test_progress_ends_when_a_run_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a bar would stay on the terminal, over what is printed next."""
    ended: list[bool] = []
    monkeypatch.setattr(validate.Progress, "__exit__", lambda *_: ended.append(True))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(validate, "_told", interrupted)
    with pytest.raises(KeyboardInterrupt):
        validate.training(
            validate.Asked(training=write_csv(tmp_path / "runs.csv", BERT), as_json=True)
        )
    assert ended == [True]


def test_band_covers_what_lies_between_the_profiles(tmp_path: Path) -> None:
    run = parsed(tmp_path, BERT)

    def made(**seconds: float) -> validate.Prediction:
        return validate.Prediction(run, {n: Timed(s, {}, {}) for n, s in seconds.items()})

    assert made(conservative=0.6, nominal=0.55, peak=0.4).band_covers
    assert not made(conservative=0.6, nominal=0.55, peak=0.51).band_covers
    assert made(conservative=0.6, nominal=0.55, peak=0.4).error == pytest.approx(0.1)


def test_the_model_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """66 over 4 heads are 16 each; of 97 words each of 4 ranks has 25; ranks have no fewer
    key-value heads than one, where they are replicated; the model has its own."""
    asked: list[tuple[Any, ...]] = []
    task = TrainTask(step=print, batch=print, init=print)
    monkeypatch.setattr(families, "family_task", lambda *given: asked.append(given) or task)
    storage = Storage(
        params="f32", activations="bf16", statistics="f32", gradients="bf16", stream="bf16"
    )
    sizes = {"layers": 3, "hidden": 66, "heads": 4, "kv_heads": 2, "ffn": 130, "vocab": 97}
    other: dict[str, Any] = {
        "optimizer": "sgd",
        "remat": "full",
        "dropout": 0.25,
        "one_hot_loss": True,
    }
    run = dataclasses.replace(
        parsed(tmp_path, BERT).workload,
        family="llama",
        seq_len=48,
        tp=4,
        storage=storage,
        **sizes,
        **other,
    )
    assert task_of(run, "named") is task
    shown = Sizes(
        layers=3,
        hidden=66,
        heads=4,
        head_dim=16,
        ffn=130,
        vocab=100,
        positions=48,
        complete=True,
        fused=False,
    )
    options = TaskOptions(
        seq_len=48,
        precision=Precision(params="f32", activations="bf16", statistics="f32", stream="bf16"),
        name="named",
        **other,
    )
    assert asked == [("llama", shown, options, 2)]
    copied = dataclasses.replace(run, replicated_kv=True, fused_projections=True, vocab=100)
    assert task_of(copied).model is task
    assert asked[1] == (*asked[2][:3], 2)
    family, fused, plain, heads = asked[2]
    assert (family, fused, heads) == ("llama", dataclasses.replace(shown, fused=True), 4)
    assert plain == dataclasses.replace(options, name="published")
    assert task_of(dataclasses.replace(run, replicated_kv=True, tp=1)).model is None
    assert asked[3][1].vocab == 97 and asked[3][3] == 2
