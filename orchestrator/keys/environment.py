"""What a captured step depends on besides files: variables of the environment and versions of
installed packages.

Variables that jax reads belong to every key. Those that a user's own function reads, and the
packages it imports, are known only after a capture; their names are kept with those of the files
that it read (`reads.py`). Nothing here imports jax.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from shardwright.orchestrator.config.model import installed
from shardwright.orchestrator.service.units import digest

LIBRARIES = ("jax", "jaxlib", "ml-dtypes", "numpy", "opt-einsum", "optax", "scipy")
"""Distributions that capture a step of ours, or of anybody."""
EVERY_NAME = "*"
"""The name under which a walk over all variables is kept: which there are."""

_SILENT = {"shardwright", "jax", "jaxlib", "ctypes", "platform", "subprocess", "sysconfig"}
"""Modules whose reading says nothing: what jax reads is in every key, the others copy all variables
for a child."""
_MAPPINGS = ("os", "collections.abc")  # the second calls itself so
_THREAD = threading.local()
_CHANGED: dict[str, tuple[str | None, str | None]] = {}
"""Variables that user's functions set: before and after."""


def always() -> dict[str, str]:
    """Parts of every key: variables that jax reads, versions of our libraries."""
    found = {f"environment {name}": value for name, value in jax_variables().items()}
    return found | {f"package {name}": text for name, text in package_versions(LIBRARIES).items()}


def jax_variables() -> dict[str, str]:
    """Variables that jax reads, by name."""
    found = sorted(variables().items())
    return {name: v for name, v in found if name.startswith("JAX_") or name == "XLA_FLAGS"}


def variables() -> dict[str, str]:
    """The environment without what functions of users made of it: as a new command has it."""
    found: dict[str, str] = dict(os.environ)
    for name, (before, after) in _CHANGED.items():
        if found.get(name) == after:
            found.pop(name, None)
            found |= {} if before is None else {name: before}
    return found


def variable_digests(names: Iterable[str]) -> dict[str, str]:
    """Digests of variables, which may be secrets; empty for one that is not set."""
    known = variables()
    told = {name: [os.fsencode(value)] for name, value in known.items()}
    told[EVERY_NAME] = list(map(os.fsencode, sorted(known)))
    return {name: digest(told[name]) if name in told else "" for name in names}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of installed distributions; empty for one that is not there."""
    found: dict[str, list[str]] = {}
    for entry in installed():
        name, _, version = entry.removesuffix(".dist-info").rpartition("-")
        found.setdefault(_plain(name), []).append(version)
    return {name: " ".join(found.get(_plain(name), ())) for name in names}


def imported_packages() -> set[str]:
    """Distributions of what this process has imported, without those that a package brings along
    for itself."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    owners = _owners((*sys.path, *installed()))
    names = {_plain(owner) for top in tops for owner in owners.get(top, ())}
    return {name for name, version in package_versions(names).items() if version}


@cache
def _owners(_: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Distributions by top-level module; the argument is what they depend on."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _plain(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def heard(found: set[str]) -> Iterator[None]:
    """Add to `found` the variables that this thread reads in the block, and remember what it makes
    of them."""
    _listen()
    before = dict(os.environ)
    _THREAD.names = found
    try:
        yield
    finally:
        _THREAD.names = None
        after = dict(os.environ)
        for name in before.keys() | after.keys():
            old, new = before.get(name), after.get(name)
            if old != new:
                _CHANGED[name] = (_CHANGED.get(name, (old, new))[0], new)


@cache
def _listen() -> None:
    """Hear of every variable that is read, in all ways `os.environ` has; it stays as long as the
    process."""
    kind: Any = type(os.environ)
    plain_item, plain_walk = kind.__getitem__, kind.__iter__

    def item(self: Any, key: Any) -> Any:
        _read(key)
        return plain_item(self, key)

    def walk(self: Any) -> Any:
        _read(EVERY_NAME)
        return plain_walk(self)

    kind.__getitem__, kind.__iter__ = item, walk


def _read(key: Any) -> None:
    names: set[str] | None = getattr(_THREAD, "names", None)
    if names is not None and isinstance(key, str | bytes) and _reader() not in _SILENT:
        names.add(os.fsdecode(key).encode(errors="backslashreplace").decode())


def _reader() -> str:
    """The package whose code asked for a variable."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _MAPPINGS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0]
