"""The backward program of the first micro-batch, which stores gradients where others add them.

Accumulators that are reduced in the last micro-batch are as large as the weights a core computes
with. To clear them in the update and to read the zeros back would take as long as a micro-batch
adds to them; PyTorch, too, has a gradient be None until the first backward pass made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from shardwright.compiler.ir.facts import splat
from shardwright.compiler.ir.rewrite import Level, with_ops
from shardwright.compiler.neff.schedule import first_of, last_of, run_counts
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.program import StepPlan, StepProgram
from shardwright.sharding.cut.overlap.last import with_runs


def stored_in_first(plan: StepPlan) -> StepPlan:
    """`plan` with accumulators stored by backward programs of the first micro-batch, which the
    update does not clear: those that one program adds to whose last run is another's.
    """
    programs = {program.name: program for program in plan.programs}
    stored = {
        name: found
        for name, program in programs.items()
        if last_of(name) in programs and (found := _accumulators(plan, program))
    }
    if not stored:
        return plan
    firsts = {name: first_of(name) for name in stored}
    schedules = tuple(with_runs(schedule, firsts, 0) for schedule in plan.schedules)
    runs = sum(map(run_counts, schedules), Counter[str]())
    gone = {name for found in stored.values() for name in found}
    made: list[StepProgram] = []
    for name, program in programs.items():
        if name in stored:
            made.append(_first(program, stored[name]))
        if runs[name]:
            made.append(program if name in stored else _without_zeros(program, gone))
    return replace(plan, programs=tuple(made), schedules=schedules)


def _accumulators(plan: StepPlan, writer: StepProgram) -> list[str]:
    """What `writer` alone adds to by one sum, and others clear."""
    users = writer.graph.uses()
    found = []
    for name, value in zip(writer.inputs, writer.graph.inputs, strict=True):
        adds = users.get(value, [])
        others = [p for p in plan.programs if name in p.outputs and p is not writer]
        if (
            plan.buffers[name].role == "gradient"
            and name in writer.outputs
            and [op.name for op in adds] == ["add"]
            and adds[0].operands[0] is value
            and all(_clears(p, name) or p.name == last_of(writer.name) for p in others)
        ):
            found.append(name)
    return found


def _clears(program: StepProgram, name: str) -> bool:
    """Whether a program leaves zeros in a buffer."""
    value = program.graph.outputs[program.outputs.index(name)]
    held = splat(program.graph.producers().get(value))
    return held is not None and not any(held.data)


def _first(program: StepProgram, names: Collection[str]) -> StepProgram:
    """`program` with what it adds to `names` in their place."""
    pairs = list(zip(program.inputs, program.graph.inputs, strict=True))
    gone = {value for name, value in pairs if name in names}
    level = Level()
    for op in program.graph.ops:
        if op.operands and op.operands[0] in gone:
            level.replace(op.results, (level.now(op.operands[1]),))
        else:
            level.ops.append(level.update(op))
    kept = [(name, value) for name, value in pairs if value not in gone]
    results = tuple(level.now(value) for value in program.graph.outputs)
    name = first_of(program.name)
    graph = with_ops(program.graph, level.ops, results, tuple(v for _, v in kept), name)
    return replace(program, name=name, graph=graph, inputs=tuple(n for n, _ in kept))


def _without_zeros(program: StepProgram, names: Collection[str]) -> StepProgram:
    """`program` without the zeros it leaves in `names`."""
    pairs = list(zip(program.outputs, program.graph.outputs, strict=True))
    kept = [(n, v) for n, v in pairs if n not in names or not _clears(program, n)]
    if len(kept) == len(pairs):
        return program
    graph = with_ops(program.graph, program.graph.ops, tuple(v for _, v in kept))
    return replace(program, graph=dce(graph), outputs=tuple(n for n, _ in kept))
