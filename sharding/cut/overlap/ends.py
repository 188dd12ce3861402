"""Backward programs of the last micro-batch, which reduces what all micro-batches added up, and of
the first, which stores gradients where others add them.

Where gradients are reduced once per step, the cut stands in front of their reductions
(`deferred.py`), so that the update begins with them, beside nothing. Here they move, with all that
leads to them, behind the sums of one more backward program, which runs in the place of the last run
of the one it is made of. `summed.py` then takes both into the loop over layers, from where on they
are reductions like any others. The same numbers are added in the same order.

Such accumulators are as large as the weights a core computes with. To clear them in the update and
to read the zeros back would take as long as a micro-batch adds to them; PyTorch, too, has a
gradient be None until the first backward pass made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.build import fresh
from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.facts import splat, stored
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.neff.schedule import Schedule, first_of, flat, folded, last_of, run_counts
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram


@dataclass(frozen=True, slots=True)
class _Moved:
    """The reduction of accumulator `name`, which program `writer` adds to: program `update` reads
    it as `source` and makes `reduced` of it by `ops`. Buffer `target` hands that over.
    """

    name: str
    writer: str
    update: str
    source: Value
    ops: Sequence[Op]
    target: BufferInfo

    @property
    def reduced(self) -> Value:
        """What the last of the reductions makes."""
        return self.ops[-1].result

    @property
    def is_widened(self) -> bool:
        """Whether the buffer has another type than what it hands over, which it holds exactly."""
        return self.reduced.type.dtype is not self.target.local_type.dtype


def reduced_in_last(plan: StepPlan) -> StepPlan:
    """`plan` with accumulators reduced in backward programs of the last micro-batch.

    One stays as it is where several programs add to it, for it is complete only behind the last of
    them; where the update does more with it than reduce it; and where its program sends to another
    stage: that would wait for reductions too, which a stage has time for while others still work.
    """
    moved = list(_moved(plan))
    if not moved:
        return plan
    writers = {one.writer: last_of(one.writer) for one in moved}
    programs: list[StepProgram] = []
    for program in plan.programs:
        programs.append(_relieved(program, [m for m in moved if m.update == program.name]))
        if program.name in writers:
            programs.append(_last(program, [m for m in moved if m.writer == program.name]))
    return replace(
        plan,
        programs=tuple(programs),
        buffers={**plan.buffers, **{one.target.name: one.target for one in moved}},
        schedules=tuple(with_runs(schedule, writers, -1) for schedule in plan.schedules),
    )


def _moved(plan: StepPlan) -> Iterator[_Moved]:
    """The reductions that can move."""
    runs = sum(map(run_counts, plan.schedules), Counter[str]())
    awaited = {transfer.writer for transfer in plan.transfers}
    for name, info in plan.buffers.items():
        users = [p for p in plan.programs if name in (*p.inputs, *p.outputs)]
        if info.role != "gradient" or len(users) != 2:
            continue
        update, writer = sorted(users, key=lambda p: runs[p.name])
        if runs[update.name] != 1 or runs[writer.name] == 1 or writer.name in awaited:
            continue
        source = update.graph.inputs[update.inputs.index(name)]
        if ops := _to_reductions(update.graph, source):
            target = _target(info, ops[-1].result)
            yield _Moved(name, writer.name, update.name, source, ops, target)


def _to_reductions(graph: Graph, value: Value) -> list[Op]:
    """The ops that lead from `value` to the last of its reductions over cores, each the only reader
    of the one before, with the constants they read; none where nothing is reduced.
    """
    users, made = graph.uses(), graph.producers()
    ops: list[Op] = []
    count = 0
    while value not in graph.outputs and len(users.get(value, ())) == 1:
        (op,) = users[value]
        others = (made.get(v) for v in op.operands if v is not value)
        constants = [other for other in others if other is not None and stored(other) is not None]
        is_alone = len(op.operands) == 1 + len(constants) and len(op.results) == 1
        if not is_alone or op.regions or is_cross_stage(op):
            break
        ops += [*constants, op]
        value = op.result
        count = len(ops) if op.name in REDUCTIONS_OF_RANKS else count
    return ops[:count]


def _target(accumulator: BufferInfo, reduced: Value) -> BufferInfo:
    """Where a reduced gradient waits for the update: in its accumulator where that holds it, so
    that it needs no memory.
    """
    held = accumulator.local_type
    if reduced.type.shape == held.shape and reduced.type.dtype.bytes <= held.dtype.bytes:
        return accumulator
    return replace(
        accumulator,
        name=f"reduced/{accumulator.name.removeprefix('gradient/')}",
        local_type=reduced.type,
        global_type=reduced.type,
        axes=((),) * reduced.type.rank,
        initial="computed",
    )


def _last(program: StepProgram, moved: Sequence[_Moved]) -> StepProgram:
    """The backward program `program` with reductions behind its sums."""
    by_name = {one.name: one for one in moved}
    outputs = dict(program.writes)
    behind = {outputs[one.name]: _behind(one, outputs[one.name]) for one in moved}
    ops: list[Op] = []
    for op in program.graph.ops:
        ops += [op, *(after for v in op.results for after in behind.get(v, ()))]
    names = tuple(by_name[n].target.name if n in by_name else n for n in program.outputs)
    results = tuple(behind[v][-1].result if v in behind else v for v in outputs.values())
    name = last_of(program.name)
    graph = with_ops(program.graph, ops, results, name=name)
    return replace(program, name=name, graph=graph, outputs=names)


def _behind(one: _Moved, total: Value) -> list[Op]:
    """What makes of a sum what its buffer hands over, with values of its own: those of the update
    may be what the backward program calls what it adds.
    """
    now = {one.source: total}
    ops: list[Op] = []
    for op in one.ops:
        ops.append(fresh(op, [now[v] for v in op.operands]))
        now[op.result] = ops[-1].result
    if one.is_widened:
        wide = ConvertAttrs(one.target.local_type.dtype)
        ops.append(make_op("convert", (ops[-1].result,), wide))
    return ops


def _relieved(program: StepProgram, moved: Sequence[_Moved]) -> StepProgram:
    """The update `program` reading what is reduced already."""
    if not moved:
        return program
    by_source, by_last = {m.source: m for m in moved}, {m.ops[-1]: m for m in moved}
    gone = {op for one in moved for op in one.ops if stored(op) is None}
    ops: list[Op] = []
    for op in program.graph.ops:
        one = by_last.get(op)
        if one is not None and one.is_widened:
            attrs = ConvertAttrs(one.reduced.type.dtype)
            ops.append(Op("convert", (one.source,), op.results, attrs, (), op.loc))
        elif op not in gone:
            ops.append(op)
    names, inputs = list(program.inputs), list(program.graph.inputs)
    for place, value in enumerate(program.graph.inputs):
        one = by_source.get(value)
        if one is not None:
            names[place] = one.target.name
            inputs[place] = value if one.is_widened else one.reduced
    graph = with_ops(program.graph, ops, inputs=tuple(inputs))
    return replace(program, graph=dce(graph), inputs=tuple(names))


def with_runs(schedule: Schedule, names: Mapping[str, str], which: int) -> Schedule:
    """`schedule` with other programs, by `names`, as the first (`which` 0) or last (-1) runs."""
    runs = list(flat(schedule))
    for old, new in names.items():
        if places := [n for n, run in enumerate(runs) if run == old]:
            runs[places[which]] = new
    return folded(runs)


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
    for name, value in writer.reads:
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
    held = splat(program.graph.producers().get(dict(program.writes)[name]))
    return held is not None and not any(held.data)


def _first(program: StepProgram, names: Collection[str]) -> StepProgram:
    """`program` with what it adds to `names` in their place."""
    gone = {value for name, value in program.reads if name in names}
    level = Level()
    for op in program.graph.ops:
        if op.operands and op.operands[0] in gone:
            level.replace(op.results, (level.now(op.operands[1]),))
        else:
            level.ops.append(level.update(op))
    kept = [(name, value) for name, value in program.reads if value not in gone]
    results = tuple(level.now(value) for value in program.graph.outputs)
    name = first_of(program.name)
    graph = with_ops(program.graph, level.ops, results, tuple(v for _, v in kept), name)
    return replace(program, name=name, graph=graph, inputs=tuple(n for n, _ in kept))


def _without_zeros(program: StepProgram, names: Collection[str]) -> StepProgram:
    """`program` without the zeros it leaves in `names`."""
    kept = [(n, v) for n, v in program.writes if n not in names or not _clears(program, n)]
    if len(kept) == len(program.writes):
        return program
    graph = with_ops(program.graph, program.graph.ops, tuple(v for _, v in kept))
    return replace(program, graph=dce(graph), outputs=tuple(n for n, _ in kept))
