"""A disk that refuses what a command leaves: an error with code, place and advice, whatever is
written and whichever verb writes it; others go on."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.whatif.journal import Journal
from shardwright.orchestrator.whatif.rows import Row
from tests.support.small_job import JOB, SIZES, write_job

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ["--target", "trn1.2xlarge", "--mesh", "dp_shard=2", "--executor", "inline"]
QUIET = ["--progress", "quiet"]
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Files whose path has one of these texts in it are refused with that number, when they are
    opened to be written or renamed to."""
    refused: dict[str, int] = {}

    def check(path: object, writes: bool = True) -> None:
        for text, number in refused.items():
            if writes and text in os.fspath(path):
                raise OSError(number, os.strerror(number), str(path))

    replace, opened = os.replace, Path.open

    def checked_replace(source: Any, target: Any, **more: Any) -> None:
        check(target)
        replace(source, target, **more)

    def checked_open(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        check(self, set(mode) & {"w", "x", "a"} != set())
        return opened(self, mode, *args, **more)

    monkeypatch.setattr(os, "replace", checked_replace)
    monkeypatch.setattr(Path, "open", checked_open)
    yield refused


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, output={"dir": str(tmp_path / "out")})


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    err = " ".join(capsys.readouterr().err.split())
    assert "error[SW_OUTPUT]" in err and "help:" in err, err
    assert all(word in err for word in words), err
    return err


@pytest.mark.parametrize("number", REFUSALS)
def test_an_error_says_what_refused_and_what_to_do(tmp_path: Path, number: int) -> None:
    with pytest.raises(UsageError) as caught, outputs.writing(tmp_path / "report.json", "--html"):
        raise OSError(number, os.strerror(number), "elsewhere")
    found = caught.value.diagnostic
    assert (found.code, caught.value.exit_code) == ("SW_OUTPUT", 2)
    place = f"--html requires a place that can be written, got {tmp_path / 'report.json'}: "
    assert found.message == place + os.strerror(number)
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    assert ("are free in" in found.hint) == is_full
    assert ("you may write to" in found.hint) != is_full


@pytest.mark.parametrize("file", ["programs", "manifest.neff", "core-00000"])
def test_a_bundle_that_cannot_be_written(
    job: Path, refusing: dict[str, int], capsys: pytest.CaptureFixture[str], file: str
) -> None:
    refusing[file] = errno.ENOSPC
    assert main(["run", str(job), *MACHINE, *QUIET, "--no-compare"]) == 2
    refusal(capsys, str(job.parent / "out" / "bundle"), "No space left on device", "make room")


@pytest.mark.parametrize("file", ["report.json", "trace.json", "report.html"])
def test_a_report_that_cannot_be_written_leaves_the_one_before(
    job: Path, refusing: dict[str, int], capsys: pytest.CaptureFixture[str], file: str
) -> None:
    out = job.parent / "out"
    out.mkdir()
    (out / file).write_text("before")
    refusing[f"out/{file}"] = errno.ENOSPC
    assert main(["run", str(job), *MACHINE, *QUIET, "--no-compare"]) == 2
    refusal(capsys, str(out / file), "No space left on device")
    assert (out / file).read_text() == "before"
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_a_checkpoint_that_cannot_be_written(
    job: Path, refusing: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    refusing["checkpoint.neff"] = errno.ENOSPC
    words = ["--no-compare", "--checkpoint-every", "1", *QUIET]
    assert main(["run", str(job), *MACHINE, *words]) == 2
    refusal(capsys, str(job.parent / "out" / "checkpoints" / "step-00000001"))
    assert not list((job.parent / "out" / "checkpoints").iterdir())


def test_a_place_that_is_no_folder_is_refused_before_the_work(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwright.orchestrator.road.job.planned", lambda *_: pytest.fail("has worked")
    )
    (job.parent / "out").write_text("a file")
    for verb in (["run", str(job)], ["run", str(job), "--compile-only"]):
        assert main([*verb, *MACHINE, *QUIET]) == 2
        told = capsys.readouterr().err
        assert "SW_OUTPUT" in told and "in the place of a folder" in " ".join(told.split())


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwright.orchestrator.road.job.planned", lambda *_: pytest.fail("has worked")
    )
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert main(["run", str(job), *MACHINE, *QUIET]) == 2
    refusal(capsys, str(job.parent / "out"), "Permission denied", "you may write to")


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("run", "--out"),
        ("run --compile-only", "--out"),
        ("plan", "--out"),
        ("run", "--dump-dir"),
        ("run --compile-only", "--dump-dir"),
        ("plan", "--dump-dir"),
    ],
)
def test_a_folder_that_another_command_writes_is_refused_before_the_work(
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    flag: str,
) -> None:
    for module in ("road.job", "road.build", "submission.compile_only"):
        monkeypatch.setattr(
            f"shardwright.orchestrator.{module}.planned", lambda *_: pytest.fail("has worked")
        )
    folder = job.parent / "shared"
    name, *words = verb.split()
    with outputs.held(folder, flag):
        assert main([name, str(job), *words, *MACHINE, *QUIET, flag, str(folder)]) == 2
    refusal(capsys, f"{flag} requires a folder that nobody else writes", str(folder), "wait until")
    with outputs.held(folder, flag):
        pass  # is free again
    told = {"compile.json", "events.jsonl"}  # of what became of all jobs
    assert {path.name for path in folder.iterdir()} <= told


