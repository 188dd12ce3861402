"""What the documented limits say about a job's programs: the checks of the compile command, for
every program of the step.

Memory is refused as the command refuses it. Instruction counts model a limit of the vendor's
compiler, not a need of the simulator: at the default limit they are warnings, a limit the user sets
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from shardwright.compiler.diagnostics import Diagnostic, DiagnosticError, Loc
from shardwright.compiler.isa.program import Program
from shardwright.compiler.linking import budget
from shardwright.compiler.lower.task import ORDINAL_FILE
from shardwright.compiler.options import DEFAULTS
from shardwright.orchestrator.changes.change import changed
from shardwright.orchestrator.changes.rules import is_open, more_instances
from shardwright.orchestrator.changes.situation import laid_out
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import Layout
from shardwright.orchestrator.road.build import Built, Planned
from shardwright.orchestrator.road.bundling import compiled_footprints
from shardwright.sharding.memory.advice import Asked, advice_text
from shardwright.sharding.memory.footprint import Footprint, check_limit, worst_stage

Check = tuple[Callable[[], None], str, Program | None]


def check_budgets(built: Built) -> None:
    """Raises the first error of a budget: CapacityError (exit 71) or CompileError (exit 70)."""
    for error, severity in _broken(built):
        if severity == "error":
            raise error


def check_state(ready: Planned) -> None:
    """Refuse before compiling what no compiler can make fit: named buffers above the limit. Raises:
    CapacityError SW_CAPACITY."""
    memory, limit = ready.plan.footprint, ready.layout.target.limit_bytes
    if sum(memory.argument_bytes.values()) > limit:
        check_limit(memory, limit, _advice(ready, memory))


def budget_findings(built: Built) -> tuple[Diagnostic, ...]:
    """Every broken budget, errors of memory first."""
    return tuple(replace(e.diagnostic, severity=severity) for e, severity in _broken(built))


def _broken(built: Built) -> Iterator[tuple[DiagnosticError, str]]:
    """(error, severity) of every check that fails."""
    for check, severity, program in _checks(built):
        try:
            check()
        except DiagnosticError as error:
            yield _located(error, program), severity


def _checks(built: Built) -> Iterator[Check]:
    limit, options = built.layout.target.limit_bytes, built.job.compiler
    memory = worst_stage(compiled_footprints(built))
    yield partial(check_limit, memory, limit, _advice(built, memory)), "error", None
    for program in built.programs.values():
        for function in program.functions:
            yield partial(budget.check_operator_memory, function, limit), "error", program
    allowed, level = options.instruction_limit, options.optlevel
    severity = "warning" if allowed == DEFAULTS.instruction_limit else "error"
    counts = {
        name: sum(budget.function_instructions(f, level) for f in program.functions)
        for name, program in built.programs.items()
    }
    for name in sorted(counts, key=counts.__getitem__, reverse=True):  # the worst decides
        program, count, title = built.programs[name], counts[name], f"program {name}"
        check = partial(budget.check_module_instructions, count, allowed, title)
        yield check, severity, program
        check = partial(budget.check_operator_instructions, program.functions, level)
        yield check, "warning", program


def _advice(ready: Planned, memory: Footprint) -> str:
    """What to change where so much is too much."""
    zero = ready.job.strategy.zero_stage
    wider = wider_text(ready.job, ready.layout)
    asked = Asked(zero=zero, context_bytes=ready.plan.context_bytes, wider=wider)
    return advice_text(memory, ready.plan.step, asked, ready.layout.target.limit_bytes)


def wider_text(job: JobConfig, layout: Layout) -> str:
    """The flags of the job with twice the shards on twice the instances; empty where there are none
    to be had, or the step has its mesh or its samples."""
    now = laid_out(job, layout)
    if not now.trains:
        return ""
    found = (changed(job, idea.keys) for idea in more_instances(now) if is_open(idea, now))
    return " ".join(f"--set {word}" for change in found for word in change.text.split())


def _located(error: DiagnosticError, program: Program | None) -> DiagnosticError:
    """`error` with a row of the program's location table in place of its number."""
    loc = error.loc
    if program is None or loc is None or loc.file != ORDINAL_FILE:
        return error
    d = error.diagnostic
    return type(error)(d.code, d.message, Loc(*program.locations[loc.line]), d.hint)
