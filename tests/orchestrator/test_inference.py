"""Prefill and decode from question to answer: figures by hand, screens, sweeps, refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.leaves import named_leaves
from shardwright.compiler.frontend.state import state_tree
from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.changes.rules import ideas, saving
from shardwright.orchestrator.changes.situation import situation_of
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.models.presets import CONFIGS, PRESETS, SIZED, UNETS
from shardwright.orchestrator.models.serving import served_preset
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.report.plan_screen import screen_lines
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.road.usage import check_room
from tests.support.cells import long_in_matrix

SIZES = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TRAINING = (
    *("goodput", "checkpoint", "HFU", "micro-batch", "published:", "optimizer", "learning_rate"),
    *(
        "forward",
        "backward",
        "> update<",
        "lora",
        "remat",
        "reduce_gradients",
        "[goal]",
        "deadline",
    ),
)
LAYERS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 32, 8, 128, 4096, 128256  # of Llama 3 8B


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inference") / "small.json"
    path.write_text(json.dumps(SIZES))
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", "--tries", "0", "--set", "run.executor=inline", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    check_report(report)
    return report


def shown(report: dict[str, Any]) -> str:
    return "\n".join(line.plain for line in screen_lines(report, 200))


def test_a_decode_step_of_8b_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """24 cores of an inf2.48xlarge: eight share the weights, three copies decode one sequence each
    over a cache of 4,096 positions."""
    report = planned(
        capsys, *("--model", "llama3-8b", "--mode", "decode", "--target", "inf2.48xlarge"),
        *("--seq-len", "4096"),
    )  # fmt: skip
    section, target = report["inference"], load_target("inf2.48xlarge")
    assert report["mesh"] == {"dp_replicate": 3, "tp": 8} and section["sequences"] == 3
    norms = 2 * (2 * LAYERS + 1) * WIDTH
    assert section["weight_bytes"] == (2 * report["graph"]["params"] - norms) // 8 + norms
    held = 2 * LAYERS * KV_HEADS * 4096 * HEAD_DIM * 2  # keys and values of one sequence, bf16
    counters = 8  # the token and the position
    assert section["cache_bytes"] == held // 8 + counters
    assert report["memory"]["categories"]["cache"] == section["cache_bytes"]
    assert report["memory"]["categories"]["optimizer"] == 0
    bandwidth = 820e9 / 2  # documented, of a chip of two cores
    assert section["hbm_bytes_per_s"] == target.hbm_bytes_per_s_per_core == bandwidth
    table = 2 * VOCAB * WIDTH // 8  # of which one row is read
    least = section["weight_bytes"] + section["cache_bytes"] - table
    seconds = report["timing"]["step_time_s"]
    assert seconds >= least / bandwidth
    moved = sum(row["hbm_bytes"] for row in report["functions"])
    assert least <= moved <= 1.03 * least  # weights once, the cache once, one position written
    assert section["mbu"] == pytest.approx((least + table) / seconds / bandwidth)
    assert section["time_per_output_token_s"] == seconds
    assert section["time_to_first_token_s"] is None
    assert section["tokens_per_s"] == pytest.approx(3 / seconds)
    cost, price = report["cost"], report["price"]["usd_per_hour"]
    assert cost["usd_per_1e6_tokens"] == pytest.approx(price * seconds / 3600 / 3 * 1e6)
    assert "goodput" not in report and report["timing"]["published"] is None


@pytest.mark.matrix
def test_a_prefill_of_8b_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(
        capsys, *("--model", "llama3-8b", "--mode", "prefill", "--target", "inf2.48xlarge"),
        *("--seq-len", "2048", "--global-batch", "6"),
    )  # fmt: skip
    seconds, timing = report["timing"]["step_time_s"], report["timing"]
    products = 2 * (report["graph"]["params"] - VOCAB * WIDTH - WIDTH * VOCAB) * 6 * 2048
    products += 2 * VOCAB * WIDTH * 6  # logits of the last positions alone
    scores = 6 * LAYERS * 4 * 32 * HEAD_DIM * 2048**2
    norms = 2 * (2 * LAYERS + 1) * WIDTH * 6 * 2048
    assert timing["flops"]["model"] == products + scores - norms
    assert seconds >= timing["flops"]["causal"] / (190e12 * 12)
    assert timing["mfu"] == pytest.approx(timing["flops"]["model"] / seconds / (190e12 * 12))
    assert report["inference"]["time_to_first_token_s"] == seconds
    assert report["inference"]["tokens_per_s"] == pytest.approx(6 * 2048 / seconds)


MACHINES = ("inf2.xlarge", "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
CELLS = [(machine, mode) for machine in MACHINES for mode in ("prefill", "decode")]
QUICK = [("inf2.xlarge", "decode")]


@pytest.mark.parametrize(
    ("machine", "mode"), long_in_matrix(CELLS, (), [cell for cell in CELLS if cell not in QUICK])
)
def test_screen_and_page_say_nothing_of_training(
    config: Path, machine: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", str(config), "--mode", mode, "--target", machine, "--seq-len", "32")
    report = planned(capsys, *words)
    text, page = shown(report), report_page(report)
    told = page.partition('<section id="provenance"')[0]  # which lists files of the tool
    assert "Resolved configuration" in told and "micro_batch" in told
    for word in TRAINING:
        assert word not in text, word
        assert word not in told, word
    assert "runs of its programs." in told
    tokens = "input" if mode == "prefill" else "output"
    told = "to the first token" if mode == "prefill" else "per output token"
    priced = report["cost"]["usd_per_hour"] is not None
    assert f"{told} (nominal)" in text and (f"million {tokens} tokens" in text) == priced
    assert "MBU" in text and "cache " in text and f"Time {told}" in page
    assert "Model bandwidth utilisation" in page
    assert report["timing"]["confidence"] == "extrapolated"
    rows = report["limits"]["cannot_tell"]
    assert rows[0]["short"] == "no inference is compared with a published run"


@pytest.mark.matrix
def test_batch_and_context_are_axes_of_a_sweep(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(config), "--set", "model.mode=decode", "--target", "inf2.xlarge"]
    words += ["--vary", "global_batch=1,4", "--vary", "model.seq_len=16,32", "--out", str(tmp_path)]
    assert main(["sweep", *words, "--set", "run.executor=inline"]) == 0
    table = capsys.readouterr().out
    assert " MBU " in table and "exposed" not in table and "remat" not in table
    with (tmp_path / "sweep.csv").open() as file:
        rows = {(r["global_batch"], r["model.seq_len"]): r for r in csv.DictReader(file)}
    assert len(rows) == 4
    for (batch, context), row in rows.items():
        assert (row["sequences"], row["context"]) == (batch, context)
        rate = int(batch) / float(row["time_per_output_token_s"])
        assert float(row["tokens_per_s"]) == pytest.approx(rate)
    sizes = {key: round(float(row["cache_gib"]) * 2**30) for key, row in rows.items()}
    each = 2 * 4 * 1 * 16 * 4  # keys and values, layers, heads of a core, head dim, fp32
    position = 4
    assert sizes == {(b, c): int(b) * int(c) * each + int(b) * 4 + position for b, c in sizes}


def test_a_run_decodes_what_the_unsharded_model_decodes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(config), "--mode", "decode", "--target", "inf2.xlarge"]
    words += ["--seq-len", "16", "--global-batch", "2", "--steps", "3", "--out", str(tmp_path)]
    assert main(["run", *words, "--set", "run.executor=inline", "--progress", "quiet"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    numerics = report["numerics"]
    assert numerics["passed"] and len(numerics["losses"]) == 3
    assert numerics["worst_param_error"]["error"] <= 1e-5
    assert "score" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(
    "name", [*(n for n, (family, _) in SIZED.items() if family != "gpt"), *UNETS]
)
def test_what_decodes_nothing_is_refused(name: str, mode: str) -> None:
    with pytest.raises(UsageError, match="requires a decoder") as caught:
        resolve_task(load(None, [f"model.preset={name}", f"model.mode={mode}"]))
    assert caught.value.code == "SW_MODE"


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "model.clip=2",
            "model.optimizer=sgd",
            "strategy.remat=full",
            "strategy.micro_batch=auto",
        ),
        *("model.lora_r=16", "model.lora_alpha=8", "model.lora_targets=q_proj"),
        "model.lora_base=int8",
        *("strategy.reduce_gradients=last", "goodput.restart_s=60"),
        *("strategy.global_batch_tokens=4Mi", "run.checkpoint_every=1", "goal.tokens=1T"),
    ],
)
def test_settings_of_training_are_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="no setting of training") as caught:
        resolve_task(load(None, ["model.preset=llama2-7b", "model.mode=decode", setting]))
    assert caught.value.code == "SW_MODE" and setting.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize("model", ["entry=a:b", "hlo=step.hlo", "recipe=vit-base-1n"])
def test_steps_of_others_are_refused(model: str) -> None:
    with pytest.raises(UsageError, match="a preset or a config") as caught:
        resolve_task(load(None, [f"model.{model}", "model.mode=decode"]))
    assert caught.value.code == "SW_MODE"


def test_a_context_has_room_for_its_prompt_and_its_steps() -> None:
    check_room(8, 16, Mode.DECODE)
    check_room(100, 16, Mode.PREFILL)
    with pytest.raises(UsageError, match="at most 8") as caught:
        check_room(9, 16, Mode.DECODE)
    assert caught.value.code == "SW_STEPS"


@pytest.mark.parametrize("name", [*PRESETS, *CONFIGS, *(n for n in SIZED if n.startswith("gpt"))])
def test_presets_have_the_weights_they_are_trained_with(name: str) -> None:
    """GPTs as GPT-2, whose keys have a bias: they are as large as their training step's."""
    from shardwright.orchestrator.models.presets import preset_task

    asked = {"mode": Mode.DECODE, "sequences": 2, "dtype": "bf16"}
    served = served_preset(name, context=64, **asked)
    trained = preset_task(name, seq_len=64)
    counts = [
        sum(leaf.size for _, leaf in named_leaves("params", state_tree(task).arrays[0]))
        for task in (served, trained)
    ]
    assert counts[0] == counts[1]


