"""Published tables and their cells: numbers that can be measurements, the machines a row names.

One reading for training runs, kernels and collectives: `float` alone takes "nan" and "inf", and a
time of 0 has no relative error.
"""

from __future__ import annotations

import csv
import io
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import target_names
from shardwright.compiler.surface.flags import TARGETS

_EXACT = 2**53  # above, a float no longer holds every whole number


def read_table(path: Path, columns: Iterable[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV file with their lines; a spreadsheet's byte order mark is no part of it.
    Cells that a short row lacks are empty. Raises UsageError for a file that cannot be read or
    lacks a column."""
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")))
        names = reader.fieldnames = [(name or "").strip() for name in reader.fieldnames or ()]
        rows = [
            (reader.line_num, {name: (row[name] or "").strip() for name in names}) for row in reader
        ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:  # the last: a quote left open
        raise UsageError("SW_TRAINING_CSV", f"cannot read {path}: {error}") from error
    if missing := [name for name in columns if name not in names]:
        raise UsageError(
            "SW_TRAINING_CSV",
            f"{path} requires columns {', '.join(missing)}, got {', '.join(names) or 'none'}",
            hint="columns are separated by commas" if len(names) == 1 else "",
        )
    return rows


def entries(file: str, table: str) -> list[dict[str, Any]]:
    """The entries of a table of a file beside this one."""
    rows: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name(file).read_text())[table]
    return rows


def finite(text: str, name: str) -> float:
    """A number from 0 on; an empty cell is 0. Raises ValueError for anything else."""
    try:
        number = float(text or 0)
    except ValueError:
        raise ValueError(f"{name} requires a number, got {text!r}") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} requires a finite number of at least 0, got {text!r}")
    return number


def positive(text: str, name: str) -> float:
    """A finite number above 0. Raises ValueError for anything else, an empty cell too."""
    number = finite(text, name)
    if not number:
        raise ValueError(f"{name} requires more than 0, got {text!r}")
    return number


def whole(text: str, name: str) -> int:
    """A whole number from 0 on; an empty cell is 0. Raises ValueError for anything else."""
    number = finite(text, name)
    if number != int(number) or number > _EXACT:
        raise ValueError(f"{name} requires a whole number up to 2^53, got {text!r}")
    return int(number)


def positive_whole(text: str, name: str) -> int:
    """A whole number from 1 on. Raises ValueError for anything else, an empty cell too."""
    positive(text, name)
    return whole(text, name)


def matches(words: Mapping[str, str], columns: Mapping[str, str]) -> bool:
    """Whether every column (any case) has the word that `words` has under its name."""
    return all(word in columns.get(name, "").lower() for name, word in words.items())


def machines_named(text: str) -> list[str]:
    """The targets a cell names, in its order, each once. A family, or an instance of one that has
    no machine file, stands for the instance with all chips of the family. What follows in brackets
    is a remark."""
    files = "|".join(re.escape(name) for name in sorted(target_names(), key=len, reverse=True))
    words = re.finditer(
        rf"\b(?:({files})|(trn\d+n?|inf\d+)(?:\.\d*xlarge)?)\b", text.lower().partition("(")[0]
    )
    found = (word[1] or TARGETS.get(word[2]) for word in words)
    return list(dict.fromkeys(name for name in found if name))
