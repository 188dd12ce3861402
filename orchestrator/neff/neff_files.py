"""Which program a file means: a program file itself, a core file with its bundle, or an export.

`export` writes one core of a bundle as a single file: its binding, the manifest and the programs it
runs, byte for byte. Whatever takes a program by file takes all three kinds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import LoadError, UsageError, nearest
from shardwright.compiler.isa.program import Program
from shardwright.compiler.neff.bundle import core_binding, read_program
from shardwright.compiler.neff.format import PROGRAM_SECTION
from shardwright.compiler.neff.manifest import CoreBinding, Manifest
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.terminal import say


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A program and the meta data of the container it came from."""

    program: Program
    meta: dict[str, Any]


def programs_of(path: Path) -> dict[str, Container]:
    """The verified program containers behind a file, by program name. Raises LoadError for damage,
    and for a kind of file that has no programs."""
    container = Container.open(path)
    container.verify()
    match container.header.kind:
        case "program":
            return {str(container.meta.get("name", "main")): container}
        case "core":
            binding = CoreBinding.from_meta(container.meta, container.name)
            bundle = path.parent.parent
            return {n: _beside(bundle, n, sha) for n, sha in binding.programs.items()}
        case "bundle" | "pipeline":
            return {
                name.removeprefix(PROGRAM_SECTION): Container(
                    container.read(name), f"{path}:{name}", "program"
                )
                for name in container.sections
                if name.startswith(PROGRAM_SECTION)
            }
    raise LoadError(
        "SW_NEFF_KIND",
        f"{path}: a program, core or exported file is required, got a {container.header.kind} file",
    )


def _beside(bundle: Path, name: str, sha: str) -> Container:
    container = Container.open(bundle / "programs" / f"{sha}.neff", "program", bundle)
    if hashlib.sha256(container.data).hexdigest() != sha:
        raise LoadError(
            "SW_NEFF_CHECKSUM",
            f"{container.name}: program {name} is not the one the core file names",
            hint="compile again or copy the bundle again",
        )
    return container


def mesh_of(opened: ProgramFile) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The mesh a program's collectives are over, and its inputs that are coordinates along it."""
    mesh = dict(opened.meta.get("mesh", ()))
    coordinates = {n: tuple(axes) for n, axes in opened.meta.get("coordinates", ())}
    return mesh, coordinates


def program_container(path: Path, name: str = "") -> Container:
    """The container of a program; `name` picks one where a file has several. Raises LoadError for
    damage, UsageError for a name that is missing or unknown."""
    found = programs_of(path)
    if not name and len(found) == 1:
        (name,) = found
    if name not in found:
        given = repr(name) if name else "none"
        raise UsageError(
            "SW_USAGE",
            f"{path} holds programs {', '.join(found)}; got {given}",
            hint=f"add --program {(*nearest(name, found), *found)[0]}",
        )
    return found[name]


def open_program(path: Path, name: str = "") -> ProgramFile:
    """The program of a file. Raises as `program_container`."""
    container = program_container(path, name)
    return ProgramFile(read_program(container), container.meta)


def export(bundle: Path, core: int, output: Path) -> int:
    """Write what core `core` of a bundle directory runs as one file. Raises LoadError for a damaged
    bundle, UsageError for a core it does not have."""
    container = Container.open(bundle / "manifest.neff", "manifest", bundle)
    manifest = Manifest.from_meta(container.meta, container.name)
    cores = manifest.num_cores
    if not 0 <= core < cores:
        raise UsageError("SW_USAGE", f"--core requires a number below {cores}, got {core}")
    binding = core_binding(manifest, hashlib.sha256(container.data).hexdigest(), core)
    sections = {
        f"{PROGRAM_SECTION}{name}": bytes(_beside(bundle, name, sha).data)
        for name, sha in manifest.programs.items()
    }
    sections["manifest"] = bytes(container.data)
    outputs.write(output, pack("bundle", binding.to_meta(), sections), "--output")
    say(f"{output}: core {core} of {cores}, programs {', '.join(manifest.programs)}")
    return 0
