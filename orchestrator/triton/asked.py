"""What `shardwright triton` is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import UsageError

LEVELS = ("L0", "L1")
LEVEL = "L1"
QUEUE, QUEUE_TIMEOUT_S = 64, 60.0  # our choice, as are those below
TIMEOUT_S = 300.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a file is to be served. `program` is which of a file with several; `weights` are .npz
    files with arguments that no request has; `queue` requests wait, each for `queue_timeout_s`; a
    run takes `timeout_s` at most."""

    name: str
    version: int = 1
    max_batch: int = 0
    instances: int = 1
    queue: int = QUEUE
    queue_timeout_s: float = QUEUE_TIMEOUT_S
    timeout_s: float = TIMEOUT_S
    level: str = LEVEL
    program: str = ""
    weights: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise required("--name", "letters, digits, _, . and -", repr(self.name))
        for field, least in (("version", 1), ("max_batch", 0), ("instances", 1), ("queue", 1)):
            if (given := getattr(self, field)) < least:
                raise required(f"--{field.replace('_', '-')}", f"at least {least}", given)
        for flag, seconds in (
            ("--queue-timeout", self.queue_timeout_s),
            ("--timeout", self.timeout_s),
        ):
            if not 0 < seconds <= _MOST_S:
                raise required(flag, f"seconds above 0, at most {_MOST_S:g}", seconds)


def required(flag: str, what: str, given: object) -> UsageError:
    """The error of a flag with another value."""
    return UsageError("SW_USAGE", f"{flag} requires {what}, got {given}")
