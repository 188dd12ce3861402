"""Links of pages lead to files and headings that are there, and paths in the text exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.console import PAGES as SESSIONS
from tests.support.console import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md"))
    if path.name != "CHANGELOG.md"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PATH = re.compile(r"`((?:collectives|compiler|sharding|sim_cluster|orchestrator|tests)/[\w./-]+)`")


def anchors(path: Path) -> set[str]:
    """The anchors of headings as they are made for the web: words in lower case, with hyphens."""
    titles = HEADING.findall(re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for link in LINK.findall(CODE.sub("", (ROOT / page).read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_the_text_exist(page: str) -> None:
    made = {path for path in re.findall(r"file=(\S+)", (ROOT / page).read_text())}
    named = set(PATH.findall((ROOT / page).read_text())) - made
    assert not sorted(path for path in named if not (ROOT / path).exists())


def test_the_index_lists_every_page_once_and_marks_sessions() -> None:
    docs = ROOT / "docs"
    rows = [row for row in (docs / "README.md").read_text().splitlines() if row.startswith("| [")]
    listed = {(docs / LINK.findall(row)[0]).resolve(): "\u25b8" in row for row in rows}
    assert len(listed) == len(rows)
    assert {path for path in docs.rglob("*.md")} - {docs / "README.md"} <= listed.keys()
    assert {path for path, marked in listed.items() if marked} == {
        ROOT / page for page in SESSIONS if page != "README.md"
    }


@pytest.mark.parametrize("note", sorted(ROOT.glob("docs/design/*.md")), ids=lambda note: note.stem)
def test_a_design_note_fits_a_page(note: Path) -> None:
    """A decision, its reason, what was measured and what was left; histories belong to git."""
    text = note.read_text()
    assert len(text) <= 6500 and text.count("\n") <= 65
