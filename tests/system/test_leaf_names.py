"""Names that leaves have in their framework (`params/Dense_0/kernel`) are those of the arguments of
NEFFs, of the tensors of a report and of `--explain sharding`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.compiler.frontend.reference import state_sizes
from shardwright.compiler.neff.bundle import load_bundle
from shardwright.orchestrator.cli import main
from tests.models import library_steps, people_steps
from tests.support.cells import long_in_matrix

FRAMEWORKS = {
    "linen": ("library_steps:linen_mnist", "state/params/Dense_0/kernel"),
    "nnx": ("people_steps:in_place", "model/inner/kernel/value"),
    "equinox": ("library_steps:equinox_cnn", "model/layers/6/weight"),
    "haiku": ("people_steps:haiku_state", "params/batch_norm/offset"),
}
"""Step, and a parameter as its library calls it below the argument of the step that it is in."""


@pytest.mark.parametrize(
    "framework", long_in_matrix(FRAMEWORKS, ["nnx"], [f for f in FRAMEWORKS if f != "nnx"])
)
def test_names_of_the_framework_are_kept(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, parameter = FRAMEWORKS[framework]
    module, _, name = step.partition(":")
    made = getattr({"library_steps": library_steps, "people_steps": people_steps}[module], name)()
    task = made if module == "library_steps" else made.task()
    sizes = state_sizes(task)
    leaves = set(sizes)
    assert parameter in leaves
    model = ["--model", f"tests.models.{step}", "--target", "trn1.2xlarge"]
    out = tmp_path / "out"
    words = ["--set", "run.executor=inline", "--set", "run.steps=1", "--micro-batch", "4"]
    assert main(["run", *model, *words, "--out", str(out)]) == 0
    bundle = load_bundle(out / "bundle")
    stacked = {leaf for stack in bundle.manifest.stacks.values() for leaf in stack}
    programs = bundle.programs.values()
    arguments = {name for one in programs for name in (*one.inputs, *one.outputs)}
    assert leaves <= arguments | stacked  # what is only written is no input
    capsys.readouterr()
    explained = ["--tries", "0", "--explain", "sharding", "--json"]
    assert main(["plan", *model, *words[4:], *explained]) == 0
    report = json.loads(capsys.readouterr().out)
    shown = {row["name"] for row in report["sharding"]["tensors"]}
    assert {name for name, size in sizes.items() if size > 8} <= shown | stacked  # no scalars
    paths = next(row["paths"] for row in report["graph"]["roles"] if row["role"] == "parameter")
    assert any(parameter.startswith(path) for path in paths)
