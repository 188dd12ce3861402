"""From functions to tile programs: the pure functions that compile units run.

`compile_function` is bytes to bytes, so that executors can run it anywhere and caches can key it.
Units carry no user locations: an error names the op by ordinal, and `located` points it at the
user's line where the graph is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.compiler.codegen.generate import Recipe
from shardwright.compiler.diagnostics import DiagnosticError, Loc
from shardwright.compiler.fusion.logical_core import LogicalCore
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import Function, Kernel, Program
from shardwright.compiler.linking.budget import check_activations
from shardwright.compiler.linking.link import Location, link_program, placed_function
from shardwright.compiler.lower.function import Signature, lower_to_fixpoint
from shardwright.compiler.lower.rule import budget_of
from shardwright.compiler.lower.task import ORDINAL_FILE
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.machine.target import Target, load_target
from shardwright.compiler.neff.listing import function_lines
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.outline import Outlined, outline_programs
from shardwright.compiler.outline.unit import Unit, pack_function, read_payload, unpack_function
from shardwright.compiler.passes.integers import computes_64_bits
from shardwright.compiler.passes.pipeline import unit_passes
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import Rewrite, run
from shardwright.compiler.rewriting.specs import LOOP_FREE, NO_RANKS
from shardwright.compiler.schedule import hbm
from shardwright.compiler.schedule.core_order import order_cores
from shardwright.compiler.schedule.kernel_order import order_kernels
from shardwright.compiler.shown.engines import overlap_text
from shardwright.compiler.shown.kernels import fusion_text, kernels_text
from shardwright.compiler.shown.memory import function_memory
from shardwright.compiler.shown.tiling import tiling_text
from shardwright.compiler.steps import note, within
from shardwright.compiler.support.schema import MOST
from shardwright.compiler.timing.evaluate import ORACLE_RECOVERY, Shares, segments_at


def compile_function(payload: bytes, target: str, options: CompileOptions = DEFAULTS) -> bytes:
    """The packed function of a compile unit (`Unit.payload`) for the machine named `target`.

    A longer search, or one for a type of model, is held against the default level's function and
    taken where it is no slower, whatever neighbours fill of its stalls: kernels are timed one by
    one, so that a function of better ones may be worse.

    Raises: CompileError whose location is an op ordinal (see `located`).
    """
    graph, signature = read_payload(payload)
    graph = FUNCTION(graph)
    machine = load_target(target)
    default = replace(options, optlevel=min(2, options.optlevel), model_type="generic")
    if options == default:
        return pack_function(_compiled(graph, signature, machine, options))
    made = []
    for name, each in (("default", default), ("asked", options)):
        with within(name):
            made.append(_compiled(graph, signature, machine, each))
    times = [_durations_ps(function, machine) for function in made]
    asked_wins = all(a <= b for a, b in zip(times[1], times[0], strict=True))
    note("chosen", lambda: _choice_text(asked_wins, times))
    return pack_function(made[asked_wins])


def _compiled(
    graph: Graph, signature: Signature, machine: Target, options: CompileOptions
) -> Function:
    if not computes_64_bits(options, machine.core.generation):
        options = replace(options, native_int64="default")
    graph = run(graph, unit_passes(options, machine.core.generation))
    core = LogicalCore(machine, options)
    fixpoint = lower_to_fixpoint(graph, signature, options, core, budget_of(machine, options))
    note("fusion", lambda: fusion_text(fixpoint))
    note("kernels", lambda: kernels_text(fixpoint.lowered))
    return generate_function(fixpoint.lowered, core)


_NEIGHBOURS = tuple(
    (recovery, Shares(dma)) for recovery in (ORACLE_RECOVERY, 1.0) for dma in (1.0, 0.9, 0.5)
)
"""Neighbours beside whom a longer search may not lose: they fill half of the stalls, or all, so
that only the busiest engine counts; they leave all of the DMA queues, nine tenths (our choice:
close to what published training reaches, `streaming` in sim_cluster/calibration.toml), or half
(beside collectives).
"""


def _durations_ps(function: Function, machine: Target) -> list[int]:
    """How long a function takes beside each of `_NEIGHBOURS`."""
    return [
        sum(s.duration_ps for s in segments_at(function, _with_recovery(machine, part), (at,))[0])
        for part, at in _NEIGHBOURS
    ]


def _with_recovery(machine: Target, part: float) -> Target:
    return replace(machine, core=replace(machine.core, stall_recovery=part))


def _choice_text(asked_wins: bool, times: Sequence[Sequence[int]]) -> str:
    """Both codes side by side: for people."""
    lines = ["microseconds   " + "".join(f"{part:>8.0%} {at.dma:.0%}" for part, at in _NEIGHBOURS)]
    for name, each in zip(("default", "asked"), times, strict=True):
        lines.append(f"{name:15}" + "".join(f"{ps / 1e6:13.3f}" for ps in each))
    lines.append("columns: stalls that neighbours fill, DMA queues that they leave")
    lines.append(f"taken: {'asked' if asked_wins else 'default'}")
    return "\n".join([*lines, ""])


def generate_function(lowered: Lowered, core: LogicalCore) -> Function:
    """Tile code for every kernel of a lowered function. Raises CompileError, CapacityError."""
    made: list[tuple[Kernel, ...]] = []
    recipes: list[tuple[Recipe | None, ...]] = []
    tensors, registers = list(lowered.tensors), lowered.num_registers
    end = lowered.scratch_bytes
    for program in lowered.kernels:
        code = core.generate(program, tensors, registers)
        made += code.pairs
        recipes += code.recipes
        placed, used = hbm.placed_from(lowered.scratch_bytes, code.scratch)
        tensors, end = [*tensors, *placed], max(end, used)
        registers = max(registers, code.next_register)
    if end > MOST:  # more than a file states: nobody behind it could tell what does not fit
        check_activations(0, end, core.target.limit_bytes)
    subgraphs = [list(kernels) for kernels in zip(*made, strict=True)] or [[]] * core.options.lnc
    order_cores(subgraphs, tensors)
    order_kernels(subgraphs, tensors, limits_for(core.target.name))
    function = Function(
        name="",
        tensors=tensors,
        inputs=lowered.inputs,
        outputs=lowered.outputs,
        parameters=lowered.parameters,
        num_registers=registers,
        kernels=subgraphs[0],
        collectives=lowered.collectives,
        scratch_bytes=end,
        target=core.target.name,
        partner=subgraphs[1] if core.options.lnc > 1 else None,
    )
    note("tiling", lambda: tiling_text(function, recipes, core.target, core.options))
    note("memory", lambda: function_memory(function))
    note("overlap", lambda: overlap_text(function, core.target))
    return function


class Observer:
    """Sees the stages of `compile_graph`; may raise to stop it."""

    def outlined(self, outlined: Outlined) -> None:
        """Functions are cut and memory is planned."""

    def compiled(self, unit: Unit, function: Function) -> None:
        """One function is compiled; errors raised here may name ops by ordinal."""


def compile_graph(
    program: StepProgram,
    target: str,
    options: CompileOptions = DEFAULTS,
    observer: Observer | None = None,
) -> Program:
    """One program compiled and linked in this process. Raises the DiagnosticError of the stage that
    refuses, or of the observer.
    """
    watch = observer or Observer()
    outlined = outline_programs((program,))
    watch.outlined(outlined)
    compiled = (compile_unit(unit, target, options) for unit in outlined.functions)
    return link_outlined(outlined, compiled, target, watch)


def link_outlined(
    outlined: Outlined, compiled: Iterable[Function], target: str, observer: Observer
) -> Program:
    """The one outlined program with its functions, in the order of `outlined.functions`. Raises the
    DiagnosticError of the observer, who sees each function first.
    """
    functions: dict[str, Function] = {}
    for unit, function in zip(outlined.functions, compiled, strict=True):
        functions[unit.key] = function
        try:
            observer.compiled(unit, function)
        except DiagnosticError as error:
            raise located(error, unit.graph) from error
    (program,) = outlined.programs
    units = {unit.key: unit for unit in outlined.functions}
    return link_program(program, units, functions, target)


def compile_unit(unit: Unit, target: str, options: CompileOptions = DEFAULTS) -> Function:
    """Compile a unit whose locations are known. Raises CompileError at the user's file and line."""
    with within(f"functions/{unit.name}", unit.key, lambda loc: _place(loc, unit.graph)):
        try:
            function = unpack_function(compile_function(unit.payload, target, options))
        except DiagnosticError as error:
            found = located(error, unit.graph)
            note("refused", lambda: f"{found.diagnostic.render()}\n")
            raise found from error
        note("listing", lambda: _listing(function, unit))
        return function


