"""The structured log: off unless asked for, the same fields in this process and in workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.orchestrator.service import logs
from tests.support.small_job import write_job

ROOT = Path(__file__).resolve().parents[2]


def command(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "SHARDWRIGHT_LOG": "", **environment}
    done = [sys.executable, "-m", "shardwright", *words]
    return subprocess.run(done, cwd=ROOT, env=given, capture_output=True, text=True, check=False)


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_workers_and_the_command_write_one_log(tmp_path: Path) -> None:
    job = write_job(tmp_path, cache={"dir": str(tmp_path / "cache")})
    words = ["plan", str(job), "--executor", "process", "--workers", "1", "--progress", "quiet"]
    done = command([*words, "--tries", "0"], SHARDWRIGHT_LOG="json")
    assert done.returncode == 0, done.stderr
    found = lines(done.stderr)
    ran = {line["unit_key"]: line for line in found if line["message"] == "unit.ran"}
    told = {line["unit_key"]: line for line in found if line["message"] == "unit.done"}
    assert ran.keys() == told.keys() != set()
    assert len({line["job"] for line in found}) == 1 and found[0]["job"]
    (driver,) = {line["process"] for line in told.values()}
    assert driver not in {line["process"] for line in ran.values()}
    for key, line in ran.items():
        assert line["worker"] == told[key]["worker"]
        assert (line["unit"], line["unit_kind"]) == (told[key]["unit"], told[key]["unit_kind"])
    quiet = command([*words, "--tries", "0"])
    assert quiet.returncode == 0 and not lines(quiet.stderr)


def test_a_field_cannot_replace_what_logging_keeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`name` and `message` are names of fields of ours and of the library's records."""
    monkeypatch.setenv(logs.VARIABLE, "json")
    before = list(logs.LOG.handlers)
    logs.start()
    logs.start()
    try:
        logs.tell("unit.failed", job="j", name="a [unit]", message="why", seconds=float("nan"))
    finally:
        for handler in logs.LOG.handlers[len(before) :]:
            logs.LOG.removeHandler(handler)
        logs.LOG.setLevel("NOTSET")
        logs.LOG.propagate = True
    (line,) = lines(capsys.readouterr().err)
    told = {k: line[k] for k in ("message", "job", "unit", "text", "seconds", "levelname")}
    assert told == {
        "message": "unit.failed",
        "job": "j",
        "unit": "a [unit]",
        "text": "why",
        "seconds": None,
        "levelname": "INFO",
    }


def test_exit_codes_come_through(tmp_path: Path) -> None:
    """The command ends its process itself: codes and buffered output are those of before."""
    for words, code in ((["errors", "SW_HOST_LOST"], 0), (["--help"], 0), (["no-verb"], 2)):
        done = command(words)
        assert done.returncode == code
        assert done.stdout or done.stderr
    missing = command(["plan", str(tmp_path / "none.toml")])
    assert missing.returncode not in (0, 1) and "none.toml" in missing.stderr
