"""Which operators of a graph run on cores, which stay on the host, and the table that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.diagnostics import CompileError, Diagnostic
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.machine.target import Target
from shardwright.compiler.surface.operators import neuron_cc_reason

_INDICES = "makes indices of operators that stay on the host"


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One kind of operator of a model: how many there are, how many of them run on cores, and why
    the others do not."""

    name: str
    instances: int
    on_cores: int
    why: str

    @property
    def is_supported(self) -> bool:
        """Whether all of them run on cores."""
        return self.on_cores == self.instances


def host_reasons(graph: Graph) -> dict[Op, str]:
    """The operators that stay on the host, each with why. A loop stays there with what is in it;
    so does the arithmetic of indices that nothing but such operators reads.

    Raises CompileError (NCC_EUOC002) for a collective that no list of neuron-cc has: the host has
    no ranks.
    """
    found = {op: why for op in graph.ops if (why := _reason(op))}
    read_by = graph.uses()
    kept = set(graph.outputs)
    for op in reversed(graph.ops):
        readers = [user for value in op.results for user in read_by.get(value, ())]
        is_index = all(not v.type.dtype.is_float for v in (*op.operands, *op.results))
        is_inner = bool(op.operands) and readers and kept.isdisjoint(op.results)
        if op not in found and is_inner and is_index and all(r in found for r in readers):
            found[op] = _INDICES
    return found


def _reason(op: Op) -> str:
    """Why an operator stays on the host; empty for one that does not."""
    for region in op.regions:
        for inner in region.ops:
            if why := _reason(inner):
                return f"has {inner.name}, which {why}"
    why = neuron_cc_reason(op.name)
    if why and OPS[op.name].kind in (Kind.COLLECTIVE, Kind.RANK):
        raise CompileError(
            "NCC_EUOC002",
            f"{op.name} requires another target: it {why}",
            op.loc,
            "compile it for inf2 or trn1, or leave the exchange to the program around it",
        )
    return why


def operator_rows(graph: Graph, reasons: Mapping[Op, str]) -> list[OperatorRow]:
    """The table of a model's operators: those that stay on the host first, then the most frequent;
    bodies of loops are counted once."""
    whys: dict[str, str] = {}
    counts: dict[str, list[int]] = {}

    def count(level: Graph, inherited: str) -> None:
        for op in level.ops:
            why = inherited or reasons.get(op, "")
            row = counts.setdefault(op.name, [0, 0])
            row[0] += 1
            row[1] += not why
            if why:
                whys.setdefault(op.name, why)
            for region in op.regions:
                count(region, why)

    count(graph, "")
    rows = [OperatorRow(n, row[0], row[1], whys.get(n, "")) for n, row in counts.items()]
    return sorted(rows, key=lambda row: (row.is_supported, -row.instances, row.name))


def check_types(graph: Graph, target: Target) -> None:
    """Refuse types that the machine's compiler does not take. Raises CompileError (NCC_ESPP004) at
    the first operator, or for an input or output."""
    core = target.core
    everywhere, ends = set(core.refused_types), set(core.refused_io_types)
    for what, values in (("input", graph.inputs), ("output", graph.outputs)):
        for number, value in enumerate(values):
            if value.type.dtype.value in everywhere | ends:
                raise _refused(f"{what} {number}", value.type.dtype.value, target)
    for op in graph.walk():
        for value in (*op.operands, *op.results):
            if value.type.dtype.value in everywhere:
                error = _refused(op.name, value.type.dtype.value, target)
                raise CompileError(error.code, error.diagnostic.message, op.loc, _ADVICE)


_ADVICE = "use float32, float16 or bfloat16, and int32 for indices"


def _refused(what: str, dtype: str, target: Target) -> CompileError:
    text = f"{what} requires a type that {target.core.compiler} takes, got {dtype}"
    return CompileError("NCC_ESPP004", text, None, _ADVICE)


def host_findings(reasons: Mapping[Op, str]) -> list[Diagnostic]:
    """A warning for every kind of operator that stays on the host by itself, at the first place of
    it; what only makes its indices is not told apart.
    """
    first: dict[tuple[str, str], Op] = {}
    for op, why in reasons.items():
        if why == _INDICES:
            continue
        first.setdefault((op.name, why), op)
    return [
        Diagnostic(
            "SW_HOST_OPERATOR",
            f"{name} stays on the CPU: it {why}",
            op.loc,
            "nothing has to be done; tensors go to the host and back, which takes time",
            "warning",
        )
        for (name, why), op in first.items()
    ]
