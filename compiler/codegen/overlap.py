"""Independent iterations side by side: innermost loops unrolled and put in an order in which the
engines overlap.

Engines are in-order queues, so a queue that waits for another inside an iteration could have begun
the next one. Each of the copies gets tiles of its own (together they take the memory of the
slots that rotated before), and a list schedule over the real costs decides the order of the
instructions of all copies. Order between instructions that touch the same memory is kept; tokens
and addresses come later, from the new order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.compiler.codegen.domain import Tensors
from shardwright.compiler.codegen.relocate import renamed
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space, Tile
from shardwright.compiler.schedule.engine_order import Memory, touched

# (initiation interval, latency after it) of an instruction in ps, and of each of several.
Costs = tuple[int, int]
Cost = Callable[[Sequence[Instr]], list[Costs]]
# Longer bodies are left alone: their queues have enough to do, and ordering them takes long.
_MAX_INSTRUCTIONS = 96


def overlap(kernel: Kernel, tensors: Tensors, most: int, cost: Cost) -> None:
    """Unroll and order the innermost loops of `kernel` in place, before tiles have addresses."""
    memory = Memory(kernel, tensors)
    for loop, count in zip(_innermost(kernel.body), unroll_factors(kernel.body, most), strict=True):
        if count:
            costs = cost([i for i in loop.body if isinstance(i, Instr)])
            copies = [c for u in range(count) for c in _copy(loop, u, count, kernel.tiles)]
            loop.trip //= count
            loop.body[:] = schedule(copies, memory, costs * count)


def unroll_factors(body: Sequence[Instr | Loop], most: int) -> tuple[int, ...]:
    """How many iterations of each innermost loop `overlap` lays side by side; 0 where it leaves the
    loop alone. The same factors for the same code give the same code.
    """
    counts = ((len(loop.body), _factor(loop, most)) for loop in _innermost(body))
    return tuple(n if size * n <= _MAX_INSTRUCTIONS else 0 for size, n in counts)


def _innermost(body: Sequence[Instr | Loop]) -> list[Loop]:
    """Loops that hold instructions only."""
    found: list[Loop] = []
    for item in body:
        if isinstance(item, Loop):
            found += _innermost(item.body) or [item]
    return found


def _factor(loop: Loop, most: int) -> int:
    """The largest divisor of the trip count up to `most` that leaves a loop."""
    return max((u for u in range(2, most + 1) if loop.trip % u == 0 and u < loop.trip), default=1)


def _copy(loop: Loop, turn: int, count: int, tiles: list[Tile]) -> list[Instr]:
    """The body for iterations `turn`, `turn + count`, ...; tiles that rotate with it are copied."""
    copies: dict[int, int] = {}

    def tile(number: int) -> int:
        old = tiles[number]
        if turn == 0 or old.loop != loop.register:
            return number
        if number not in copies:
            copies[number] = len(tiles)
            tiles.append(replace(old, name=f"{old.name}.{turn}"))
        return copies[number]

    instrs = [i for i in loop.body if isinstance(i, Instr)]
    made = [_unrolled(i, loop.register, count, turn, tile) for i in instrs]
    if turn == count - 1:
        for old in tiles:
            if old.loop == loop.register:
                old.slots = math.ceil(old.slots / count)
    return made


def _unrolled(
    instr: Instr, register: int, count: int, turn: int, tile: Callable[[int], int]
) -> Instr:
    """`instr` with `register` standing for `count * register + turn`."""

    def affine(value: Affine) -> Affine:
        step = dict(value.terms).get(register, 0)
        return value + Affine(step * turn, ((register, step * (count - 1)),)) if step else value

    def buffer(p: AccessPattern) -> int:
        return p.buffer if p.space is Space.HBM else tile(p.buffer)

    def zero_when(first: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if turn and register in first else first  # the first iteration is turn 0

    return renamed(instr, affine, buffer, zero_when)


def schedule(instrs: Sequence[Instr], memory: Memory, costs: Sequence[Costs]) -> list[Instr]:
    """A list schedule: what can start first, of equals what has the longest way to go."""
    before = _dependences(instrs, memory)
    ahead = _ways_to_go(before, costs)
    after: list[list[int]] = [[] for _ in instrs]
    for n, earlier in enumerate(before):
        for b in earlier:
            after[b].append(n)
    clock = dict.fromkeys(Engine, 0)
    open_inputs = [len(earlier) for earlier in before]
    ready_ps = [0] * len(instrs)  # when the last input so far has finished
    ready = [n for n, count in enumerate(open_inputs) if not count]
    order: list[int] = []
    while ready:
        start, _, n = min((max(clock[instrs[n].engine], ready_ps[n]), -ahead[n], n) for n in ready)
        interval, latency = costs[n]
        clock[instrs[n].engine] = start + interval
        ready.remove(n)
        order.append(n)
        for m in after[n]:
            ready_ps[m] = max(ready_ps[m], start + interval + latency)
            open_inputs[m] -= 1
            if not open_inputs[m]:
                ready.append(m)
    return [instrs[n] for n in order]


def _dependences(instrs: Sequence[Instr], memory: Memory) -> list[list[int]]:
    """Earlier instructions that touch memory an instruction also touches, one of them writing."""
    seen: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    before: list[list[int]] = []
    for n, instr in enumerate(instrs):
        mine: set[int] = set()
        for key, engines in touched(instr, memory).items():
            writes = any(engines.values())
            mine.update(m for m, wrote in seen.get(key, ()) if wrote or writes)
            seen.setdefault(key, []).append((n, writes))
        before.append(sorted(mine))
    return before


def _ways_to_go(before: Sequence[Sequence[int]], costs: Sequence[Costs]) -> list[int]:
    """Longest chain of costs from the start of each instruction to the end."""
    ahead = [sum(c) for c in costs]
    for n in range(len(before) - 1, -1, -1):
        for b in before[n]:
            ahead[b] = max(ahead[b], sum(costs[b]) + ahead[n])
    return ahead
