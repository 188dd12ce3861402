"""Cutting straight-line code into pieces that repeat: unrolled layers, and optimizer updates of
equal shapes.

Ops of a stretch are first grouped into components that share no tensor (scalars such as the global
norm separate what comes before from what comes after); inside a component, runs of equal op
signatures become one piece per repetition. A cut is only kept when the pieces really are equal, so
nothing here needs to know what a layer is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from shardwright.compiler.ir.cross_stage import consecutive
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.ops.host import TRANSFERS
from shardwright.compiler.ir.traits import MOVES, TRAFFIC, of
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.passes.remat.recipes import RATIO, contracts
from shardwright.compiler.support.families import Families

MIN_PERIOD_OPS = 8  # shorter repetitions are loops over data, not layers (our choice)
MOVERS = TRAFFIC - {"collective_permute"} | {*TRANSFERS}
CARRIERS = MOVERS | MOVES | of(Kind.CAST, Kind.IDENTITY, Kind.UPDATE) | {"add"}  # to an accumulator
MAX_PERIODS = 12  # candidate periods looked at

Hash = Callable[[Sequence[Op]], int]


@dataclass(frozen=True, slots=True)
class Level:
    """What splitting needs to know of a graph level: operands of each op seen through views, and
    who uses a value.
    """

    sources: Mapping[Op, tuple[Value, ...]]
    producers: Mapping[Value, Op]


def split(ops: Sequence[Op], level: Level, identity: Hash, whole: bool = False) -> list[list[Op]]:
    """`ops` (program order) as pieces in an order that respects dependencies. `identity` numbers
    pieces by their structure. What repeats in a `whole` level stays together.
    """
    if whole:
        return [list(chain.from_iterable(group)) for group in _phases(ops, level)]
    pieces = [p for group in _phases(ops, level) for p in _merge_unique(group, identity)]
    return [part for piece in pieces for part in _cut_repeats(piece, level, identity)]


def _phases(ops: Sequence[Op], level: Level) -> Iterator[list[list[Op]]]:
    """Groups of independent components, in dependency order.

    Tensor ops are in even phases, pure scalar code in odd ones; a tensor op that reads a scalar
    made here comes a phase after it.
    """
    before = _producers_inside(ops, level)
    phase: dict[Op, int] = {}
    for op in ops:  # the first after all that it reads; scalars made of inputs come first
        first = -1 if _is_scalar(op) else 0
        phase[op] = max([first, *[phase[p] + distance for distance, p in before[op]]])
    _sink(ops, before, phase)
    families = Families[Op]()
    for op in ops:
        for _, producer in before[op]:
            if phase[producer] == phase[op]:
                families.join(producer, op)
    components: dict[Op, list[Op]] = {}
    for op in ops:
        components.setdefault(families.of(op), []).append(op)
    by_phase: dict[int, list[list[Op]]] = {}
    for component in components.values():
        by_phase.setdefault(phase[component[0]], []).append(component)
    for number in sorted(by_phase):
        yield by_phase[number]


Edges = Mapping[Op, Sequence[tuple[int, Op]]]


def _producers_inside(ops: Sequence[Op], level: Level) -> Edges:
    """Per op, the ops of the stretch it reads, each with the phases between the two; collectives
    over stages also stand behind each other.
    """
    scalar = {op: _is_scalar(op) for op in ops}
    edges: dict[Op, list[tuple[int, Op]]] = {}
    for op in ops:
        made = ((v, level.producers.get(v)) for v in level.sources[op])
        edges[op] = [
            (_distance(v, scalar[p], scalar[op]), p)
            for v, p in made
            if p is not None and p in scalar
        ]
    for first, then in consecutive(ops):
        edges[then].append((int(scalar[first] != scalar[then]), first))
    return edges


def _is_scalar(op: Op) -> bool:
    """True for pure scalar code."""
    return all([v.type.num_elements == 1 for v in (*op.operands, *op.results)])


def _distance(value: Value, producer: bool, consumer: bool) -> int:
    """Phases between two ops that are pure scalar code or not: a scalar that crosses from or to
    tensor code starts a new one.
    """
    if producer or consumer:
        return int(producer != consumer)
    return 2 if value.type.num_elements == 1 else 0


def _sink(ops: Sequence[Op], before: Edges, phase: dict[Op, int]) -> None:
    """Move ops to the phase of their first user, so that they share its function instead of
    crossing memory.
    """
    limit: dict[Op, int] = {}
    for op in reversed(ops):
        phase[op] = max(phase[op], limit.get(op, phase[op]))
        for distance, producer in before[op]:
            latest = phase[op] - distance
            limit[producer] = min(limit.get(producer, latest), latest)


def _merge_unique(components: Sequence[list[Op]], identity: Hash) -> list[list[Op]]:
    """Components that occur more than once stay apart; all others of the phase become one piece.

    What only moves data between cores joins that piece, where it runs beside other code: a function
    waits for its collectives before it returns.
    """
    hashes = [identity(c) for c in components]
    counts = Counter(hashes)
    unique: list[Op] = []
    repeated: list[list[Op]] = []
    for component, number in zip(components, hashes, strict=True):
        if counts[number] > 1 and not _only_moves(component):
            repeated.append(component)
        else:
            unique += component
    return [unique, *repeated] if unique else repeated


def _only_moves(ops: Sequence[Op]) -> bool:
    """True for collectives with what brings data to them and away, or adds it up."""
    return any(op.name in MOVERS for op in ops) and all(op.name in CARRIERS for op in ops)


def _cut_repeats(ops: list[Op], level: Level, identity: Hash) -> list[list[Op]]:
    """`ops` cut where its longest repetition repeats, and so on for what is left."""
    found = _best_run(ops)
    if found is None:
        return [ops] if ops else []
    start, period, length = found
    first = _cheapest_cut(ops, level, start, period, length)
    count = (start + length - first) // period
    windows = [ops[first + i * period : first + (i + 1) * period] for i in range(count)]
    if count < 2 or not _are_layers(windows, ops, level):
        return [ops]
    if Counter(identity(w) for w in windows).most_common(1)[0][1] < 2:
        return [ops]
    left = _cut_repeats(ops[:first], level, identity)
    right = _cut_repeats(ops[first + count * period :], level, identity)
    return left + windows + right


def _are_layers(windows: Sequence[Sequence[Op]], ops: Sequence[Op], level: Level) -> bool:
    """True for repetitions that compute something and hand over no more than they read: between
    the rounds of a random generator, or behind a softmax, values would only pass through memory.
    """
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in level.sources[op]:
            readers.setdefault(value, []).append(op)
    return all(_is_layer(window, readers, level) for window in windows)


def _is_layer(window: Sequence[Op], readers: Mapping[Value, Sequence[Op]], level: Level) -> bool:
    made = {v for op in window for v in op.results}
    inside = set(window)
    read = {v for op in window for v in level.sources[op]} - made
    handed = [v for v in made if any(op not in inside for op in readers.get(v, ()))]
    limit = RATIO * sum(v.type.num_bytes for v in read)
    return any(map(contracts, window)) and all(v.type.num_bytes < limit for v in handed)


def _best_run(ops: Sequence[Op]) -> tuple[int, int, int] | None:
    """(start, period, length) of the run of repeating op signatures that saves most ops."""
    symbols = [_symbol(op) for op in ops]
    best, saved = None, MIN_PERIOD_OPS - 1
    for period in _candidate_periods(symbols):
        start = 0
        for i in range(len(symbols) - period + 1):
            matches = i + period < len(symbols) and symbols[i] == symbols[i + period]
            if matches:
                continue
            length = i - start + period
            if i - start >= period and (length // period - 1) * period > saved:
                best, saved = (start, period, length), (length // period - 1) * period
            start = i + 1
    return best


def _symbol(op: Op) -> int:
    return hash((op.name, op.attrs, tuple(v.type for v in (*op.operands, *op.results))))


def _candidate_periods(symbols: Sequence[int]) -> list[int]:
    """Most frequent distances between neighbours of one signature."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, symbol in enumerate(symbols):
        if symbol in last:
            distances[i - last[symbol]] += 1
        last[symbol] = i
    usable = [(count, d) for d, count in distances.items() if d >= MIN_PERIOD_OPS]
    return [d for _, d in sorted(usable, key=lambda x: (-x[0], x[1]))[:MAX_PERIODS]]


def _cheapest_cut(ops: Sequence[Op], level: Level, start: int, period: int, length: int) -> int:
    """The first cut: the phase of the period at which fewest bytes cross, keeping the number of
    repetitions.
    """
    crossing = _crossing_bytes(ops, level)
    candidates = range(start, start + length % period + 1)
    return min(candidates, key=lambda i: (crossing[i + period], i))


def _crossing_bytes(ops: Sequence[Op], level: Level) -> list[int]:
    """Bytes of the values of `ops` that are live between op i-1 and op i."""
    at = {op: i for i, op in enumerate(ops)}
    last: dict[Value, int] = {}
    for i, op in enumerate(ops):
        for value in level.sources[op]:
            if level.producers.get(value) in at:
                last[value] = i
    change = [0] * (len(ops) + 2)
    for value, end in last.items():
        change[at[level.producers[value]] + 1] += value.type.num_bytes
        change[end + 1] -= value.type.num_bytes
    return list(accumulate(change))
