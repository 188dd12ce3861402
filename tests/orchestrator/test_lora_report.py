"""What a report says of adapters: parameters and those that are trained, memory, FLOPs, what is
saved; and what a preference loss needs. By arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.dpo import step as preferences
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.traits import CONTRACTIONS
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.hidden import levels
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.report.rates import FORWARD, passes_of
from shardwright.orchestrator.report.text import KIB, MIB, count_text
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from tests.support.cells import long_in_matrix
from tests.support.road import captured_graph, run_and_compare, worst
from tests.support.step_plans import build_plan

LAYERS, WIDTH, INNER, KV, VOCAB, LENGTH, RANK = 2, 64, 128, 32, 256, 16, 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
}
MATRICES = [(WIDTH, WIDTH), (WIDTH, KV), (WIDTH, KV), (WIDTH, WIDTH)]
MATRICES += [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
TRAINED = LAYERS * RANK * sum(rows + columns for rows, columns in MATRICES)
FROZEN = LAYERS * sum(rows * columns for rows, columns in MATRICES)
OTHERS = 2 * VOCAB * WIDTH + (2 * LAYERS + 1) * WIDTH


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lora")
    words = ["plan", "--set", f"model.config={json.dumps(CONFIG)}", "--seq-len", str(LENGTH)]
    words += ["--lora", str(RANK), "--target", "trn1.2xlarge", "--mesh", "dp_shard=2"]
    words += ["--micro-batch", "2", "--remat", "none", "--tries", "0", "--json"]
    out = folder / "report"
    assert main([*words, "--set", f"cache.dir={folder}", "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads((Path(out) / "report.json").read_text())
    return found


def test_parameters_are_those_of_the_model_and_its_adapters(report: dict[str, Any]) -> None:
    assert report["graph"]["params"] == FROZEN + OTHERS + TRAINED
    assert report["graph"]["trained"] == TRAINED
    every = count_text(FROZEN + OTHERS + TRAINED).strip()
    told = f"{every} parameters ({TRAINED / 1e3:.3g} k trained)"
    (job,) = [text for name, text in sections.job(report) if name == "job"]
    assert job.startswith(f"{told} on 2 cores") and told in report_page(report)


def test_the_legend_of_the_memory_comes_to_the_digits_of_the_peak(report: dict[str, Any]) -> None:
    """Adapters of a large model: a core holds 512 MiB, of which 160 KiB are what is trained."""
    sizes = {"parameters": 160 * KIB, "frozen": 400 * MIB, "gradients": 160 * KIB, "other": 100}
    sizes["activations"] = 512 * MIB - sum(sizes.values())
    memory = report["memory"] | {"peak_bytes": 512 * MIB, "categories": sizes}
    *_, (_, legend) = sections.memory(report | {"memory": memory})
    shown = {str(entry).split()[1]: float(str(entry).split()[2]) for entry in legend}
    units = {str(entry).split()[1]: str(entry).split()[3] for entry in legend}
    assert units == {
        "parameters": "KiB",
        "frozen": "MiB",
        "gradients": "KiB",
        "activations": "MiB",
    }
    total = sum(n / 1024 if units[name] == "KiB" else n for name, n in shown.items())
    assert total == pytest.approx(512, abs=0.01)


def test_memory_has_frozen_weights_apart(report: dict[str, Any]) -> None:
    """Two cores share everything; the optimizer counts steps."""
    found = report["memory"]["argument_bytes"]
    assert found["frozen"] == 2 * (FROZEN + OTHERS) // 2
    assert found["parameters"] == found["gradients"] == 4 * TRAINED // 2
    assert found["optimizer"] == 2 * 4 * TRAINED // 2 + 4


def test_a_checkpoint_holds_what_is_trained(report: dict[str, Any]) -> None:
    assert report["goodput"]["checkpoint_bytes"] == 3 * 4 * TRAINED + 4


def test_the_model_needs_no_gradient_of_frozen_weights(report: dict[str, Any]) -> None:
    """A product with a frozen matrix and the gradient of what it reads, none of the matrix;
    adapters and the scores of attention have both."""
    tokens = report["batch"]["global_batch"] * LENGTH
    frozen = 2 * 2 * (FROZEN + VOCAB * WIDTH)
    attention = 3 * 2 * 2 * LAYERS * LENGTH * WIDTH
    assert report["timing"]["flops"]["model"] == tokens * (frozen + 3 * 2 * TRAINED + attention)


def needed(loss: str) -> float:
    """FLOPs of a preference step of four pairs, per token of an answer."""
    captured = capture(preferences.make_task(loss), 4)
    names = [info.name for info in captured.outputs]
    forward = FORWARD(import_module(captured.artifact), names.index("metrics/loss"))
    passes = passes_of(forward, [info.role for info in captured.inputs], Mode.TRAIN)
    total = sum(
        times * passes(op) * OPS[op.name].flops(op)
        for level, times in levels(forward)
        for op in level.ops
        if op.name in CONTRACTIONS
    )
    return total / (2 * 4 * preferences.LENGTH)


def test_a_reference_takes_a_forward_pass_alone() -> None:
    """Of both answers: the policy forward and back, the reference only forward."""
    p = preferences
    matrices = p.LAYERS * sum(rows * columns for rows, columns in p.MATRICES.values())
    frozen = 2 * (matrices + p.VOCAB * p.WIDTH)
    adapters = 2 * p.LAYERS * p.RANK * sum(sum(shape) for shape in p.MATRICES.values())
    attention = 2 * 2 * p.LAYERS * p.LENGTH * p.WIDTH
    policy = 2 * frozen + 3 * (adapters + attention)
    assert needed("orpo") == policy
    assert needed("dpo") == policy + frozen + attention


@pytest.mark.matrix
@pytest.mark.parametrize("loss", long_in_matrix(preferences.LOSSES, ["orpo"]))
def test_preferences_on_four_cores_are_those_of_one(loss: str) -> None:
    task = preferences.make_task(loss)
    graph, inputs, outputs = captured_graph(task, 4)
    plan = build_plan(graph, inputs, outputs, make_mesh({"dp_shard": 4}), unit=answer_request)
    errors, _ = run_and_compare(plan.step, task)
    errors = {name: error for name, error in errors.items() if "/nu/" not in name}
    assert worst(errors)[1] <= 1e-4
