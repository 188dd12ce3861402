"""docs/validation.md is what its template and the files of published runs say."""

from __future__ import annotations

import re

from benchmarks.validation_page import PAGE, filled, kept_facts


def test_the_text_and_the_facts_of_the_page_are_those_of_the_repository() -> None:
    text = re.split(r"^@\w+$", filled(kept_facts()), flags=re.MULTILINE)
    page = PAGE.read_text()
    assert [part for part in text if part not in page] == []


def test_settings_are_narrow_rows_with_their_sources_below() -> None:
    facts = {name: list(lines) for name, lines in kept_facts().items()}
    assert max(len(line) for line in "\n".join(facts["settings"]).splitlines()) < 120
    profiles = [line.split("|")[1].strip() for line in facts["settings"][1:]]
    assert profiles == [line.split("`")[1] for line in facts["sources"]]
