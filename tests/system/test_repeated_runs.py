"""`neff run`: several executions and what their times are, and the inputs of one that fails."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.neff.input_dumps import VARIABLE
from tests.support.model_files import compile_line, write_model
from tests.system.test_partitioned_files import add, module

ROWS, WIDTH = 8, 4


def taken(table: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.tanh(table).at[rows].get(mode="promise_in_bounds") * 2


TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a table by numbers that are given."""
    folder = tmp_path_factory.mktemp("rows")
    model = write_model(folder / "rows.mlir", taken, [TABLE, np.zeros(3, np.int32)])
    line = f"neuronx-cc compile {model} --target trn1 --output {folder}/rows.neff"
    assert compile_line(f"{line} --logfile {folder}/log.txt") == 0
    return folder / "rows.neff"


@pytest.fixture
def neff(compiled_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, for a test in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return compiled_once


def milliseconds(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(["neff", "run", *line.split()]) == 0
    err = capsys.readouterr().err
    once = re.search(r"simulated time (\S+) s", err)
    assert once
    found = dict(re.findall(r"(mean|min|max|std_dev) (\S+) ms", err))
    return {"once": float(once[1]) * 1000} | {name: float(ms) for name, ms in found.items()}


def test_executions_are_alike_without_jitter(
    neff: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert milliseconds(capsys, f"{neff} --time").keys() == {"once"}
    found = milliseconds(capsys, f"{neff} --time --iterations 5 --warmup 5")
    assert found["mean"] == found["min"] == found["max"] == pytest.approx(found["once"], abs=1e-6)
    assert found["std_dev"] == 0


def test_jitter_tells_executions_apart(neff: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{neff} --time --iterations 20 --jitter 0.1"
    found = milliseconds(capsys, line)
    assert found["once"] < found["min"] < found["mean"] < found["max"] and found["std_dev"] > 0
    assert found["mean"] == pytest.approx(1.1 * found["once"], rel=0.1)
    assert milliseconds(capsys, line) == found != milliseconds(capsys, f"{line} --warmup 3")


@pytest.mark.matrix
def test_executions_of_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(module([add([[*range(8)]])]))
    assert compile_line("neuronx-cc compile m.mlir --target trn1 --output m.neff") == 0
    found = milliseconds(capsys, "m.neff --time --iterations 4 --jitter 0.5")
    assert found["once"] < found["min"] < found["max"]


@pytest.mark.parametrize("flags", ["--iterations 0", "--warmup -1", "--jitter 11", "--jitter -1"])
def test_counts_that_cannot_be_are_refused(
    flags: str, neff: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["neff", "run", str(neff), "--time", *flags.split()]) == 2
    assert "--iterations requires at least 1" in capsys.readouterr().err


def run(neff: Path, *flags: str) -> int:
    np.savez("in.npz", arg0=TABLE, arg1=np.array([0, ROWS, 2], np.int32))
    line = ["neff", "run", str(neff), "--inputs", "in.npz", "--outputs", "out.npz"]
    return main([*line, *flags])


def test_inputs_of_a_failed_execution_run_again(
    neff: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    assert run(neff, "--dump-inputs", str(kept)) == 0 and not kept.exists()
    capsys.readouterr()
    assert run(neff, "--strict-indices", "--dump-inputs", str(kept)) not in (0, 2)
    (folder,) = kept.iterdir()
    assert str(folder) in capsys.readouterr().err
    assert re.fullmatch(r"input_dump_\d+_h_nn_\d+", folder.name)
    files = {path.name for path in folder.iterdir()}
    assert files == {"input0.bin", "input1.bin", "inputs.npz", "model_name.txt"}
    np.testing.assert_array_equal(
        np.fromfile(folder / "input0.bin", np.float32).reshape(TABLE.shape), TABLE
    )
    assert np.fromfile(folder / "input1.bin", np.int32).tolist() == [0, ROWS, 2]
    assert (folder / "model_name.txt").read_text().strip()
    again = ["neff", "run", str(neff), "--inputs", str(folder / "inputs.npz")]
    assert main([*again, "--outputs", "again.npz", "--strict-indices"]) not in (0, 2)


@pytest.mark.parametrize(("status", "left"), [("1006", 1), ("1", 0), ("", 0)])
def test_the_variable_names_the_status_that_leaves_inputs(
    status: str, left: int, neff: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, status)
    assert run(neff, "--strict-indices") not in (0, 2)
    assert len(list(tmp_path.glob("input_dump_*/model_name.txt"))) == left


def test_a_place_that_cannot_be_written_is_said(
    neff: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(neff, "--strict-indices", "--dump-inputs", str(tmp_path / "file")) == 2
    assert "--dump-inputs requires a place that can be written" in capsys.readouterr().err
