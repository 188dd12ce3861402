"""Runs of programs as entries with counts, folded by hand."""

from __future__ import annotations

import pytest

from shardwright.compiler.neff.schedule import flat, folded


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        ("", ""),
        ("a", "a1"),
        ("aaa", "a3"),
        ("ababab", "ab3"),
        ("abababa", "ab3 a1"),
        ("aaaa", "a4"),  # and not twice two
        ("aabb", "a2 b2"),
        ("caaab", "c1 a3 b1"),
        ("cababab", "c1 ab3"),
        ("abcabc", "a1 b1 c1 a1 b1 c1"),  # three that repeat are not looked for
        ("ffbfbfbb", "f2 bf2 b2"),
        ("abaab", "a1 b1 a2 b1"),
    ],
)
def test_repeated_programs_and_pairs_are_written_once(names: str, entries: str) -> None:
    found = folded(names)
    assert " ".join(f"{''.join(programs)}{count}" for programs, count in found) == entries
    assert "".join(flat(found)) == names
