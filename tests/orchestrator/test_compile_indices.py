"""Wrong indices from the command line to what is said of them: `compile`, then `neff run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from tests.support.error_triggers import TRIGGERS
from tests.support.model_files import compile_line, write_model

TABLE = np.ones((8, 3), np.float32)
IDS = np.array([0, 1, 9, 700, 2, 3], np.int32)  # two of them are wrong


def read_and_added(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return table[ids], table.at[ids].add(1.0)


@pytest.mark.parametrize("level", ["L0", "L1"])
@pytest.mark.parametrize(
    ("release", "checks"), [("", True), ("2.12.54", True), ("2.11.0.34", False)]
)
def test_a_release_without_the_check_would_not_have_told(
    release: str, checks: bool, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, neff, given = tmp_path / "m.export", tmp_path / "m.neff", tmp_path / "in.npz"
    write_model(model, read_and_added, [TABLE, IDS])
    flag = f"--compiler-version-profile {release}" if release else ""
    line = f"shardwright compile {model} --target trn1 --output {neff} {flag}"
    assert compile_line(f"{line} --logfile {tmp_path / 'log.txt'}") == 0
    np.savez(given, arg0=TABLE, arg1=IDS)
    capsys.readouterr()
    run = ["neff", "run", str(neff), "--inputs", str(given), "--level", level]
    run += ["--outputs", str(tmp_path / "out.npz")]
    assert main(run) == 0
    err = " ".join(capsys.readouterr().err.split())
    said = "the Neuron runtime says: failed to run scatter/gather (indirect memory copy), due to"
    silent = f"neuronx-cc {release} does not check indices, 2.12.54 is the first that does"
    for access in ("gather", "scatter"):
        assert err.count(f"warning[SW_SIM_INDEX]: {access}: 2 indices lie out of bounds") == 1
    assert (err.count(said), err.count(silent)) == ((2, 0) if checks else (0, 2))
    assert main([*run, "--strict-indices"]) == 72
    err = " ".join(capsys.readouterr().err.split())
    assert "error[SW_SIM_INDEX]: " in err and "requires indices inside of its operand, got 2" in err
    assert err.split(": ")[0].endswith(f"test_compile_indices.py:{LINE}")


LINE = read_and_added.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda t, i: t[i], False),
        (lambda t, i: t[:, i], True),  # columns
        (lambda t, i: t.at[:, i].add(1.0), True),
        (lambda t, i: t[i, i], False),  # single elements
    ],
)
def test_windows_that_are_no_runs_are_told_of_and_compiled(
    function: Callable[..., jax.Array],
    told: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "m.export"
    write_model(model, function, [TABLE, IDS])
    line = f"shardwright compile {model} --target trn1 --output {tmp_path / 'm.neff'}"
    assert compile_line(f"{line} --logfile {tmp_path / 'log.txt'}") == 0
    err = " ".join(capsys.readouterr().err.split())
    text = "IndirectLoad/Save requires contiguous indirect access per partition"
    assert (text in err) is told and ("warning[SW_INDIRECT_ACCESS]" in err) is told
    assert ("test_compile_indices.py:" in err) is told


@pytest.mark.parametrize(("release", "refuses"), [("2.12.68", False), ("2.13.66", True)])
def test_releases_that_are_known_for_it_refuse_windows_that_are_no_runs(
    release: str, refuses: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.export"
    write_model(model, lambda t, i: t.at[:, i].add(1.0), [TABLE, IDS])
    line = f"shardwright compile {model} --target trn1 --output {tmp_path / 'm.neff'}"
    line += f" --compiler-version-profile {release} --logfile {tmp_path / 'log.txt'}"
    assert compile_line(line) == (70 if refuses else 0)
    err = " ".join(capsys.readouterr().err.split())
    assert ("error[SW_INDIRECT_ACCESS]" in err) is refuses
    assert ("warning[SW_INDIRECT_ACCESS]" in err) is not refuses


@pytest.mark.matrix
@pytest.mark.parametrize(("release", "checks"), [("2.22.12471", False), ("2.24.5133", True)])
@pytest.mark.parametrize("code", ["NCC_EVRF056", "NCC_EVRF031", "NCC_ESMP002"])
def test_known_indices_are_checked_by_the_compiler_from_a_release_on(
    code: str, release: str, checks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, they are data: what runs the program tells of them."""
    model, output = tmp_path / "m.mlir", tmp_path / "m.neff"
    model.write_text(TRIGGERS[code].text)
    line = f"shardwright compile {model} --target trn1 --output {output}"
    line += f" --compiler-version-profile {release} --logfile {tmp_path / 'log.txt'}"
    assert compile_line(line) == (70 if checks else 0)
    if not checks:
        given = np.ones((8, 3), np.float32), np.ones((9, 3), np.float32)
        np.savez(tmp_path / "in.npz", arg0=given[0], arg1=given[1])
        run = ["neff", "run", str(output), "--inputs", str(tmp_path / "in.npz")]
        assert main([*run, "--outputs", str(tmp_path / "out.npz")]) == 0
    err = capsys.readouterr().err
    assert (f"[{code}]" in err) is checks
    is_told = not checks and code != "NCC_ESMP002"  # constants are clamped by the compiler itself
    assert ("1 index lies out of bounds" in err) is is_told
