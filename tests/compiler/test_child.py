"""A child process is asked within limits, whatever it does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from shardwright.compiler.support.child import Child, UnwantedError

ECHO = (
    "from shardwright.compiler.support.child import serve\n"
    "import os, sys, time\n"
    "def answer(data):\n"
    "    if data == b'end': os._exit(7)\n"
    "    return data[::-1]\n"
    "serve(answer)\n"
)
LONG = bytes(4 << 20)  # more than any pipe holds


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child([sys.executable, "-c", ECHO], {"MARK": "1"})
    yield made
    made.end()


def test_requests_longer_than_a_pipe_are_answered(child: Child) -> None:
    assert child.ask(b"abc" + LONG, 60) == LONG + b"cba"
    assert child.ask(b"", 60) == b""


def test_one_that_does_not_read_is_late(child: Child) -> None:
    """Writing is within the limit: the request does not fit the pipe."""
    assert child.ask(b"ab", 60) == b"ba"
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        child.ask(LONG, 0.2)


def test_one_that_is_not_wanted_is_left(child: Child) -> None:
    looks = iter([True, True, False])
    assert child.ask(b"ab", 60) == b"ba"
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(UnwantedError):
        child.ask(LONG, 60, lambda: next(looks))
    assert next(looks, None) is None, "it was asked three times"


def test_one_that_ends_says_how(child: Child) -> None:
    with pytest.raises(EOFError):
        child.ask(b"end", 60)
    assert child.ended()[0] == 7
    with pytest.raises(EOFError):
        child.ask(LONG, 60)
