"""Golden files: one JSON file per cell, one line per row, and what differs between two records.

A difference names its cell, the stage of the road and the row, and says by how much a number moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.golden.record import Record

FOLDER = Path(__file__).parent / "expected"
SHOWN = 40
"""Differences that a failed test lists; a changed stage changes everything behind it."""
UPDATE = "python -m pytest tests/golden --update-golden"
_MISSING = "nothing"


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is another, of a row of a stage."""

    stage: str
    row: str
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        place = " ".join(part for part in (self.row, self.key) if part)
        return f"{self.stage}: {place}: {_short(self.old)} -> {_short(self.new)}{self._moved()}"

    def _moved(self) -> str:
        """By how much a number moved."""
        numbers = all(_is_number(value) for value in (self.old, self.new))
        if not numbers or not self.old:
            return ""
        return f" ({(self.new - self.old) / abs(self.old):+.3g} of itself)"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    """Digests by their first digits."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:12]}.." if len(text) == 64 and " " not in text else text


def path_of(name: str) -> Path:
    """The golden file of a cell."""
    return FOLDER / f"{name}.json"


def text_of(record: Record) -> str:
    """The content of a golden file: stages in the order of the road, a line per row."""
    stages = []
    for stage, rows in record.items():
        lines = [
            f"  {json.dumps(row)}: {json.dumps(value, sort_keys=True)}"
            for row, value in sorted(rows.items())
        ]
        stages.append(f" {json.dumps(stage)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(stages) + "\n}\n"


def read(name: str) -> Record:
    """What a golden file expects; nothing where there is none."""
    path = path_of(name)
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def differences(old: Record, new: Record) -> list[Difference]:
    """Every value that differs, in the order of the road: the first stage named is where it began.

    Numbers and texts are compared as a file would hold them.
    """
    new = json.loads(json.dumps(new))
    found: list[Difference] = []
    for stage in dict.fromkeys([*new, *old]):
        before, after = old.get(stage, {}), new.get(stage, {})
        for row in sorted(before.keys() | after.keys()):
            pairs = _values(before.get(row, _MISSING), after.get(row, _MISSING))
            found += [Difference(stage, row, *pair) for pair in pairs]
    return found


def _values(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of every value of a row that differs."""
    if old == new:
        return
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        yield "", old, new
        return
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        if before != after:
            yield key, before, after


def report_of(name: str, found: list[Difference]) -> str:
    """What people read: the cell, and what differs."""
    began = found[0].stage
    lines = [f"golden {name}: {len(found)} values differ, the first in stage {began}"]
    lines += [f"  {name}: {difference}" for difference in found[:SHOWN]]
    if len(found) > SHOWN:
        stages = dict.fromkeys(difference.stage for difference in found[SHOWN:])
        lines.append(f"  and {len(found) - SHOWN} more, of {', '.join(stages)}")
    return "\n".join(lines)


def compare(name: str, new: Record) -> str:
    """What differs from the golden file, as text; nothing when all is equal."""
    found = differences(read(name), new)
    return report_of(name, found) if found else ""


def update(name: str, new: Record) -> str:
    """Write the golden file if it differs, and say what did."""
    path = path_of(name)
    changed = compare(name, new) if path.is_file() else f"golden {name}: new"
    if changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(new), encoding="utf-8")
    return changed


def golden(name: str, new: Record, request: pytest.FixtureRequest) -> None:
    """Compare with the golden file `name`, or, with `--update-golden`, write it; what changed is
    printed at the end of the run."""
    if request.config.getoption("--update-golden"):
        request.node.user_properties.append(("golden", update(name, new)))
    elif changed := compare(name, new):
        pytest.fail(f"{changed}\nif that is meant: {UPDATE}", pytrace=False)
