"""`shardwright compile FILES ...`: neuronx-cc's command, one NEFF per model for one NeuronCore.

Reads the flags (`compile_flags.py`), finds out what each file holds, enforces the release's rules,
compiles in this process and writes a container that tells what made it. Exit code 0, 2 for what the
user typed, 70 for everything the compiler refuses.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compiler import budget
from compiler.diagnostics import DiagnosticError, InternalError, UsageError
from compiler.driver import Observer, compile_graph, with_ordinals
from compiler.frontend.detect import Module
from compiler.frontend.donation import Aliases
from compiler.ir.analysis import count_ops, flops
from compiler.ir.serialize import dump
from compiler.ir.types import Graph
from compiler.isa.program import Function, Program
from compiler.neff.bundle import program_bytes
from compiler.neff.writer import write_atomic
from compiler.outline import Outlined
from compiler.outline.unit import Unit
from compiler.passes.integers import downcasts
from compiler.passes.pipeline import run, step_passes, unit_passes
from compiler.program import StepProgram
from compiler.surface.resolve import Resolved, resolve
from orchestrator.bundling import compiler_version
from orchestrator.compile_flags import of_environment, parse
from orchestrator.compile_log import CompileLog
from orchestrator.compile_partition import with_partitions
from sharding.coordinates import coordinate_axes, coordinate_name, hoist_coordinates

COMPILE_FAILURE, USAGE = 70, 2


def main(arguments: Sequence[str]) -> int:
    """Run `compile`; returns the exit code. Mistakes on the command line raise UsageError."""
    files, given = parse(arguments, "shardwright compile")
    resolved = resolve([*of_environment(os.environ), *given])  # the right-most wins
    outputs = _outputs(files, resolved.command.output)
    with CompileLog(Path(resolved.command.logfile), resolved.command.verbose) as log:
        for notice in resolved.notices:
            log.say(notice.severity, notice.message)
        try:
            for file, output in zip(files, outputs, strict=True):
                _compile_file(Path(file), output, resolved, log)
        except DiagnosticError as error:
            log.failed(error, _facts(arguments, resolved, outputs))
            return USAGE if isinstance(error, UsageError) else COMPILE_FAILURE
        except Exception as error:
            trace = traceback.format_exc()
            log.failed(InternalError.of(error, trace), _facts(arguments, resolved, outputs))
            return COMPILE_FAILURE
        log.passed()
    return 0


def _outputs(files: Sequence[str], output: str) -> list[Path]:
    """The file to write for each model. Raises UsageError when several would be one."""
    if len(files) == 1:
        path = Path(output)
        return [path / f"{Path(files[0]).stem}.neff" if path.is_dir() else path]
    stems = [Path(file).name.partition(".")[0] for file in files]
    folder = Path("." if output == "file.neff" else output)
    if folder.suffix == ".neff" or len(set(stems)) < len(stems):
        raise UsageError(
            "SW_USAGE",
            f"several models require --output to be a directory and different names, got {output}",
        )
    return [folder / f"{stem}.neff" for stem in stems]


def _facts(
    arguments: Sequence[str], resolved: Resolved, outputs: Sequence[Path]
) -> list[tuple[str, str]]:
    """What a failure report needs besides the error."""
    facts = [
        ("Command line", shlex.join(["shardwright", "compile", *arguments])),
        ("Version", version_text()),
        ("Version profile", str(resolved.command.profile)),
        ("Host", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
    ]
    if resolved.command.save_temps:
        facts.append(("Artifacts", ", ".join(str(_temps(o)) for o in outputs)))
    return [*facts, ("Exit code", str(COMPILE_FAILURE))]


def version_text() -> str:
    """What `--version` prints."""
    import numpy as np

    python = platform.python_version()
    return (
        f"Shardwright compiler {compiler_version()}, Python {python}, NumPy {np.__version__},"
        " NEFF format 1"
    )


def _compile_file(file: Path, output: Path, resolved: Resolved, log: CompileLog) -> None:
    """One model file to one NEFF. Raises DiagnosticError."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError("SW_USAGE", f"cannot read {file}: {error.strerror}") from error
    log.dot()
    command, options = resolved.command, resolved.options
    temps = _temps(output) if command.save_temps else None
    graph, module = _import(data, file, resolved, temps, log)
    watch, aliases = _Watch(resolved, temps, log), module.facts.aliases
    with log.stage("compile"):
        budget.check_io_memory(graph, watch.limit_bytes, aliases)
        budget.check_graph_instructions(graph, options.instruction_limit, options.optlevel)
        program = compile_graph(_whole(graph, file, aliases), command.target.name, options, watch)
        budget.check_module_instructions(watch.instructions, options.instruction_limit)
        memory = budget.check_program_memory(program, watch.limit_bytes)
    _report_sizes(graph, watch, memory, log)
    meta = _meta(graph, module, program, resolved) | {"memory_bytes": memory.as_dict()}
    content = program_bytes(program, meta, compress=not command.fast_loading)
    with log.stage("write"):
        _write(output, content)
    log.dot()


def _write(output: Path, content: bytes) -> None:
    try:
        write_atomic(output, content)
    except OSError as error:
        raise UsageError(
            "SW_USAGE", f"--output requires a writable path, got {output}: {error.strerror}"
        ) from error


