"""What a user gets wrong, and what the command answers: code, place, required against given,
advice, exit code; as JSON when asked for. And Ctrl-C: exit 130, nothing left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator.cli import main
from tests.support.interrupts import heard_by_children
from tests.support.small_job import write_job

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60  # to start, to end: only a hang takes that long, also beside other work

MODEL = '''"""A user's own training step."""

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.frontend.task import TrainTask


def loss_fn(params, batch):
    y = batch["x"] @ params["w"]
    gram = jax.lax.stop_gradient(params["w"].T @ params["w"]) + jnp.eye(32)
    return jnp.mean(y @ jnp.linalg.cholesky(gram))


def make_task():
    def step(params, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), {"loss": loss}

    return TrainTask(
        step=step,
        init=lambda key: ({"w": jax.random.normal(key, (32, 32))},),
        state_names=("params",),
        batch=lambda n: {"x": jax.ShapeDtypeStruct((n, 32), np.float32)},
    )
'''
FACTOR_LINE = 1 + MODEL[: MODEL.index("jnp.linalg.cholesky")].count("\n")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, and the signal handler of the test run kept."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) with the lines joined."""
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """(exit code, what `--json` prints on stdout, which is nothing else)."""
    code, out, _ = command(capsys, *arguments, "--json")
    return code, json.loads(out)


def entry_job(folder: Path) -> Path:
    (folder / "whitened_model.py").write_text(MODEL)
    (folder / "job.toml").write_text('[model]\nentry = "whitened_model:make_task"\n')
    return folder / "job.toml"


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_an_unsupported_operator_names_the_users_line(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = entry_job(tmp_path)
    code, out, err = command(capsys, verb, job)
    assert code == 70
    assert f"whitened_model.py:{FACTOR_LINE}: error[NCC_EHCA005]: custom call lapack_spotrf" in err
    assert not out
    code, data = as_json(capsys, verb, job)
    assert code == 70
    assert data["error"]["code"] == "NCC_EHCA005"
    assert (data["error"]["loc"]["file"], data["error"]["loc"]["line"]) == (
        "whitened_model.py",
        FACTOR_LINE,
    )


def test_the_help_of_an_unsupported_operator_works(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "list-operators")
    assert code == 0
    assert "DotGeneral" in out.split()
    assert "TriangularSolve" not in out.split()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--global-batch", 33), ("SW_BATCH", "strategy.global_batch", "32", "got 33", "use 32")),
        (("--strategy", "magic"), ("SW_USAGE", "strategy.name", "fsdp", "'magic'")),
        (("--target", "tpu"), ("NCC_EARG001", "target", "trn1n.32xlarge", "'tpu'")),
        (("--model", "llama9-1b"), ("SW_PRESET", "preset", "llama2-7b", "llama9-1b")),
        (("--lnc", 2), ("NCC_EARG001", "cluster.lnc", "1", "got 2")),
        (("--set", "run.speed=9"), ("SW_USAGE", "run.speed", "steps")),
        (("--set", "run.steps=many"), ("SW_USAGE", "run.steps", "int", "'many'")),
        (("--mesh", "dp_shard"), ("SW_USAGE", "axis=size")),
        (("--executor", "abacus"), ("SW_USAGE", "executor", "inline, process, ray", "'abacus'")),
    ],
)
def test_a_wrong_setting_is_a_usage_error_with_its_field(
    arguments: tuple[object, ...],
    wanted: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = write_job(tmp_path)
    code, out, err = command(capsys, "run", job, *arguments)
    assert code == 2
    assert not out
    assert all(text in err for text in wanted), err
    code, data = as_json(capsys, "run", job, *arguments)
    assert code == 2
    assert data["error"]["code"] == wanted[0]


def test_a_mesh_that_does_not_fill_the_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(capsys, "run", write_job(tmp_path), "--mesh", "dp_shard=31")
    assert code != 0
    assert "error[SW_MESH_PRODUCT]" in err
    assert "31" in err
    assert "32" in err


@pytest.mark.parametrize("text", ["[model", "model = 3", "[modle]\nx = 1", None])
def test_a_job_file_that_is_none(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_text(text)
    code, _, err = command(capsys, "run", path)
    assert code == 2
    assert "SW_USAGE" in err
    assert "job.toml" in err


@pytest.mark.matrix
def test_a_model_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """70 billion parameters on one instance: plan shows it, run refuses before any value exists."""
    arguments = ("--model", "llama2-70b", "--instances", 1, "--set", "compiler.optlevel=1")
    code, report = as_json(capsys, "plan", *arguments, "--tries", 0)
    assert code == 71
    memory = report["memory"]
    assert not memory["fits"]
    assert memory["peak_bytes"] > memory["limit_bytes"] > 0
    code, out, _ = command(capsys, "plan", *arguments, "--tries", 0)
    assert code == 71
    assert "SW_CAPACITY" in out
    screen = " ".join(out.split())
    assert f"({memory['peak_bytes']} bytes)" in screen
    assert f"({memory['limit_bytes']} bytes)" in screen
    wider = "--set mesh.dp_shard=64 --set cluster.instances=2 --set strategy.global_batch=64"
    assert f"{wider} (saves" in screen
    assert "strategy.zero" not in screen, "fsdp has spread the state already"
    job = tmp_path / "job.toml"
    job.write_text("")
    code, data = as_json(capsys, "run", job, *arguments, "--out", tmp_path / "out")
    assert code == 71
    assert data["error"]["code"] == "SW_CAPACITY"
    assert f"({memory['limit_bytes']} bytes)" in data["error"]["message"]
    assert "dp_shard" in data["error"]["hint"]
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert left == ["events.jsonl"], "what was done is told; there is no bundle and no report"


def processes_of(session: int) -> list[str]:
    """Living processes of a session, as (pid, state, command) lines of /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text()
        except (OSError, ValueError):
            continue
        name, _, rest = fields.rpartition(")")
        state, _, _, its_session, *_ = rest.split()
        if entry.name.isdigit() and int(its_session) == session and state not in "ZX":
            found.append(f"{name}) {state}")
    return found


@pytest.mark.parametrize(
    ("moment", "whole_group"),
    [
        ("partition", True),
        pytest.param("step", False, marks=pytest.mark.matrix),
        pytest.param("step", True, marks=pytest.mark.matrix),
    ],
)
def test_an_interrupt_ends_the_run_and_its_children(
    moment: str, whole_group: bool, tmp_path: Path
) -> None:
    """While the Shardy child works, and in the middle of the values with the unsharded run beside;
    as a terminal sends it (to all) and as a supervisor does (to the job alone).
    """
    job = write_job(tmp_path, run={"steps": 10_000, "executor": "auto"})
    command = [sys.executable, "-m", "shardwright", "run", str(job), "--out", str(tmp_path / "o")]
    with heard_by_children():
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    try:
        _wait_for(process, moment)
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=PATIENCE_S)[1]
        assert process.returncode == 130, err
        assert "interrupted; finished units are kept in the cache" in err
        assert "Traceback" not in err
        _wait_until_gone(process.pid)
    finally:
        if processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_for(process: subprocess.Popen[str], moment: str) -> None:
    """Until the Shardy child lives, or the second step is done."""
    assert process.stderr is not None
    if moment == "partition":
        deadline = time.monotonic() + PATIENCE_S
        while len(processes_of(process.pid)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return
    watchdog = threading.Timer(3 * PATIENCE_S, process.kill)
    watchdog.start()
    seen = any(re.search(r"step +2/", line) for line in process.stderr)
    watchdog.cancel()
    assert seen


def _wait_until_gone(session: int) -> None:
    deadline = time.monotonic() + 5
    while processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(session)
