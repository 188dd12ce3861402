"""What a field of another project means here: the rows of its table, and how fields are read by
them.

Every field ends in one of four lists of a `Reading`: read, without counterpart, assumed, or
unknown; or it is refused (SW_IMPORT_FIELD).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import Loc, UsageError, did_you_mean
from shardwright.orchestrator.config.config import KEYS
from shardwright.orchestrator.config.importers.facts import FACTS
from shardwright.orchestrator.config.importers.fields import Field, Fields

Kind = Callable[[Any], Any]
"""Reads a value; raises ValueError that says what is required."""
_NOT_SAID: Any = object()
MOST_SHOWN = 200  # characters of what was given in a message (our choice)
LARGEST = 2**31 - 1
"""Of sizes: what indices of the machine reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one field means: a key of a job or a fact (`ours`), or nothing, and why (`says`); or a
    sentence that is assumed (`assumes`) where its value is not among the `plain` ones. With
    `plain` and no sentence other values are refused."""

    ours: str = ""
    kind: Kind | None = None
    default: Any = _NOT_SAID
    says: str = ""
    plain: tuple[Any, ...] = ()
    assumes: str = ""
    hint: str = ""


Table = Mapping[str, Row]
"""Rows by the name of a field; `table.*` is for all of a table that have no row of their own."""


def key(ours: str, kind: Kind, default: Any = _NOT_SAID) -> Row:
    """A field with a counterpart: a key of a job, or a fact that a key is made of. Raises
    ValueError for a fact without words."""
    if ours not in KEYS and ours not in FACTS:
        raise ValueError(f"a field requires a key of a job or one of FACTS, got {ours}")
    return Row(ours=ours, kind=kind, default=default)


def nothing(says: str) -> Row:
    """A field that changes neither memory nor time of a step."""
    return Row(says=says)


def only(*plain: Any, says: str, hint: str) -> Row:
    """A field that would change the answer, and is built under these values alone."""
    return Row(plain=(None, *plain), says=says, hint=hint)


def instead(*plain: Any, assumes: str, default: Any = _NOT_SAID) -> Row:
    """A field in whose place, unless it has a plain value, something else is computed; a `default`
    is what the project takes where the file does not have it."""
    return Row(plain=(None, *plain), assumes=assumes, default=default)


def whole(low: int = 0, high: int = LARGEST) -> Kind:
    """A whole number, also as text."""

    def read(value: Any) -> int:
        found = _number(value)
        if found is None or found != int(found) or not low <= found <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(found)

    return read


def real(value: Any) -> float:
    """A number of at least 0, also as text."""
    found = _number(value)
    if found is None or found < 0:
        raise ValueError("a number of at least 0")
    return float(found)


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = value if isinstance(value, int) else float(value)
        return found if math.isfinite(found) else None
    except (ValueError, OverflowError):
        return None


def switch(value: Any) -> bool:
    """A flag: a truth value, its word, or a flag of a command with nothing behind it."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    found = value if isinstance(value, bool) else known.get(str(value).lower())
    if found is None:
        raise ValueError("true or false")
    return found


def given(value: Any) -> bool:
    """A flag of a command, which is there, or a truth value of JSON."""
    return value is not False and value is not None


def words(meanings: Mapping[str, Any]) -> Kind:
    """One of some words, in any case; what it means here."""
    known = {word.lower(): meaning for word, meaning in meanings.items()}

    def read(value: Any) -> Any:
        name = "none" if value is None else str(value).lower()
        if name not in known:
            raise ValueError(f"one of {', '.join(meanings)}")
        return known[name]

    return read


def text(value: Any) -> str:
    """A word or a path."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


STOPPED = "{name} {value}: training stops while state is saved (goodput.checkpoint_s)"
"""What is assumed of saving beside training."""


@dataclass(slots=True)
class Reading:
    """The fields of a file, sorted by what they mean."""

    path: Path
    found: dict[str, Any] = field(default_factory=dict)
    """Values by key or fact."""
    fields: dict[str, Field] = field(default_factory=dict)
    """Where those were given."""
    without: list[tuple[Field, str]] = field(default_factory=list)
    unknown: list[Field] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    """Sentences about what was not in the file, or is computed in another way."""
    defaults: list[str] = field(default_factory=list)
    """The one about the project's defaults, if there is any."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key or a fact."""
        return self.found.get(name, default)

    def refuse(self, ours: str, required: str, got: str, hint: str) -> UsageError:
        """The refusal of a fact, at the field that gave it."""
        at = self.fields.get(ours)
        got = got if len(got) <= MOST_SHOWN else f"{got[: MOST_SHOWN - 3]}..."
        name = at.name if at else FACTS.get(ours, ours)
        return UsageError(
            "SW_IMPORT_FIELD",
            f"{name} requires {required}, got {got}",
            Loc(str(self.path), at.line if at else 0),
            hint,
        )


