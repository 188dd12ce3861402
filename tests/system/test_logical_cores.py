"""Logical NeuronCores as a user meets them: defaults, refusals, reports, files and tools."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from tests.support.model_files import compile_line, info_of, meta_of, write_model
from tests.support.small_job import write_job

GIB = 2**30


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", str(write_job(folder)), *flags, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.matrix
def test_a_hypothetical_machine_says_so_in_every_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = planned(capsys, tmp_path, "--logical-nc-config", "2", "--hypothetical")
    cores = report["logical_cores"]
    assert (report["cores"], cores["lnc"], cores["per_instance"]) == (16, 2, 16)
    assert (cores["hbm_bytes"], cores["hypothetical"]) == (32 * GIB, True)
    assert cores["kernels_cut"] > 0
    assert report["findings"][0]["code"] == "SW_HYPOTHETICAL"
    assert "16 cores of 32 GiB" in report["findings"][0]["message"]
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "job.toml"), "--lnc", "2", "--hypothetical"]) == 0
    assert "hypothetical, LNC 2: 16 cores of 32.00 GiB" in capsys.readouterr().out


@pytest.mark.matrix
def test_trn2_has_logical_cores_of_two_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = planned(capsys, tmp_path, "--target", "trn2.48xlarge")
    one = planned(capsys, tmp_path, "--target", "trn2.48xlarge", "--lnc", "1")
    assert (two["cores"], two["logical_cores"]["lnc"]) == (64, 2)
    assert (one["cores"], one["logical_cores"]["lnc"]) == (128, 1)
    assert two["logical_cores"]["hbm_bytes"] == 2 * one["logical_cores"]["hbm_bytes"] == 24 * GIB
    assert two["memory"]["limit_bytes"] == 2 * one["memory"]["limit_bytes"]
    assert not any(f["code"] == "SW_HYPOTHETICAL" for f in two["findings"])
    # The same work per core on twice the physical cores, and its collectives among fewer ranks.
    assert two["timing"]["step_time_ps"] < one["timing"]["step_time_ps"]
    assert one["logical_cores"]["alone_ps"] == 0


@pytest.mark.parametrize("target", ["trn1.32xlarge", "trn1n.32xlarge", "inf2.48xlarge"])
def test_machines_without_logical_cores_refuse_them(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path))
    assert main(["plan", job, "--target", target, "--lnc", "2"]) == 2
    err = capsys.readouterr().err
    assert "NCC_EARG001" in err
    assert f"cluster.lnc on {target} requires 1, got 2" in err
    assert "--hypothetical" in err


def two_layers(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ u


ARGUMENTS = [(256, 128), (128, 512), (512, 256)]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in ARGUMENTS]
    write_model(tmp_path / "m.hlo.pb", two_layers, arrays)
    return tmp_path, {f"arg{n}": a for n, a in enumerate(arrays)}


def test_a_compiled_file_has_two_subgraphs_and_runs(
    model: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, arrays = model
    np.savez(folder / "in.npz", **arrays)
    line = "shardwright compile m.hlo.pb --framework XLA --target trn2 --output"
    assert compile_line(f"{line} two.neff") == 0
    assert compile_line(f"{line} one.neff --lnc 1") == 0
    assert (meta_of(folder / "two.neff")["lnc"], meta_of(folder / "one.neff")["lnc"]) == (2, 1)
    found = info_of(folder / "two.neff", capsys)["subgraphs"]
    assert found["kernels on both"] >= 1
    assert found["sg00 instructions"] == found["sg01 instructions"] > 0
    assert main(["neff", "verify", "two.neff"]) == 0
    capsys.readouterr()
    assert main(["neff", "dump", "two.neff"]) == 0
    dumped = capsys.readouterr().out
    assert "subgraph sg00 on physical core 0" in dumped
    assert "subgraph sg01 on physical core 1" in dumped
    assert main(["neff", "diff", "one.neff", "two.neff"]) == 1
    want = two_layers(*(jnp.asarray(a) for a in arrays.values()))
    times = {}
    for name in ("one", "two"):
        for level in ("L0", "L1"):
            command = ["neff", "run", f"{name}.neff", "--inputs", "in.npz", "--outputs", "o.npz"]
            capsys.readouterr()
            assert main([*command, "--level", level, "--time"]) == 0
            times[name] = float(capsys.readouterr().err.split("simulated time ")[1].split()[0])
            with np.load("o.npz") as outputs:
                assert np.allclose(outputs["out0"], want, rtol=1e-4, atol=1e-3)
    launch = 100e-6  # of the program, the same for both
    assert 1.2 < (times["one"] - launch) / (times["two"] - launch) <= 2.0


def test_a_hypothetical_file_says_so_and_a_real_machine_refuses_another(
    model: tuple[Path, dict[str, np.ndarray]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, arrays = model
    np.savez(folder / "in.npz", **arrays)
    line = "shardwright compile m.hlo.pb --framework XLA --output"
    assert compile_line(f"{line} what-if.neff --target trn1n --lnc 2 --hypothetical") == 0
    assert meta_of(folder / "what-if.neff")["hypothetical"] is True
    run = ["--inputs", "in.npz", "--outputs", "o.npz", "--time"]
    capsys.readouterr()
    assert main(["neff", "run", "what-if.neff", *run]) == 0
    assert "hypothetical: no trn1n.32xlarge has" in capsys.readouterr().err
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert main(["neff", "run", "what-if.neff", *run]) == 72
    assert "SW_LOAD_LNC" in capsys.readouterr().err
