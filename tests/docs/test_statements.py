"""The page of every statement: what it says is what running the commands gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.statements import (
    PAGE,
    ROOT,
    TITLES,
    Outcome,
    Statement,
    page,
    ran,
    statements,
    stored,
    write_models,
)

ROWS = statements()
CHEAP = (
    "trn1n came with 2.5.0.28",
    "Of competing flags the right-most wins",
    "--target inf1 is the machine of neuron-cc",
)
"""Statements whose commands plain tests run again, so that the runner itself is tested."""


def test_every_statement_was_run_as_it_stands_and_did_what_it_says() -> None:
    found = stored()
    assert found.keys() == {row.says for row in ROWS}
    wrong = [row.says for row in ROWS if not found[row.says].meets(row)]
    assert not wrong, f"python -m tests.support.statements runs them again: {wrong}"


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run `make statements`"


def test_statements_are_told_once_and_in_a_part_of_the_page() -> None:
    says = [row.says for row in ROWS]
    assert len(says) == len(set(says)) > 250
    assert {row.of for row in ROWS} == set(TITLES)


def test_what_is_refused_here_is_refused_with_an_exit_code() -> None:
    """By a command, or by a test that says so."""
    for row in ROWS:
        if row.outcome is Outcome.REFUSED:
            assert row.exit or row.run[-1].startswith("pytest "), row.says


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.mark.parametrize("says", CHEAP)
def test_a_statement_is_run(says: str, models: Path) -> None:
    (row,) = (row for row in ROWS if row.says == says)
    found = ran(row, models)
    assert found.meets(row), found
    other = Statement(of=row.of, says="", outcome=Outcome.WORKS, run=row.run, shows=("no such",))
    assert ran(other, models).absent == ["no such"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.says[:60])
def test_every_statement_holds_now(row: Statement, models: Path) -> None:
    found = ran(row, models)
    assert found.meets(row), found
