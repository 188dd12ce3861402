"""`check-model` and `parallel-compile --command analyze` count the operators of files by type, and
parts of too few operators stay on the CPU."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.hook import ABOUT, GRAPH
from shardwright.compiler.surface.framework_operators import LISTED
from shardwright.orchestrator.cli import main
from tests.fixtures import mxnet_models, onnx_models
from tests.support.model_files import compile_line, info_of, run_neff, write_model
from tests.support.mxnet_json import operator, symbol, variable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["check-model", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def kinds(found: Any, is_supported: bool) -> dict[str, int]:
    rows = [row for row in found["by_type"] if row["supported"] is is_supported]
    return {row["operator"]: row["instances"] for row in rows}


def test_files_of_every_form_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator of a file that has no row is one that `compile` refuses."""
    write_model(folder / "m.mlir", lambda x: jnp.fft.fft(x).real + jnp.tanh(x), [np.ones(8)])
    rows = [variable("x"), operator("box_nms", "n", 0), operator("relu", "r", 1)]
    (folder / "m-symbol.json").write_text(symbol(*rows, operator("relu", "s", 2)))
    onnx = str(onnx_models.stored("convnet").path)
    found = checked(capsys, "m.mlir", "m-symbol.json", onnx)
    assert kinds(found["m.mlir"], False) == {"fft": 1, "real": 1}
    assert found["m.mlir"]["form"] == "stablehlo text"
    assert kinds(found["m-symbol.json"], False) == {"box_nms": 1}
    assert kinds(found["m-symbol.json"], True) == {"relu": 2}
    assert kinds(found[onnx], True)["BatchNormalization"] == 2
    assert found[onnx]["unsupported"] == 0 < found[onnx]["supported"] == found[onnx]["operators"]


def test_the_table_is_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "m-symbol.json").write_text(
        symbol(variable("x"), operator("relu", "r", 0), operator("box_nms", "n", 1))
    )
    assert main(["check-model", "m-symbol.json"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[2].split()[:3] == ["box_nms", "1", "no:"]
    assert told[-1] == "1 of 2 operators supported by neuronx-cc (50.0 %)"


def test_neuron_cc_takes_what_it_lists(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(mxnet_models.stored("bert").path)
    assert kinds(checked(capsys, path)[path], False) == {}
    found = checked(capsys, path, "--target", "inf1")[path]
    assert kinds(found, False) == {"Embedding": 2, "SoftmaxOutput": 1}
    assert {row["why"] for row in found["by_type"] if row["why"]} == {"is in no list of neuron-cc"}


def test_the_lists_of_neuron_cc(capsys: pytest.CaptureFixture[str]) -> None:
    """All of MXNet's have rows; of ONNX's, names that its standard does not have are left out."""
    assert {name: len(names) for name, names in LISTED.items()} == {
        "mxnet": 123,
        "onnx": 68,
        "tensorflow": 113,
    }
    for framework, missing in (("MXNET", 0), ("ONNX", 7)):
        words = ["list-operators", "--framework", framework, "--target", "inf1"]
        assert main(words) == 0
        listed = LISTED[framework.lower()]
        told = capsys.readouterr().out.split()
        assert len(told) == len(listed) - missing and set(told) <= set(listed)
    assert main(["list-operators", "--framework", "MXNET"]) == 0
    assert len(capsys.readouterr().out.split()) > 280


def graph_of(folder: Path, name: str, data: bytes) -> None:
    place = folder / "graphs" / name
    place.mkdir(parents=True)
    (place / GRAPH).write_bytes(data)
    about = {"name": name, "digest": hashlib.sha256(data).hexdigest()}
    (place / ABOUT).write_text(json.dumps(about))


@pytest.mark.parametrize("verbosity", [1, 2])
def test_analyze_writes_what_is_supported(
    verbosity: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lowered = jax.jit(lambda x: jnp.fft.fft(x).real + 1.0).lower(np.ones(8, np.float32))
    graph_of(folder, "step", lowered.as_text().encode())
    words = ["--command", "analyze", "--analyze-verbosity", str(verbosity)]
    assert main(["parallel-compile", *words]) == 0
    assert "operators supported" in capsys.readouterr().err
    found = json.loads((folder / "model_analysis_result" / "result.json").read_text())
    assert (found["unsupported"], found["compiler"]) == (2, "neuronx-cc")
    (step,) = found["graphs"].values()
    assert kinds(step, False) == {"fft": 1, "real": 1}
    assert ("add" in kinds(step, True)) is (verbosity == 2)


def test_analyze_requires_graphs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel-compile", "--command", "analyze"]) == 2
    assert "SW_GRAPH" in capsys.readouterr().err


def test_parts_of_too_few_operators_stay_on_the_cpu(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two large parts around a gather, and one operator behind another."""
    table = np.ones((16, 8), np.float32)

    def model(x: Any, at: Any) -> Any:
        y = jnp.tanh(x @ x.T) @ x
        y = jnp.exp(jnp.take(y, at, 0))
        return jnp.take(y, at[:4], 0)

    write_model(folder / "m.mlir", model, [table, np.zeros(8, np.int32)])
    on_cores, programs, values = {}, {}, {}
    for least in (1, 3):
        line = "shardwright compile m.mlir --target inf1 --output m.neff"
        assert compile_line(f"{line} --minimum-segment-size {least}") == 0
        capsys.readouterr()
        info = info_of(folder / "m.neff", capsys)
        on_cores[least] = sum(row[2] for row in info["operators"])
        programs[least] = len(info["programs"])
        values[least] = run_neff(folder / "m.neff", [table, np.arange(8, dtype=np.int32)])[0]
    assert on_cores[3] < on_cores[1] and programs[3] < programs[1]
    np.testing.assert_allclose(values[3], values[1], rtol=2e-2)
    line = "shardwright compile m.mlir --target inf1 --output m.neff --minimum-segment-size 99"
    assert compile_line(line) == 70
    assert "SW_NO_OPERATORS" in capsys.readouterr().err
