"""Every example is listed, is understood, and gives what is recorded beside it."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from tests.support.cells import long_in_matrix
from tests.support.gallery import (
    EXAMPLES,
    EXHAUSTIVE,
    NEEDS,
    PLANNED,
    QUICK,
    RECORDED,
    SHARE,
    figures,
    is_possible,
    planned,
    words,
)

FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\((\S+?)\)", table, re.M)
    assert sorted(name for name, _ in rows) == [n for n in FOLDERS if not n.startswith("__")]
    assert all((EXAMPLES / path).is_file() for _, path in rows)


@pytest.mark.parametrize("folder", [n for n in FOLDERS if (EXAMPLES / n / "job.toml").exists()])
def test_job_files_are_understood(folder: str) -> None:
    job = config.load(EXAMPLES / folder / "job.toml")
    if folder in PLANNED:
        recorded = (EXAMPLES / folder / RECORDED).read_text()
        assert f"  {job.strategy.name}  " in recorded.splitlines()[0]
        assert max(map(len, recorded.splitlines())) <= 80


@pytest.mark.parametrize(
    "folder",
    long_in_matrix(PLANNED, [n for n in PLANNED if n not in (*QUICK, *EXHAUSTIVE)], EXHAUSTIVE),
)
def test_a_plan_says_what_is_recorded(folder: str) -> None:
    """`python -m tests.support.gallery FOLDER` records it anew."""
    if not is_possible(folder):
        pytest.skip(f"needs {NEEDS[folder]}: pip install -e '.[torch]'")
    recorded, now = (EXAMPLES / folder / RECORDED).read_text(), planned(folder)
    assert words(now) == words(recorded)
    assert figures(now) == pytest.approx(figures(recorded), rel=SHARE, abs=0.05)


def test_the_module_is_written_and_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "hlo" / "make_hlo.py"), run_name="__main__")
    flags = ["--framework", "XLA", "--target", "trn1", "--output", "file.neff"]
    assert main(["compile", "step.hlo.pb", *flags]) == 0
    assert main(["neff", "verify", "file.neff"]) == 0


@pytest.mark.exhaustive
def test_the_what_ifs_are_a_table(tmp_path: Path) -> None:
    varied = ["--vary", "mesh.tp=1,2,4", "--vary", "remat=none,full"]
    job = [str(EXAMPLES / "what_if" / "job.toml"), "--set", "compiler.optlevel=1"]
    assert main(["sweep", *job, *varied, "--out", str(tmp_path / "out")]) == 0
    (table,) = (tmp_path / "out").glob("*.csv")
    assert len(list(csv.DictReader(table.open()))) == 6
