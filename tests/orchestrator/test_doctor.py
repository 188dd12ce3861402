"""`shardwright doctor`: what will not work is named, with what to do, and never a secret."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.commands import doctor
from shardwright.sharding.partition.partitioner import PYTHON_VARIABLE

Run = Callable[[], tuple[int, dict[str, str], str]]


@pytest.fixture
def states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the command on a host of its own; the exit code, and the state and words of checks."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", PYTHON_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_tried", lambda name, *_: doctor.Check(name, "ok", "imported"))

    def run() -> tuple[int, dict[str, str], str]:
        code = main(["doctor", "--json", "--cache-dir", str(tmp_path / "cache")])
        out = capsys.readouterr().out
        return code, {c["name"]: c["state"] for c in json.loads(out)["checks"]}, out

    return run


def test_a_sound_host(states: Run, tmp_path: Path) -> None:
    code, found, _ = states()
    assert code == 0
    names = {"python", "packages", "jax", "partitioner", "ray", "cache", "token", "host"}
    assert names < set(found) and "fail" not in found.values()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_library_that_crashes_is_a_failure() -> None:
    check = doctor._tried("jax", "import sys; sys.exit('no good')", {})
    assert (check.state, check.found) == ("fail", "no good")
    assert doctor._tried("jax", "import os; os.abort()", {}).state == "fail"
    assert doctor._tried("jax", "print('fine')", {}) == doctor.Check("jax", "ok", "fine")


def test_a_release_that_is_not_the_required_one(
    states: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: ["numpy<1", "nothing-like-it>=2"])
    code, found, out = states()
    assert (code, found["packages"]) == (1, "fail")
    assert f"got {metadata.version('numpy')}" in out and "nothing-like-it>=2 is not there" in out


def test_a_partitioner_that_does_not_start(states: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/bin/false")
    code, found, _ = states()
    assert (code, found["partitioner"]) == (1, "fail")


def test_a_cache_that_cannot_be_written_is_a_warning(states: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    code, found, out = states()
    assert (code, found["cache"]) == (0, "warn")
    assert "compute everything again" in out


def test_a_place_that_is_none_is_a_failure(states: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json", "--cache-dir", "http://host/cache"]) == 1


@pytest.mark.parametrize(
    ("variables", "mode", "state"),
    [
        ({"RAY_AUTH_TOKEN": "very-secret"}, None, "ok"),
        ({"RAY_AUTH_MODE": "disabled"}, None, "warn"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "token"}, 0o600, "ok"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "token"}, 0o644, "warn"),
        ({"RAY_AUTH_TOKEN_PATH": "token"}, 0o600, "warn"),
        ({"RAY_AUTH_TOKEN_PATH": "token"}, None, "fail"),
        ({}, None, "ok"),
    ],
)
def test_tokens(
    states: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    mode: int | None,
    state: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if mode is not None:
        Path("token").write_text("very-secret")
        Path("token").chmod(mode)
    _, found, out = states()
    assert found["token"] == state and "very-secret" not in out


def test_limits_of_the_host(states: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(doctor, "_SHM_BYTES", 2**60)
    monkeypatch.setattr(doctor, "_MEMORY_BYTES", 2**60)
    code, found, out = states()
    assert code == 0
    assert {found[name] for name in ("open files", "/dev/shm", "host")} == {"warn"}
    assert "ulimit -n 4096" in out


def test_the_screen_says_what_to_do(
    states: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/bin/false")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "--cache-dir", os.devnull]) == 1
    text = capsys.readouterr().out
    assert "will not work: partitioner" in text and f"unset {PYTHON_VARIABLE}" in text
    assert max(map(len, text.splitlines())) <= 80
