"""Re-rolling: repeated layers of an unrolled step become loops over stacked weights.

The first thing that happens to an imported step, so that everything behind it sees what a scanned
model would have been. Leaves of the state that correspond between layers become one stacked input;
its slot lists them, and the host alone splits it up again. Design note 0003.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.frontend.roles import UNCHANGED_ROLES
from shardwright.compiler.ir.types import Graph, Value
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.prepare.reroll.emit import Emitter
from shardwright.sharding.prepare.reroll.names import stack_name
from shardwright.sharding.prepare.reroll.packs import Leaves, Pack, Packer, RefusedError
from shardwright.sharding.prepare.reroll.periods import (
    MIN_REPEATS,
    Run,
    Varying,
    light_ops,
    repeats,
    varying_ops,
)
from shardwright.sharding.prepare.reroll.sections import Section, found_section
from shardwright.sharding.prepare.reroll.sums import Sum, SumFinder

__all__ = ["Rerolled", "reroll"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerolled:
    """A step with loops in place of repeated layers. `notes` says, line by line, what was rolled
    and why the rest was not.
    """

    graph: Graph
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
        """The graph, its inputs and its outputs."""
        return self.graph, self.inputs, self.outputs


def reroll(graph: Graph, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> Rerolled:
    """The step with its repeats rolled; the step itself where nothing repeats or can be proven
    to.
    """
    plain = Rerolled(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs))
    slots = dict(zip(graph.inputs, inputs, strict=True))
    varying = varying_ops(graph, set(_of_no_layer(slots)))
    runs = sorted(repeats(varying.ops), key=lambda run: run.first)
    packer = Packer(graph, slots, varying.shared, graph.producers())
    sections, packer, notes = _sections(varying, runs, packer)
    if not sections:
        return replace(plain, notes=tuple(notes))
    spans = [(s.rows[0][0], s.rows[-1][-1]) for s in sections]
    packer.repeated = light_ops(graph, varying, spans)
    try:
        rolled = _rolled(packer, sections, outputs)
        before, now = len(graph.ops), len(rolled.graph.ops)
        if now > before:
            raise RefusedError(f"{now} ops would take the place of {before}")
    except RefusedError as refused:
        return replace(plain, notes=(*notes, f"and all stays as it was: {refused}"))
    return replace(rolled, notes=tuple(notes))


def _of_no_layer(slots: Mapping[Value, Slot]) -> Iterator[Value]:
    """The inputs that no layer owns: the batch, and leaves that no step changes with too few like
    them to be one per layer, as frequencies of rotary positions in a module's buffer.
    """
    alike = Counter(value.type for value in slots)
    for value, slot in slots.items():
        shared = slot.role in UNCHANGED_ROLES and alike[value.type] < MIN_REPEATS
        if shared or slot.role == "batch":
            yield value


def _sections(
    varying: Varying, runs: Sequence[Run], packer: Packer
) -> tuple[list[Section], Packer, list[str]]:
    """The runs that are layers, their packs, and a line about each run."""
    sections = []
    notes = []
    for run in runs:
        why = []
        for multiple in run.multiples():
            try:
                section, packer = found_section(varying.ops, multiple, packer)
            except RefusedError as refused:
                why.append(refused)
                continue
            sections.append(section)
            notes.append(f"{_shown(varying, multiple)} became a loop")
            break
        else:
            notes.append(f"{_shown(varying, run)} stay as they are: {why[0]}")
    return sections, packer, notes


def _shown(varying: Varying, run: Run) -> str:
    return f"{run.count} repeats of {run.period} ops at {varying.ops[run.first].loc}"


def _rolled(packer: Packer, sections: Sequence[Section], outputs: Sequence[Slot]) -> Rerolled:
    """The step with `sections` as loops. Raises RefusedError."""
    results = dict(zip((s.name for s in outputs), packer.graph.outputs, strict=True))
    stacked: dict[Leaves, Pack] = {}
    _pack_results(packer, results, stacked)
    sums = {s.op.result: s for s in _sums(packer)}
    _pack_results(packer, results, stacked)
    names = {leaves: _names(packer, leaves) for leaves in stacked}
    first = {found[0]: leaves for leaves, found in names.items()}
    rest = {name for found in names.values() for name in found}
    kept = [slot for slot in outputs if slot.name in first or slot.name not in rest]
    wanted = [stacked[first[s.name]] if s.name in first else results[s.name] for s in kept]
    graph = Emitter(packer, sections, sums).graph(wanted)
    slots = {
        found[0]: Slot(stack_name(found), packer.slots[leaves.members[0]].role, leaves=found)
        for leaves, found in names.items()
    }
    before = (packer.slots[v] for v in packer.graph.inputs)
    inputs = [slot for slot in before if slot.name in first or slot.name not in rest]
    return Rerolled(
        graph=graph,
        inputs=tuple(slots.get(slot.name, slot) for slot in inputs),
        outputs=tuple(slots.get(slot.name, slot) for slot in kept),
    )


def _pack_results(
    packer: Packer, results: Mapping[str, Value], stacked: dict[Leaves, Pack]
) -> None:
    """Enter what becomes of every stack of leaves, those found on the way included. Raises
    RefusedError.
    """
    while new := [p for p in packer.packs.values() if isinstance(p, Leaves) and p not in stacked]:
        for leaves in new:
            names = _names(packer, leaves)
            if not results.keys() >= {*names}:
                raise RefusedError(f"{names[0]} does not come back from the step")
            stacked[leaves] = packer.pack(tuple([results[n] for n in names]), copies=False)


def _names(packer: Packer, leaves: Leaves) -> tuple[str, ...]:
    return tuple([packer.slots[v].name for v in leaves.members])


def _sums(packer: Packer) -> Iterator[Sum]:
    graph = packer.graph
    readers = Counter(v for op in graph.ops for v in op.operands) + Counter(graph.outputs)
    outside = [op for op in graph.ops if op not in packer.inside and op.results[0].type.rank == 0]
    return SumFinder(packer, outside, readers).sums()