def test_meshes_that_are_left_out_share_heads_evenly() -> None:
    def mesh(preset: str, target: str, instances: int = 1) -> dict[str, int]:
        keys = [f"model.preset={preset}", "model.mode=decode", f"cluster.target={target}"]
        return dict(layout_of(load(None, [*keys, f"cluster.instances={instances}"])).mesh.sizes)

    assert mesh("llama3-8b", "inf2.48xlarge") == {"dp_replicate": 3, "tp": 8}
    assert mesh("llama2-70b", "trn1.32xlarge", 2) == {"dp_replicate": 2, "tp": 32}
    assert mesh("gpt3-175b", "inf2.48xlarge") == {"tp": 24}
    assert mesh("llama3-8b", "inf2.xlarge") == {"tp": 2}


def test_what_is_worth_trying_changes_who_shares_the_weights() -> None:
    job = load(
        None, ["model.preset=llama3-8b", "model.mode=decode", "cluster.target=inf2.48xlarge"]
    )
    report = {
        "mesh": {"dp_replicate": 3, "tp": 8},
        "batch": {"global_batch": 3, "num_microbatches": 1},
        "graph": {"product_types": {"bf16": 1.0}, "ops": {}},
        "memory": {"fits": True, "peak_bytes": 2, "limit_bytes": 16, "categories": {}},
        "timing": {
            "step_time_ps": 10,
            "breakdown_ps": {"memory": 10},
            "engines": {"dma_in": {"share": 0.9}},
        },
        "findings": [],
    }
    found = [idea.keys for idea in ideas(situation_of(job, report), report)]
    assert {"mesh.dp_replicate": 1, "mesh.dp_shard": 1, "mesh.tp": 24}.items() <= found[0].items()
    assert {"strategy.global_batch": 6} in found
    keys = {key for one in found for key in one}
    assert not keys & {"strategy.remat", "strategy.zero", "strategy.micro_batch"}


