"""Jobs on their way to a cluster, without one: what goes up, what is refused before, what comes
back. With a cluster: `tests/system/test_ray_jobs.py`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from shardwright.compiler.diagnostics import ExecutionError, UsageError
from shardwright.orchestrator import cli, host
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.submission import ray_jobs, submit
from shardwright.orchestrator.submission.ray_jobs import JobState, RayJobs, Submission
from tests.support.small_job import SIZES

JOB = """
[model]
config = "config.json"
[output]
dir = "/shared/out"
[run]
steps = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a job, as the working directory."""
    folder = tmp_path / "my jobs"
    folder.mkdir()
    (folder / "a job.toml").write_text(JOB)
    (folder / "config.json").write_text(json.dumps(SIZES))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """What would have been submitted, by a cluster that takes everything."""
    taken: list[Submission] = []
    monkeypatch.setattr(RayJobs, "__init__", lambda self, address: setattr(self, "address", "x"))
    monkeypatch.setattr(RayJobs, "submit", lambda self, what: taken.append(what) or "job-1")
    return taken


def test_a_job_goes_up_with_its_folder_and_our_package(
    folder: Path, sent: list[Submission], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--detach", "--env", "A=b=c", "--steps", "3", "--mesh", "dp_shard=16,tp=2"]
    assert cli.main(["submit", "a job.toml", *words, "--fault", "jitter=0.5"]) == 0
    (what,) = sent
    assert what.working_dir == folder
    assert what.packages == (host.DOOR,)
    assert what.environment["A"] == "b=c"
    assert capsys.readouterr().out == "job-1\n"
    assert shlex.split(what.command)[:5] == ["python", "-m", "shardwright", "run", "a job.toml"]
    sets = shlex.split(what.command)[6::2]
    job = load(folder / "a job.toml", sets)
    assert (job.run.steps, job.mesh.dp_shard, job.mesh.tp, job.faults.jitter) == (3, 16, 2, 0.5)
    assert job.model.config == "config.json"


def test_a_checkout_needs_no_packages_beside_it(sent: list[Submission]) -> None:
    job = host.PACKAGES_ROOT / "examples" / "llama_fsdp" / "job.toml"
    root = str(host.PACKAGES_ROOT)
    words = ["submit", str(job), "--working-dir", root, "--detach", "--out", "/shared/out"]
    assert cli.main([*words, "--model", str(job.parent / "config.json")]) == 0
    assert sent[0].packages == ()
    assert "examples/llama_fsdp/job.toml" in sent[0].command
    assert "model.config=config.json" in sent[0].command


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--out", "out"], "SW_RELATIVE_OUTPUT", "--out /absolute/path"),
        (["--set", "cache.dir=cache"], "SW_RELATIVE_OUTPUT", "cache.dir"),
        (["--events", "log"], "SW_RELATIVE_OUTPUT", "output.events"),
        (["--working-dir", "/usr"], "SW_USAGE", "inside of the working directory"),
        (["--env", "RAY_AUTH_TOKEN=s3cret"], "SW_SECRET", "RAY_AUTH_TOKEN_FILE=/path"),
        (["--env", "DB=postgres://user:s3cret@host/db"], "SW_SECRET", "DB, a URL with a password"),
        (["--set", "cache.dir=s3://user:s3cret@bucket"], "SW_CACHE_URL", "without credentials"),
        (["--env", "novalue"], "SW_USAGE", "KEY=VALUE"),
        (["--set", "run.stepz=3"], "SW_USAGE", "unknown key run.stepz"),
        (["--mesh", "dp_shard=3"], "SW_MESH_PRODUCT", "3"),
        (["--global-batch", "7"], "SW_BATCH", "global_batch"),
        (["--target", "trn9"], "NCC_EARG001", "trn9"),
        (["--target", "trn1.2xlarge", "--instances", "2"], "SW_NETWORK", "EFA"),
        (["--placement", "up"], "SW_PLACEMENT", "cluster.placement"),
        (["--fault", "dead_cores=99"], "SW_FAULT", "99"),
        (["--set", "cluster.collectives=x=1"], "SW_USAGE", "cluster.collectives"),
        (["--steps", "0"], "SW_STEPS", "run.steps"),
        (["--hosts", "64"], "SW_USAGE", "one host per rank (32), got 64"),
        (["--set", "run.data=absent.txt"], "SW_DATA", "absent.txt"),
        (["--executor", "inline", "--set", "run.unit_timeout_s=1"], "SW_USAGE", "unit_timeout_s"),
        (["--model", "llama9-7b"], "SW_PRESET", "did you mean"),
        (["--model", "task:"], "SW_ENTRY", "module:function"),
        (["--model", "task.py"], "SW_ENTRY", "requires the function or class"),
        (["--set", "model.config=absent.json"], "SW_MODEL", "absent.json"),
        (["--set", "model.config=../config.json"], "SW_USAGE", "its model inside"),
        (["--set", "model.preset=llama2-7b"], "SW_MODEL", "exactly one"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(
    words: list[str],
    code: str,
    told: str,
    folder: Path,
    sent: list[Submission],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["submit", "a job.toml", *words]) == 2
    err = capsys.readouterr().err
    assert code in err and told in err and "s3cret" not in err
    assert not sent


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "aws_access_key_id", "HF_TOKEN", "token"),
        *("DB_PASSWORD", "MYSQL_PWD", "WANDB_API_KEY", "OPENAI_APIKEY", "GITHUBTOKEN", "GH_PAT"),
        *("MY_SECRET_VALUE", "SSH_KEY", "SSH_PASSPHRASE", "GOOGLE_CREDENTIALS", "KEY", "DB_PASS"),
    ],
)
def test_what_looks_like_a_secret_is_not_sent(
    folder: Path, sent: list[Submission], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert cli.main(["submit", "a job.toml", "--env", f"{name}=s3cret"]) == 2
    told = capsys.readouterr()
    assert "SW_SECRET" in told.err and f"got {name}" in told.err
    assert "s3cret" not in told.out + told.err and not sent


@pytest.mark.parametrize(
    "variable",
    [
        *("TOKENIZERS_PARALLELISM=false", "MAX_TOKENS=4", "KEYBOARD=x", "PATTERN=x", "PASSES=3"),
        *("RAY_AUTH_TOKEN_PATH=/t", "AWS_SHARED_CREDENTIALS_FILE=/c", "SECRETS_DIR=/run"),
        *(
            "AWS_PROFILE=p",
            "AWS_ENDPOINT_URL_S3=http://host:9000",
            "MONKEY=1",
            "PWD=/",
            "X=http://[",
        ),
    ],
)
def test_what_is_no_secret_is_sent(folder: Path, sent: list[Submission], variable: str) -> None:
    assert cli.main(["submit", "a job.toml", "--detach", "--env", variable]) == 0
    name, _, value = variable.partition("=")
    assert sent[0].environment[name] == value


def test_an_address_is_required_and_has_to_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    for words in ([], ["--address", "127.0.0.1:1"]):
        assert cli.main(["status", *words]) == 2
        assert "SW_RAY_ADDRESS" in capsys.readouterr().err


def state(**changed: object) -> JobState:
    fields = {"id": "j", "status": "FAILED", "ended": True, "exit_code": None, "message": "why"}
    times = {"command": "c", "started_s": 1.0, "ended_s": 2.0}
    return JobState(**(fields | times | changed))


def test_status_shows_whole_ids_in_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = ["raysubmit_wPp4GTW8ADcCU94x", "raysubmit_cxdie82MH6pqvAbK"]
    states = [state(id=ids[0], exit_code=71, command="c " * 90), state(id=ids[1], ended_s=None)]
    monkeypatch.setattr(RayJobs, "__init__", lambda self, address: None)
    monkeypatch.setattr(RayJobs, "states", lambda self: states)
    monkeypatch.setattr(RayJobs, "state", lambda self, job: states[0])
    assert cli.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert ids[0] in lines[1] and "FAILED" in lines[1] and " 71 " in lines[1]
    assert cli.main(["status", ids[0]]) == 0
    told = capsys.readouterr().out
    assert f"job {ids[0]}: FAILED, exit code 71\n" in told and "message  why" in told


def test_the_exit_code_is_the_jobs_own() -> None:
    assert state(exit_code=71).result == 71
    assert state(exit_code=-9).result == 137
    assert state(status="STOPPED").result == 130
    with pytest.raises(ExecutionError, match="without an exit code: why"):
        _ = state().result


class Breaking:
    """A job API whose connection breaks in the middle of a log."""

    def __init__(self) -> None:
        self.tails, self.logs = 0, ["one\n", "two\n", "three\n"]

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        self.tails += 1
        for number, text in enumerate(self.logs):
            if self.tails == 1 and number == 2:
                raise RuntimeError("WebSocket connection closed unexpectedly")
            yield text

    def get_job_info(self, job: str) -> object:
        ended = self.tails > 1
        return SimpleNamespace(
            submission_id=job,
            status=SimpleNamespace(value="RUNNING", is_terminal=lambda: ended),
            driver_exit_code=0 if ended else None,
            message="",
            entrypoint="c",
            start_time=1000,
            end_time=None,
        )


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that following a job would have slept: of its module alone, because threads
    that other tests left behind sleep too."""
    seconds: list[float] = []
    monkeypatch.setattr(ray_jobs, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.mark.usefixtures("slept")
def test_a_log_is_written_once_though_its_connection_breaks() -> None:
    jobs, client, seen = RayJobs.__new__(RayJobs), Breaking(), list[str]()
    jobs.address, jobs._client = "x", client
    assert jobs.follow("j", seen.append).result == 0
    assert "".join(seen) == "one\ntwo\nthree\n"
    assert client.tails == 2


class Away(Breaking):
    """One whose cluster does not answer for a while after the connection broke."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__()
        self.failures, self.error = failures, error

    def get_job_info(self, job: str) -> object:
        if self.failures:
            self.failures -= 1
            raise self.error
        return super().get_job_info(job)


def followed(client: object) -> int:
    jobs = RayJobs.__new__(RayJobs)
    jobs.address, jobs._client = "x", client
    return submit.follow(jobs, "j")


OUTAGES = [
    ConnectionError("no route"),
    requests.exceptions.ConnectionError("refused"),  # none of Python's own
    requests.exceptions.ReadTimeout("slow"),
    requests.exceptions.ChunkedEncodingError("cut"),
    RuntimeError("Request failed with status code 503: no head"),
    RuntimeError("Request failed with status code 500: the head starts"),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda e: f"{type(e).__module__}, {e}")
def test_an_outage_does_not_end_the_log(
    error: Exception, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert followed(Away(20, error)) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    assert 60 < sum(slept) < 180
    with pytest.raises(UsageError, match="SW_RAY_ADDRESS"):
        followed(Away(10**6, error))
    assert "job j goes on\nfollow: shardwright status j" in capsys.readouterr().err


class Closing(Breaking):
    """One whose head closes the log in order, on its way down."""

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        self.tails += 1
        for text in self.logs if self.tails > 1 else self.logs[:1]:
            yield text


@pytest.mark.usefixtures("slept")
def test_a_head_that_ends_does_not_end_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    client = Closing()
    assert followed(client) == 0 and client.tails == 2
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


@pytest.mark.usefixtures("slept")
def test_a_head_that_was_started_anew_has_forgotten_the_job() -> None:
    gone = RuntimeError("Request failed with status code 404: no such job")
    with pytest.raises(ExecutionError, match="has forgotten job j"):
        followed(Away(10**6, gone))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (requests.exceptions.HTTPError("502 Server Error"), "SW_RAY_ADDRESS"),
        (RuntimeError("Request failed with status code 502: bad gateway"), "SW_RAY_ADDRESS"),
        (RuntimeError("Request failed with status code 500: too large"), "SW_RAY_JOB"),
        (requests.exceptions.InvalidURL("no address"), "SW_RAY_JOB"),
    ],
)
def test_what_submitting_meets(error: Exception, code: str, tmp_path: Path) -> None:
    class Refusing:
        def submit_job(self, **_: object) -> str:
            raise error

    jobs = RayJobs.__new__(RayJobs)
    jobs.address, jobs._client = "x", Refusing()
    with pytest.raises(UsageError, match=code):
        jobs.submit(Submission(command="c", working_dir=tmp_path, environment={}))


def test_files_of_the_cluster_are_looked_at_there(folder: Path, sent: list[Submission]) -> None:
    words = ["--set", "model.config=/on/the/cluster.json", "--set", "run.data=/on/the/text"]
    assert cli.main(["submit", "a job.toml", "--detach", *words]) == 0
    assert "model.config=/on/the/cluster.json" in sent[0].command


def test_jobs_that_only_compile_are_asked_less_and_must_agree(
    folder: Path, sent: list[Submission], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "b.toml").write_text(JOB + "workers = 3\n")
    words = ["--compile-only", "--detach"]
    assert cli.main(["submit", "a job.toml", *words, "--steps", "0"]) == 0 and len(sent) == 1
    assert cli.main(["submit", "a job.toml", "b.toml", *words]) == 2
    assert "require one run.workers" in capsys.readouterr().err and len(sent) == 1


def test_a_run_refuses_before_it_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwright.orchestrator.road.job.planned", pytest.fail)
    assert cli.main(["run", "a job.toml", "--out", "out", "--steps", "0"]) == 2
    assert "SW_STEPS" in capsys.readouterr().err and not (folder / "out").exists()


def test_the_verbs_load_no_ray_to_refuse(folder: Path) -> None:
    code = (
        "import sys; from shardwright.orchestrator.cli import main;"
        "main(['submit', 'a job.toml', '--out', 'x']); sys.exit('ray' in sys.modules)"
    )
    env = {"PYTHONPATH": str(host.PACKAGES_ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, check=True)


def test_the_cluster_file_is_one_that_ray_takes() -> None:
    """Defaults filled in and checked as `ray up` does."""
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    given = yaml.safe_load((host.PACKAGES_ROOT / "cluster.yaml").read_text())
    config = prepare_config(given)
    validate_config(config)
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert len(starts) == 2 and not any("ray stop" in text for text in starts)
    for text in starts:
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in text
    with pytest.raises(Exception, match="surprise"):
        validate_config(config | {"surprise": 1})


@pytest.fixture
def remote_home(tmp_path: Path) -> Path:
    """The home directory of a head after `ray up`; its Python tells what it was given."""
    python = tmp_path / "shardwright" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD $RAY_ADDRESS $RAY_AUTH_MODE $*"\nexit 71\n')
    python.chmod(0o700)
    (tmp_path / ".shardwright").mkdir()
    (tmp_path / ".shardwright" / "token").write_text("s3cret")
    return tmp_path


def test_ray_submit_runs_the_command_of_the_checkout(remote_home: Path) -> None:
    """Started as `ray submit` starts it: by another Python, in the home directory, by its copy."""
    script = remote_home / "ray_submit.py"
    script.write_bytes((host.PACKAGES_ROOT / "scripts" / "ray_submit.py").read_bytes())

    def started(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-S", str(script), *words],
            cwd="/",
            env={"HOME": str(remote_home), "PATH": os.defpath},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    code, told = started("run", "job.toml")
    ran, said = told.splitlines()
    assert ran == f"{remote_home}/shardwright auto token -m shardwright run job.toml"
    assert (code, said) == (71, "shardwright run: exit code 71")
    assert started()[0] == 2
    (remote_home / ".shardwright" / "token").unlink()
    code, told = started("run", "job.toml")
    assert code == 2 and "ray up" in told


def test_a_model_file_goes_up_as_a_compilation(
    folder: Path, sent: list[Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a model.hlo.pb").write_bytes(b"")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target trn1 -O1")
    flags = "--output /shared/a.neff --auto-cast=matmult"
    assert cli.main(["submit", "a model.hlo.pb", "--detach", "--cc-flags", flags]) == 0
    (what,) = sent
    words = ["compile", "a model.hlo.pb", "--target", "trn1", "-O1", *shlex.split(flags)]
    assert what.command == shlex.join(["python", "-m", "shardwright", *words])
    assert what.working_dir == folder.resolve() and what.packages == (host.DOOR,)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["m.mlir"], "SW_USAGE", "requires --target"),
        (["m.mlir", "--cc-flags", "--target trn1"], "SW_RELATIVE_OUTPUT", "--output"),
        (
            ["m.mlir", "--cc-flags", "--target trn1 --output /x --cache_dir=kept"],
            "SW_RELATIVE_OUTPUT",
            "--cache_dir",
        ),
        (["m.mlir", "--cc-flags", "--target trn9 --output /x"], "NCC_EARG001", "trn9"),
        (["m.mlir", "--strategy", "fsdp"], "SW_USAGE", "takes no key of a job, got strategy.name"),
        (["m.mlir", "a job.toml"], "SW_USAGE", "jobs or model files"),
        (["../m.mlir", "--cc-flags", "--target trn1 --output /x"], "SW_USAGE", "inside"),
    ],
)
def test_a_compilation_that_cannot_work_is_refused_before_anything_is_sent(
    words: list[str],
    code: str,
    told: str,
    folder: Path,
    sent: list[Submission],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["submit", *words]) == 2
    err = capsys.readouterr().err
    assert code in err and told in err and not sent
