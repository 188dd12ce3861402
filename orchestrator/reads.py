"""What a user's own function reads while it is captured: data files beside it or anywhere else,
modules from elsewhere on the import path, variables of the environment, packages.

They are known only after a capture. The plan cache keeps their list, so that an answer is never
taken for one of other data.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator import environment
from orchestrator.host import package_folder
from orchestrator.service.units import PACKAGES, digest

LARGEST = 64 * 2**20
"""Bytes of the largest file that is read to tell whether it changed (our choice); larger ones by
their size and time."""

FILE, VARIABLE, PACKAGE = "read ", "environment ", "package "
"""What the name of something that was read begins with."""

_SYSTEM = ("/proc", "/sys", "/dev")
_THREAD = threading.local()


@contextmanager
def recorded(found: dict[str, str]) -> Iterator[None]:
    """Add to `found` the digests of the user's files that this thread opens for reading in the
    block, and of the modules that are loaded at its end."""
    _listen()
    opened: set[str] = set()
    _THREAD.opened = opened
    try:
        yield
    finally:
        _THREAD.opened = None
    paths = opened | loaded_files()
    found |= file_digests(sorted(path for path in paths if _is_users(path)))


@contextmanager
def all_recorded(found: dict[str, str]) -> Iterator[None]:
    """As `recorded`, by names that `observed` understands, with variables that this thread reads
    and packages that are loaded at the end."""
    files: dict[str, str] = {}
    names: set[str] = set()
    try:
        with recorded(files), environment.heard(names):
            yield
    finally:
        found |= {f"{FILE}{path}": value for path, value in files.items()}
        variables = sorted(f"{VARIABLE}{name}" for name in names)
        packages = sorted(f"{PACKAGE}{name}" for name in environment.imported_packages())
        found |= observed([*variables, *packages])


def observed(names: Iterable[str]) -> dict[str, str]:
    """What there is now of what was read, by its names."""
    kinds: Mapping[str, Any] = {
        FILE: file_digests,
        VARIABLE: environment.variable_digests,
        PACKAGE: environment.package_versions,
    }
    found: dict[str, str] = {}
    names = tuple(names)
    for start, values in kinds.items():
        chosen = [name.removeprefix(start) for name in names if name.startswith(start)]
        found |= {f"{start}{name}": value for name, value in values(chosen).items()}
    return found


def loaded_files() -> set[str]:
    """Files of all modules that are loaded."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {os.path.abspath(name) for name in files if isinstance(name, str)}


def file_digests(paths: Iterable[str]) -> dict[str, str]:
    """Digests of files by path; empty for what is no file any more."""
    return {path: _file_digest(path) for path in paths}


def _file_digest(path: str) -> str:
    try:
        about = os.stat(path)
        if about.st_size > LARGEST:
            return f"{about.st_size} bytes of {about.st_mtime_ns}"
        return digest([Path(path).read_bytes()])
    except OSError:
        return ""


@cache
def _listen() -> None:
    """Hear of every file that is opened; a hook stays as long as the process."""
    sys.addaudithook(_opened)


def _opened(event: str, args: tuple[Any, ...]) -> None:
    opened: set[str] | None = getattr(_THREAD, "opened", None)
    if opened is None or event != "open":
        return
    path, _, flags = args
    if isinstance(path, str | bytes) and not flags & (os.O_WRONLY | os.O_RDWR):
        opened.add(os.path.abspath(os.fsdecode(path)))


def _is_users(path: str) -> bool:
    """Whether a file is there, and no part of Python, of an installed package or of ours. What is
    said about a package, its version says."""
    if path.endswith(".pyc") or ".dist-info" + os.sep in path or not os.path.isfile(path):
        return False
    return not any(Path(path).is_relative_to(folder) for folder in _foreign())


@cache
def _foreign() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names]
    folders += [*site.getsitepackages(), site.getusersitepackages(), *_SYSTEM]
    folders += [str(package_folder(name)) for name in PACKAGES]
    return tuple(os.path.abspath(folder) for folder in folders)
