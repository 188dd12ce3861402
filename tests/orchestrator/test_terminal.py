"""Text of others on a terminal: nothing in it is obeyed, and all of it goes the one way."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator import cli
from shardwright.orchestrator.cache import About, Cache
from shardwright.orchestrator.report import screen
from shardwright.orchestrator.submission import compile_only, parallel_compile
from shardwright.orchestrator.submission.compile_only import CompiledJob, CompileSummary
from shardwright.orchestrator.submission.graphs import CompiledGraph, GraphSummary
from shardwright.orchestrator.submission.ray_jobs import JobState, RayJobs
from shardwright.orchestrator.submission.together import UnitCounts
from shardwright.orchestrator.terminal import terminal

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "x[bold]\x1b[2J\x1b]0;owned\x07\x9b31m\u202eeman:smile:\r\b"
SHOWN = "x[bold]?[2J?]0;owned??31m?eman:smile:??"
NONE = UnitCounts(total=1, cached=0, compiled=0, failed=1)


def harmless(text: str) -> bool:
    """Whether HOSTILE is in it, and nothing that is obeyed. Rich leaves out some characters."""
    return "x[bold]?[2J?]0;owned" in text and all(c.isprintable() for c in text if c != "\n")


def test_there_is_one_way_to_the_terminal() -> None:
    """What prints by itself would have to think of all this."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "orchestrator").rglob("*.py"))
        if path.name != "terminal.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "Console", "sys.stdout.write", "sys.stderr.write")
    ]
    assert not found, "use orchestrator.terminal"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("params/[0]/w", "params/[0]/w"),
        ("größe █ ─ 层", "größe █ ─ 层"),
        ("a\tb\nc", "a\tb\nc"),
        (HOSTILE, SHOWN),
        ("a\0b\x7fc\x85d\u2028e\ud800f\u200bg", "a?b?c?d?e?f?g"),
    ],
)
def test_what_a_terminal_would_obey_is_a_question_mark(text: str, shown: str) -> None:
    assert terminal.printable(text) == shown


def test_a_name_has_one_line() -> None:
    assert (
        terminal.one_line("j\njob k: SUCCEEDED, exit code 0") == "j?job k: SUCCEEDED, exit code 0"
    )


def test_cells_have_no_markup_and_our_styles_stay() -> None:
    out = io.StringIO()
    table = Table(box=None, show_header=False)
    table.add_row(HOSTILE, Text(HOSTILE, "bold"))
    terminal.console(file=out, width=200).print(table)
    assert SHOWN in out.getvalue() and harmless(out.getvalue().replace(SHOWN, ""))
    styled = io.StringIO()
    terminal.console(file=styled, force_terminal=True, width=200).print(Text("\x1b]0;x", "bold"))
    assert styled.getvalue() == "\x1b[1m?]0;x\x1b[0m\n"


def test_errors_and_notices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["run", str(tmp_path / HOSTILE)]) == 2
    assert harmless(capsys.readouterr().err)


def test_jobs_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    state = JobState(
        id=HOSTILE,
        status="FAILED",
        ended=True,
        exit_code=None,
        message=HOSTILE,
        command=HOSTILE,
        started_s=1e300,
        ended_s=2.0,
    )
    monkeypatch.setattr(RayJobs, "__init__", lambda self, address: setattr(self, "address", "a"))
    monkeypatch.setattr(RayJobs, "states", lambda self: [state])
    monkeypatch.setattr(RayJobs, "state", lambda self, job: state)
    monkeypatch.setattr(RayJobs, "stop", lambda self, job: state)

    def follow(self: RayJobs, job: str, write: Any) -> JobState:
        write("60 %\r100 %\r\ndone\n")
        write(HOSTILE.replace("\r", ""))
        return state

    monkeypatch.setattr(RayJobs, "follow", follow)
    for words in (["status"], ["status", "j"], ["stop", HOSTILE]):
        assert cli.main(words) == 0
        assert harmless(capsys.readouterr().out), words
    assert cli.main(["status", "j", "--follow"]) == 70  # it never ran
    told = capsys.readouterr()
    assert told.out.startswith("60 %\n100 %\ndone\nx[bold]?[2J") and harmless(told.err)


def test_a_forged_program_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.neff"
    meta = {HOSTILE: HOSTILE, "options": {HOSTILE: [HOSTILE]}}
    file.write_bytes(pack("core", meta, {}))
    cli.main(["neff", "info", str(file)])
    assert harmless(capsys.readouterr().out.replace("\n", ""))


def test_entries_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    Cache(tmp_path).put("compile", "0" * 64, b"x", About(HOSTILE))
    assert cli.main(["cache", "ls", "--cache-dir", str(tmp_path)]) == 0
    assert harmless(capsys.readouterr().out)


def test_screens_of_runs_and_compilations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    row = {"kind": "compile", "name": HOSTILE, "worker": HOSTILE.replace(":", ""), "cache": "miss"}
    screen._units(terminal.console(), {"units": [row | {"seconds": 1.0}], "neffs": 1})
    built = capsys.readouterr().out
    assert harmless(built) and "NEFFs from 1 partition, compile and timing tasks: 1 run" in built
    error = UsageError("SW_USAGE", HOSTILE).diagnostic
    job = CompiledJob(job=HOSTILE, bundle=HOSTILE, units=NONE, error=error, exit_code=2)
    summary = CompileSummary(jobs=(job,), units=NONE, seconds=1.0, findings=(error,))
    compile_only._screen(summary, terminal.console(), "shardwright run")
    told = capsys.readouterr()
    assert harmless(told.out) and harmless(told.err)
    graph = CompiledGraph(name=HOSTILE, folder=HOSTILE, neff="", units=NONE, error=error)
    compiled = GraphSummary(graphs=(graph,), units=NONE, seconds=1.0)
    parallel_compile._screen(compiled, Path(HOSTILE), "shardwright parallel-compile")
    told = capsys.readouterr()
    assert harmless(told.out) and harmless(told.err)


def test_codes_are_explained_with_their_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["errors", "SW_FAULT"]) == 0
    assert "[faults] names a core" in " ".join(capsys.readouterr().out.split())


def test_a_line_is_there_when_it_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=False)
    monkeypatch.setattr(sys, "stdout", out)
    terminal.say("now")
    assert out.buffer.getvalue() == b"now\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_terminal_without_bars_gets_other_signs(errors: str) -> None:
    """Locales that are not UTF-8, and PYTHONIOENCODING."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors=errors)
    terminal.adapt(stream, io.StringIO())
    terminal.console(file=stream, width=40).print(Text("time █▓▒░▚▤· ── ┏┃ •\u2801 \u20ac \ud800"))
    stream.flush()
    assert raw.getvalue().decode("ascii").split("\n")[0] == "time #=+-xo. -- +| .. ? ?"


def test_the_command_adapts_what_it_prints_to() -> None:
    """A plot has points that ASCII does not."""
    sizes = ("-b", "8", "-e", "1kb", "-f", "2")
    words = ("-m", "shardwright", "nccom", "allr", "-r", "2", *sizes, "--plot")
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"...." in done.stdout and b"?" not in done.stdout
