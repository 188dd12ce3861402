"""Damages with a name (`named.toml`): made by hand, and held by tests that are named with them.

A damage is a text that stands once within a symbol, and what it becomes, so that it outlives what
moves around it; whoever rewrites the text itself writes it here anew.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutants.campaign import noticed
from tests.mutants.damage import Damage, symbols
from tests.mutants.runs import Recorder, run_tests
from tests.mutants.trees import Tree

FILE = Path(__file__).with_name("named.toml")
BUDGET_S = 120.0  # of processor time for the tests of one damage


@dataclass(frozen=True)
class Named:
    """A damage of a row of `named.toml`."""

    name: str
    path: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]

    def of(self, source: str) -> Damage:
        """The damage of a source. Raises ValueError unless its text stands once in the symbol."""
        start, end = symbols(ast.parse(source), source)[self.symbol]
        if source.count(self.old, start, end) != 1:
            raise ValueError(f"{self.name}: {self.symbol} requires {self.old!r} once")
        start = source.index(self.old, start)
        line = source.count("\n", 0, start) + 1
        return Damage(
            self.path, self.symbol, "named", 0, line, start, start + len(self.old), self.new
        )


def named_damages() -> list[Named]:
    """All of them, in the order of the file."""
    rows = tomllib.loads(FILE.read_text())["damage"]
    return [Named(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def judge(damages: list[Named], tree: Tree) -> Iterator[tuple[Named, str]]:
    """Every damage with the test that noticed it, or nothing."""
    for damage in damages:
        source = (tree.path / damage.path).read_text()
        module = damage.of(source).module
        with tree.holding(damage.path, damage.of(source).applied(source)):
            run = run_tests(
                tree, damage.tests, partial(Recorder, None), budget_s=BUDGET_S, module=module
            )
        yield damage, (noticed(run) or ("", ""))[0]