def test_the_lock_of_a_command_that_was_killed_is_free(tmp_path: Path) -> None:
    ended = (
        "import os, signal, sys; from pathlib import Path\n"
        "from shardwright.orchestrator.terminal import outputs\n"
        "with outputs.held(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", ended, str(tmp_path)]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir())
    is_held = pytest.raises(UsageError, match="nobody else writes")
    with outputs.held(tmp_path), is_held, outputs.held(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
def test_a_job_whose_place_refuses_leaves_the_others_alone(
    tmp_path: Path,
    refusing: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    names = ("a", "full", "misplaced", "z")
    for name in names:
        (tmp_path / f"{name}.toml").write_text(JOB)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "misplaced").write_text("a file")
    refusing["out/full/bundle"] = errno.ENOSPC
    words = [f"{name}.toml" for name in names]
    assert main(["run", *words, "--compile-only", "--json"]) == 2
    rows = {row["job"]: row for row in json.loads(capsys.readouterr().out)["jobs"]}
    codes = {name: (rows[f"{name}.toml"]["error"] or {}).get("code") for name in names}
    assert codes == {"a": None, "full": "SW_OUTPUT", "misplaced": "SW_OUTPUT", "z": None}
    for name in ("a", "z"):
        assert (tmp_path / "out" / name / "bundle" / "manifest.neff").exists()
    assert main(["neff", "export", "out/a/bundle", "--output", "out"]) == 2
    refusal(capsys, "--output requires", "Is a directory")

    refusing["compile.json"] = errno.EROFS
    assert main(["run", "a.toml", "--compile-only", "--out", "alone", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 2 and not told["jobs"][0]["error"]
    assert [finding["code"] for finding in told["findings"]] == ["SW_OUTPUT"]
    assert (tmp_path / "alone" / "bundle" / "manifest.neff").exists()


def test_pages_and_traces_of_plans(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file")
    whys = {"--trace": "File exists", "--html": "File exists", "--out": "Not a directory"}
    for flag, why in whys.items():
        assert main(["plan", str(job), *MACHINE, flag, str(blocked / "x")]) == 2
        refusal(capsys, f"{flag} requires a place", str(blocked / "x"), why)


def test_a_plan_leaves_its_report_and_page_where_it_is_told(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "plan"
    assert main(["plan", str(job), *MACHINE, "--json", "--out", str(place)]) == 0
    assert sorted(path.name for path in place.iterdir()) == ["report.html", "report.json"]
    report = json.loads(capsys.readouterr().out)
    assert json.loads((place / "report.json").read_text()) == report
    assert (place / "report.html").read_text() == report_page(report)


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    outputs.write(Path("/dev/null"), b"x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(UsageError, match="No space left on device"):
        outputs.write(Path("/dev/full"), b"x")


def test_a_row_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    """The limit on file sizes makes a real write end in the middle."""
    journal = Journal(tmp_path / "points.jsonl")
    row = Row(key="k", values={}, status="fits")
    journal.add(row)
    size = (tmp_path / "points.jsonl").stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        with pytest.raises(UsageError, match="SW_OUTPUT"):
            journal.add(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(journal.read()) == ["k"]


@pytest.mark.parametrize("words", [["errors"], ["errors", "--json"]])
def test_an_answer_that_cannot_be_printed_is_no_success(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardwright", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert "SW_OUTPUT" in done.stderr and "Traceback" not in done.stderr
