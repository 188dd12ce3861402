"""Units in flight: as many with an executor as keep its workers busy, the rest where they can still
be left to others.

Where units come from is a `Source`; one that shares its units with other jobs may have none to give
now and some later.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Protocol

from shardwright.orchestrator.service.executor import Outcome, Start, WorkUnit

POLL_S = 0.05
"""How often a source is asked again for units that it could not give. Our choice: a lock takes
0.2 ms to try, a unit takes tens of milliseconds or more."""


class Source(Protocol):
    """Units that are still to be run."""

    def take(self) -> WorkUnit | None:
        """The next unit to run, None when there is none now."""

    def __bool__(self) -> bool:
        """Whether there may be one later."""


def fly(executor: Start, source: Source) -> Generator[Outcome, None, None]:
    """Outcomes of all units of `source`; `executor` is asked for only when there is one to run.
    Units in flight are cancelled when the iterator is closed or interrupted."""
    flying = 0
    try:
        while True:
            while flying == 0 or flying < executor().capacity:
                unit = source.take()
                if unit is None:
                    break
                executor().submit(unit)
                flying += 1
            if flying:
                outcome = executor().next(POLL_S if source else None)
                if outcome is not None:
                    flying -= 1
                    yield outcome
            elif source:
                time.sleep(POLL_S)
            else:
                return
    finally:
        if flying:
            executor().cancel()
