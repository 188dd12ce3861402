"""Rows of points that are done, one JSON line each: what a sweep that was ended goes on from.

A line is written at once, in one call, and synced; it carries a digest of its row, so a line that
was cut off or damaged counts as absent, and so does one that holds what no row has. Lines are never
changed: of two for one point the later counts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.compiler.support.documents import parse_json
from shardwright.orchestrator.service.units import digest
from shardwright.orchestrator.terminal.outputs import writing
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.whatif.rows import Row


class Journal:
    """A file of rows by plan key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, since_s: float = 0.0) -> dict[str, Row]:
        """The rows that are whole, and were stored at that Unix time or later."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        rows = (row for line in lines if (row := _row_of(line)) is not None)
        return {row.key: row for row in rows if row.stored_s >= since_s}

    def add(self, row: Row) -> None:
        """Append a row. Raises UsageError (SW_OUTPUT)."""
        with writing(self._path):
            self._append(row)

    def _append(self, row: Row) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        data = row.as_dict()
        line = dumps({**data, "digest": _digest(data)}).encode() + b"\n"
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            is_cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            line = b"\n" + line if is_cut else line
            if os.write(file, line) < len(line):  # the next row begins a new line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)


def _digest(row: Mapping[str, Any]) -> str:
    return digest([dumps(row).encode()])


def _row_of(line: bytes) -> Row | None:
    try:
        data = parse_json(line)
        if data.pop("digest") != _digest(data):
            return None
        return Row.of(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
