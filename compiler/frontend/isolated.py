"""Reading a model file in a child process, so that no file can end this one.

XLA and MLIR are native code: a damaged HLO proto can crash them, and a malicious one keep them busy
for ever. The child imports one file after another and answers with serialised graphs; when it dies
or takes too long, the file is refused with a code, the next one gets a new child. This process
never loads jaxlib.
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
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgpack

from compiler import diagnostics
from compiler.diagnostics import (
    Diagnostic,
    DiagnosticError,
    ImportRuleError,
    InternalError,
    Loc,
)
from compiler.frontend.detect import Module
from compiler.frontend.locations import MODULE_FILE
from compiler.frontend.shardings import ModuleShardings
from compiler.frontend.stablehlo import Facts
from compiler.ir.ops import ShardingConstraintAttrs
from compiler.ir.serialize import dump, load
from compiler.ir.types import Graph
from compiler.surface.releases import Profile

TIMEOUT_S = 1800.0
_LENGTH = struct.Struct("<Q")
_STDERR_TAIL = 2000
_CHUNK = 1 << 20
_SAYS_WITHIN_S = 2.0
_FRAME = re.compile(r'File "[^"]*?(compiler/[^"]+)", line (\d+) in (\S+)\n')
"""A line of `faulthandler` about code of this package."""


class Reader:
    """A child that imports model files. Use as a context manager."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._noise: IO[bytes] | None = None
        self._running = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def read(
        self, data: bytes, base_dir: str, profile: Profile, name: str = MODULE_FILE
    ) -> tuple[Graph, Module]:
        """The graph of a file's content under the rules of a release, and what the file held;
        `name` stands for the file in locations of its own lines.

        Raises: the error of the import, at the user's line; ImportRuleError SW_READER_CRASH or
        SW_READER_TIMEOUT when native code did not answer.
        """
        child = self._start()
        deadline = time.monotonic() + self._timeout_s
        try:
            answer = self._exchange(child, [data, base_dir, profile.version], deadline)
        except TimeoutError:
            doing = self._doing(child)
            self._stop()
            raise ImportRuleError(
                "SW_READER_TIMEOUT",
                f"reading the module requires at most {self._timeout_s:g} s, got no answer{doing}",
                hint="simplify the module, or report it with the file",
            ) from None
        except (BrokenPipeError, EOFError):
            raise self._crashed(child) from None
        if "error" in answer:
            raise _error_of(answer["error"], name)
        return read_answer(answer, name)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child, self._noise = self._running.enter_context(_spawned())
        return self._child

    def _stop(self) -> None:
        self._child = self._noise = None
        self._running.close()

    def _exchange(
        self, child: subprocess.Popen[bytes], request: Any, deadline: float
    ) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises TimeoutError, EOFError,
        BrokenPipeError.
        """
        assert child.stdin and child.stdout
        _send(child.stdin, request)
        (size,) = _LENGTH.unpack(_receive(child.stdout, _LENGTH.size, deadline))
        answer: dict[str, Any] = msgpack.unpackb(
            _receive(child.stdout, size, deadline), use_list=False
        )
        return answer

    def _doing(self, child: subprocess.Popen[bytes]) -> str:
        """What a child works on, innermost first; empty when it cannot say."""
        assert self._noise is not None
        start = self._noise.seek(0, os.SEEK_END)
        child.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _SAYS_WITHIN_S
        frames: list[tuple[str, str, str]] = []
        while not frames and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            said = os.pread(self._noise.fileno(), _CHUNK, start)  # the child writes at the end
            frames = _FRAME.findall(said.decode(errors="replace"))
        if not frames:
            return ""
        return ": it was in " + ", in ".join(f"{f[2]} ({f[0]}:{f[1]})" for f in frames[:3])

    def _crashed(self, child: subprocess.Popen[bytes]) -> ImportRuleError:
        """What to tell about a child that ended."""
        status = child.wait()
        assert self._noise is not None
        self._noise.seek(0)
        lines = self._noise.read()[-_STDERR_TAIL:].decode(errors="replace").strip().splitlines()
        self._stop()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        advice = "the module is damaged or made by another release: dump it again"
        if status == -signal.SIGKILL:
            advice = "the host ran out of memory or somebody killed the reader: try again"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ImportRuleError(
            "SW_READER_CRASH",
            f"XLA ended with {how} while it read the module" + (f": {last}" if last else ""),
            hint=advice,
        )


@contextmanager
def _spawned() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A waiting child and the file of what native code prints there; it is killed on leaving."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as noise:
        child = subprocess.Popen(
            [sys.executable, "-m", "compiler.frontend.isolated"],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
        )
        assert child.stdin and child.stdout
        try:
            yield child, noise
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):  # what it never read
                child.stdin.close()
            child.stdout.close()


def read_answer(answer: Mapping[str, Any], name: str) -> tuple[Graph, Module]:
    """What a child says of a file called `name`."""
    findings = []
    for code, message, loc, hint, severity in answer["findings"]:
        findings.append(Diagnostic(code, message, _loc_of(loc, name), hint, severity))
    facts = Facts(
        answer["aliases"], answer["mesh"], tuple(findings), _shardings_of(answer["shardings"])
    )
    return load(answer["graph"]), Module(answer["form"], answer["stablehlo"], facts)


def _shardings_of(rows: tuple[Any, ...] | None) -> ModuleShardings | None:
    """Shardings from their fields."""
    if rows is None:
        return None
    meshes, *sides = rows
    given = [tuple(s and ShardingConstraintAttrs(*s) for s in side) for side in sides]
    return ModuleShardings(meshes, *given)


def _rows_of(asked: ModuleShardings | None) -> tuple[Any, ...] | None:
    """The fields of shardings."""
    if asked is None:
        return None
    sides = [[s and (s.spec, s.open_dims) for s in side] for side in (asked.inputs, asked.outputs)]
    return asked.meshes, *sides


def _loc_of(row: tuple[str, int, str] | None, name: str) -> Loc | None:
    """A location from its fields; `name` stands for the file in places of its own lines."""
    if row and row[0] == MODULE_FILE:
        row = (name, *row[1:])
    return Loc(*row) if row else None


def _error_of(row: tuple[Any, ...], name: str) -> DiagnosticError:
    kind, code, message, loc, hint, _ = row
    error: DiagnosticError = getattr(diagnostics, kind)(code, message, _loc_of(loc, name), hint)
    return error


def _send(pipe: IO[bytes], body: Any) -> None:
    data = msgpack.packb(body)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes], size: int, deadline: float) -> bytes:
    """`size` bytes of an unbuffered or empty-buffered pipe. Raises TimeoutError, EOFError."""
    parts, missing = [], size
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while missing:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(pipe.fileno(), min(missing, _CHUNK))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
    return b"".join(parts)


def _serve() -> None:
    """The child: answer requests until the parent closes the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # native code prints; answers stay clean
    requests = sys.stdin.buffer
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # `Reader._doing` asks
    while head := requests.read(_LENGTH.size):
        request = msgpack.unpackb(requests.read(_LENGTH.unpack(head)[0]))
        _send(answers, _answer(*request))


def _answer(data: bytes, base_dir: str, version: str) -> dict[str, Any]:
    from compiler.frontend.detect import import_file
    from compiler.frontend.restrictions import checks_for

    try:
        graph, module = import_file(data, base_dir, checks_for(Profile(version)))
        return {
            "graph": dump(graph, with_locs=True),
            "form": module.form,
            "stablehlo": module.stablehlo,
            "aliases": module.facts.aliases,
            "mesh": module.facts.mesh,
            "shardings": _rows_of(module.facts.shardings),
            "findings": [_fields(finding) for finding in module.facts.findings],
        }
    except DiagnosticError as error:
        return {"error": _row_of(error)}
    except Exception as error:
        return {"error": _row_of(InternalError.of(error, traceback.format_exc()))}


def _row_of(error: DiagnosticError) -> tuple[Any, ...]:
    return type(error).__name__, *_fields(error.diagnostic)


def _fields(d: Diagnostic) -> tuple[Any, ...]:
    loc = (d.loc.file, d.loc.line, d.loc.scope) if d.loc else None
    return d.code, d.message, loc, d.hint, d.severity


if __name__ == "__main__":
    _serve()
