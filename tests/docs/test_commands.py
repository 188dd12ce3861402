"""docs/commands.md has every verb of the command, and no other."""

from __future__ import annotations

import re

from tests.support.console import ROOT
from tests.test_hints import command


def test_the_page_has_the_verbs_of_the_command() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)", page, re.MULTILINE)) == set(command().verbs)
