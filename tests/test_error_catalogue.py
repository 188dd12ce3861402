"""Every code in the source is in the catalogue, and `errors` explains each. That documented codes
are raised is in `test_error_triggers.py`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics.catalogue import WHO, catalogue
from shardwright.orchestrator.cli import main

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orchestrator", "sharding", "sim_cluster", "compiler", "collectives")
CODE = re.compile(r"\b(?:NCC|SW)_[A-Z0-9_]*[A-Z0-9]\b")
BUILT_NAMES = {"SW_SBUF_CAPACITY", "SW_PSUM_CAPACITY"}  # put together from the name of a memory


def constants(tree: ast.AST) -> Iterator[str]:
    """Text constants that are no docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def codes_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {code for text in constants(tree) for code in CODE.findall(text)}


@cache
def raised_codes() -> dict[str, str]:
    """Code -> one file of the packages that names it."""
    files = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return {code: str(p.relative_to(ROOT)) for p in files for code in codes_in(p)}


def test_every_code_of_the_source_is_in_the_catalogue() -> None:
    missing = {c: path for c, path in raised_codes().items() if c not in catalogue()}
    assert not missing, f"add a row to compiler/diagnostics/catalogue.toml for {missing}"


def test_the_catalogue_has_no_code_of_ours_that_nothing_raises() -> None:
    own = {code for code in catalogue() if code.startswith("SW_")}
    assert own - set(raised_codes()) <= BUILT_NAMES


def test_rows_are_complete() -> None:
    for code, entry in catalogue().items():
        assert entry.who in WHO and entry.meaning and entry.advice, code
        assert code.startswith("SW_") == (entry.who == "O"), code


def test_the_documented_codes_are_all_there() -> None:
    documented = [c for c in catalogue() if c.startswith("NCC_E")]
    assert len(documented) == 60 + len({"NCC_ESMP002", "NCC_EVRF024", "NCC_ETUP002"})


@pytest.mark.parametrize("text", ["NCC_EVRF035", "evrf035", "[NCC_EVRF035]"])
def test_errors_explains_a_code(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["errors", text]) == 0
    out = capsys.readouterr().out
    assert "NCC_EVRF035" in out and "integers" in out and "What to do" in out


def test_errors_lists_all_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["errors", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["code"] for row in rows] == list(catalogue())
    assert main(["errors", "NCC_EVRF03"]) == 2
    assert "did you mean NCC_EVRF0" in capsys.readouterr().err
