"""Parts of a model on their way to NEFF files: modules that were lowered in this process, and the
folder of what is left on the way."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.compiler.frontend.detect import AS_IT_IS, Asked, Module, import_file
from shardwright.compiler.frontend.locations import MODULE_FILE
from shardwright.compiler.frontend.rules.restrictions import checks_for
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.surface.releases import Profile
from shardwright.compiler.surface.resolve import Resolved
from shardwright.orchestrator.compile.compile_log import FileLog
from shardwright.orchestrator.compile.modules import compiled
from shardwright.orchestrator.terminal.outputs import write

LOG = "log-neuron-cc.txt"
WORKDIR = "compiler_workdir"


@dataclass(frozen=True, slots=True)
class InProcess:
    """A reader of modules that were lowered here, which need no child process; with names of their
    arguments and results, where they have some."""

    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    def read(
        self,
        data: bytes,
        base_dir: str,
        profile: Profile,
        name: str = MODULE_FILE,
        asked: Asked = AS_IT_IS,
    ) -> tuple[Graph, Module]:
        """The graph of a module, and what was in it."""
        checks = checks_for(profile, asked.generation, asked.fp8_as_e4m3)
        known = profile.has("constant_index_check")
        graph, module = import_file(data, base_dir, checks, asked, known)
        if not self.arguments and not self.results:
            return graph, module
        return graph, replace(module, arguments=self.arguments, results=self.results)


def part_neff(
    artifact: bytes, name: str, resolved: Resolved, folder: Path, reader: InProcess | None = None
) -> bytes:
    """The NEFF of a part's module; both, and the log, are left in a folder. Raises
    DiagnosticError."""
    write(folder / f"{name}.stablehlo", artifact, WORKDIR)
    with FileLog(folder / LOG) as log:
        neff = compiled(Path(f"{name}.stablehlo"), artifact, resolved, log, reader or InProcess())
    write(folder / f"{name}.neff", neff, WORKDIR)
    return neff


@contextmanager
def workdir(asked: Path | str) -> Iterator[Path]:
    """The folder of what is left on the way: one that stays where it is asked for."""
    if asked:
        folder = Path(asked)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
