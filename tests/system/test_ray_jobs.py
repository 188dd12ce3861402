"""Jobs on a private Ray head with a token, as users see them: exit codes, logs, interrupts, stop.

Without a cluster: `tests/orchestrator/test_submission.py`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from tests.support.interrupts import heard_by_children
from tests.support.ray_head import ROOT, Head, ray_head
from tests.support.small_job import ON_ONE_CHIP, SIZES

pytestmark = [pytest.mark.ray, pytest.mark.matrix]  # a minute of waiting for Ray
WAITING = """
import time
from shardwright import orchestrator

def task(seq_len):
    print("here:", orchestrator.__file__, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with ray_head(tmp_path_factory.mktemp("head") / "state") as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project, no checkout."""
    folder = tmp_path_factory.mktemp("project")
    job = f'{ON_ONE_CHIP}[output]\ndir = "{folder}/out"\n[cache]\ndir = "{folder}/cache"\n'
    (folder / "config.json").write_text(json.dumps(SIZES))
    (folder / "large.json").write_text(json.dumps(SIZES | {"vocab_size": 2**29}))
    (folder / "job.toml").write_text(job)
    (folder / "wait.toml").write_text(
        job.replace('config = "config.json"', 'entry = "waiting:task"')
    )
    (folder / "waiting.py").write_text(WAITING)
    return folder


def test_a_checkout_is_a_ray_job(head: Head, folder: Path) -> None:
    """Without being installed; its units have the keys that they have here."""
    command = ["python", "-m", "shardwright", "run", str(folder / "job.toml"), "--compile-only"]
    ray = str(Path(sys.executable).parent / "ray")
    words = [ray, "job", "submit", "--working-dir", str(ROOT), "--", *command]
    code, out, err = head.run(words, folder)
    assert code == 0, out + err
    assert "compile 1/" in out and "on ray-0:" in out
    told = json.loads((folder / "out" / "compile.json").read_text())
    assert told["units"]["compiled"] == told["units"]["total"] > 6
    again = ["run", str(folder / "job.toml"), "--compile-only", "--out", str(folder / "here")]
    assert main([*again, "--json"]) == 0
    here = json.loads((folder / "here" / "compile.json").read_text())
    assert here["units"].pop("stored_s") > 0 == told["units"].pop("stored_s")
    assert here["units"] == told["units"] | {"cached": told["units"]["total"], "compiled": 0}
    assert here["jobs"][0]["programs"] == told["jobs"][0]["programs"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--set", "compiler.instruction_limit=10", "--executor", "ray"], 70, "NCC_EBVF030"),
        pytest.param(
            *(["--set", "model.config=large.json", "--executor", "inline"], 71, "SW_CAPACITY"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_submitted_job_gives_its_own_exit_code(
    words: list[str], code: int, told: str, head: Head, folder: Path
) -> None:
    ours = ["submit", "job.toml", "--compile-only", *words]
    found, out, err = head.shardwright(*ours, folder=folder)
    assert found == code, out + err
    assert told in out and f"exit code {code}" in err


def test_an_interrupt_leaves_the_job_and_stop_ends_it(head: Head, folder: Path) -> None:
    words = [sys.executable, "-m", "shardwright", "submit", "wait.toml"]
    with heard_by_children():
        client = head.start(words, folder)
    assert client.stdout is not None
    for line in client.stdout:
        if line.startswith("here: "):
            assert "/py_modules_files/_ray_pkg_" in line, "our packages as they were uploaded"
            break
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 130
    job = err.split()[1]
    assert f"job {job} goes on" in err and f"shardwright stop {job} --address http://" in err

    code, out, _ = head.shardwright("status", job, "--json", folder=folder)
    state = json.loads(out)
    assert (code, state["status"], state["exit_code"]) == (0, "RUNNING", None)
    code, out, _ = head.shardwright("stop", job, folder=folder)
    assert (code, out) == (0, f"job {job}: STOPPED\n")
    code, out, err = head.shardwright("status", job, "--follow", folder=folder)
    assert code == 130 and "here: " in out and "STOPPED" in err


def test_a_client_without_the_token_is_refused(head: Head, folder: Path) -> None:
    stranger = Head({k: v for k, v in head.environment.items() if "AUTH" not in k}, head.token)
    code, _, err = stranger.shardwright("status", folder=folder)
    assert code == 2 and "SW_RAY_TOKEN" in err and "RAY_AUTH_TOKEN_PATH" in err


def test_the_token_is_in_nothing_that_jobs_leave(head: Head, folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "events.jsonl" for path in files)
    assert not [path for path in files if head.token.encode() in path.read_bytes()]
    code, out, _ = head.shardwright("status", folder=folder)
    assert code == 0 and out.count("raysubmit_") >= 3


def test_the_death_of_the_head_is_waited_out(head: Head, folder: Path) -> None:
    """The last test here: the new head knows no jobs."""
    words = [sys.executable, "-m", "shardwright", "submit", "wait.toml"]
    client = head.start(words, folder)
    assert client.stdout is not None and any(line.startswith("here: ") for line in client.stdout)
    head.start_anew()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 70 and "Traceback" not in err, err
    assert "error[SW_RAY_JOB]" in err and "has forgotten job raysubmit_" in " ".join(err.split())
