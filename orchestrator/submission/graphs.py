"""Graphs that a user's script left (`compiler/frontend/hook.py`), compiled together.

A graph has a folder of its own: the artifact, what it is, and after compilation its NEFF and a log.
Each is compiled as `shardwright compile` compiles a file, but their functions are one batch of the
service. Flags are those of NEURON_CC_FLAGS and of the caller, the right-most wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import (
    Diagnostic,
    ExecutionError,
    InternalError,
    LoadError,
    UsageError,
)
from shardwright.compiler.driver import link_outlined
from shardwright.compiler.frontend import isolated
from shardwright.compiler.frontend.hook import ABOUT, GRAPH
from shardwright.compiler.outline import outline_programs
from shardwright.compiler.outline.unit import unpack_function
from shardwright.compiler.support.files import read_regular
from shardwright.compiler.surface.resolve import Given, Resolved, resolve
from shardwright.orchestrator.cache.location import locate, named_by
from shardwright.orchestrator.compile.compile_flags import flags_alone, of_environment
from shardwright.orchestrator.compile.compile_log import FileLog
from shardwright.orchestrator.compile.modules import OpenModule, finished, open_module
from shardwright.orchestrator.config.config import JobConfig, asked_now
from shardwright.orchestrator.road.parts import Parts, parts_of
from shardwright.orchestrator.road.units import unit_service
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.service.service import Settled
from shardwright.orchestrator.submission.together import (
    Ended,
    Task,
    UnitCounts,
    compile_together,
    end_as_dict,
)
from shardwright.orchestrator.terminal.outputs import write, writing

CC_FLAGS = "--cc-flags"
_MAX_GRAPH_BYTES, _MAX_ABOUT_BYTES = 2**32, 2**20
"""Our choice: what is larger was not captured."""
NEFF, LOG, SUMMARY = "model.neff", "log-neuron-cc.txt", "compile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """What became of one graph; `neff` is empty when it failed. Cached: the cache had all units."""

    name: str
    folder: str
    neff: str
    units: UnitCounts
    error: Diagnostic | None = None
    exit_code: int = 0
    retries: int = 0

    @property
    def cached(self) -> bool:
        """Whether nothing of it was compiled now."""
        return bool(self.neff) and not self.units.compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSummary:
    """What became of all graphs. Those that were cached have succeeded, too."""

    graphs: tuple[CompiledGraph, ...]
    units: UnitCounts
    seconds: float
    notices: tuple[Diagnostic, ...] = ()

    @property
    def total(self) -> int:
        """Graphs."""
        return len(self.graphs)

    @property
    def succeeded(self) -> int:
        """Graphs with a NEFF."""
        return sum(bool(graph.neff) for graph in self.graphs)

    @property
    def failed(self) -> int:
        """Graphs without one."""
        return self.total - self.succeeded

    @property
    def cached(self) -> int:
        """Graphs of which nothing was compiled now."""
        return sum(graph.cached for graph in self.graphs)

    @property
    def exit_code(self) -> int:
        """0, or that of the first graph that failed."""
        return next((graph.exit_code for graph in self.graphs if graph.exit_code), 0)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        rows = [end_as_dict(graph) | {"cached": graph.cached} for graph in self.graphs]
        counts = ("total", "succeeded", "failed", "cached", "exit_code")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in counts},
            "seconds": self.seconds,
            "units": asdict(self.units),
            "graphs": rows,
        }


class _Graph:
    """A graph on its way."""

    def __init__(self, folder: Path, resolved: Resolved, reader: isolated.Reader) -> None:
        self.folder, self.neff = folder, folder / NEFF
        self._resolved, self._reader = resolved, reader
        self._log: FileLog | None = None
        self._opened: OpenModule | None = None
        self.name = folder.name.rpartition("-")[0]

    def prepare(self) -> Parts:
        """Read, and cut into units. Raises LoadError for an artifact that is not what was left."""
        with writing(self.neff, "--graphs"):
            self.neff.unlink(missing_ok=True)  # of an earlier compilation
        log = self._log = FileLog(self.folder / LOG)
        data, about = read_graph(self.folder)
        self.name = about["name"]
        file = Path(f"{self.name}.stablehlo")
        resolved = self._resolved
        self._opened = open_module(file, data, resolved, log, self._reader)
        _check_plain(self._opened)
        outlined = outline_programs((self._opened.program,))
        self._opened.watch.outlined(outlined)
        return parts_of(outlined, resolved.command.target.name, resolved.options)

    def finish(self, parts: Parts, settled: Settled) -> None:
        """Link, check, write."""
        assert self._opened is not None and self._log is not None
        functions = map(unpack_function, parts.compiled(settled))
        program = link_outlined(parts.outlined, functions, parts.target, self._opened.watch)
        write(self.neff, finished(self._opened, program, self._resolved, self._log), "--graphs")

    def told(self, ended: Ended) -> CompiledGraph:
        """Its row, and the end of its log."""
        error = ended.error
        if self._log is not None:
            text = str(error) if error else f"wrote {self.neff}"
            self._log.say("error" if error else "info", text)
            self._log.close()
        return CompiledGraph(
            name=self.name,
            folder=str(self.folder),
            neff="" if error else str(self.neff),
            **ended.as_fields(),
        )


def _check_plain(opened: OpenModule) -> None:
    """Refuse what becomes several programs, for which there is no task of units yet."""
    if opened.placed is not None and not opened.placed.serial.is_plain:
        raise UsageError(
            "SW_USAGE",
            "parallel-compile requires graphs that are one program each, got one with"
            f" {len(opened.placed.serial.pieces)} pieces (a pipeline, or operators on the CPU)",
            hint="compile the graph.stablehlo of its folder with `shardwright compile`",
        )


def graph_folders(directory: Path) -> list[Path]:
    """The folders of whole graphs, by name."""
    return sorted(path.parent for path in directory.glob(f"*/{ABOUT}"))


def compile_graphs(
    directory: Path, flags: Sequence[str], job: JobConfig, progress: Progress, retries: int = 0
) -> GraphSummary:
    """Compile every graph of a directory; `job` says where units run and are cached. What failed
    without being refused is tried `retries` times more. Raises UsageError for flags that are not
    understood."""
    start = time.perf_counter()
    given = flags_alone(flags, CC_FLAGS)
    resolved, job = resolve([*of_environment(os.environ), *given]), cached_by(given, job)
    if resolved.command.no_cache:
        job = asked_now(job.but({"cache.fresh": True}))
    elif resolved.command.retry_failed_compilation:
        job = job.but({"cache.failed_since_s": time.time()})
    with ExitStack() as stack:
        reader = stack.enter_context(isolated.Reader())
        graphs = [_Graph(folder, resolved, reader) for folder in graph_folders(directory)]
        service = stack.enter_context(unit_service(job, progress))
        tasks = [Task(graph.prepare, graph.finish) for graph in graphs]
        ended, counts = compile_together(tasks, service)
        tried = [0] * len(tasks)
        while lost := [n for n, end in enumerate(ended) if _is_lost(end) and tried[n] < retries]:
            ends = {error.code for n in lost if (error := ended[n].error)}
            service.rows[:] = [row for row in service.rows if row.error not in ends]
            again, counts = compile_together([tasks[n] for n in lost], service)
            for number, end in zip(lost, again, strict=True):
                ended[number] = end
                tried[number] += 1
        told = zip(graphs, ended, tried, strict=True)
        rows = [replace(graph.told(end), retries=count) for graph, end, count in told]
    return GraphSummary(
        graphs=tuple(rows),
        units=counts,
        seconds=round(time.perf_counter() - start, 3),
        notices=(*resolved.notices, *service.findings),
    )


def _is_lost(end: Ended) -> bool:
    """Whether another try may end otherwise: a refusal stays one."""
    return isinstance(end.error, ExecutionError | InternalError)


def cached_by(flags: Sequence[Given], job: JobConfig) -> JobConfig:
    """The job with the cache that `--cache_dir` among the flags names, as it does in
    NEURON_CC_FLAGS, unless the job names one itself. Raises UsageError for no place."""
    place = named_by(flags)
    if not place or job.cache.dir:
        return job
    locate(place, job.cache.local_dir, source=f"--cache_dir of {CC_FLAGS}")
    return job.but({"cache.dir": place})


def clean(directory: Path) -> int:
    """Remove the graphs of a directory and what was made of them; how many. Nothing else."""
    folders = graph_folders(directory)
    for folder in folders:
        for name in (ABOUT, GRAPH, NEFF, LOG):  # without its description a graph is none
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    (directory / SUMMARY).unlink(missing_ok=True)
    return len(folders)


def read_graph(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The artifact of a folder, and what it is. Raises LoadError for another one."""
    try:
        data = read_regular(folder / GRAPH, _MAX_GRAPH_BYTES)
        about = json.loads(read_regular(folder / ABOUT, _MAX_ABOUT_BYTES))
        if about["digest"] == hashlib.sha256(data).hexdigest() and isinstance(about["name"], str):
            return data, about
        found = "another artifact"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
    raise LoadError(
        "SW_GRAPH",
        f"{folder} requires the graph that was captured, got {found}",
        hint="collect again: parallel-compile --command collect",
    )
