"""What happens to units, as it happens: one JSON object per line, with the ids of job and unit.

Names: `batch.started`, `unit.hit`, `unit.waiting` (another job computes it), `unit.started`,
`unit.done`, `unit.failed`, `unit.retried`, `worker.lost`. docs/orchestration.md lists their fields.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.orchestrator.service.logs import tell
from shardwright.orchestrator.terminal.strict_json import dumps


class EventLog:
    """Stamps events with time and job, and appends them to a file; a disk that refuses costs the
    log, not the job. Without a path it only has the job's id."""

    def __init__(self, path: Path | str = "", job: str = "") -> None:
        self.job = job or secrets.token_hex(4)
        self.warnings: list[str] = []
        self._file: int | None = None
        if path:
            self._try(lambda: self._open(Path(path)))

    def __call__(self, event: str, **fields: Any) -> None:
        """Note an event. A line is written at once and whole, so that jobs can share a file."""
        tell(event, job=self.job, **fields)
        file = self._file
        if file is None:
            return
        line = {"time_s": round(time.time(), 6), "job": self.job, "event": event, **fields}
        self._try(lambda: os.write(file, dumps(line).encode() + b"\n"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.warnings.append(f"cannot write the event log: {error}; going on without it")
            self.close()
