"""A bundle moved elsewhere runs, is timed and is verified where only NumPy, msgpack and zstandard
are installed, without the repository: a child process sees a copy of our package alone, and its
import system refuses every other third-party one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.road.numerics import FP32_BOUND
from shardwright.sim_cluster.timing.step_time import Step, band
from tests.support.small_job import TARGET, build_on, bundle_of, run_steps, small_llama

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = ("numpy", "msgpack", "zstandard")
STEPS = 2

# Runs in the child, before anything else is imported.
GUARD = """
import runpy, sys

HOME, ROOT, ALLOWED, OURS = {home!r}, {root!r}, {allowed!r}, {ours!r}

class Guard:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ALLOWED or top == OURS
        if known or top.startswith("__"):
            return None
        raise ModuleNotFoundError("refused by the test: " + name, name=name)

foreign = [p for p in sys.path if p == ROOT or p == "" or p.startswith(ROOT + "/") and
           "site-packages" not in p]
sys.path[:] = [HOME] + [p for p in sys.path if p not in foreign]
sys.meta_path.insert(0, Guard)
try:
    import jax
except ModuleNotFoundError:
    pass
else:
    sys.exit("the guard lets jax through")
from shardwright import sim_cluster
assert sim_cluster.__file__.startswith(HOME), sim_cluster.__file__
sys.argv[0] = "sim_cluster"
runpy.run_module("shardwright.sim_cluster", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Elsewhere:
    """A place with our package, and nothing else of the repository."""

    home: Path

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """`python -m shardwright.sim_cluster` with the guard in front."""
        names = {"allowed": ALLOWED, "ours": "shardwright"}
        code = GUARD.format(home=str(self.home), root=str(ROOT), **names)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.home, env=environment, capture_output=True, text=True, timeout=120
        )


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    home = tmp_path_factory.mktemp("elsewhere")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "shardwright", home / "shardwright", ignore=ignore)
    return Elsewhere(home)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State and two batches of the small llama; batch arrays have a first axis of steps."""
    path = tmp_path_factory.mktemp("inputs") / "inputs.npz"
    task = small_llama()
    batches = task_batches(task, 0, 8)
    found = [batch_leaves(next(batches)) for _ in range(STEPS)]
    stacked = {name: np.stack([b[name] for b in found]) for name in found[0]}
    np.savez(path, **initial_state(task, 0), **stacked)
    return path


@pytest.mark.matrix
def test_a_moved_bundle_gives_the_same_values_and_times(
    elsewhere: Elsewhere, bundle_copy: Path, inputs: Path, small_bundle: Bundle, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs.npz"
    done = elsewhere.run(
        *(bundle_copy, "--inputs", inputs, "--outputs", outputs),
        *("--steps", str(STEPS), "--time"),
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    expected = run_steps(small_bundle, small_llama(), 8, STEPS)
    final = expected.run.gather(expected.after_one)
    with np.load(outputs) as given:
        assert given["metrics/loss"].tolist() == expected.losses
        assert set(given.files) == {"metrics/loss", *final}
        assert all(given[name].tobytes() == array.tobytes() for name, array in final.items())
    for check in expected.run.result.l0.values():
        assert check.distance <= FP32_BOUND
        assert f"{check.program}: L0 against L1 {check.distance:.1e} on core 0" in done.stdout
    for name, seconds in times(small_bundle).items():
        assert f"{name} {seconds:.9f} s" in done.stdout


def times(bundle: Bundle) -> dict[str, float]:
    step = Step(
        programs=bundle.programs,
        schedules=bundle.manifest.schedules,
        mesh=bundle.manifest.mesh,
        target=load_target(TARGET),
        instances=1,
    )
    return {name: timing.step_time_ps / 1e12 for name, timing in band(step).items()}


def test_a_moved_bundle_is_verified(elsewhere: Elsewhere, bundle_copy: Path) -> None:
    done = elsewhere.run(bundle_copy, "--verify")
    assert done.returncode == 0, done.stderr
    assert "3 programs for 4 cores of trn1n.32xlarge, sound" in done.stdout
    path = next((bundle_copy / "programs").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    done = elsewhere.run(bundle_copy, "--verify")
    assert done.returncode == 72
    assert "error[SW_NEFF_TRUNCATED]" in done.stderr


def test_wrong_inputs_are_named(
    elsewhere: Elsewhere, bundle_copy: Path, inputs: Path, tmp_path: Path
) -> None:
    with np.load(inputs) as data:
        arrays = {name: data[name] for name in data.files if name != "params/embed"}
    lacking = tmp_path / "lacking.npz"
    np.savez(lacking, **arrays)
    out = ("--outputs", tmp_path / "out.npz")
    done = elsewhere.run(bundle_copy, "--inputs", lacking, *out)
    assert done.returncode == 2
    assert "error[SW_INPUTS]" in done.stderr
    assert "params/embed" in done.stderr
    done = elsewhere.run(bundle_copy, "--inputs", inputs, *out, "--steps", "3")
    assert done.returncode == 2
    assert "batch/targets requires a first axis of 3 steps" in done.stderr
    assert (
        elsewhere.run(bundle_copy, "--inputs", bundle_copy / "manifest.neff", *out).returncode == 2
    )


@pytest.mark.matrix
def test_bf16_says_what_it_needs(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """NumPy has no bf16: a bundle that computes in it asks for ml_dtypes by name."""
    bundle = bundle_of(build_on(small_llama("bf16"), {"dp_shard": 4}), tmp_path / "bundle")
    assert elsewhere.run(bundle.path, "--verify", "--time").returncode == 0
    done = elsewhere.run(bundle.path, "--inputs", tmp_path / "absent", "--outputs", tmp_path / "o")
    assert done.returncode == 2
    assert "SW_INPUTS" in done.stderr
    task = small_llama("bf16")
    batch = batch_leaves(next(task_batches(task, 0, 8)))
    np.savez(tmp_path / "in.npz", **initial_state(task, 0), **batch)
    done = elsewhere.run(bundle.path, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "o")
    assert done.returncode == 2
    assert "error[SW_NEEDS_ML_DTYPES]" in done.stderr
