"""Software pipelining of passes: products, arithmetic and transposes work on different blocks.

Engines are in-order queues. Where a block goes from the tensor engine to the others and back, the
tensor engine would wait for the arithmetic of every block before it begins the next one. So a pass
has phases: at any time phase 1 works on block i + 2 while phase 2 works on block i + 1, phase 0 on
block i + 3, and phase 3 takes the sums of block i out of PSUM. Values that go from one phase to a
later one lie in two places, taken in turn; a loop body therefore covers two blocks. Where several
row tiles take turns in a block, each is one in this sense, and a loop body ends with a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.compiler.codegen.builder import Box, Held, Scope
from shardwright.compiler.codegen.rows.columns import Run
from shardwright.compiler.isa.kernel import Affine

PHASES = 4
# Sums leave PSUM before the tensor engine adds to their banks again, and before Vector begins what
# waits for other engines. Products come before what waits for arithmetic on those of the block
# before, unless they would overwrite what phase 2 still reads.
_ORDER = (3, 1, 0, 2)
_ORDER_OF_KEPT = (3, 1, 2, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """A value of a block, with `transposes` its transpose, or with `leaves` its way out of PSUM."""

    number: int
    transposes: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Where every second block of a pass keeps its values: `tiles` and `kept` (PSUM) what a later
    phase reads, `banks` what a phase needs of PSUM. They belong to the scope `home`.
    """

    home: Scope
    tiles: dict[int, Held] = field(default_factory=dict)
    kept: dict[tuple[str, int], Held] = field(default_factory=dict)
    banks: dict[tuple[str, int], Held] = field(default_factory=dict)


@dataclass(slots=True)
class Iteration:
    """A block of a row tile in the pipeline: the phase at work, the phase of every step, the values
    that go from one phase to a later one, where those are now, and where new ones may be put.
    """

    phases: Mapping[Step, int]
    crossing: frozenset[int]
    places: Places
    held: dict[int, Held] = field(default_factory=dict)
    phase: int = 0


def crossing(phases: Mapping[Step, int], reads: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Values that a later phase than their own reads; `reads` are the values each value reads."""
    return frozenset(i for i, _ in _crossings(phases, reads))


def order(phases: Mapping[Step, int], reads: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The order of the phases in the code."""
    kept = any(phases[Step(i)] == 0 and phase == 2 for i, phase in _crossings(phases, reads))
    return _ORDER_OF_KEPT if kept else _ORDER


def _crossings(
    phases: Mapping[Step, int], reads: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """(value, later phase than its own that reads it)."""
    for step, phase in phases.items():
        read = [step.number] if step.transposes else [] if step.leaves else reads[step.number]
        made = [i for i in read if Step(i) in phases]
        yield from ((i, phase) for i in made if phases[Step(i)] < phase)


class Turn(NamedTuple):
    """Row tile number `tile` in block `at` of run number `run`."""

    run: int
    at: int
    tile: int


def pipelined(
    tiles: Sequence[Scope],
    iter_dim: int,
    runs: Sequence[Run],
    iterations: Sequence[Sequence[Iteration]],
    phases: Sequence[int],
) -> Iterator[tuple[Turn, Scope, Iteration]]:
    """(whose turn, where, iteration with its phase set) in the order of the code of a pass of row
    tiles at `tiles`, which share a body and take turns in every block.

    At time t, phase p of `phases` works on turn t - p; times with all phases in one run become a
    loop over as many at once as bring it to the same tile and place. `iterations` are those of even
    and odd turns of every run.
    """
    blocks = [(r, at) for r, run in enumerate(runs) for at in range(run.piece.trip)]
    turns = [Turn(r, at, tile) for r, at in blocks for tile in range(len(tiles))]
    period = math.lcm(2, len(tiles))
    time, last = 0, len(turns) + PHASES - 1
    while time < last:
        trip = _trip(turns, time, period)
        looped = trip > 1
        body = tiles[0].loop(trip) if looped else tiles[0]
        for beside in range(period if looped else 1):
            for phase in phases:
                number = time + beside - phase
                if 0 <= number < len(turns):
                    turn = turns[number]
                    iteration = iterations[turn.run][number % 2]
                    iteration.phase = phase
                    lane = 1 + number % 2 + 2 * looped
                    here = tiles[turn.tile].beside(body.body, lane)
                    looping = (body.register, period // len(tiles)) if looped else None
                    yield turn, _scope(here, iter_dim, runs[turn.run], turn, looping), iteration
        time += period * trip if looped else 1


def _trip(turns: Sequence[Turn], time: int, period: int) -> int:
    """How often `period` times from `time` on can repeat."""
    first = time - PHASES + 1
    if not 0 <= first < len(turns):
        return 0
    end = first
    while end < len(turns) and turns[end].run == turns[first].run:
        end += 1
    return (end - first - PHASES + 1) // period


def _scope(
    here: Scope, iter_dim: int, run: Run, turn: Turn, looping: tuple[int, int] | None
) -> Scope:
    """The code for a turn; in a loop (its register, blocks it moves on by) for those after it."""
    extent = run.piece.extent
    terms = ((looping[0], looping[1] * extent),) if looping else ()
    origin = here.boxes[iter_dim].origin + Affine(run.piece.start + turn.at * extent, terms)
    scope = here.straight({iter_dim: Box(origin, extent)})
    begins, begun = looping[:1] if looping else (), here.first.get(iter_dim, ())
    goes_on = (turn.run, turn.at) > (0, 0) or begun is None
    scope.first = {**here.first, iter_dim: None if goes_on else (*(begun or ()), *begins)}
    return scope
