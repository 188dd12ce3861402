"""Calls below frames of lines that somebody else wrote: JAX notes the frames of a traced operation,
and with them every later message names those lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any


def called_at(stack: Sequence[tuple[str, int]], call: Callable[[], Any]) -> Any:
    """What `call` returns, called below frames of the given files and lines, the innermost
    first."""
    for file, line in stack:
        call = partial(_frame(file, line), call)
    return call()


@cache
def _frame(file: str, line: int) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls what it is given on a line of a file."""
    names: dict[str, Any] = {}
    exec(compile("\n" * (line - 1) + "def at(call): return call()", file, "exec"), names)
    made: Callable[[Callable[[], Any]], Any] = names["at"]
    return made
