"""Bundles on disk: write a linked step, and load one back with every digest checked.

Loading needs only NumPy, msgpack and zstandard, and only what is inside the directory: a bundle may
be moved anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.isa.decode import decode_function, decode_program, unpack_attrs
from shardwright.compiler.isa.encode import encode_program, pack_attrs
from shardwright.compiler.isa.program import Function, Program
from shardwright.compiler.neff.format import FEATURE_BORDERS, FEATURE_ROW_SUMS, FEATURE_SUBGRAPHS
from shardwright.compiler.neff.manifest import MAX_CORE_FILES, CoreBinding, Manifest
from shardwright.compiler.neff.meta import check_program_meta
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.compiler.support.files import write_atomic


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded bundle: the manifest and its programs by name."""

    path: Path
    manifest: Manifest
    programs: Mapping[str, Program]


def program_bytes(program: Program, meta: Mapping[str, Any], compress: bool = True) -> bytes:
    """The NEFF of one program; `meta` says which compiler, options and graph made it."""
    meta = {"name": program.name, "target": program.target, "lnc": program.lnc, **meta}
    features = FEATURE_SUBGRAPHS if program.lnc > 1 else 0
    features |= FEATURE_BORDERS if any(f.has_borders for f in program.functions) else 0
    sections = encode_program(program)
    features |= FEATURE_ROW_SUMS if any(s.endswith("/row_sums") for s in sections) else 0
    return pack("program", meta, sections, compress, features)


def read_program(
    container: Container, function: Callable[[Mapping[str, Any]], Function] = decode_function
) -> Program:
    """The program of a container of kind `program`; `function` as in `decode_program`.

    Raises LoadError when the content makes no sense.
    """
    try:
        program = decode_program(container.read, container.sections, function)
        check_program_meta(program, container.meta)
        return program
    except LoadError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LoadError("SW_NEFF_CONTENT", f"{container.name}: program: {error!r}") from error


def write_bundle(
    path: Path, manifest: Manifest, programs: Mapping[str, Program], meta: Mapping[str, Any]
) -> Manifest:
    """Write the directory and return the manifest with the digests filled in. Raises LoadError for
    a folder of it that is a link to another place."""
    for folder in (path / "programs", path / "cores"):
        if folder.is_symlink():
            raise LoadError(
                "SW_NEFF_PATH",
                f"{folder}: a folder is required, got a link to {folder.resolve()}",
                None,
                "remove the link, or write the bundle to another directory",
            )
    digests = {}
    for name, program in programs.items():
        data = program_bytes(program, meta)
        digests[name] = hashlib.sha256(data).hexdigest()
        write_atomic(path / "programs" / f"{digests[name]}.neff", data)
    manifest = replace(manifest, programs=digests)
    data = pack("manifest", manifest.to_meta(), {})
    write_atomic(path / "manifest.neff", data)
    _write_cores(path, manifest, hashlib.sha256(data).hexdigest())
    _remove_others(path, manifest)
    return manifest


def _remove_others(path: Path, manifest: Manifest) -> None:
    """Remove the files of an earlier bundle in the same directory."""
    cores = manifest.num_cores
    kept = {f"{sha}.neff" for sha in manifest.programs.values()}
    kept |= {"cores.neff"} if cores > MAX_CORE_FILES else set(map(_core_file, range(cores)))
    for pattern in ("programs/*.neff", "cores/core-*.neff", "cores.neff"):
        for file in path.glob(pattern):
            if file.name not in kept:
                file.unlink()


def core_binding(manifest: Manifest, manifest_sha256: str, rank: int) -> CoreBinding:
    """The binding of one rank of a row-major mesh."""
    coordinates, rest = {}, rank
    for axis, size in reversed(list(manifest.mesh.items())):
        rest, coordinates[axis] = divmod(rest, size)
    return CoreBinding(
        rank=rank,
        coordinates={axis: coordinates[axis] for axis in manifest.mesh},
        programs=manifest.programs_on(manifest.stage(rank)),
        target=manifest.target,
        manifest_sha256=manifest_sha256,
    )


def _write_cores(path: Path, manifest: Manifest, digest: str) -> None:
    bindings = [core_binding(manifest, digest, rank) for rank in range(manifest.num_cores)]
    if len(bindings) > MAX_CORE_FILES:
        table = {"bindings": pack_attrs([b.to_meta() for b in bindings])}
        write_atomic(path / "cores.neff", pack("cores", {"count": len(bindings)}, table))
        return
    for binding in bindings:
        data = pack("core", binding.to_meta(), {})
        write_atomic(path / "cores" / _core_file(binding.rank), data)


def _core_file(rank: int) -> str:
    return f"core-{rank:05d}.neff"


def load_bundle(path: Path, target: str | None = None) -> Bundle:
    """Load and verify a bundle.

    Raises LoadError; `target`, when given, must be the one it was compiled for.
    """
    container = Container.open(path / "manifest.neff", "manifest", path)
    manifest = Manifest.from_meta(container.meta, container.name)
    if target is not None and manifest.target != target:
        raise LoadError(
            "SW_NEFF_TARGET",
            f"{path}: a bundle for {target} is required, got one for {manifest.target}",
            None,
            f"compile with --target {target}",
        )
    digest = hashlib.sha256(container.data).hexdigest()
    _check_cores(path, manifest, digest)
    programs = {name: _load_program(path, name, sha) for name, sha in manifest.programs.items()}
    for name, program in programs.items():
        if program.functions and program.lnc != manifest.lnc:
            raise _mixed_up(
                "SW_NEFF_BINDING",
                f"{path}: program {name} requires logical NeuronCores of {program.lnc}, the"
                f" manifest binds it to those of {manifest.lnc}",
            )
    return Bundle(path, manifest, programs)


def _load_program(path: Path, name: str, sha: str) -> Program:
    container = Container.open(path / "programs" / f"{sha}.neff", "program", path)
    container.verify()
    if hashlib.sha256(container.data).hexdigest() != sha:
        message = f"{container.name}: program {name} is not the one the manifest names"
        raise _mixed_up("SW_NEFF_CHECKSUM", message)
    return read_program(container)


def _mixed_up(code: str, message: str) -> LoadError:
    return LoadError(code, message, None, "compile again or copy the bundle again")


def _check_cores(path: Path, manifest: Manifest, digest: str) -> None:
    for rank, binding in enumerate(_read_cores(path, manifest.num_cores)):
        if binding != core_binding(manifest, digest, rank):
            message = f"{path}: core {rank} is bound to another manifest or to other programs"
            raise _mixed_up("SW_NEFF_BINDING", message)


def _read_cores(path: Path, cores: int) -> Sequence[CoreBinding]:
    if cores > MAX_CORE_FILES:
        container = Container.open(path / "cores.neff", "cores", path)
        rows = unpack_attrs(container.read("bindings"))
        if len(rows) != cores:
            raise LoadError(
                "SW_NEFF_BINDING", f"{path}: {cores} cores are required, got {len(rows)}"
            )
        return [CoreBinding.from_meta(row, container.name) for row in rows]
    names = map(_core_file, range(cores))
    files = [Container.open(path / "cores" / name, "core", path) for name in names]
    return [CoreBinding.from_meta(file.meta, file.name) for file in files]
