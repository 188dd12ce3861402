"""Arrays in and out of `neff run`: types that NumPy has no name for, outputs of one program as
inputs of the next, and the time of a program without any."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.neff.arrays import read_arrays, write_arrays
from shardwright.orchestrator.cli import main
from tests.support.forge.sound import RANKS
from tests.support.model_files import compile_line, write_model

BF16 = np.dtype(ml_dtypes.bfloat16)
UNNAMED = {
    DType.BF16: ml_dtypes.bfloat16,
    DType.F8E4M3: ml_dtypes.float8_e4m3,
    DType.F8E4M3FN: ml_dtypes.float8_e4m3fn,
    DType.F8E5M2: ml_dtypes.float8_e5m2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    return main(["neff", "run", *words])


@pytest.mark.parametrize("dtype", UNNAMED)
def test_arrays_that_numpy_saved_have_the_type_that_is_asked_for(
    dtype: DType, tmp_path: Path
) -> None:
    """NumPy does not read what it wrote of f8E5M2."""
    wanted = np.array([[1.5, -2.0], [0.25, 8.0]]).astype(UNNAMED[dtype])
    np.savez(tmp_path / "a.npz", arg0=wanted, scalar=wanted[0, 0])
    found = read_arrays(tmp_path / "a.npz")
    assert found["arg0"].is_taken_as(dtype) and not found["arg0"].is_taken_as(DType.F16)
    np.testing.assert_array_equal(found["arg0"].of_type(dtype), wanted)
    assert found["scalar"].of_type(dtype) == wanted[0, 0]


def test_what_is_written_is_read_with_its_types_and_names(tmp_path: Path) -> None:
    arrays = {d.value: np.arange(6).reshape(2, 3).T.astype(n) for d, n in UNNAMED.items()}
    arrays |= {"f32": np.eye(2, dtype=np.float32), "none": np.zeros((0, 3), BF16)}
    with (tmp_path / "a.npz").open("wb") as file:
        write_arrays(file, arrays.items(), {"f32": "params/w"})
    found = read_arrays(tmp_path / "a.npz")
    for name, wanted in arrays.items():
        assert found[name].array.dtype == wanted.dtype
        np.testing.assert_array_equal(found[name].array, wanted)
    assert [name for name, one in found.items() if one.name] == ["f32"]
    with np.load(tmp_path / "a.npz") as plain:  # as anybody else reads them
        np.testing.assert_array_equal(plain["bf16"].view(BF16), arrays["bf16"])


KINDS = {
    "<U1": np.array(["a"]),
    "3 bytes each, without a type": np.zeros(1, "V3"),
    "2 bytes each, without a type": np.zeros(1, [("a", "i1"), ("b", "i1")]),
    "complex128": np.zeros(1, complex),
}


def test_what_has_no_values_of_the_type_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.mlir", lambda x: x + 1, [np.zeros(1, BF16)])
    assert compile_line("shardwright compile m.mlir --target trn1") == 0
    for kind, array in KINDS.items():
        np.savez("in.npz", arg0=array)
        assert run("file.neff", "--inputs", "in.npz", "--outputs", "out.npz") == 2
        told = " ".join(capsys.readouterr().err.split())
        assert f"error[SW_NEFF_INPUTS]: input arg0 requires bf16, in.npz has {kind}" in told


def step(state: Any, grads: Any) -> Any:
    return state - (grads * 0.5).astype(state.dtype), jnp.sum(grads)


def test_outputs_of_one_program_are_inputs_of_the_next(folder: Path) -> None:
    """A donated state has its own name; what is not found under its name comes from another
    file."""
    state, grads = np.ones((4, 8), BF16), np.full((4, 8), 0.25, np.float32)
    write_model(folder / "m.mlir", step, [state, grads], donate=(0,))
    assert compile_line("shardwright compile m.mlir --target trn1") == 0
    np.savez("in.npz", arg0=state, arg1=grads)
    assert run("file.neff", "--inputs", "in.npz", "--outputs", "out.npz") == 0
    again = ("--inputs", "in.npz", "--inputs", "out.npz", "--outputs", "out.npz")
    assert run("file.neff", *again) == 0
    (found, _) = (one.array for one in read_arrays(Path("out.npz")).values())
    np.testing.assert_array_equal(found, np.full((4, 8), 0.75, BF16))

    write_model(folder / "n.mlir", lambda x: x.astype(jnp.float32) * 2, [state])
    assert compile_line("shardwright compile n.mlir --target trn1 --output n.neff") == 0
    assert run("n.neff", "--inputs", "out.npz", "--outputs", "last.npz") == 0
    with np.load("last.npz") as last:
        np.testing.assert_array_equal(last["out0"], np.full((4, 8), 1.5, np.float32))


def seconds(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[float, str]:
    capsys.readouterr()
    assert run("file.neff", "--time", *words) == 0
    told = re.fullmatch(r"simulated time (\S+) s on \S+ cores of (\S+)\n", capsys.readouterr().err)
    assert told is not None
    return float(told[1]), told[2]


def test_time_needs_no_values_and_is_that_of_the_machine_that_was_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "m.mlir").write_text(RANKS)
    assert compile_line("shardwright compile m.mlir --target trn1") == 0
    own, alike = seconds((), capsys), seconds(("--target", "inf2"), capsys)
    assert (own[1], alike[1]) == ("trn1.32xlarge", "inf2.48xlarge")
    monkeypatch.setenv("NEURON_RT_ALLOW_LEGACY_NEFF", "1")
    newer = seconds(("--target", "trn2"), capsys)
    assert newer[1] == "trn2.48xlarge" and 0 < newer[0] != own[0] > 0
    assert seconds(("--target", "TRN1.32xlarge"), capsys) == own
    assert not (folder / "out.npz").exists()
    assert run("file.neff", "--time", "--target", "gpu") == 2
    assert "NCC_EARG001" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--inputs", "in.npz"), ("--inputs", "in.npz", "--time")])
def test_values_go_somewhere(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("file.neff", *words) == 2
    assert "error[SW_USAGE]: neff run requires --outputs" in capsys.readouterr().err
