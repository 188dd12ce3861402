"""What a user's own function reads while it is captured: data files beside it or anywhere else,
modules and where they were looked for, lists of folders, variables of the environment, packages.

They are known only after a capture. The plan cache keeps their list, so that an answer is never
taken for one of other data.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from typing import Any

from shardwright.orchestrator.host import DOOR, package_folder
from shardwright.orchestrator.keys import environment
from shardwright.orchestrator.service.units import PACKAGES, digest

LARGEST = 64 * 2**20
"""Bytes of the largest file that is read to tell whether it changed (our choice); larger ones by
their size and time."""

FILE, FOLDER, MODULE = "read ", "listed ", "looked for "
VARIABLE, PACKAGE = "environment ", "package "
"""What the name of something that was read begins with."""

Reads = dict[str, str]
"""Digests of what was read, by names that `observed` understands."""

_SYSTEM = ("/proc", "/sys", "/dev")
_IMPORT_SYSTEM = ("importlib", "_frozen_importlib")  # its lists of folders are no answer to anybody
_LOADERS: tuple[tuple[Any, list[str]], ...] = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_THREAD = threading.local()


@dataclass(slots=True)
class _Heard:
    """Absolute paths: of files that were opened for reading, folders that were listed, and modules
    as `folder/name` for each folder that was searched."""

    opened: set[str] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)

    def names(self) -> list[str]:
        """What was the user's, by names that `observed` understands."""
        files = {path for path in self.opened | loaded_files() if not os.path.isdir(path)}
        # A module that raised is loaded no more, and its file not opened where it was compiled.
        files |= {path for path in module_files(self.modules).values() if os.path.isfile(path)}
        found = [f"{FILE}{path}" for path in sorted(files) if is_users(path)]
        found += [f"{FOLDER}{path}" for path in sorted(self.listed) if not _is_foreign(path)]
        return found + [f"{MODULE}{name}" for name in sorted(self.modules) if is_users(name)]


@contextmanager
def recorded(found: Reads) -> Iterator[None]:
    """Add to `found`, by names that `observed` understands, what this thread reads in the block,
    and the modules and packages that are loaded at its end."""
    _listen()
    heard = _THREAD.heard = _Heard()
    variables: set[str] = set()
    try:
        with environment.heard(variables):
            yield
    finally:
        _THREAD.heard = None
        names = heard.names()
        names += sorted(f"{VARIABLE}{name}" for name in variables)
        names += sorted(f"{PACKAGE}{name}" for name in environment.imported_packages())
        found |= observed(names)


def observed(names: Iterable[str]) -> Reads:
    """What there is now of what was read, by its names; empty for what is not there."""
    kinds: Mapping[str, Callable[[list[str]], Mapping[str, str]]] = {
        FILE: lambda paths: {path: file_digest(path) for path in paths},
        FOLDER: lambda paths: {path: _folder_digest(path) for path in paths},
        MODULE: module_files,
        VARIABLE: environment.variable_digests,
        PACKAGE: environment.package_versions,
    }
    found: Reads = {}
    names = tuple(names)
    for start, values in kinds.items():
        chosen = [name.removeprefix(start) for name in names if name.startswith(start)]
        found |= {f"{start}{name}": value for name, value in values(chosen).items()}
    return found


def loaded_files() -> set[str]:
    """Files of all modules that are loaded."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {os.path.abspath(name) for name in files if isinstance(name, str)}


def file_digest(path: str) -> str:
    """Digest of a file; empty for what is no file any more."""
    try:
        about = os.stat(path)
        if about.st_size > LARGEST:
            return f"{about.st_size} bytes of {about.st_mtime_ns}"
        return digest([Path(path).read_bytes()])
    except OSError:
        return ""


def _folder_digest(path: str) -> str:
    """Digest of the names in a folder, without what Python compiles; empty for what is no folder
    any more."""
    try:
        names = set(os.listdir(path)) - {"__pycache__"}
    except OSError:
        return ""
    return digest(map(os.fsencode, sorted(names)))


def module_files(names: Iterable[str]) -> dict[str, str]:
    """The file that `import` finds for `folder/name`, or the folder where there is no file; empty
    for none."""
    finders: dict[str, FileFinder] = {}  # new ones, which remember no list of a folder
    found = dict.fromkeys(names, "")
    for name in found:
        folder, module = os.path.split(name)
        finder = finders.setdefault(folder, FileFinder(folder, *_LOADERS))
        if (spec := finder.find_spec(module)) is not None:
            found[name] = spec.origin or name
    return found


class _Listener(MetaPathFinder):
    """Finds nothing, hears what is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        """As the import system asks; `path` is that of the package, none at the top."""
        heard: _Heard | None = getattr(_THREAD, "heard", None)
        if heard is not None:
            module = name.rpartition(".")[2]
            places = sys.path if path is None else path
            heard.modules |= {os.path.join(os.path.abspath(place), module) for place in places}


@cache
def _listen() -> None:
    """Hear of every file that is opened, every folder that is listed and every module that is
    looked for; both hooks stay as long as the process."""
    sys.addaudithook(_happened)
    sys.meta_path.insert(0, _Listener())


def _happened(event: str, args: tuple[Any, ...]) -> None:
    heard: _Heard | None = getattr(_THREAD, "heard", None)
    if heard is None:
        return
    if event == "open":
        path, _, flags = args
        if isinstance(path, str | bytes) and not flags & (os.O_WRONLY | os.O_RDWR):
            heard.opened.add(os.path.abspath(os.fsdecode(path)))
    elif event in ("os.listdir", "os.scandir"):
        path = "." if args[0] is None else args[0]
        asker = str(sys._getframe(1).f_globals.get("__name__"))
        if isinstance(path, str | bytes | os.PathLike) and not asker.startswith(_IMPORT_SYSTEM):
            heard.listed.add(os.path.abspath(os.fsdecode(path)))


def is_users(path: str) -> bool:
    """Whether a path is no part of Python, of an installed package or of ours. What is said about a
    package, its version says."""
    if path.endswith(".pyc") or ".dist-info" + os.sep in path:
        return False
    return not _is_foreign(os.path.dirname(path))


@cache
def _is_foreign(folder: str) -> bool:
    return any(Path(folder).is_relative_to(place) for place in _foreign())


@cache
def _foreign() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names]
    folders += [*site.getsitepackages(), site.getusersitepackages(), *_SYSTEM]
    folders += [str(DOOR), *(os.path.realpath(package_folder(name)) for name in PACKAGES)]
    folders += [place for place in sys.path if place.endswith(".zip")]  # as Python's own may be
    return tuple(os.path.abspath(folder) for folder in folders)
