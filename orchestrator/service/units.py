"""The work units: pure functions from bytes to bytes, the only code executors call.

`partition` partitions one strategy point (its Shardy child is a process of its own), `compile`
compiles one distinct function, `time` times a step under a profile. Keys are digests of what the
result depends on, so equal keys mean equal bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from functools import cache

import msgpack

from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.steps import unrecorded
from shardwright.orchestrator.host import package_folder

KeyParts = dict[str, str]
"""What a result depends on, by name."""
PACKAGES = ("collectives", "compiler", "orchestrator", "sharding", "sim_cluster")
# What the result of each kind of unit depends on besides its payload.
_SOURCES = {
    "partition": ("sharding", "compiler", "collectives"),  # a mesh's groups among them
    "compile": ("compiler", "collectives"),
    "time": ("sim_cluster", "compiler", "collectives"),  # the fitted constants among them
}


def run_unit(kind: str, payload: bytes) -> bytes:
    """Run the unit function of `kind`."""
    with unrecorded():  # what a dump shows of it is done again, with the user's locations
        return _UNITS[kind](payload)


def _partition(payload: bytes) -> bytes:
    from shardwright.sharding.partition.partitioner import ask

    return ask(payload)


def _compile(payload: bytes) -> bytes:
    from shardwright.compiler.driver import compile_function

    function, target, options = msgpack.unpackb(payload)
    return compile_function(function, target, CompileOptions.unpacked(options))


def _time(payload: bytes) -> bytes:
    from shardwright.sim_cluster.timing.timing_unit import answer

    return answer(payload)


_UNITS: dict[str, Callable[[bytes], bytes]] = {
    "partition": _partition,
    "compile": _compile,
    "time": _time,
}
KINDS = tuple(_UNITS)


def compile_payload(function: bytes, target: str, options: CompileOptions) -> bytes:
    """The payload of a compile unit: a function without locations, the target's name, options."""
    payload: bytes = msgpack.packb([function, target, options.packed()])
    return payload


def key_parts(kind: str, payload: bytes, target: str = "") -> KeyParts:
    """What the result of a unit depends on, by name: its payload, the target's table, and the
    sources it runs. `cache explain` tells people which of them differs."""
    parts = _PAYLOAD_PARTS.get(kind, _whole)(payload)
    if target:
        parts["target"] = f"{target} {load_target(target).digest}"
    return parts | {f"sources {name}": source_digest((name,)) for name in _SOURCES[kind]}


def parts_digest(kind: str, parts: KeyParts) -> str:
    """The key that parts make, in any order."""
    return digest([kind.encode(), *(f"{name}\0{parts[name]}".encode() for name in sorted(parts))])


def _whole(payload: bytes) -> KeyParts:
    return {"payload": hashlib.sha256(payload).hexdigest()}


def _compile_parts(payload: bytes) -> KeyParts:
    """Every option is a part, also those with their default."""
    function, _, packed = msgpack.unpackb(payload)
    options = dataclasses.asdict(CompileOptions.unpacked(packed))
    named = {f"option {name}": str(value) for name, value in options.items()}
    return {"function": hashlib.sha256(function).hexdigest()} | named


def _partition_parts(payload: bytes) -> KeyParts:
    from shardwright.sharding.partition.partitioner import partitioner_version

    return _whole(payload) | {"jaxlib": partitioner_version()}


def _time_parts(payload: bytes) -> KeyParts:
    from shardwright.sim_cluster.timing.timing_unit import question_parts

    return question_parts(payload)


_PAYLOAD_PARTS = {"partition": _partition_parts, "compile": _compile_parts, "time": _time_parts}


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
    folders = {package: package_folder(package) for package in packages}
    files = {
        f"{package}/{path.relative_to(folder).as_posix()}": path
        for package, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in suffixes
    }
    return digest(name.encode() + b"\0" + files[name].read_bytes() for name in sorted(files))
