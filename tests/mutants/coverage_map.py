"""Which test executes which line of the damaged sources, and what each test costs.

Made once by running every file of tests, the long matrices too, in a child of its own under
`coverage`, one context per test and per shared fixture; a file of tests that did not change is not
run again. Lines are looked up by the text of their function, so the map outlives edits elsewhere
in a file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutants.runs import Recorder, run_tests
from tests.mutants.trees import Tree

FILE_BUDGET_S = 600.0  # of processor time per file of tests; what does not fit is not in the map


class Tracing(Recorder):
    """A recorder that also keeps the lines every test and every shared fixture executes."""

    def __init__(self, rows: Path, sources: Sequence[str]) -> None:
        super().__init__(None, rows)
        here = Path.cwd()
        include = [str(here / source) for source in sources if source.endswith(".py")]
        self.coverage = coverage.Coverage(data_file=None, include=include, config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.entered: set[str] = set()
        self.enter(f"test {item.nodeid}")
        answer = yield from super().pytest_runtest_protocol(item)
        names = getattr(item, "fixturenames", [])
        self.write(fixtures=list(names), of=item.nodeid)
        self.flush()
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        outer = self.context
        self.enter(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.enter(outer)

    def enter(self, context: str) -> None:
        """What runs from here on counts for a test or a fixture."""
        self.context = context
        self.entered.add(context)
        self.coverage.switch_context(context)

    def flush(self) -> None:
        """Write what the last test, and fixtures set up for it, executed."""
        data, here = self.coverage.get_data(), Path.cwd()
        for context in self.entered:
            data.set_query_context(context)
            for name in data.measured_files():
                if lines := data.lines(name):
                    mask = sum(1 << line for line in lines)
                    source = Path(name).relative_to(here).as_posix()
                    self.write(source=source, context=context, lines=f"{mask:x}")


@dataclass
class Covered:
    """Lines by test for one source, as bits."""

    text: str
    masks: dict[str, int] = field(default_factory=dict)


@dataclass
class Map:
    """All of it: seconds of every test that passed, and the lines of every source by test."""

    seconds: dict[str, float] = field(default_factory=dict)
    sources: dict[str, list[Covered]] = field(default_factory=lambda: defaultdict(list))

    def tests_of(self, source: str, text: str, lines: Collection[int]) -> set[str]:
        """Tests that execute any of these lines of a source that reads `text` now."""
        found = set()
        for covered in self.sources[source]:
            mask = _mask(text, covered.text, frozenset(lines))
            found |= {test for test, bits in covered.masks.items() if bits & mask}
        return found & self.seconds.keys()


@cache
def _mask(now: str, then: str, lines: frozenset[int]) -> int:
    """The lines of `now` as bits of the lines of `then`: the same lines of the same function, the
    whole function where it reads otherwise, the whole file where it is not there.
    """
    if now == then:
        return sum(1 << line for line in lines)
    old, mask = dict(functions(then)), 0
    for name, (first, last) in functions(now):
        inside = [line for line in lines if first <= line <= last]
        if inside and name in old:
            begin, end = old[name]
            same = now.splitlines()[first - 1 : last] == then.splitlines()[begin - 1 : end]
            moved = [line - first + begin for line in inside] if same else range(begin, end + 1)
            mask |= sum(1 << line for line in moved)
    return mask or (1 << len(then.splitlines()) + 1) - 1


@cache
def functions(text: str) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Qualified name and lines of every function of a module, inner ones after outer ones."""
    found: list[tuple[str, tuple[int, int]]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}."
                if not isinstance(child, ast.ClassDef):
                    assert child.end_lineno is not None
                    found.append((name[:-1], (child.lineno, child.end_lineno)))
            walk(child, name)

    walk(ast.parse(text), "")
    return tuple(found)


def test_files(root: Path) -> list[str]:
    """Files of tests, those worked out by hand first, but for the tests of this folder."""
    paths = (p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py"))
    files = (path for path in paths if not path.startswith("tests/mutants/"))
    return sorted(files, key=lambda path: ("by_hand" not in path, path))


def map_file(tree: Tree, file: str, sources: Sequence[str], store: Path) -> None:
    """Run one file of tests under coverage and keep what it showed."""
    run = run_tests(
        tree, [file], lambda rows: Tracing(rows, sources), budget_s=FILE_BUDGET_S, stop=False
    )
    texts = {source: (tree.path / source).read_text() for source in sources}
    covered = {row["source"] for row in run.rows if "source" in row}
    body = {
        "file": file,
        "cpu_s": run.end.cpu_s,
        "rows": run.rows,
        "texts": {source: texts[source] for source in covered},
    }
    place = entry_of(tree.path, file, store)
    place.parent.mkdir(parents=True, exist_ok=True)
    written = place.with_suffix(f".{os.getpid()}")
    written.write_bytes(zlib.compress(json.dumps(body).encode()))
    written.replace(place)


def entry_of(root: Path, file: str, store: Path) -> Path:
    """Where the rows of a file of tests are kept: its name and the digest of its text."""
    digest = hashlib.sha256((root / file).read_bytes()).hexdigest()[:16]
    return store / f"{file.replace('/', '.')}.{digest}.z"


def load_map(root: Path, files: Iterable[str], store: Path) -> Map:
    """The map of the files of tests that have been run."""
    found = Map()
    for file in files:
        entry = entry_of(root, file, store)
        if entry.exists():
            _add(found, json.loads(zlib.decompress(entry.read_bytes())))
    return found


def _add(found: Map, body: dict[str, Any]) -> None:
    rows = body["rows"]
    passed = {r["test"]: r["cpu_s"] for r in rows if r.get("outcome") == "passed"}
    found.seconds |= passed
    uses: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for name in row.get("fixtures", ()):
            uses[f"fixture {name}"].append(row["of"])
    sources: dict[str, Covered] = {}
    for row in rows:
        if "source" in row:
            source = row["source"]
            covered = sources.setdefault(source, Covered(body["texts"][source]))
            context = row["context"]
            for test in uses[context] or [context.removeprefix("test ")]:
                covered.masks[test] = covered.masks.get(test, 0) | int(row["lines"], 16)
    for source, covered in sources.items():
        found.sources[source].append(covered)
