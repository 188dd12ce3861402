"""The work units: pure functions from bytes to bytes, the only code executors call.

`partition` partitions one strategy point (its Shardy child is a process of its own); `compile`
compiles one distinct function. Keys are digests of what the result depends on, so equal keys mean
equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import msgpack

from compiler.options import CompileOptions
from compiler.target import load_target

PACKAGES = ("collectives", "compiler", "orchestrator", "sharding", "sim_cluster")
_ROOT = Path(__file__).resolve().parent.parent
# What the result of each kind of unit depends on besides its payload.
_SOURCES = {"partition": ("sharding", "compiler"), "compile": ("compiler", "collectives")}


def run_unit(kind: str, payload: bytes) -> bytes:
    """Run the unit function of `kind`."""
    return _UNITS[kind](payload)


def _partition(payload: bytes) -> bytes:
    from sharding.shardy import run_child

    return run_child(payload)


def _compile(payload: bytes) -> bytes:
    from compiler.driver import compile_function

    function, target, options = msgpack.unpackb(payload)
    return compile_function(function, target, CompileOptions.unpacked(options))


_UNITS: dict[str, Callable[[bytes], bytes]] = {"partition": _partition, "compile": _compile}


def compile_payload(function: bytes, target: str, options: CompileOptions) -> bytes:
    """The payload of a compile unit: a function without locations, the target's name, options."""
    payload: bytes = msgpack.packb([function, target, options.packed()])
    return payload


def unit_key(kind: str, payload: bytes, target: str = "") -> str:
    """Digest of the payload, the sources the unit runs, and the target's table."""
    parts = [kind.encode(), payload, source_digest(_SOURCES[kind]).encode()]
    if target:
        parts.append(load_target(target).digest.encode())
    return digest(parts)


def digest(parts: Iterable[bytes]) -> str:
    """Sha256 over length-prefixed parts."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


@cache
def source_digest(
    packages: tuple[str, ...], suffixes: tuple[str, ...] = (".py", ".json", ".toml")
) -> str:
    """Digest of the Python and data files of our packages, by relative path."""
    files = sorted(
        path
        for package in packages
        for path in (_ROOT / package).rglob("*")
        if path.suffix in suffixes
    )
    parts = [p.relative_to(_ROOT).as_posix().encode() + b"\0" + p.read_bytes() for p in files]
    return digest(parts)
