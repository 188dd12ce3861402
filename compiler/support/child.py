"""Native code at work in a process of its own, which stays for the next request.

XLA and MLIR may crash or never end on what they are given, and no file may end the process that
asks. Both ends are here: a `Child` asks, `serve` is the loop of the process that answers. Requests
and answers are bytes behind their length, one at a time, over the child's standard input and
output; what native code prints goes to a file.
"""

from __future__ import annotations

import faulthandler
import os
import re
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20
_SAYS_WITHIN_S = 2.0
_ENDS_WITHIN_S = 10.0  # a process that closed its pipes, or was killed
_LOOK_S = 0.05  # from one look at whether an answer is still wanted to the next
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FRAME = re.compile(r'File "[^"]*?(compiler/[^"]+)", line (\d+) in (\S+)\n')
"""A line of `faulthandler` about code of this package."""


class UnwantedError(Exception):
    """Nobody wants the answer any more."""


def ending(status: int) -> str:
    """How a process with an exit status (minus the signal) ended; a signal also as neuronx-cc names
    it, F and the status a shell gives: F134, F137, F139.
    """
    if status >= 0:
        return f"status {status}"
    name = signal.Signals(-status).name
    killed = ", which is mostly the host's memory" if status == -signal.SIGKILL else ""
    return f"{name} (F{128 - status}{killed})"


class Child:
    """A process that runs `command` and answers requests; `environment` is added to ours. Raises
    OSError when it cannot start. No call waits without an end."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        root = str(Path(__file__).parents[3])  # last: modules of a user may have any name
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115, until `end`
        try:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._noise,
            )
        except OSError:
            self._noise.close()
            raise
        assert self.process.stdin
        os.set_blocking(self.process.stdin.fileno(), False)  # a child that does not read is late

    def ask(
        self, request: bytes, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> bytes:
        """The answer to `request`. Raises TimeoutError after so many seconds, EOFError when the
        child has ended, UnwantedError when `is_wanted`, which is asked while we wait, says no: it
        is of no use then, but `doing`, `ended` and `end`."""
        limit = _Limit(time.monotonic() + timeout_s, is_wanted)
        assert self.process.stdin and self.process.stdout
        limit.write(self.process.stdin, _LENGTH.pack(len(request)) + request)
        (size,) = _LENGTH.unpack(limit.read(self.process.stdout, _LENGTH.size))
        return limit.read(self.process.stdout, size)

    def doing(self) -> str:
        """What it works on, innermost first; empty when it cannot say."""
        start = self._noise.seek(0, os.SEEK_END)
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _SAYS_WITHIN_S
        frames: list[tuple[str, str, str]] = []
        while not frames and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            said = os.pread(self._noise.fileno(), _CHUNK, start)  # the child writes at the end
            frames = _FRAME.findall(said.decode(errors="replace"))
        if not frames:
            return ""
        return ": it was in " + ", in ".join(f"{f[2]} ({f[0]}:{f[1]})" for f in frames[:3])

    def ended(self) -> tuple[int, str]:
        """The status of a child that ends (minus the signal), and what it printed."""
        try:
            status = self.process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:  # it closed its pipe, and stays
            self.process.kill()
            status = -signal.SIGKILL
        self._noise.seek(0)
        return status, self._noise.read().decode(errors="replace")

    def waits(self, resident_bytes: int) -> bool:
        """Whether it can be asked again, and holds no more than so much memory."""
        if self.process.poll() is not None:
            return False
        with suppress(OSError):  # it ends just now
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            return pages * _PAGE_BYTES <= resident_bytes
        return False

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # it waits for a disk
            self.process.wait(_ENDS_WITHIN_S)
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # what it never read
            self.process.stdin.close()
        self.process.stdout.close()
        self._noise.close()


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer requests until whoever asks closes the pipe, or has ended."""
    # Ctrl-C in a terminal reaches every process there; whoever asks decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # native code prints; answers stay clean
    requests = sys.stdin.buffer
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # `Child.doing` asks
    while head := requests.read(_LENGTH.size):
        _send(answers, answer(requests.read(_LENGTH.unpack(head)[0])))


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


@dataclass(frozen=True, slots=True)
class _Limit:
    """How long a pipe is waited for: until `deadline` (monotonic seconds), while `is_wanted`."""

    deadline: float
    is_wanted: Callable[[], bool]

    def write(self, pipe: IO[bytes], data: bytes) -> None:
        """Write all of `data` to a pipe that does not block. Raises as `Child.ask`."""
        rest = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            while rest:
                self._await(selector)
                try:
                    rest = rest[os.write(pipe.fileno(), rest[:_CHUNK]) :]
                except BlockingIOError:  # room for less than a page
                    continue
                except BrokenPipeError:
                    raise EOFError from None

    def read(self, pipe: IO[bytes], size: int) -> bytes:
        """`size` bytes of an unbuffered or empty-buffered pipe. Raises as `Child.ask`."""
        parts, missing = [], size
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while missing:
                self._await(selector)
                part = os.read(pipe.fileno(), min(missing, _CHUNK))
                if not part:
                    raise EOFError
                parts.append(part)
                missing -= len(part)
        return b"".join(parts)

    def _await(self, selector: selectors.BaseSelector) -> None:
        while not selector.select(max(0.0, min(self.deadline - time.monotonic(), _LOOK_S))):
            if time.monotonic() >= self.deadline:
                raise TimeoutError
            if not self.is_wanted():
                raise UnwantedError
