"""`shardwright parallel-compile`: neuron_parallel_compile's workflow.

`collect` runs the user's command with the capture hook on, `compile` compiles what it left, no
command does both; `analyze` says which operators of what it left are supported; `clean` removes
graphs, `clear-locks` the locks of the unit cache that nobody holds.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import ExecutionError, UsageError
from shardwright.compiler.frontend.counting import counted
from shardwright.compiler.frontend.hook import DEFAULT_DIRECTORY, DIRECTORY, EXTRACT_ONLY
from shardwright.compiler.machine.target import FIRST_TARGET
from shardwright.compiler.surface.resolve import find_target
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.commands.check_model import as_dict
from shardwright.orchestrator.compile.compile_flags import flags_alone, of_environment
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.host import python_path
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.submission.graphs import (
    CC_FLAGS,
    SUMMARY,
    GraphSummary,
    cached_by,
    clean,
    compile_graphs,
    graph_folders,
    read_graph,
)
from shardwright.orchestrator.terminal import outputs, terminal
from shardwright.orchestrator.terminal.age import AGAIN
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.terminal.terminal import one_line, say

RESULT = "result.json"
IGNORE_ERRORS = "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `parallel-compile` was asked; without a `command`, to collect and to compile."""

    command: str
    script: Sequence[str]
    flags: Sequence[str]
    job: JobConfig
    graphs: Path | None = None
    as_json: bool = False
    analyze_output: Path = Path()
    analyze_verbosity: int = 2
    again: str = AGAIN  # the command that asks anew

    @property
    def directory(self) -> Path:
        """Where the graphs are."""
        given = self.graphs or os.environ.get(DIRECTORY) or DEFAULT_DIRECTORY
        return Path(given).resolve()


def run(asked: Asked) -> int:
    """Do what was asked; returns the exit code."""
    match asked.command:
        case "clean":
            count = clean(asked.directory)
            say(f"removed {count} graphs of {asked.directory}")
            return 0
        case "clear-locks":
            job = cached_by(flags_alone(asked.flags, CC_FLAGS), asked.job)
            local = open_cache(job.cache).local
            free, held = local.clear_locks()
            say(f"removed {free} locks of {local.place}" + (f", {held} held" if held else ""))
            return 0
    if asked.command == "analyze":
        return _analyze(asked)
    if asked.command != "compile":
        _collect(asked)
    return _compile(asked) if asked.command != "collect" else 0


def _collect(asked: Asked) -> None:
    """Run the user's command. Raises UsageError without one, ExecutionError when it fails."""
    if not asked.script:
        raise UsageError(
            "SW_USAGE",
            "parallel-compile requires the command that runs the script, got none",
            hint="for example: shardwright parallel-compile python train.py --steps 10",
        )
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": python_path()}
    environment |= {EXTRACT_ONLY: "1", DIRECTORY: str(asked.directory)}
    before = len(graph_folders(asked.directory))
    try:
        # What the script prints is for people: stdout stays the summary.
        output = sys.stderr if asked.as_json else None
        code = subprocess.run(asked.script, env=environment, stdout=output, check=False).returncode
    except OSError as error:
        raise UsageError(
            "SW_USAGE", f"cannot run {asked.script[0]}: {error.strerror or error}"
        ) from error
    count = len(graph_folders(asked.directory))
    say(f"{count} graphs, {count - before} of them new, in {asked.directory}", err=True)
    if code and not reading.value(IGNORE_ERRORS, False):
        raise ExecutionError(
            "SW_SCRIPT",
            f"`{shlex.join(asked.script)}` ended with exit code {code}",
            hint=f"its output above says why; {IGNORE_ERRORS}=1 compiles what it left all the same",
        )


def _check_graphs(asked: Asked) -> None:
    if not graph_folders(asked.directory):
        raise UsageError(
            "SW_GRAPH",
            f"parallel-compile requires graphs in {asked.directory}, got none",
            hint="put @shardwright.capture on the jitted step, and collect",
        )


def _analyze(asked: Asked) -> int:
    """Collect the graphs of a script, if one is given, and write which of their operators are
    supported."""
    if asked.script:
        _collect(asked)
    _check_graphs(asked)
    given = [*of_environment(os.environ), *flags_alone(asked.flags, CC_FLAGS)]
    named = [flag.value for flag in given if flag.flag.name == "target"]
    compiler = find_target([FIRST_TARGET, *named][-1]).core.compiler
    found = {}
    for folder in graph_folders(asked.directory):
        data, about = read_graph(folder)
        one = counted(data, str(folder), compiler)
        found[folder.name] = {"name": about["name"], **as_dict(one, asked.analyze_verbosity > 1)}
        say(f"{about['name']}: {one.supported} of {one.total} operators supported", err=True)
    counts = {
        key: sum(one[key] for one in found.values())
        for key in ("operators", "supported", "unsupported")
    }
    text = dumps({"compiler": compiler, **counts, "graphs": found}, indent=1)
    outputs.write(asked.analyze_output / RESULT, text, "--analyze-output")
    say(text if asked.as_json else str(asked.analyze_output / RESULT))
    return 0


def _compile(asked: Asked) -> int:
    """Compile the graphs, show and store the summary. Raises UsageError when there are none."""
    _check_graphs(asked)
    retries = reading.value("NEURON_PARALLEL_COMPILE_MAX_RETRIES", 0)
    with Progress("quiet" if asked.as_json else asked.job.run.progress) as progress:
        summary = compile_graphs(asked.directory, asked.flags, asked.job, progress, retries)
    text = dumps(summary.as_dict(), indent=1)
    told, code = list(summary.notices), summary.exit_code
    try:
        outputs.write(asked.directory / SUMMARY, text, "--graphs")
    except UsageError as error:  # NEFFs are there, and what was to be said of them is said
        told, code = [*told, error.diagnostic], code or error.exit_code
    for notice in told:
        say(notice.render(), err=True)
    if asked.as_json:
        say(text)
    else:
        _screen(summary, asked.directory, asked.again)
    return code


def _screen(summary: GraphSummary, directory: Path, again: str) -> None:
    right = ("units", "cached", "compiled", "failed")
    table = terminal.table("graph", "status", *right, right=right, box=None, pad_edge=True)
    for graph in summary.graphs:
        status = "cached" if graph.cached else "compiled" if graph.neff else "failed"
        table.add_row(one_line(Path(graph.folder).name), status, *graph.units.cells())
    terminal.console().print(table)
    say(
        f"{summary.total} graphs in {summary.seconds:.1f} s: {summary.succeeded} succeeded"
        f" ({summary.cached} cached), {summary.failed} failed\n{directory}"
    )
    if text := summary.units.stored_text(again):
        say(text)
    for graph in summary.graphs:
        if graph.error:
            say(f"{one_line(graph.name)}: {graph.error.render()}", err=True)
