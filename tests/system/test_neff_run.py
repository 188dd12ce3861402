"""`shardwright neff info|run` on the programs of a one-core bundle: the whole step, file by file,
equals the value run of the bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.cli import main
from shardwright.sim_cluster.values.result import distance
from shardwright.sim_cluster.values.run_values import ValueRun
from tests.support.cells import long_in_matrix
from tests.support.small_job import build_on, bundle_of, small_llama

L0_BOUND = 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The small llama on one core, two samples: nobody to talk to, no collectives."""
    path = tmp_path_factory.mktemp("alone")
    road = build_on(small_llama(), {"dp_shard": 1}, num_microbatches=1, micro_batch=2)
    return bundle_of(road, path / "bundle")


def program_file(bundle: Bundle, name: str) -> Path:
    return bundle.path / "programs" / f"{bundle.manifest.programs[name]}.neff"


def run_file(
    file: Path,
    arrays: Mapping[str, np.ndarray],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    level: str,
) -> dict[str, np.ndarray]:
    """The outputs of a program by name, as a user of the command gets them."""
    capsys.readouterr()
    assert main(["neff", "info", str(file), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    given = {f"arg{k}": arrays[row["name"]] for k, row in enumerate(info["inputs"])}
    for k, row in enumerate(info["inputs"]):
        assert list(given[f"arg{k}"].shape) == row["shape"]
    inputs, outputs = folder / "in.npz", folder / "out.npz"
    np.savez(inputs, **given)
    command = ["neff", "run", str(file), "--inputs", str(inputs), "--outputs", str(outputs)]
    assert main([*command, "--level", level, "--time"]) == 0
    assert "simulated time 0.00" in capsys.readouterr().err
    with np.load(outputs) as found:
        return {row["name"]: found[f"out{k}"] for k, row in enumerate(info["outputs"])}


@pytest.mark.parametrize("level", long_in_matrix(("L0", "L1"), ("L0",)))
def test_programs_run_one_by_one_make_the_step(
    level: str, alone: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = small_llama()
    state, batch = initial_state(task, 0), batch_leaves(next(task_batches(task, 0, 2)))
    whole = ValueRun(alone.programs, alone.manifest, check_l0=False)
    whole.load(state)
    metrics = dict(whole.step(batch))
    expected = whole.gather(state) | metrics
    buffers = alone.manifest.buffers.values()
    arrays = {b.name: np.zeros(b.local_shape, b.dtype.numpy) for b in buffers}
    arrays |= dict(state) | dict(batch)
    ((names, count),) = [(n, c) for n, c in alone.manifest.schedules[0] if "forward" in n]
    assert count == 1
    for name in dict.fromkeys((*names, *alone.programs)):
        arrays |= run_file(program_file(alone, name), arrays, tmp_path, capsys, level)
    errors = {name: distance(arrays[name], array) for name, array in expected.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= (0 if level == "L1" else L0_BOUND), worst


def test_wrong_inputs_of_one_program_are_refused(
    alone: Bundle, small_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = program_file(alone, "forward"), tmp_path / "out.npz"
    empty, text = tmp_path / "empty.npz", tmp_path / "text.npz"
    np.savez(empty)
    text.write_text("PK\x03\x04 no archive")
    for inputs, code in (
        (empty, "SW_SIM_SHAPE"),
        (text, "SW_NEFF_INPUTS"),
        (tmp_path / "absent.npz", "SW_NEFF_INPUTS"),
    ):
        command = ["neff", "run", str(file), "--inputs", str(inputs), "--outputs", str(out)]
        assert main(command) in (2, 72)
        assert f"error[{code}]" in capsys.readouterr().err
    assert not out.exists()
    # A program of a larger mesh cannot finish alone.
    program = small_bundle.programs["forward"]
    named = {b.name: np.zeros(b.shape, b.dtype.numpy) for b in program.buffers if b.kind == "named"}
    np.savez(empty, **{f"arg{k}": named[n] for k, n in enumerate(program.inputs)})
    forward = program_file(small_bundle, "forward")
    assert main(["neff", "run", str(forward), "--inputs", str(empty), "--outputs", str(out)]) == 72
    assert "error[SW_SIM_COLLECTIVE]" in capsys.readouterr().err