def _import(
    data: bytes, file: Path, resolved: Resolved, temps: Path | None, log: CompileLog
) -> tuple[Graph, Module]:
    """The graph of a file after the whole-module passes, and what was in the file."""
    from compiler.frontend.isolated import Reader
    from compiler.frontend.restrictions import check_outputs

    with log.stage("import"), Reader() as reader:
        graph, module = reader.read(data, os.getcwd(), resolved.command.profile, str(file))
        log.say("info", f"{file}: {module.form}, {len(graph.inputs)} inputs, {len(graph.ops)} ops")
        check_outputs(graph, resolved.command.profile)
        for finding in (*module.facts.findings, *downcasts(graph)):
            log.say("warning", finding.render())
    if temps is not None:
        content = module.stablehlo
        write_atomic(
            temps / "module.stablehlo", content.encode() if isinstance(content, str) else content
        )
    with log.stage("passes"):
        graph = run(graph, step_passes(resolved.options), temps and temps / "module")
    if module.facts.shardings is not None:
        with log.stage("partition"):
            graph, module = with_partitions(graph, module)
        shown = ", ".join(f"{axis} = {size}" for axis, size in module.facts.mesh)
        log.say("info", f"{file}: partitioned by its own shardings over {shown}")
    log.dot()
    return graph, module


def _whole(graph: Graph, file: Path, aliases: Aliases) -> StepProgram:
    """The graph as one program over buffers `arg0...` and `out0...`; an output that takes over an
    input has the input's name, and what depends on the rank is a coordinate behind the inputs.
    """
    owners = dict(aliases)
    named = tuple(f"arg{k}" for k in range(len(graph.inputs)))
    graph, coordinates = hoist_coordinates(graph)
    return StepProgram(
        name=file.name.partition(".")[0] or "main",
        graph=graph,
        inputs=named + tuple(coordinate_name(axes) for axes in coordinates),
        outputs=tuple(
            f"arg{owners[k]}" if k in owners else f"out{k}" for k in range(len(graph.outputs))
        ),
    )


class _Watch(Observer):
    """Budget checks, progress and dumps while the functions are compiled."""

    def __init__(self, resolved: Resolved, temps: Path | None, log: CompileLog) -> None:
        target = resolved.command.target
        self.limit_bytes = target.limit_bytes
        self.instructions = 0
        self._arena_bytes = 0
        self._resolved = resolved
        self._temps = temps
        self._log = log

    def outlined(self, outlined: Outlined) -> None:
        """Check the memory between functions."""
        (program,) = outlined.programs
        self._arena_bytes = program.arena_bytes
        budget.check_activations(self._arena_bytes, 0, self.limit_bytes)
        self._log.say("info", f"{len(outlined.functions)} functions to compile")

    def compiled(self, unit: Unit, function: Function) -> None:
        """Check memory and instructions of a function, keep intermediates."""
        options = self._resolved.options
        budget.check_operator_memory(function, self.limit_bytes)
        budget.check_activations(self._arena_bytes, function.scratch_bytes, self.limit_bytes)
        budget.check_operator_instructions([function], options.optlevel)
        count = budget.function_instructions(function, options.optlevel)
        self.instructions += count
        self._log.say("info", f"{unit.name}: {len(function.regions)} regions, {count} instructions")
        self._log.dot()
        if self._temps is not None:
            generation = self._resolved.command.target.core.generation
            folder = self._temps / f"{unit.name}-{unit.key[:8]}"
            run(with_ordinals(unit.graph), unit_passes(options, generation), folder)


def _report_sizes(graph: Graph, watch: _Watch, memory: budget.Memory, log: CompileLog) -> None:
    log.say("info", f"estimated instruction count: {watch.instructions}")
    log.say("info", f"HBM: {memory}; limit {watch.limit_bytes} bytes")
    ops = sum(count_ops(graph).values())
    log.say("info", f"{ops} operators, {flops(graph)} flops; -O1 compiles faster than -O2")


def _meta(graph: Graph, module: Module, program: Program, resolved: Resolved) -> dict[str, Any]:
    """What `neff info` tells about the making of a file."""
    command = resolved.command
    settings = {
        "distribution_strategy": command.strategy,
        "enable_fast_loading_neuron_binaries": command.fast_loading,
        "enable_fast_context_switch": command.fast_context_switch,
        "hbm_scratchpad_page_size": command.scratchpad_page_mb,
    }
    return {
        "compiler": compiler_version(),
        "version_profile": str(command.profile),
        "options": asdict(resolved.options) | settings | {"recorded": resolved.recorded},
        "lnc": command.target.lnc,
        "hypothetical": command.target.is_hypothetical,
        "graph_digest": hashlib.sha256(dump(graph, with_locs=False)).hexdigest(),
        "source_form": module.form,
        "mesh": [list(axis) for axis in module.facts.mesh],
        "coordinates": _coordinates(program),
        **_pages(program, command.scratchpad_page_mb * 2**20),
    }


def _coordinates(program: Program) -> list[list[Any]]:
    """The inputs that tell a core its position, with the axes they count along."""
    found = ((name, coordinate_axes(name)) for name in program.inputs)
    return [[name, list(axes)] for name, axes in found if axes]


def _pages(program: Program, page_bytes: int) -> dict[str, Any]:
    """What the scratchpad takes in pages of the size asked for."""
    if not page_bytes:
        return {}
    variables = budget.scratchpad_variables(program)
    shared, private = budget.scratchpad_pages([variables], page_bytes)
    sizes = {"page_bytes": page_bytes, "shared_bytes": shared, "private_bytes": private}
    return {"scratchpad_pages": sizes}


def _temps(output: Path) -> Path:
    """Where the intermediates of an output are kept."""
    return output.with_suffix(".temps")