def read(path: Path, fields: Fields, table: Table, project: str) -> Reading:
    """Read every field by its row. Raises UsageError for a value that no row takes, and for two
    names of one thing with different values."""
    reading = Reading(path)
    for one in fields.values():
        row = _row_of(table, one.name)
        if row is None:
            reading.unknown.append(one)
        else:
            _by_row(reading, one, row)
    if not reading.found:
        name = next(iter(fields), "")
        line = fields[name].line if name else 0
        example = f", for example {name}" if name else ""
        raise UsageError(
            "SW_IMPORT",
            f"a configuration of {project} requires fields that are known, got none of"
            f" {len(fields)}{example}",
            Loc(str(path), line),
            did_you_mean(name, table, "is the file of another project? See docs/from.md"),
        )
    if branches := [f for f in fields.values() if f.is_conditional and _counts(table, f.name)]:
        names = ", ".join(f"{f.name} (line {f.line})" for f in branches)
        reading.assumed.append(f"conditions of the script are true: {names}")
    return _with_defaults(reading, table, project, fields)


def _counts(table: Table, name: str) -> bool:
    """Whether a field has an effect on the job."""
    row = _row_of(table, name)
    return row is not None and bool(row.ours or row.assumes)


def _row_of(table: Table, name: str) -> Row | None:
    """The row of a field: its own, or that of the nearest table around it."""
    if name in table:
        return table[name]
    while "." in name:
        name = name.rpartition(".")[0]
        if row := table.get(f"{name}.*"):
            return row
    return None


def _by_row(reading: Reading, one: Field, row: Row) -> None:
    where = Loc(str(reading.path), one.line)
    if row.ours and one.value is not None:
        _keep(reading, one, row)
    elif row.ours:
        reading.without.append((one, "none is given"))
    elif row.plain and not _is_plain(one.value, row.plain):
        if not row.assumes:
            wanted = " or ".join(map(str, row.plain[1:])) or "nothing"
            message = f"{one.name} requires {wanted}, got {one.shown()}: {row.says}"
            raise UsageError("SW_IMPORT_FIELD", message, where, row.hint)
        told = row.assumes.format(value=one.shown(), name=one.name)
        reading.assumed.append(told)
        reading.without.append((one, told.removeprefix(f"{one.name} {one.shown()}: ")))
    else:
        reading.without.append((one, row.says or "as it is here"))


def _is_plain(value: Any, plain: tuple[Any, ...]) -> bool:
    """Whether a value is among some, a number also as text, a word in any case."""
    if isinstance(value, list | dict):
        return not value
    number = _number(value)
    for one in plain:
        same = one is value or (not isinstance(value, bool) and one == value)
        if same or str(one).lower() == str(value).lower():
            return True
        if number is not None and _number(one) == number:
            return True
    return False


def _keep(reading: Reading, one: Field, row: Row) -> None:
    assert row.kind
    try:
        value = row.kind(one.value)
        low, high = _range(row.ours) or (value, value)
        if not low <= value <= high:
            raise ValueError(f"{low} to {high}")
    except ValueError as error:
        raise UsageError(
            "SW_IMPORT_FIELD",
            f"{one.name} requires {error}, got {one.shown()}",
            Loc(str(reading.path), one.line),
            row.hint or _next_step(one),
        ) from error
    if row.ours in reading.found and reading.found[row.ours] != value:
        before = reading.fields[row.ours]
        raise UsageError(
            "SW_IMPORT_FIELD",
            f"{one.name} requires the value of {before.name} in line {before.line},"
            f" {before.shown()}, got {one.shown()}",
            Loc(str(reading.path), one.line),
            "keep the one that counts: both say the same thing",
        )
    reading.found[row.ours] = value
    reading.fields[row.ours] = one


def _range(ours: str) -> tuple[float, float] | None:
    """What a key of a job may be, if it is a number with bounds; -1 is a word of a mesh."""
    found: tuple[float, float] | None = None
    if ours in KEYS and not ours.startswith("mesh."):
        found = KEYS[ours].metadata.get("range")
    return found


def _next_step(one: Field) -> str:
    if isinstance(one.value, str) and "$" in one.value:
        return "write the value in its place: variables are followed only inside the file"
    return "write a value that this setting can have here (docs/from.md)"


def _with_defaults(reading: Reading, table: Table, project: str, fields: Fields) -> Reading:
    """The reading, with the project's defaults where the file says nothing, and that they are."""
    told = []
    for name, row in table.items():
        if row.assumes and row.default is not _NOT_SAID and name not in fields:
            name_told = f"default of {project}: {name}"
            reading.assumed.append(row.assumes.format(name=name_told, value=row.default))
        if row.ours and row.default is not _NOT_SAID and row.ours not in reading.found:
            assert row.kind
            reading.found[row.ours] = row.kind(row.default)
            told.append(f"{name} {row.default}")
    if told:
        reading.defaults.append(f"defaults of {project}: {', '.join(told)}")
    return reading
