"""A model file on its way to a NEFF: read and checked, compiled by whoever calls, finished.

The compile command compiles in its process (`compiled`), `parallel-compile` gives the functions of
many files to the service. What happens before and after is the same: `open_module`, `finished`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from shardwright.compiler.diagnostics import CompileError, Diagnostic, UsageError
from shardwright.compiler.driver import Observer, compile_graph
from shardwright.compiler.frontend.context import module_text
from shardwright.compiler.frontend.detect import Asked, Module
from shardwright.compiler.frontend.rules.restrictions import check_outputs, check_types
from shardwright.compiler.ir.analysis import count_ops, flops
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Function, Program
from shardwright.compiler.linking import budget
from shardwright.compiler.neff.bundle import program_bytes
from shardwright.compiler.neff.serial import serial_bytes
from shardwright.compiler.outline import Outlined
from shardwright.compiler.outline.buffers import OutlinedProgram
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.passes.doubles import doubles_narrowed
from shardwright.compiler.passes.indices import crosswise_windows
from shardwright.compiler.passes.integers import downcasts
from shardwright.compiler.passes.pipeline import DCE, DOUBLES, ONE_HOT, WORDS, step_passes
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.compiler.steps import note, step, unrecorded
from shardwright.compiler.surface.releases import Profile
from shardwright.compiler.surface.resolve import Resolved
from shardwright.orchestrator.compile.compile_log import CompileLog
from shardwright.orchestrator.compile.compile_partition import buffer_names, with_partitions
from shardwright.orchestrator.compile.serial_file import Placed, placed
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.sharding.cut.rewrites import COALESCED, COORDINATES
from shardwright.sharding.localize.coordinates import coordinate_axes, coordinate_name


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModule:
    """A file that was read: its graph, one program of it, and the checks while it is compiled."""

    graph: Graph
    module: Module
    program: StepProgram
    watch: Watch
    placed: Placed | None = None
    """Where its operators run, on machines whose compiler leaves some to the host or spreads them
    over cores; None where it is one program."""


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


Maker = Callable[[OpenModule, Resolved, CompileLog], Program]
"""What compiles the one program of an open module: this process, or the cache."""


def in_process(opened: OpenModule, resolved: Resolved, log: CompileLog) -> Program:
    """Compile it here, whatever has been compiled before."""
    del log
    return compile_graph(
        opened.program, resolved.command.target.name, resolved.options, opened.watch
    )


def compiled(
    file: Path,
    data: bytes,
    resolved: Resolved,
    log: CompileLog,
    reader: Reading,
    make: Maker = in_process,
) -> bytes:
    """The NEFF of a file, whose programs `make` compiles. Raises DiagnosticError."""
    opened = open_module(file, data, resolved, log, reader)
    if opened.placed is not None and not opened.placed.serial.is_plain:
        return _compiled_pieces(opened, opened.placed, resolved, log, make)
    with log.stage("compile"):
        program = make(opened, resolved, log)
    return finished(opened, program, resolved, log)


def open_module(
    file: Path, data: bytes, resolved: Resolved, log: CompileLog, reader: Reading
) -> OpenModule:
    """The program of a file, within the limits that can be told before compilation. Raises the
    DiagnosticError of the import, of the partitioner, or of a limit."""
    log.dot()
    graph, module = _read(data, file, resolved, log, reader)
    inputs, outputs = buffer_names(graph, module)
    put = placed(graph, (inputs, outputs), resolved, log)
    if put is not None:
        graph, outputs = put.graph, list(put.outputs)
        _check_ranks(put, module)
    watch, aliases = Watch(resolved, log), module.facts.aliases
    options = resolved.options
    budget.check_io_memory(graph, watch.limit_bytes, aliases)
    budget.check_graph_instructions(graph, options.instruction_limit, options.optlevel)
    program = _whole(graph, file, inputs, outputs)
    return OpenModule(graph=graph, module=module, program=program, watch=watch, placed=put)


def _check_ranks(put: Placed, module: Module) -> None:
    """Refuse a pipeline, or operators on the host, in the program of one rank of many."""
    if module.facts.mesh and not put.serial.is_plain:
        raise UsageError(
            "SW_USAGE",
            "--neuroncore-pipeline-cores above 1, and operators on the CPU, require a model of one"
            f" rank, got one of {math.prod(size for _, size in module.facts.mesh)} ranks",
            hint="leave the collectives out of the model, or compile it for inf2 or trn1",
        )


def _compiled_pieces(
    opened: OpenModule, put: Placed, resolved: Resolved, log: CompileLog, make: Maker
) -> bytes:
    """The file of a model in several pieces. Raises DiagnosticError."""
    programs, graphs, serial = dict[str, bytes](), dict[str, Graph](), put.serial
    target = resolved.command.target.name
    for piece in serial.pieces:
        if piece.is_on_host:
            graphs[piece.name] = piece.graph
            continue
        with log.stage(f"compile {piece.name}"):
            made = StepProgram(
                name=piece.name, graph=piece.graph, inputs=piece.inputs, outputs=piece.outputs
            )
            one = replace(opened, graph=piece.graph, program=made, watch=Watch(resolved, log))
            program = make(one, resolved, log)
            programs[piece.name] = finished(one, program, resolved, log)
    meta = _made_by(opened, resolved) | {
        "name": opened.program.name,
        "target": target,
        "cores": serial.cores,
        "inputs": [
            [name, value.type.dtype.value, list(value.type.shape)]
            for name, value in zip(serial.inputs, opened.graph.inputs, strict=True)
        ],
        "outputs": [list(pair) for pair in serial.outputs],
        "pieces": [
            {"name": p.name, "core": p.core, "inputs": list(p.inputs), "outputs": list(p.outputs)}
            for p in serial.pieces
        ],
    }
    return serial_bytes(meta, programs, graphs, compress=not resolved.command.fast_loading)


def finished(opened: OpenModule, program: Program, resolved: Resolved, log: CompileLog) -> bytes:
    """The NEFF of a compiled program. Raises CompileError, CapacityError for a broken limit."""
    watch = opened.watch
    limit = resolved.options.instruction_limit
    budget.check_module_instructions(watch.instructions, limit, called=watch.largest)
    memory = budget.check_program_memory(program, watch.limit_bytes)
    log.say("info", f"estimated instruction count: {watch.instructions}")
    log.say("info", f"HBM: {memory}; limit {watch.limit_bytes} bytes")
    log.say("info", opened.watch.transposes)
    ops = sum(count_ops(opened.graph).values())
    log.say("info", f"{ops} operators, {flops(opened.graph)} flops; -O1 compiles faster than -O2")
    meta = _meta(opened, program, resolved)
    meta["memory_bytes"] = memory.as_dict()
    return program_bytes(program, meta, compress=not resolved.command.fast_loading)


def _read(
    data: bytes, file: Path, resolved: Resolved, log: CompileLog, reader: Reading
) -> tuple[Graph, Module]:
    """The graph of a file after the whole-module passes, and what was in the file."""
    with log.stage("import"):
        asked = Asked(
            file=str(file),
            input_shape=resolved.command.input_shape,
            generation=resolved.command.target.core.generation,
            fp8_as_e4m3=resolved.options.experimental_unsafe_fp8e4m3fn_as_fp8e4m3,
        )
        profile = resolved.command.profile
        graph, module = reader.read(data, os.getcwd(), profile, str(file), asked)
        log.say("info", f"{file}: {module.form}, {len(graph.inputs)} inputs, {len(graph.ops)} ops")
        check_outputs(graph, resolved.command.profile)
        for one in (graph, *module.facts.regions):
            check_types(one, resolved.command.profile)
        findings = list(module.facts.findings)
        for one in (graph, *module.facts.regions):
            findings += doubles_narrowed(one, resolved.options)
            with unrecorded():  # as the passes will make it
                live = run(one, (WORDS, DCE))
            findings += downcasts(live, resolved.options, asked.generation)
            findings += _windows(one, profile)
        for finding in findings:
            log.say("warning", finding.render())
    note("captured", lambda: module_text(module.stablehlo), "mlir")
    _tell_ops(log, "imported", graph)
    with log.stage("passes"):
        passes = (*step_passes(resolved.options), DOUBLES)
        if profile.has("coalesced_reductions") and module.facts.mesh:
            passes = (*passes, COALESCED)
        if not profile.is_own and profile.has("one_hot_gather"):
            passes = (ONE_HOT, *passes)
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


def _windows(graph: Graph, profile: Profile) -> list[Diagnostic]:
    """What is to say of windows that are no runs of memory. Raises CompileError where a release is
    asked for that refuses them."""
    found = crosswise_windows(graph)
    for d in found if not profile.is_own and profile.has("indirect_access_refused") else ():
        hint = f"{d.hint}, or name no --compiler-version-profile"
        raise CompileError(d.code, d.message.replace("may refuse", "refuses"), d.loc, hint)
    return found


def _tell_ops(log: CompileLog, when: str, graph: Graph) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in count_ops(graph).items())
    log.say("debug", f"operators {when}: {counts or 'none'}")


def _whole(graph: Graph, file: Path, inputs: Sequence[str], outputs: Sequence[str]) -> StepProgram:
    """The graph as one program; what depends on the rank is a coordinate behind the inputs."""
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
        self._tensor_work: list[tuple[float, float]] = []  # cycles of functions, of transposes
        self._counts: dict[str, int] = {}  # instructions of functions, by what they are called
        self._resolved = resolved
        self._log = log

    @property
    def instructions(self) -> int:
        """Instructions of all functions."""
        return sum(self._counts.values())

    @property
    def transposes(self) -> str:
        """How much of what the tensor engine does, over all functions, is transposes."""
        total, transposes = map(sum, zip((0.0, 0.0), *self._tensor_work, strict=True))
        share = transposes / total if total else 0.0
        return f"transposes are {share:.1%} of the work of the tensor engine"

    @property
    def largest(self) -> str:
        """What the function with most instructions is called; empty where there is none."""
        return max(self._counts, key=self._counts.__getitem__, default="")

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
        called = budget.subgraph_name(len(self._counts), unit.name)
        budget.check_operator_instructions([function], options.optlevel, called)
        count = budget.function_instructions(function, options.optlevel)
        self._counts[called] = count
        self._tensor_work.append(budget.tensor_work(function))
        self._log.say("info", f"{unit.name}: {len(function.kernels)} kernels, {count} instructions")
        for number, kernel in enumerate(chain.from_iterable(function.subgraphs)):
            made = budget.count_instructions(kernel.body, unrolled=options.optlevel > 1)
            name = f"{unit.name} kernel {number} {kernel.program.name}"
            self._log.say("debug", f"{name} ({kernel.program.kind}): {made} instructions")
        self._log.dot()


def _meta(opened: OpenModule, program: Program, resolved: Resolved) -> dict[str, Any]:
    """What `neff info` tells of a program."""
    return _made_by(opened, resolved) | {
        "coordinates": _coordinates(program),
        **_pages(program, resolved.command.scratchpad_page_mb * 2**20),
    }


def _made_by(opened: OpenModule, resolved: Resolved) -> dict[str, Any]:
    """What `neff info` tells about the making of a file."""
    graph, module = opened.graph, opened.module
    rows = opened.placed.rows if opened.placed is not None else ()
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
        **({"operators": [list(astuple(row)) for row in rows]} if rows else {}),
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
