"""MLIR locations -> `Loc`: the user's innermost frame and JAX's name stack.

JAX writes a name location (the name stack) around a chain of call sites (the Python frames,
innermost first). The frame shown to the user is the innermost one of their own code; library frames
count only when there is nothing else, and what called the step or `capture` does not count at all.
Everything is cached by attribute object, because a module repeats few locations.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, DiagnosticError, Loc

UNNAMED = "-"
"""The file MLIR gives to places in text and bytes without a name."""

MODULE_FILE = "<module>"
"""File name of locations inside a model file whose path only the caller knows."""

CELL_FILE = "<cell>"
"""File name of locations in cells of a notebook. IPython has another one for each process and each
text of a cell, which nobody can open and which would make every answer that names it another one.
"""

_CELL = re.compile(
    r"[/\\]\.?ipykernel[_/\\]\d+[/\\][^/\\]+$"  # ipykernel, Databricks
    r"|[/\\<]ipython-input-\d+-\w+(\.py|>)$"  # Colab, IPython in a terminal
)
_PACKAGE = os.path.join(Path(__file__).resolve().parents[1], "")  # the folder of `compiler`
_OWN = ("compiler", "collectives", "orchestrator", "sharding", "sim_cluster")
_ROOT = os.path.join(Path(__file__).resolve().parents[2], "")  # the folder of all of them
_INSTALLED = re.compile(r".*?[/\\](?:site|dist)-packages[/\\]")
"""Where packages lie, of this interpreter, of a user, or of another that a path leads to."""
_NOWHERE = "<"  # of code in no file: Python's own machinery of imports, what a library wrote
_TRACERS = ("capture.py", "state.py", "train_step.py")
_CALLERS = {os.path.join(_PACKAGE, "frontend", name) for name in _TRACERS}
_MODELS = "orchestrator/models/"  # below the root; their code counts as the user's
_ROWS = tuple(
    os.path.join(_PACKAGE, "frontend", name, "")
    for name in ("pytorch", "graphs", "onnx", "mxnet", "tensorflow")
)
"""Functions that stand for operators of others: below them is the code that called the operator.
"""


@contextmanager
def named_file(name: str) -> Iterator[None]:
    """Say the name of a model file in errors whose place is inside of one."""
    try:
        yield
    except DiagnosticError as error:
        d = error.diagnostic
        if d.loc is None or d.loc.file != MODULE_FILE:
            raise
        raise type(error)(d.code, d.message, replace(d.loc, file=name), d.hint) from error


class LocationReader:
    """Reads the locations of one module; paths below `base_dir` become relative to it."""

    def __init__(self, base_dir: str | None = None) -> None:
        self._base = os.path.join(os.path.realpath(base_dir or os.getcwd()), "")
        self._locs: dict[Any, Loc] = {}
        self._frames: dict[Any, tuple[tuple[str, int], ...]] = {}
        self._joined: dict[tuple[Loc, Loc], Loc] = {}
        self._interned: dict[Loc, Loc] = {}

    @property
    def base(self) -> str:
        """The folder that paths are relative to."""
        return self._base

    def read(self, location: Any) -> Loc:
        """The `Loc` of an MLIR location."""
        key = location.attr
        loc = self._locs.get(key)
        if loc is None:
            loc = self._locs[key] = self._convert(location)
        return loc

    def join(self, call: Loc, callee: Loc) -> Loc:
        """The location of an inlined op: name stacks appended, the op's own frame unless only the
        caller's is known.

        JAX lowers a function once and locates its body relative to the call.
        """
        key = (call, callee)
        loc = self._joined.get(key)
        if loc is None:
            own = callee if _is_user(callee) or not call.file else call
            loc = Loc(own.file, own.line, _join_scopes(call.scope, callee.scope))
            self._joined[key] = loc = self._interned.setdefault(loc, loc)
        return loc

    def frame(self, file: str, line: int) -> Loc:
        """A line of a file, as it is shown."""
        return Loc(_shown(file, self._base)[0], line)

    def raised(self, error: BaseException) -> Loc | None:
        """The user's innermost line of what was raised while their functions were called, else that
        of a library; None where our own code alone was at work."""
        traced = reversed(traceback.extract_tb(error.__traceback__))
        below = takewhile(lambda f: _real(f.filename) not in _CALLERS, traced)
        frames = [(f.filename, f.lineno or 0) for f in below if not _is_ours(_real(f.filename))]
        return self.innermost(frames) if frames else None

    def innermost(self, frames: Iterable[tuple[str, int]]) -> Loc:
        """The user's innermost line of Python frames (file, line), the innermost first; else the
        innermost of all, if there is any.
        """
        named = []
        for file, line in frames:
            if _real(file) in _CALLERS:
                break
            if _real(file).startswith(_ROWS):
                continue
            shown, library = _shown(file, self._base)
            if not library:
                return Loc(shown, line)
            named.append(Loc(shown, line))
        return named[0] if named else UNKNOWN_LOC

    def _convert(self, location: Any) -> Loc:
        """Name stack of the outermost name (HLO fuses name and line), frame of what it wraps."""
        from jaxlib.mlir import ir

        fused = isinstance(location, ir.FusedLoc)
        parts = location.locations if fused else [location]
        scope = next((part.name_str for part in parts if isinstance(part, ir.NameLoc)), "")
        loc = replace(self.innermost(self._frames_of(location)), scope=scope)
        return self._interned.setdefault(loc, loc)

    def _frames_of(self, location: Any) -> tuple[tuple[str, int], ...]:
        """(file, line) of the frames below `location`, innermost first."""
        key = location.attr
        frames = self._frames.get(key)
        if frames is None:
            frames = self._frames[key] = self._walk_frames(location)
        return frames

    def _walk_frames(self, location: Any) -> tuple[tuple[str, int], ...]:
        from jaxlib.mlir import ir

        if isinstance(location, ir.FileLineColLoc):
            named = location.filename != UNNAMED
            return ((location.filename if named else MODULE_FILE, location.start_line),)
        if isinstance(location, ir.NameLoc):
            return self._frames_of(location.child_loc)
        if isinstance(location, ir.CallSiteLoc):
            return self._frames_of(location.callee) + self._frames_of(location.caller)
        if isinstance(location, ir.FusedLoc):
            return tuple(frame for part in location.locations for frame in self._frames_of(part))
        return ()


@cache
def _shown(file: str, base: str) -> tuple[str, bool]:
    """How `file` is printed, and whether it is library code (our models count as the user's)."""
    if _CELL.search(file):
        return CELL_FILE, False
    path = _real(file)
    if path.startswith(_NOWHERE) and path != MODULE_FILE:
        return path, True
    if _is_below(_OWN, path):
        return "pkg:" + _posix(path, _ROOT), _is_ours(path)
    installed = _INSTALLED.match(path)
    for root in (installed[0],) if installed else _library_roots():
        if path.startswith(root):
            return "pkg:" + _posix(path, root), True
    if path.startswith(base):
        return _posix(path, base), False
    return path, False


def _is_below(folders: Iterable[str], path: str) -> bool:
    return any(path.startswith(os.path.join(_ROOT, name, "")) for name in folders)


def _is_ours(path: str) -> bool:
    """True for our own code but the models, which count as the user's."""
    return _is_below(_OWN, path) and not _is_below((_MODELS,), path)


@cache
def _real(file: str) -> str:
    """An absolute path without symbolic links; a relative one (HLO metadata) as it is."""
    return os.path.realpath(file) if os.path.isabs(file) else file


def _posix(path: str, root: str) -> str:
    """`path` relative to `root`, with forward slashes."""
    return os.path.relpath(path, root).replace(os.sep, "/")


@cache
def _library_roots() -> tuple[str, ...]:
    """Folders of the standard library."""
    paths = sysconfig.get_paths()
    keys = ("stdlib", "platstdlib")
    return tuple(dict.fromkeys(os.path.join(os.path.realpath(paths[key]), "") for key in keys))


def _is_user(loc: Loc) -> bool:
    """True when the location is in code the user can edit, which includes our models."""
    return bool(loc.file) and (
        not loc.file.startswith("pkg:") or loc.file.startswith("pkg:" + _MODELS)
    )


def _join_scopes(outer: str, inner: str) -> str:
    """`outer/inner`, unless `inner` is already complete."""
    if not outer or not inner:
        return outer or inner
    return inner if inner.startswith(outer) else f"{outer}/{inner}"
