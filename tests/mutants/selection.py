"""Which tests are run for a damage, and in which order: those that execute what it changes, figures
worked out by hand first, then the nearest and the cheapest, golden files last."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.mutants.coverage_map import Map, functions
from tests.mutants.damage import Damage

TABLES = {
    "compiler/machine/targets": "compiler/machine/target.py",
    "sim_cluster/calibration.toml": "sim_cluster/calibration.py",
}
"""What reads a table: its tests are the tests of the table."""
FIRST_FILES = 5  # importing a file of tests takes as long as many of its tests
WHOLE_FILE_S = 2.0  # such a file is run as a whole: caches hide which of its tests need a line
LIMIT_S = 100.0  # processor time of the tests of one damage


class Batch(NamedTuple):
    """Tests that one process runs, in their order, and what they take when nothing is damaged."""

    tests: tuple[str, ...]
    seconds: float

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(_file(test) for test in self.tests))


def batches(damage: Damage, text: str, known: Map) -> Iterator[Batch]:
    """The tests of a damage of a source that reads `text`: a few files, then the others."""
    chosen = _by_file(damage, text, known)
    cost = {file: sum(known.seconds[test] for test in tests) for file, tests in chosen.items()}
    order = sorted(chosen, key=lambda file: (*_rank(file, damage), cost[file], file))
    spent = 0.0
    for part in (order[:FIRST_FILES], order[FIRST_FILES:]):
        tests = []
        for test in (test for file in part for test in chosen[file]):
            if spent + known.seconds[test] <= LIMIT_S:
                spent += known.seconds[test]
                tests.append(test)
        if tests:
            yield Batch(tuple(tests), sum(known.seconds[test] for test in tests))


def _by_file(damage: Damage, text: str, known: Map) -> dict[str, list[str]]:
    """The tests that execute a damage, cheap files as a whole."""
    whole = defaultdict(list)
    for test in known.seconds:
        whole[_file(test)].append(test)
    chosen = defaultdict(list)
    for test in sorted(_covering(damage, text, known), key=lambda test: known.seconds[test]):
        chosen[_file(test)].append(test)
    for file in chosen:
        if sum(known.seconds[test] for test in whole[file]) <= WHOLE_FILE_S:
            chosen[file] = whole[file]
    return chosen


def _covering(damage: Damage, text: str, known: Map) -> set[str]:
    for table, reader in TABLES.items():
        if damage.path.startswith(table):
            return {t for covered in known.sources[reader] for t in covered.masks} & set(
                known.seconds
            )
    return known.tests_of(damage.path, text, telling_lines(damage, text))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _rank(file: str, damage: Damage) -> tuple[bool, bool, int]:
    """Golden files last; by hand before others; then by the folders shared with the source."""
    ours, theirs = PurePosixPath(file).parts[1:-1], PurePosixPath(damage.path).parts[:-1]
    shared = sum(a == b for a, b in zip(ours, theirs, strict=False))
    return file.startswith("tests/golden"), "by_hand" not in file, -shared


def telling_lines(damage: Damage, text: str) -> set[int]:
    """The lines whose execution may show a damage: of the statement it is in, and, for what is
    executed once at import, of the functions that name it or what is made of it or by them; of all
    functions where none does, since other modules may.
    """
    spans = {name: span for name, span in functions(text)}
    inside = any(first < damage.line <= last for first, last in spans.values())
    names = {name for name in damage.symbol.split(".") if name != "<module>"}
    naming = set[str]() if inside else _naming(names, text)
    made = _made_of(names | {name.rpartition(".")[2] for name in naming}, text) - names
    naming |= _naming(made, text)
    found = [spans[name] for name in naming] or ([] if inside else spans.values())
    told = {line for first, last in found for line in range(first + 1, last + 1)}
    return told | _statement(text, damage.line) if inside else told


def _naming(names: set[str], text: str) -> set[str]:
    """The functions that name any of these."""
    lines = text.splitlines()
    return {
        function
        for function, (first, last) in functions(text)
        if _names_any(names, "\n".join(lines[first - 1 : last]))
    }


def _made_of(names: set[str], text: str) -> set[str]:
    """The names, and those of constants of the module that are made of them."""
    made = {
        target.id: ast.unparse(node)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    while more := {n for n, value in made.items() if n not in names and _names_any(names, value)}:
        names = names | more
    return names


def _names_any(names: set[str], text: str) -> bool:
    return bool(names) and bool(
        re.search(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b", text)
    )


def _statement(text: str, line: int) -> set[int]:
    """Lines of the innermost statement at a line; of a compound one its head, of the head of a
    function, which is executed at import alone, its body."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if isinstance(node, ast.FunctionDef) and node.lineno < line < node.body[0].lineno:
                best = range(node.body[0].lineno, (node.end_lineno or line) + 1)
            elif line <= last or line == node.lineno:
                best = range(node.lineno, max(last, node.lineno) + 1)
    return set(best)