def test_a_table_of_positions_has_no_advice_that_would_not_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A row of 32 is cut out by a step: it is whole under `tp` of 6, and of 4 too."""
    sizes = {"vocab_size": 50, "n_embd": 48, "n_head": 12, "n_layer": 2, "n_positions": 32}
    sizes |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0)
    text = json.dumps({"model_type": "gpt2", **sizes})
    words = ("--set", f"model.config={text}", "--mode", "decode", "--target", "inf2.48xlarge")
    words += ("--global-batch", "24", "--explain", "sharding")
    for tensor in (6, 4):
        mesh = f"dp_replicate={24 // tensor},tp={tensor}"
        report = planned(capsys, *words, "--mesh", mesh)
        assert [one["code"] for one in report["findings"]] == ["SW_TENSOR_PADDED"]
        layouts = {row["name"]: row["layout"] for row in report["sharding"]["tensors"]}
        assert layouts["params/positions"] == "[-, -]" and layouts["params/embed"] == "[tp, -]"


def test_what_saves_memory_is_said_once() -> None:
    """Half of two copies given to `tp` and one copy on all cores are one change."""
    job = load(
        None, ["model.preset=llama3-8b", "model.mode=decode", "cluster.target=inf2.48xlarge"]
    )
    report = {
        "mesh": {"dp_replicate": 2, "tp": 12},
        "batch": {"global_batch": 2, "num_microbatches": 1},
        "graph": {"product_types": {"bf16": 1.0}, "ops": {}},
    }
    found = [idea.keys for idea in saving(situation_of(job, report))]
    assert {"mesh.tp": 24, "mesh.dp_replicate": 1}.items() <= found[0].items()
    assert all(keys not in found[:n] for n, keys in enumerate(found))
