"""From one program order to engine queues: counting semaphores wherever an engine must wait for
another.

Two instructions that touch the same memory are ordered at the innermost loop that holds both: the
earlier one gives a token per iteration of that loop and the later one takes it; the way back (the
next iteration may not start too early) is the same with initial tokens, one per slot of a rotating
tile. Where one side sits in a deeper loop, a bare `signal` after that loop or a bare `wait` before
it stands in. Edges that others imply are dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.isa.kernel import Tensor, View, root_of
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile
from shardwright.compiler.machine.target import Limits
from shardwright.compiler.schedule.allocate import end_address, share_bytes
from shardwright.compiler.schedule.engine_spans import Span, Spans, apart, fixed
from shardwright.compiler.schedule.reach import patterns_of

Key = tuple[str, int]  # ("tile", number) or ("hbm", tensor number)
# Per memory: engine -> whether it writes.
Touched = dict[Key, dict[Engine, bool]]
Use = tuple[int, Engine, bool]  # element of a body, who touches a memory, whether it writes


@dataclass(frozen=True, slots=True)
class Edge:
    """In each iteration of a body, `to` on queue `to_engine` waits for `source` on `from_engine`,
    `back` iterations ago.
    """

    source: int
    from_engine: Engine
    to: int
    to_engine: Engine
    back: int

    def rank(self) -> tuple[int, int, int, str, str]:
        """Sort key."""
        return (self.source, self.to, self.back, _NAMES[self.from_engine], _NAMES[self.to_engine])

    def position(self, count: int) -> int:
        """Place of the source relative to this iteration, in elements of a body of `count`."""
        return self.source - self.back * count


_NAMES = {engine: engine.value for engine in Engine}


def order_engines(kernel: Kernel, tensors: Sequence[Tensor], limits: Limits) -> None:
    """Add waits, signals and stand-ins to the code of `kernel` and set its `tokens`. Tiles must
    have addresses.

    Raises CapacityError SW_SEMAPHORES when the kernel needs more semaphores than the core has.
    """
    bodies: list[Ordered] = []
    _order_body(kernel.body, None, 0, Memory(kernel, tensors), bodies)
    for share in _SHARE:
        numbers, tokens = _semaphores(bodies, share)
        if len(tokens) <= limits.semaphores:
            break
    else:
        raise CapacityError(
            "SW_SEMAPHORES",
            f"kernel {kernel.program.name} requires {len(tokens)} semaphores, the core has"
            f" {limits.semaphores}",
            hint="split the kernel",
        )
    for ordered, chosen in zip(bodies, numbers, strict=True):
        _insert(ordered, chosen)
    kernel.tokens = tuple(tokens)


@dataclass(frozen=True, slots=True)
class Ordered:
    """A body, how many loops are around it, and the edges between its elements."""

    body: list[Instr | Loop]
    depth: int
    edges: Sequence[Edge]


# Which edges may share semaphores, tried in turn: none; forward edges, which loses nothing; all,
# where the first turns of a loop then also wait for the last turns of the loop before it.
_SHARE = ("none", "forward", "all")


def _semaphores(bodies: Sequence[Ordered], share: str) -> tuple[list[list[int]], list[int]]:
    """(semaphore of every edge of every body, initial tokens of each).

    Queues are in order, so edges between the same two queues may share a semaphore where their
    tokens are given and taken in the same order. Two forward edges of a body are: one that crossed
    another would be implied by it. Bodies at the same depth run one after the other; the tokens an
    edge around a loop leaves behind are those the next one starts with.
    """
    found: dict[object, int] = {}
    tokens: list[int] = []
    numbers: list[list[int]] = []
    for at, ordered in enumerate(bodies):
        chosen: list[int] = []
        seen: dict[object, int] = {}
        for index, e in enumerate(ordered.edges):
            pair = (ordered.depth, e.from_engine, e.to_engine, e.back)
            if e.back:
                seen[pair] = seen.get(pair, 0) + 1
            shared = share == "all" or (share == "forward" and not e.back)
            key: object = (*pair, seen.get(pair, 0)) if shared else (at, index)
            if key not in found:
                found[key] = len(tokens)
                tokens.append(e.back)
            chosen.append(found[key])
        numbers.append(chosen)
    return numbers, tokens


class Memory:
    """Which memories can hold the same bytes, and how far apart iterations that reuse them are."""

    def __init__(self, kernel: Kernel, tensors: Sequence[Tensor]) -> None:
        self.tiles = kernel.tiles
        self.root = {n: root_of(tensors, n) for n in range(len(tensors))}
        self.sharing = _sharing(kernel.tiles)
        self.pointwise = _pointwise(kernel, self.root)
        self.spans = Spans()

    def keys(self, pattern: AccessPattern) -> Iterable[Key]:
        """The memory a pattern touches: an HBM tensor (aliases are one), or a tile."""
        if pattern.space is Space.HBM:
            root = self.root[pattern.buffer]
            return () if root in self.pointwise else (("hbm", root),)
        return (("tile", pattern.buffer),)

    def back(self, key: Key, register: int) -> int:
        """Iterations of loop `register` after which a memory is used again."""
        if key[0] == "tile" and self.tiles[key[1]].loop == register:
            return self.tiles[key[1]].slots
        return 1

    def is_window(self, key: Key, loop: Loop) -> bool:
        """Whether every iteration of `loop` touches a part of a tile of its own."""
        return key[0] == "tile" and self.spans.are_apart(key[1], loop)

    def drains(self, key: Key, loop: Loop) -> bool:
        """A tile whose iterations of `loop` are not ordered evenly among themselves, because its
        slots do not come round or each has its own part: the next run of the loop must wait for
        this one.
        """
        return self.is_window(key, loop) or loop.trip % self.back(key, loop.register) != 0


def _pointwise(kernel: Kernel, root: Mapping[int, int]) -> set[int]:
    """Memory that is read by one node and written in place through the same view: each point
    depends on itself only, and the data flow from the load to the store already orders the two."""
    views: dict[int, dict[str, list[View]]] = {}
    for node in kernel.program.nodes:
        view = node.attrs.get("view")
        if view is not None:
            views.setdefault(root[view.tensor], {}).setdefault(node.op, []).append(view)
    found = set()
    for number, by_op in views.items():
        loads, stores = by_op.get("load", []), by_op.get("store", [])
        same = {(v.offset, v.strides) for v in (*loads, *stores)}
        in_place = set(by_op) == {"load", "store"} and len(loads) == 1 and len(same) == 1
        if in_place and _is_injective(loads[0], kernel.program.iter_dims):
            found.add(number)
    return found


def _is_injective(view: View, iter_dims: Sequence[int]) -> bool:
    """Whether no two points of the index space share an element (sufficient test)."""
    reach = 0
    for stride, size in sorted(
        (abs(s), n) for s, n in zip(view.strides, iter_dims, strict=True) if n > 1
    ):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _sharing(tiles: Sequence[Tile]) -> dict[int, list[int]]:
    """Per tile that shares bytes with others: those tiles."""
    found: dict[int, list[int]] = {}
    placed = [n for n, tile in enumerate(tiles) if tile.address >= 0]
    reaching: list[int] = []  # tiles that may reach beyond the address of the next one
    for n in sorted(placed, key=lambda n: tiles[n].address):
        start = tiles[n].address
        reaching = [m for m in reaching if end_address(tiles[m]) > start]
        for m in reaching:
            if share_bytes(tiles[m], tiles[n]):
                found.setdefault(m, []).append(n)
                found.setdefault(n, []).append(m)
        reaching.append(n)
    return found


def touched(instr: Instr, memory: Memory) -> Touched:
    """What an instruction touches."""
    result: Touched = {}
    for pattern, writes in patterns_of(instr):
        for key in memory.keys(pattern):
            _note(result, key, instr.engine, writes)
    return result


def _note(found: Touched, key: Key, engine: Engine, writes: bool) -> None:
    mine = found.setdefault(key, {})
    mine[engine] = mine.get(engine, False) or writes


def _order_body(
    body: list[Instr | Loop],
    loop: Loop | None,
    depth: int,
    memory: Memory,
    bodies: list[Ordered],
) -> Touched:
    """Collect the edges of one body, inner bodies first; what the body touches."""
    uses = [
        _order_body(item.body, item, depth + 1, memory, bodies)
        if isinstance(item, Loop)
        else touched(item, memory)
        for item in body
    ]
    waits = _Waits(len(body))
    _collect(body, uses, loop, memory, waits)
    bodies.append(Ordered(body, depth, _reduce(waits, loop is not None)))
    return _together(uses)


def _together(uses: Iterable[Touched]) -> Touched:
    """What all of them touch."""
    result: Touched = {}
    for one in uses:
        for key, engines in one.items():
            for engine, writes in engines.items():
                _note(result, key, engine, writes)
    return result


class _Waits:
    """The orders asked for in a body of `count` elements. Of several sources on one queue that an
    element waits for, only the latest is kept: it implies the others.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # (element, its queue, queue of the source) -> Edge.position of the source
        self._latest: dict[tuple[int, Engine, Engine], int] = {}

    def add(self, source: int, from_engine: Engine, to: int, to_engine: Engine, back: int) -> None:
        """Ask for an edge."""
        key, position = (to, to_engine, from_engine), source - back * self.count
        known = self._latest.get(key)
        if known is None or position > known:
            self._latest[key] = position

    def edges(self) -> list[Edge]:
        """What is left, the oldest sources first."""
        found = [
            Edge(position % self.count, x, to, y, -(position // self.count))
            for (to, y, x), position in self._latest.items()
        ]
        return sorted(found, key=lambda e: (e.position(self.count), e.rank()))


def _collect(
    body: Sequence[Instr | Loop],
    uses: Sequence[Touched],
    loop: Loop | None,
    memory: Memory,
    waits: _Waits,
) -> None:
    """All orders the memory asks for between elements of a body, forward and around the loop."""
    users: dict[Key, list[Use]] = {}
    for at, keys in enumerate(uses):
        for key, engines in keys.items():
            users.setdefault(key, []).extend((at, e, w) for e, w in engines.items())
    _same_memory(body, users, loop, memory, waits)
    _shared_bytes(users, loop is not None, memory, waits)
    if loop is not None:
        _draining(body, uses, loop, memory, waits)


def _same_memory(
    body: Sequence[Instr | Loop],
    users: Mapping[Key, Sequence[Use]],
    loop: Loop | None,
    memory: Memory,
    waits: _Waits,
) -> None:
    """Orders between uses of one memory, one of them writing, unless spans show them apart: every
    use waits for the latest such use on each other queue, before it and, in a loop, in the
    iteration before.
    """
    for key, accesses in users.items():
        engines = {engine for _, engine, _ in accesses}
        if len(engines) == 1 or not any(writes for _, _, writes in accesses):
            continue
        back, register = 0, -1
        if loop is not None and not memory.is_window(key, loop):
            back, register = memory.back(key, loop.register), loop.register
        queues: dict[Engine, list[_Spanned]] = {}
        for at, engine, writes in accesses:
            span = memory.spans.of(body[at]).get(key[1]) if key[0] == "tile" else None
            queues.setdefault(engine, []).append((at, writes, fixed(span, register)))
        for mine, other in permutations(queues.items(), 2):
            _latest_uses(mine, other, back, waits)


_Spanned = tuple[int, bool, Span | None]  # element of a body, whether it writes, `fixed` span
_Queue = tuple[Engine, Sequence[_Spanned]]  # the uses of one memory on one queue, in order


def _latest_uses(mine: _Queue, other: _Queue, back: int, waits: _Waits) -> None:
    """Let every use of `mine` wait for the latest of `other` that it may meet: before it, and,
    `back` iterations ago, after it."""
    writing = [use for use in other[1] if use[1]]
    for at, writes, span in mine[1]:
        after = True
        for place, _, theirs in reversed(other[1] if writes else writing):
            if place > at:
                if back and after and not apart(span, theirs):
                    waits.add(place, other[0], at, mine[0], back)
                    after = False
            elif place < at and not apart(span, theirs):
                waits.add(place, other[0], at, mine[0], 0)
                break


def _shared_bytes(
    users: Mapping[Key, Sequence[Use]], is_loop: bool, memory: Memory, waits: _Waits
) -> None:
    """Orders between uses of tiles that share bytes: whatever the two do, every use waits for the
    latest one of the other tile, before it and, in a loop, in the iteration before.
    """
    sharing = [(n, others) for n, others in memory.sharing.items() if ("tile", n) in users]
    queues = {n: _by_queue(users["tile", n]) for n, _ in sharing}
    for n, others in sharing:
        used: dict[Engine, list[int]] = {}  # elements that use any of the others
        for other in others:
            for engine, places in queues.get(other, {}).items():
                used.setdefault(engine, []).extend(places)
        for engine, places in used.items():
            places.sort()
            last = places[-1]
            for mine, elements in queues[n].items():
                if mine is engine:
                    continue
                for at in elements:
                    earlier = bisect_left(places, at)
                    if earlier:
                        waits.add(places[earlier - 1], engine, at, mine, 0)
                    if is_loop and last > at:
                        waits.add(last, engine, at, mine, 1)


def _by_queue(accesses: Sequence[Use]) -> dict[Engine, list[int]]:
    """Elements per queue, in order."""
    found: dict[Engine, list[int]] = {}
    for at, engine, _ in accesses:
        found.setdefault(engine, []).append(at)
    return found


def _draining(
    body: Sequence[Instr | Loop],
    uses: Sequence[Touched],
    around: Loop,
    memory: Memory,
    waits: _Waits,
) -> None:
    """Orders from one run of an inner loop to its next run, for tiles whose use in it is not
    ordered around the loop.
    """
    for at, (item, keys) in enumerate(zip(body, uses, strict=True)):
        if not isinstance(item, Loop):
            continue
        for key, engines in keys.items():
            if memory.drains(key, item) and not memory.is_window(key, around):
                back = memory.back(key, around.register)
                for x, y in permutations(engines, 2):
                    if engines[x] or engines[y]:
                        waits.add(at, x, at, y, back)


def _reduce(waits: _Waits, is_loop: bool) -> list[Edge]:
    """The edges that no others imply."""
    count, edges = waits.count, waits.edges()
    into: dict[Engine, _Into] = {}
    for number in sorted(range(len(edges)), key=lambda n: edges[n].to):
        edge = edges[number]
        into.setdefault(edge.to_engine, _Into()).append(edge, number, count)
    kept = bytearray(b"\1") * len(edges)
    for number, edge in enumerate(edges):
        kept[number] = False
        kept[number] = not _implied(edge, into, kept, count, is_loop)
    return sorted((e for e, stays in zip(edges, kept, strict=True) if stays), key=Edge.rank)


class _Into:
    """The edges into one queue, in the order of the elements that wait."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.sources: list[tuple[int, Engine, int]] = []  # position, queue, number of the edge

    def append(self, edge: Edge, number: int, count: int) -> None:
        """The next one: no later element has been added."""
        self.places.append(edge.to)
        self.sources.append((edge.position(count), edge.from_engine, number))

    def windows(
        self, first: int, last: int, count: int, is_loop: bool
    ) -> Iterator[tuple[int, Sequence[tuple[int, Engine, int]]]]:
        """Sources of what waits from `first` to `last`, each element where it ran last; with what
        to add to their positions, as elements of a loop run again every `count`."""
        iteration, at = divmod(last, count)
        end = bisect_right(self.places, at)
        shift = iteration * count
        yield shift, self.sources[bisect_left(self.places, first - shift) : end]
        if is_loop:
            shift -= count
            yield shift, self.sources[max(end, bisect_left(self.places, first - shift)) :]


def _implied(
    edge: Edge, into: Mapping[Engine, _Into], kept: bytearray, count: int, is_loop: bool
) -> bool:
    """Whether the waits that are kept already make `edge.to` start after `edge.source`.

    `known` is, per queue, the last element (relative to this iteration) known to be finished when
    `edge.to` starts. A source comes before what waits for it: nothing that waits before the wanted
    source leads to it.
    """
    wanted = edge.position(count)
    known = {edge.to_engine: edge.to}
    work = [edge.to_engine] if edge.to_engine in into else []
    while work:
        engine = work.pop()
        for shift, sources in into[engine].windows(wanted, known[engine], count, is_loop):
            for place, source, number in sources:
                position = place + shift
                if position <= known.get(source, wanted - 1) or not kept[number]:
                    continue
                if source is edge.from_engine:
                    return True
                known[source] = position
                if source in into:
                    work.append(source)
    return False


def _insert(ordered: Ordered, numbers: Sequence[int]) -> None:
    """Waits and signals of every edge; bare ones where an end of the edge is a loop."""
    waits: list[dict[Engine, tuple[int, ...]]] = [{} for _ in ordered.body]
    signals: list[dict[Engine, tuple[int, ...]]] = [{} for _ in ordered.body]
    for edge, number in zip(ordered.edges, numbers, strict=True):
        for table, engine in (
            (waits[edge.to], edge.to_engine),
            (signals[edge.source], edge.from_engine),
        ):
            table[engine] = (*table.get(engine, ()), number)
    result: list[Instr | Loop] = []
    for item, taken, given in zip(ordered.body, waits, signals, strict=True):
        if isinstance(item, Instr):
            item.waits += taken.get(item.engine, ())
            item.signals += given.get(item.engine, ())
            result.append(item)
            continue
        result += [Instr("wait", e, None, waits=s) for e, s in taken.items()]
        result.append(item)
        result += [Instr("signal", e, None, signals=s) for e, s in given.items()]
    ordered.body[:] = result
