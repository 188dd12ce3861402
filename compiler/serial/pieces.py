"""A graph cut into pieces: each the operators of one core, or of the host, that run in one go.

Constants, and what follows from constants alone, are repeated in every piece that reads them, so
that they are weights of its core instead of tensors that are handed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from shardwright.compiler.diagnostics import CompileError, UsageError
from shardwright.compiler.ir.build import subgraph
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.ops import ConstantAttrs
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.machine.target import Target
from shardwright.compiler.serial.groups import group_ends

HOST = -1
_REPEATED = of(Kind.LITERAL, Kind.VIEW, Kind.CAST, Kind.ELEMENTWISE, Kind.PART)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Operators that run in one go on core `core`, or on the host (`HOST`), and the names of what
    they read and make."""

    name: str
    core: int
    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def is_on_host(self) -> bool:
        """Whether no core runs it."""
        return self.core == HOST

    @property
    def weight_bytes(self) -> int:
        """Bytes of its constants."""
        held = (op.attrs for op in self.graph.walk())
        return sum(len(attrs.data) for attrs in held if isinstance(attrs, ConstantAttrs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Serial:
    """The pieces of a model in the order in which they run. `outputs` are (name of the model's
    output, name of the value that it is)."""

    pieces: tuple[Piece, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    cores: int

    @property
    def is_plain(self) -> bool:
        """Whether it is one program on one core."""
        return [piece.core for piece in self.pieces] == [0]


def serial_of(
    graph: Graph,
    names: tuple[Sequence[str], Sequence[str]],
    on_host: Set[Op],
    cores: int,
    target: Target,
) -> Serial:
    """`graph`, whose inputs and outputs have `names`, in pieces on `cores` cores and the host.

    Raises: UsageError (SW_USAGE) for more cores than there are operators on cores; CompileError
    (SW_NO_OPERATORS) where there are none.
    """
    repeated = _repeated(graph, on_host)
    segments = _segments(graph, on_host, repeated)
    moved = [op for op in graph.ops if op not in repeated]
    order = sorted(moved, key=lambda op: segments[op])
    computed = [op for op in order if op not in on_host]
    if not computed:
        raise CompileError(
            "SW_NO_OPERATORS",
            f"a file requires operators that a core computes, got none of {len(graph.ops)}",
            hint="the model runs on the host as it is; nothing is to be compiled",
        )
    if cores > len(computed):
        raise UsageError(
            "SW_USAGE",
            f"--neuroncore-pipeline-cores requires at most {len(computed)}, as many as there are"
            f" operators for cores in this model, got {cores}",
            hint=f"use {len(computed)} or fewer",
        )
    costs = [_cost_ps(op, graph, repeated, target) for op in computed]
    ends = group_ends(costs, _crossing(graph, order, computed), cores)
    core_of = _numbers(computed, ends)
    places: dict[tuple[int, int], list[Op]] = {}
    for op in order:
        places.setdefault((segments[op], core_of.get(op, HOST)), []).append(op)
    return _named(graph, names, list(places.items()), repeated, cores)


def whole_parts(graph: Graph, reasons: Mapping[Op, str], minimum: int) -> dict[Op, str]:
    """The operators that stay on the host, each with why, where parts on cores of fewer operators
    than a minimum stay there too; what joins around such a part is one part."""
    found = dict(reasons)
    while True:
        segments = _segments(graph, found.keys(), _repeated(graph, found.keys()))
        sizes = Counter(number for op, number in segments.items() if op not in found)
        small = {
            op: f"stands in a part of {sizes[number]}, fewer than --minimum-segment-size {minimum}"
            for op, number in segments.items()
            if op not in found and sizes[number] < minimum
        }
        if not small:
            return found
        found |= small


def _repeated(graph: Graph, on_host: Set[Op]) -> dict[Op, None]:
    """Constants and what follows from them alone, element by element, in program order."""
    found: dict[Op, None] = {}
    known: set[Value] = set()
    for op in graph.ops:
        if op.name in _REPEATED and op not in on_host and known.issuperset(op.operands):
            found[op] = None
            known.update(op.results)
    return found


def _segments(graph: Graph, on_host: Set[Op], repeated: Mapping[Op, None]) -> dict[Op, int]:
    """The segment of every operator: cores have even ones, the host odd ones, each as early as what
    it reads allows."""
    made: dict[Value, int] = {}
    found: dict[Op, int] = {}
    for op in graph.ops:
        if op in repeated:
            continue
        earliest = max((made.get(value, 0) for value in op.operands), default=0)
        found[op] = earliest + (earliest % 2 != (op in on_host))
        made.update(dict.fromkeys(op.results, found[op]))
    return found


def _cost_ps(op: Op, graph: Graph, repeated: Mapping[Op, None], target: Target) -> float:
    """About how long an operator takes on a core: its arithmetic, its elements on the vector
    engine, or its weights from memory, whichever is longest."""
    core = target.core
    weights = set(graph.inputs).union(*(one.results for one in repeated))
    read = sum(v.type.num_bytes for v in op.operands if v in weights)
    elements = max(v.type.num_elements for v in op.results)
    lanes = core.limits.partitions * core.clock_hz["vector"]
    inner = [one for region in op.regions for one in region.ops]
    work = OPS[op.name].flops(op) if not inner else 0
    work += getattr(op.attrs, "trip", 1) * sum(OPS[one.name].flops(one) for one in inner)
    rates = core.peak_bf16_flops_per_s, lanes, target.hbm_bytes_per_s_per_core
    return 1e12 * max(a / b for a, b in zip((work, elements, read), rates, strict=True))


def _crossing(graph: Graph, order: Sequence[Op], computed: Sequence[Op]) -> list[float]:
    """By position among `computed`, the bytes that are handed over where the operators in front of
    it are cut off."""
    position = {op: number for number, op in enumerate(computed)}
    made: dict[Value, int] = {}
    last: dict[Value, int] = dict.fromkeys(graph.outputs, len(computed))
    at = 0
    for op in order:
        at = position.get(op, at)
        for value in op.operands:
            last[value] = max(last.get(value, 0), at)
        made.update(dict.fromkeys(op.results, at))
    changes = [0.0] * (len(computed) + 2)
    for value, start in made.items():
        end = last.get(value, start)
        if end > start:
            changes[start + 1] += value.type.num_bytes
            changes[end + 1] -= value.type.num_bytes
    total, found = 0.0, list[float]()
    for change in changes[: len(computed) + 1]:
        total += change
        found.append(total)
    return found


def _numbers(computed: Sequence[Op], ends: Sequence[int]) -> dict[Op, int]:
    starts = [0, *ends]
    return {
        op: core
        for core, (first, end) in enumerate(zip(starts, ends, strict=False))
        for op in computed[first:end]
    }


def _named(
    graph: Graph,
    names: tuple[Sequence[str], Sequence[str]],
    places: Sequence[tuple[tuple[int, int], list[Op]]],
    repeated: Mapping[Op, None],
    cores: int,
) -> Serial:
    """The pieces with names for what goes from one to another."""
    given, asked = names
    name_of: dict[Value, str] = dict(zip(graph.inputs, given, strict=True))
    maker = {value: number for number, (_, ops) in enumerate(places) for value in results_of(ops)}
    rest = [v for v in graph.outputs if v not in maker and v not in name_of]
    readers: dict[Value, set[int]] = {}
    for number, (_, ops) in enumerate(places):
        for value in operands_of(ops):
            readers.setdefault(value, set()).add(number)
    handed = {
        value: None
        for number, (_, ops) in enumerate(places)
        for value in results_of(ops)
        if value in graph.outputs or readers.get(value, set()) - {number}
    }
    name_of |= {value: f"v{number}" for number, value in enumerate([*handed, *dict.fromkeys(rest)])}
    counts = {True: 0, False: 0}
    pieces = []
    for number, ((_, core), ops) in enumerate(places):
        is_last = number == len(places) - 1
        made = [value for value in results_of(ops) if value in handed]
        made += list(dict.fromkeys(rest)) if is_last else []
        body = _with_repeated(ops, made, repeated)
        inside = set(results_of(body))
        read = dict.fromkeys(value for value in operands_of(body) if value not in inside)
        kind = "cpu" if core == HOST else "sg"
        pieces.append(
            Piece(
                name=f"{kind}{counts[core == HOST]:02d}",
                core=core,
                graph=subgraph(read, body, made, graph.name),
                inputs=tuple(name_of[value] for value in read),
                outputs=tuple(name_of[value] for value in made),
            )
        )
        counts[core == HOST] += 1
    outputs = tuple((n, name_of[v]) for n, v in zip(asked, graph.outputs, strict=True))
    return Serial(pieces=tuple(pieces), inputs=tuple(given), outputs=outputs, cores=cores)


def _with_repeated(
    ops: Iterable[Op], made: Iterable[Value], repeated: Mapping[Op, None]
) -> list[Op]:
    """`ops` behind the repeated operators that they, and what leaves the piece, need."""
    own = list(ops)
    needed = {*operands_of(own), *made}
    found = list[Op]()
    for op in reversed(list(repeated)):
        if needed.intersection(op.results):
            found.append(op)
            needed.update(op.operands)
    return [*reversed(found), *own]


def results_of(ops: Iterable[Op]) -> Iterable[Value]:
    """What operators make."""
    return (value for op in ops for value in op.results)


def operands_of(ops: Iterable[Op]) -> Iterable[Value]:
    """What operators read."""
    return (value for op in ops for value in op.operands)
