"""Children that answer Ctrl-C, also when the test run itself ignores it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard_by_children() -> Iterator[None]:
    """Processes started inside take SIGINT as one started at a terminal does.

    A shell script starts `pytest &` with SIGINT ignored, and an ignored signal stays ignored in
    children; one with a handler is reset to its default there.
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
