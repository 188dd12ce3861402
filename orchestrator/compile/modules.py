"""A model file on its way to a NEFF: read and checked, compiled by whoever calls, finished.

The compile command compiles in its process (`compiled`), `parallel-compile` gives the functions of
many files to the service. What happens before and after is the same: `open_module`, `finished`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from shardwright.compiler.driver import Observer, compile_graph
from shardwright.compiler.frontend.context import module_text
from shardwright.compiler.frontend.detect import Asked, Module
from shardwright.compiler.frontend.rules.restrictions import check_outputs
from shardwright.compiler.ir.analysis import count_ops, flops
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Function, Program
from shardwright.compiler.linking import budget
from shardwright.compiler.neff.bundle import program_bytes
from shardwright.compiler.outline import Outlined
from shardwright.compiler.outline.buffers import OutlinedProgram
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.passes.doubles import doubles_narrowed
from shardwright.compiler.passes.integers import downcasts
from shardwright.compiler.passes.pipeline import DOUBLES, step_passes
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.compiler.steps import note, step
from shardwright.compiler.surface.releases import Profile
from shardwright.compiler.surface.resolve import Resolved
from shardwright.orchestrator.compile.compile_log import CompileLog
from shardwright.orchestrator.compile.compile_partition import buffer_names, with_partitions
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.sharding.cut.rewrites import COORDINATES
from shardwright.sharding.localize.coordinates import coordinate_axes, coordinate_name


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModule:
    """A file that was read: its graph, one program of it, and the checks while it is compiled."""

    graph: Graph
    module: Module
    program: StepProgram
    watch: Watch


class Reading(Protocol):
    """What imports a module: a child process for files of others, or this one."""

    def read(
        self,
        data: bytes,
        base_dir: str,
        profile: Profile,
        name: str = ...,
        asked: Asked = ...,
    ) -> tuple[Graph, Module]:
        """The graph of a file's content, and what the file held."""
        ...


def compiled(
    file: Path, data: bytes, resolved: Resolved, log: CompileLog, reader: Reading
) -> bytes:
    """The NEFF of a file, compiled in this process. Raises DiagnosticError."""
    opened = open_module(file, data, resolved, log, reader)
    with log.stage("compile"):
        target, options = resolved.command.target.name, resolved.options
        program = compile_graph(opened.program, target, options, opened.watch)
    return finished(opened, program, resolved, log)


def open_module(
    file: Path, data: bytes, resolved: Resolved, log: CompileLog, reader: Reading
) -> OpenModule:
    """The program of a file, within the limits that can be told before compilation. Raises the
    DiagnosticError of the import, of the partitioner, or of a limit."""
    log.dot()
    graph, module = _read(data, file, resolved, log, reader)
    watch, aliases = Watch(resolved, log), module.facts.aliases
    options = resolved.options
    budget.check_io_memory(graph, watch.limit_bytes, aliases)
    budget.check_graph_instructions(graph, options.instruction_limit, options.optlevel)
    program = _whole(graph, file, module)
    return OpenModule(graph=graph, module=module, program=program, watch=watch)


def finished(opened: OpenModule, program: Program, resolved: Resolved, log: CompileLog) -> bytes:
    """The NEFF of a compiled program. Raises CompileError, CapacityError for a broken limit."""
    watch = opened.watch
    budget.check_module_instructions(watch.instructions, resolved.options.instruction_limit)
    memory = budget.check_program_memory(program, watch.limit_bytes)
    log.say("info", f"estimated instruction count: {watch.instructions}")
    log.say("info", f"HBM: {memory}; limit {watch.limit_bytes} bytes")
    ops = sum(count_ops(opened.graph).values())
    log.say("info", f"{ops} operators, {flops(opened.graph)} flops; -O1 compiles faster than -O2")
    meta = _meta(opened.graph, opened.module, program, resolved)
    meta["memory_bytes"] = memory.as_dict()
    return program_bytes(program, meta, compress=not resolved.command.fast_loading)