def _listing(function: Function, unit: Unit) -> str:
    """The code of a function as it is in a program, with the user's places."""
    places: dict[Location, int] = {}
    placed = placed_function(function, unit.name, unit, places)
    return "\n".join(function_lines(placed, tuple(places))) + "\n"


def _place(loc: Loc, graph: Graph) -> Loc:
    """The user's location of an op of `graph`, for its ordinal."""
    is_ordinal = loc.file == ORDINAL_FILE and loc.line < len(graph.ops)
    return graph.ops[loc.line].loc if is_ordinal else loc


def with_ordinals(graph: Graph) -> Graph:
    """`graph` with op ordinals in place of locations; passes keep them."""
    ops = tuple(
        Op(op.name, op.operands, op.results, op.attrs, op.regions, Loc(ORDINAL_FILE, number))
        for number, op in enumerate(graph.ops)
    )
    return with_ops(graph, ops)


FUNCTION = Rewrite(
    "function",
    with_ordinals,
    "the graph of the function, before its passes",
    needs=(LOOP_FREE, NO_RANKS),
)


def located(error: DiagnosticError, graph: Graph) -> DiagnosticError:
    """`error` with the user's location in place of an op ordinal of `graph`."""
    loc = None if error.loc is None else _place(error.loc, graph)
    d = error.diagnostic
    return error if loc is error.loc else type(error)(d.code, d.message, loc, d.hint)
