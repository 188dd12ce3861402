"""pytest in a forked child of a parent that has the heavy libraries, but nothing of the product,
in memory: a damage costs no import of jax. What ran is written down line by line."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.processes import End, run_child
from tests.mutants.trees import Tree

LIBRARIES = (
    "ml_dtypes",
    "msgpack",
    "zstandard",
    "filelock",
    "rich.console",
    "jinja2",
    "hypothesis.extra.numpy",
    "_hypothesis_pytestplugin",
    "pytest_timeout",
    "jax.numpy",
    "jax.export",
    "jaxlib.mlir.dialects.stablehlo",
    "optax",
)
OPTIONS = (
    "-q",
    "-m",
    "not exhaustive and not ray",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--tb=short",
)
PRODUCT = ("shardwright", "tests")


def warm() -> None:
    """Import what all tests share, with the settings that `tests/conftest.py` makes before."""
    conftest = Path(__file__).resolve().parents[1] / "conftest.py"
    exec(compile(conftest.read_text(), str(conftest), "exec"), {"__name__": "settings"})
    for name in LIBRARIES:
        importlib.import_module(name)


@dataclass(frozen=True)
class Run:
    """What a child did: the lines it wrote, and its end."""

    rows: tuple[dict[str, Any], ...]
    end: End

    def tests(self) -> Iterator[dict[str, Any]]:
        return (row for row in self.rows if "outcome" in row)

    @property
    def unfinished(self) -> str:
        """The test that was running when the child was ended."""
        begun = [row["begin"] for row in self.rows if "begin" in row]
        ended = {row["test"] for row in self.tests()}
        return begun[-1] if begun and begun[-1] not in ended else ""


class Recorder:
    """A plugin: only the wanted tests, in the order wanted, each with its processor time."""

    def __init__(self, wanted: Sequence[str] | None, rows: Path) -> None:
        self.order = None if wanted is None else {name: at for at, name in enumerate(wanted)}
        self.rows, self.failed = rows, ""

    def write(self, **row: Any) -> None:
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.order is not None:
            order = self.order
            items[:] = sorted(
                (item for item in items if item.nodeid in order),
                key=lambda item: order[item.nodeid],
            )
        self.write(collected=len(items), cpu_s=cpu_s())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="error", cpu_s=0.0, why=_last(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.failed, before = "", cpu_s()
        self.write(begin=item.nodeid)
        answer = yield
        outcome = "failed" if self.failed else "passed"
        spent = round(cpu_s() - before, 3)
        self.write(test=item.nodeid, outcome=outcome, cpu_s=spent, why=self.failed)
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = _last(report)
        elif report.skipped:
            self.failed = "skipped"


def _last(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The line of a failure that says most."""
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
    return (lines[0][1:].strip() if lines else str(report.longrepr)[-200:])[:300]


def cpu_s() -> float:
    """Processor time of this process and of its ended children."""
    return sum(os.times()[:4])


def run_tests(
    tree: Tree,
    files: Sequence[str],
    plugin: Callable[[Path], Recorder],
    *,
    budget_s: float,
    stop: bool = True,
    module: str = "",
) -> Run:
    """The tests of `files` in a copy of the repository; `module`, by its place in the checkout, is
    imported before.

    An error of that import is one row `{"import": ...}`, and no test runs.
    """
    rows, log = tree.path.with_suffix(".rows"), tree.path.with_suffix(".log")
    rows.write_text("")
    log.write_text("")

    def work() -> None:
        _move_to(tree)
        recorder = plugin(rows)
        if module and (why := _import_error(module)):
            recorder.write(**{"import": why})
            return
        base = tree.path.with_suffix(f".{os.getpid()}.tests")
        options = [*OPTIONS, f"--basetemp={base}", *(["-x"] if stop else [])]
        pytest.main([*options, f"--rootdir={tree.path}", *files], plugins=[recorder])

    end = run_child(work, budget_s, log)
    _clean(tree)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    return Run(tuple(lines), end)


def _move_to(tree: Tree) -> None:
    """From here on this process, and those it starts, see the copy only."""
    os.chdir(tree.path)
    os.environ["PYTHONPATH"] = str(tree.path)
    os.environ["TMPDIR"] = str(tree.path.with_suffix(".tmp"))
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None
    here = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [str(tree.path), *(p for p in sys.path if p not in ("", here))]
    for name in [n for n in sys.modules if n.split(".")[0] in PRODUCT]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _import_error(module: str) -> str:
    try:
        importlib.import_module(f"shardwright.{module}")
    except Exception as error:  # whatever a damaged module raises
        return f"{type(error).__name__}: {error}"
    return ""


def _clean(tree: Tree) -> None:
    for path in tree.path.parent.glob(f"{tree.path.name}.*.tests"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(tree.path.with_suffix(".tmp"), ignore_errors=True)
