"""The house: every folder says what it holds, docs/house.md lists them all, and what makes repairs
dear is counted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.house import counted
from tests.test_layers import PACKAGES, ROOT

MOST = {
    "tables of op names": 11,
    "tables of rules by op": 32,
    "tests for op names": 6,
    "graphs built": 0,
    "rewrites outside the driver": 0,
    "modules that build a Graph": 0,
    "files at the root of orchestrator": 3,
    "files at the root of sharding": 4,
    "files at the root of sim_cluster": 2,
    "files at the root of compiler": 6,
    "files at the root of collectives": 6,
    "imports in functions that close a circle": 0,
}
ROOM = re.compile(r"^\| `([\w/]+)/` \| (.+) \|$", re.MULTILINE)


def rooms() -> list[Path]:
    """All packages of ours, a folder before what is in it."""
    return sorted(p.parent for name in PACKAGES for p in (ROOT / name).rglob("__init__.py"))


def said(room: Path) -> str:
    """The first sentence that a package says of itself."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def test_the_page_of_rooms_says_what_they_say() -> None:
    page = (ROOT / "docs" / "house.md").read_text()
    listed = ROOM.findall(page)
    assert listed == [(room.relative_to(ROOT).as_posix(), said(room)) for room in rooms()]


def test_every_room_says_what_it_holds() -> None:
    assert not [room for room in rooms() if not said(room)]


def test_what_is_counted_only_falls() -> None:
    """`python -m tests.support.house` says where. A figure that falls is written down here."""
    counts, _ = counted()
    assert counts == MOST, "`python -m tests.support.house` says where; what fell is written down"
