"""From one program order to engine queues: counting semaphores wherever an engine must wait for
another.

Two instructions that touch the same memory are ordered at the innermost loop that holds both: the
earlier one gives a token per iteration of that loop and the later one takes it; the way back (the
next iteration may not start too early) is the same with initial tokens, one per slot of a rotating
tile. Where one side sits in a deeper loop, a bare `signal` after that loop or a bare `wait` before
it stands in. Edges that others imply are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from compiler.allocate import share_bytes
from compiler.diagnostics import CapacityError
from compiler.engine_spans import Span, Spans, disjoint
from compiler.isa.limits import Limits
from compiler.isa.program import AccessPattern, Engine, Instr, Loop, Region, Space, Tile
from compiler.isa.region import Tensor, View

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
        return (self.source, self.to, self.back, self.from_engine.value, self.to_engine.value)

    def position(self, count: int) -> int:
        """Place of the source relative to this iteration, in elements of a body of `count`."""
        return self.source - self.back * count


def order_engines(region: Region, tensors: Sequence[Tensor], limits: Limits) -> None:
    """Add waits, signals and stand-ins to the code of `region` and set its `tokens`. Tiles must
    have addresses.

    Raises CapacityError SW_SEMAPHORES when the region needs more semaphores than the core has.
    """
    bodies: list[Ordered] = []
    _order_body(region.body, None, 0, Memory(region, tensors), bodies)
    for share in _SHARE:
        numbers, tokens = _semaphores(bodies, share)
        if len(tokens) <= limits.semaphores:
            break
    if len(tokens) > limits.semaphores:
        raise CapacityError(
            "SW_SEMAPHORES",
            f"region {region.program.name} requires {len(tokens)} semaphores, the core has"
            f" {limits.semaphores}",
            hint="split the region",
        )
    for ordered, chosen in zip(bodies, numbers, strict=True):
        _insert(ordered, chosen)
    region.tokens = tuple(tokens)


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

    def __init__(self, region: Region, tensors: Sequence[Tensor]) -> None:
        self.tiles = region.tiles
        self.root = {n: _root(tensors, n) for n in range(len(tensors))}
        self.sharing = _sharing(region.tiles)
        self.pointwise = _pointwise(region, self.root)
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
        if self.is_window(key, loop):
            return True
        return (
            key[0] == "tile"
            and self.back(key, loop.register) > 1
            and (loop.trip % self.tiles[key[1]].slots != 0)
        )


def _root(tensors: Sequence[Tensor], number: int) -> int:
    seen = set()
    while tensors[number].alias >= 0 and number not in seen:
        seen.add(number)
        number = tensors[number].alias
    return number


def _pointwise(region: Region, root: Mapping[int, int]) -> set[int]:
    """Memory that is read by one node and written in place through the same view: each point
    depends on itself only, and the data flow from the load to the store already orders the two."""
    views: dict[int, dict[str, list[View]]] = {}
    for node in region.program.nodes:
        view = node.attrs.get("view")
        if view is not None:
            views.setdefault(root[view.tensor], {}).setdefault(node.op, []).append(view)
    found = set()
    for number, by_op in views.items():
        loads, stores = by_op.get("load", []), by_op.get("store", [])
        same = {(v.offset, v.strides) for v in (*loads, *stores)}
        in_place = set(by_op) == {"load", "store"} and len(loads) == 1 and len(same) == 1
        if in_place and _is_injective(loads[0], region.program.atoms):
            found.add(number)
    return found


def _is_injective(view: View, atoms: Sequence[int]) -> bool:
    """Whether no two points of the index space share an element (sufficient test)."""
    reach = 0
    for stride, size in sorted(
        (abs(s), n) for s, n in zip(view.strides, atoms, strict=True) if n > 1
    ):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _sharing(tiles: Sequence[Tile]) -> list[tuple[int, int]]:
    """Pairs of tiles that share bytes."""
    placed = [n for n, tile in enumerate(tiles) if tile.address >= 0]
    return [(a, b) for a, b in combinations(placed, 2) if share_bytes(tiles[a], tiles[b])]


def touched(item: Instr | Loop, memory: Memory) -> Touched:
    """What an element of a body touches, instructions of inner loops included."""
    result: Touched = {}
    if isinstance(item, Loop):
        for inner in item.body:
            for key, engines in touched(inner, memory).items():
                mine = result.setdefault(key, {})
                for engine, writes in engines.items():
                    mine[engine] = mine.get(engine, False) or writes
        return result
    for pattern, writes in [(p, False) for p in item.srcs] + (
        [(item.dst, True)] if item.dst else []
    ):
        for key in memory.keys(pattern):
            mine = result.setdefault(key, {})
            mine[item.engine] = mine.get(item.engine, False) or writes
    return result


def _order_body(
    body: list[Instr | Loop],
    loop: Loop | None,
    depth: int,
    memory: Memory,
    bodies: list[Ordered],
) -> None:
    """Collect the edges of one body, inner bodies first."""
    uses = [touched(item, memory) for item in body]
    for item in body:
        if isinstance(item, Loop):
            _order_body(item.body, item, depth + 1, memory, bodies)
    edges = _edges(body, uses, loop, memory)
    bodies.append(Ordered(body, depth, _reduce(edges, len(body), loop is not None)))


def _edges(
    body: Sequence[Instr | Loop], uses: Sequence[Touched], loop: Loop | None, memory: Memory
) -> set[Edge]:
    """All orders the memory asks for between elements of a body, forward and around the loop."""
    users: dict[Key, list[Use]] = {}
    for at, keys in enumerate(uses):
        for key, engines in keys.items():
            users.setdefault(key, []).extend((at, e, w) for e, w in engines.items())
    edges: set[tuple[int, Engine, int, Engine, int]] = set()
    spans = [memory.spans.of(item) for item in body]
    for first, second, back in _conflicts(users, spans, loop, memory):
        (a, x, _), (b, y, _) = (first, second) if first[0] < second[0] else (second, first)
        if x is not y and a != b:
            edges.add((a, x, b, y, 0))
            if back:
                edges.add((b, y, a, x, back))
    if loop is not None:
        edges |= _draining(body, uses, loop, memory)
    return {Edge(a, x, b, y, back) for a, x, b, y, back in edges}


def _conflicts(
    users: Mapping[Key, Sequence[Use]],
    spans: Sequence[Mapping[int, Span | None]],
    loop: Loop | None,
    memory: Memory,
) -> Iterator[tuple[Use, Use, int]]:
    """Uses that must not change places, and after how many iterations of `loop` the memory comes
    round (0: it does not). Tiles that share bytes conflict whatever the two do.
    """
    for key, accesses in users.items():
        window = loop is not None and memory.is_window(key, loop)
        back = memory.back(key, loop.register) if loop is not None and not window else 0
        register = loop.register if loop is not None and not window else -1
        for first, second in combinations(accesses, 2):
            parts = (spans[first[0]].get(key[1]), spans[second[0]].get(key[1]))
            apart = key[0] == "tile" and disjoint(*parts, register)
            if (first[2] or second[2]) and not apart:
                yield first, second, back
    for one, other in memory.sharing:
        pairs = product(users.get(("tile", one), ()), users.get(("tile", other), ()))
        yield from ((first, second, int(loop is not None)) for first, second in pairs)


def _draining(
    body: Sequence[Instr | Loop], uses: Sequence[Touched], around: Loop, memory: Memory
) -> set[tuple[int, Engine, int, Engine, int]]:
    """Edges from one run of an inner loop to its next run, for tiles whose use in it is not ordered
    around the loop.
    """
    edges = set()
    for at, (item, keys) in enumerate(zip(body, uses, strict=True)):
        if not isinstance(item, Loop):
            continue
        for key, engines in keys.items():
            if memory.drains(key, item) and not memory.is_window(key, around):
                back = memory.back(key, around.register)
                for x, y in permutations(engines, 2):
                    if engines[x] or engines[y]:
                        edges.add((at, x, at, y, back))
    return edges


def _reduce(edges: set[Edge], count: int, is_loop: bool) -> list[Edge]:
    """The edges that no others imply, for a body of `count` elements."""
    strictest: dict[tuple[int, Engine, Engine], Edge] = {}
    for edge in sorted(edges, key=Edge.rank):
        key = (edge.to, edge.to_engine, edge.from_engine)
        if key not in strictest or edge.position(count) > strictest[key].position(count):
            strictest[key] = edge
    into: dict[Engine, list[Edge]] = {}
    for edge in strictest.values():
        into.setdefault(edge.to_engine, []).append(edge)
    for edge in sorted(strictest.values(), key=lambda e: (e.position(count), e.rank())):
        into[edge.to_engine].remove(edge)
        if not _implied(edge, into, count, is_loop):
            into[edge.to_engine].append(edge)
    return sorted((e for kept in into.values() for e in kept), key=Edge.rank)


def _implied(edge: Edge, into: Mapping[Engine, Sequence[Edge]], count: int, is_loop: bool) -> bool:
    """Whether the waits in `into` already make `edge.to` start after `edge.source`.

    `known` is, per queue, the last element (relative to this iteration) known to be finished when
    `edge.to` starts.
    """
    wanted = edge.position(count)
    known = {edge.to_engine: edge.to}
    work = [edge.to_engine]
    while work:
        engine = work.pop()
        for other in into.get(engine, ()):
            shift = (known[engine] - other.to) // count
            if shift < 0 and not is_loop:
                continue
            position = other.position(count) + shift * count
            if position < wanted or position <= known.get(other.from_engine, wanted - 1):
                continue
            if other.from_engine is edge.from_engine:
                return True
            known[other.from_engine] = position
            work.append(other.from_engine)
    return False


def _insert(ordered: Ordered, numbers: Sequence[int]) -> None:
    """Waits and signals of every edge; bare ones where an end of the edge is a loop."""
    body = ordered.body
    waits: dict[tuple[int, Engine], tuple[int, ...]] = {}
    signals: dict[tuple[int, Engine], tuple[int, ...]] = {}
    for edge, number in zip(ordered.edges, numbers, strict=True):
        taker, giver = (edge.to, edge.to_engine), (edge.source, edge.from_engine)
        waits[taker] = (*waits.get(taker, ()), number)
        signals[giver] = (*signals.get(giver, ()), number)
    result: list[Instr | Loop] = []
    for at, item in enumerate(body):
        taken = {e: s for (i, e), s in waits.items() if i == at}
        given = {e: s for (i, e), s in signals.items() if i == at}
        if isinstance(item, Instr):
            item.waits += taken.get(item.engine, ())
            item.signals += given.get(item.engine, ())
            result.append(item)
            continue
        result += [Instr("wait", e, None, waits=s) for e, s in taken.items()]
        result.append(item)
        result += [Instr("signal", e, None, signals=s) for e, s in given.items()]
    body[:] = result
