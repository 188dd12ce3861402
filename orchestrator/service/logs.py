"""The log of everything that runs: one logger, JSON lines on stderr, job and unit as fields.

`SHARDWRIGHT_LOG=json` turns it on in a command and in all its workers; without it nothing is
written. Workers on Ray use Ray's own JSON encoding (`ray_session.py`), which adds the ids of node,
worker and actor; the fields are the same. The events of a job (`events.py`) are lines of it too.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from shardwright.orchestrator.terminal.strict_json import dumps

VARIABLE = "SHARDWRIGHT_LOG"
LOG = logging.getLogger("shardwright")
LOG.addHandler(logging.NullHandler())
_OF_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "taskName"}
# Names that `logging` keeps for itself, as fields of a unit.
_RENAMED = {"name": "unit", "key": "unit_key", "kind": "unit_kind", "message": "text"}


def is_on() -> bool:
    """Whether lines are wanted."""
    return os.environ.get(VARIABLE, "") == "json"


def start() -> None:
    """Write the log of this process to stderr, if it is wanted."""
    if is_on() and not any(isinstance(h.formatter, _JsonLines) for h in LOG.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(_JsonLines())
        LOG.addHandler(handler)
        LOG.propagate = False
        LOG.setLevel(logging.INFO)


def start_in_actor() -> None:
    """Leave the writing to Ray, which has configured the root logger."""
    if is_on():
        LOG.setLevel(logging.INFO)


def tell(event: str, **fields: Any) -> None:
    """One line, with its fields."""
    if LOG.isEnabledFor(logging.INFO):
        LOG.info(event, extra={_RENAMED.get(name, name): value for name, value in fields.items()})


class _JsonLines(logging.Formatter):
    """Time, level and message under the names Ray gives them, then the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        own = {k: v for k, v in record.__dict__.items() if k not in _OF_EVERY_RECORD}
        head = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "process": record.process,
        }
        return dumps(head | own)