def _read(
    data: bytes, file: Path, resolved: Resolved, log: CompileLog, reader: Reading
) -> tuple[Graph, Module]:
    """The graph of a file after the whole-module passes, and what was in the file."""
    with log.stage("import"):
        asked = Asked(file=str(file), input_shape=resolved.command.input_shape)
        profile = resolved.command.profile
        graph, module = reader.read(data, os.getcwd(), profile, str(file), asked)
        log.say("info", f"{file}: {module.form}, {len(graph.inputs)} inputs, {len(graph.ops)} ops")
        check_outputs(graph, resolved.command.profile)
        findings = list(module.facts.findings)
        for one in (graph, *module.facts.regions):
            findings += (*doubles_narrowed(one, resolved.options), *downcasts(one))
        for finding in findings:
            log.say("warning", finding.render())
    note("captured", lambda: module_text(module.stablehlo), "mlir")
    _tell_ops(log, "imported", graph)
    with log.stage("passes"):
        passes = (*step_passes(resolved.options), DOUBLES)
        graph = run(step("imported", graph), passes)
        regions = tuple(run(step("imported", one), passes) for one in module.facts.regions)
        module = replace(module, facts=replace(module.facts, regions=regions))
    _tell_ops(log, "after passes", graph)
    if module.facts.shardings is not None:
        with log.stage("partition"):
            graph, module = with_partitions(graph, module)
        shown = ", ".join(f"{axis} = {size}" for axis, size in module.facts.mesh)
        log.say("info", f"{file}: partitioned by its own shardings over {shown}")
    log.dot()
    return graph, module


def _tell_ops(log: CompileLog, when: str, graph: Graph) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in count_ops(graph).items())
    log.say("debug", f"operators {when}: {counts or 'none'}")


def _whole(graph: Graph, file: Path, module: Module) -> StepProgram:
    """The graph as one program; what depends on the rank is a coordinate behind the inputs."""
    inputs, outputs = buffer_names(graph, module)
    made, coordinates = COORDINATES(graph)
    return StepProgram(
        name=file.name.partition(".")[0] or "main",
        graph=made,
        inputs=(*inputs, *map(coordinate_name, coordinates)),
        outputs=tuple(outputs),
    )


class Watch(Observer):
    """Budget checks and progress while the functions are compiled."""

    _program: OutlinedProgram  # what `outlined` was told, before anything is compiled

    def __init__(self, resolved: Resolved, log: CompileLog) -> None:
        target = resolved.command.target
        self.limit_bytes = target.limit_bytes
        self.instructions = 0
        self._resolved = resolved
        self._log = log

    def outlined(self, outlined: Outlined) -> None:
        """Check the memory between functions."""
        (self._program,) = outlined.programs
        budget.check_activations(self._program.bound_bytes, 0, self.limit_bytes)
        self._log.say("info", f"{len(outlined.functions)} functions to compile")

    def compiled(self, unit: Unit, function: Function) -> None:
        """Check memory and instructions of a function."""
        options = self._resolved.options
        budget.check_operator_memory(function, self.limit_bytes)
        beside = self._program.most_beside(unit.key)
        budget.check_activations(beside, function.scratch_bytes, self.limit_bytes)
        budget.check_operator_instructions([function], options.optlevel)
        count = budget.function_instructions(function, options.optlevel)
        self.instructions += count
        self._log.say("info", f"{unit.name}: {len(function.kernels)} kernels, {count} instructions")
        for number, kernel in enumerate(chain.from_iterable(function.subgraphs)):
            made = budget.count_instructions(kernel.body, unrolled=options.optlevel > 1)
            name = f"{unit.name} kernel {number} {kernel.program.name}"
            self._log.say("debug", f"{name} ({kernel.program.kind}): {made} instructions")
        self._log.dot()


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
