"""The partitioner's process: requests of `shardy` out, its answers in.

It is a process of its own because native code may abort, and it stays for the next request: an
interpreter that loads jaxlib's MLIR costs more than partitioning a small step.
`SHARDWRIGHT_PARTITIONER_PYTHON` names another interpreter for it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata

import msgpack

from shardwright.compiler.diagnostics import ExecutionError, Loc, ShardingError
from shardwright.compiler.support.child import Child, ending

PartitionUnit = Callable[[bytes], bytes]

PYTHON_VARIABLE = "SHARDWRIGHT_PARTITIONER_PYTHON"
TIMEOUT_S = 600.0
VERSION_TIMEOUT_S = 30.0
_STDERR_TAIL = 2000
_KEPT_BYTES = 512 << 20
"""What a waiting process may hold: one that has partitioned a large step is ended instead."""

_waiting: dict[str, Child] = {}
"""By interpreter, a process that waits for a request."""


def ask(request: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
    """The answer to an encoded request: an encoded partitioned graph.

    Raises: ShardingError when the partitioner refuses, ExecutionError when its process crashes,
    does not start or does not answer in time.
    """
    try:
        with _child(os.environ.get(PYTHON_VARIABLE) or sys.executable) as child:
            try:
                answer = msgpack.unpackb(child.ask(request, timeout_s), use_list=False)
            except EOFError:
                raise _crashed(*child.ended()) from None
    except TimeoutError:
        raise _late(timeout_s) from None
    if "error" in answer:
        code, message, loc, hint = answer["error"]
        raise ShardingError(code, message, Loc(*loc) if loc else None, hint)
    data: bytes = answer["graph"]
    return data


@contextmanager
def _child(python: str) -> Iterator[Child]:
    """A process for one request. It waits for the next one unless something is raised."""
    child = _waiting.pop(python, None)
    if child is not None and not child.waits(_KEPT_BYTES):
        child.end()
        child = None
    if child is None:
        try:
            child = Child([python, "-m", "shardwright.sharding.partition"])
        except OSError as error:
            raise _not_started(python, error) from error
    try:
        yield child
    except BaseException:
        child.end()
        raise
    if not child.waits(_KEPT_BYTES) or _waiting.setdefault(python, child) is not child:
        child.end()  # another thread's process waits already


@atexit.register
def _end_waiting() -> None:
    """End the processes that wait."""
    while _waiting:
        _waiting.popitem()[1].end()


os.register_at_fork(after_in_child=_waiting.clear)  # they answer the process that started them


def partitioner_version() -> str:
    """The release of jaxlib that partitions. Raises ExecutionError when the interpreter that
    `SHARDWRIGHT_PARTITIONER_PYTHON` names does not start, or has none."""
    python = os.environ.get(PYTHON_VARIABLE)
    return _jaxlib_of(python) if python else metadata.version("jaxlib")


@cache
def _jaxlib_of(python: str) -> str:
    code = "from importlib.metadata import version; print(version('jaxlib'))"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _late(VERSION_TIMEOUT_S) from None
    except OSError as error:
        raise _not_started(python, error) from error
    if done.returncode:
        raise _crashed(done.returncode, done.stderr.decode(errors="replace"))
    return done.stdout.decode(errors="replace").strip()


def _late(timeout_s: float) -> ExecutionError:
    return ExecutionError(
        "SW_PARTITIONER_TIMEOUT",
        f"the partitioner requires at most {timeout_s:g} s, got no answer",
        hint="scan over layers instead of unrolling them, or raise the limit",
    )


def _not_started(python: str, error: OSError) -> ExecutionError:
    return ExecutionError(
        "SW_PARTITIONER_START",
        f"{PYTHON_VARIABLE} requires an interpreter, got {python}: {error}",
    )


def _crashed(status: int, said: str) -> ExecutionError:
    return ExecutionError(
        "SW_PARTITIONER_CRASH",
        f"the partitioner ended with {ending(status)}:\n{said[-_STDERR_TAIL:]}",
        hint="run it again with --dump-dir DIR, and report *-shardy_input.mlir from there",
    )
