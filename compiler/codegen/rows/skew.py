"""Sweeps whose products, arithmetic and transposes work on different blocks at a time.

Engines are in-order queues. Where a block goes from the tensor engine to the others and back, the
tensor engine would wait for the arithmetic of every block before it begins the next one. So a sweep
has three phases, and at any time phase 1 works on block i + 1 while phase 2 works on block i and
phase 0 on block i + 2. Values that go from one phase to the next lie in two places, taken in turn;
a loop body therefore covers two blocks. Next: `group.py` emits the phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compiler.codegen.builder import Box, Held, Scope
from compiler.codegen.rows.columns import Run
from compiler.isa.region import Affine

PHASES = 3
# What phase 2 still reads of phase 0 must not be overwritten before.
_ORDER = (1, 2, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """A value of a block, or with `turns` its transposes."""

    number: int
    turns: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Where every second block of a sweep keeps its values: `tiles` and `kept` (PSUM) what a later
    phase reads, `banks` what a phase needs of PSUM. They belong to the scope `home`.
    """

    home: Scope
    tiles: dict[int, Held] = field(default_factory=dict)
    kept: dict[tuple[str, int], Held] = field(default_factory=dict)
    banks: dict[tuple[str, int], Held] = field(default_factory=dict)


@dataclass(slots=True)
class Flight:
    """A block on its way: the phase at work, the phase of every step, the values that go from one
    phase to a later one, where those are now, and where new ones may be put.
    """

    phases: Mapping[Step, int]
    crossing: frozenset[int]
    places: Places
    held: dict[int, Held] = field(default_factory=dict)
    phase: int = 0


def crossing(phases: Mapping[Step, int], reads: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Values that a later phase than their own reads; `reads` are the values each value reads."""
    found = {s.number for s, p in phases.items() if s.turns and p > phases[Step(s.number)]}
    for step, phase in phases.items():
        made = [i for i in reads[step.number] if Step(i) in phases and not step.turns]
        found.update(i for i in made if phases[Step(i)] < phase)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Block:
    """Block `at` of run number `run`."""

    run: int
    at: int


def in_phases(
    place: Scope, atom: int, runs: Sequence[Run], flights: Sequence[Sequence[Flight]]
) -> Iterator[tuple[int, Scope, Flight]]:
    """(run, where, flight with its phase set) in the order of the code of a sweep at `place`.

    At time t, phase p works on block t - p; times with all phases in one run become a loop over
    two at once. `flights` are those of even and odd blocks of every run.
    """
    blocks = [_Block(r, at) for r, run in enumerate(runs) for at in range(run.piece.trip)]
    time, last = 0, len(blocks) + PHASES - 1
    while time < last:
        pairs = _pairs(blocks, time)
        body = place.loop(pairs) if pairs > 1 else place
        for beside in range(2 if pairs > 1 else 1):
            # Both blocks of a loop body have tiles of their own, so one slot is enough.
            looped = pairs > 1
            here = Scope(place.builder, body.body, body.boxes, body.register) if looped else body
            for phase in _ORDER:
                number = time + beside - phase
                if 0 <= number < len(blocks):
                    block = blocks[number]
                    flight = flights[block.run][number % 2]
                    flight.phase = phase
                    scope = _scope(here, place, atom, runs[block.run], block, number, looped)
                    yield block.run, scope, flight
        time += 2 * pairs if pairs > 1 else 1


def _pairs(blocks: Sequence[_Block], time: int) -> int:
    """How often two times from `time` on can repeat."""
    first = time - PHASES + 1
    if not 0 <= first < len(blocks):
        return 0
    end = first
    while end < len(blocks) and blocks[end].run == blocks[first].run:
        end += 1
    return (end - first - PHASES + 1) // 2


def _scope(
    here: Scope, place: Scope, atom: int, run: Run, block: _Block, number: int, looped: bool
) -> Scope:
    """The code for a block; in a loop, for every second one from it on."""
    extent = run.piece.extent
    terms = ((here.register, 2 * extent),) if looped else ()
    origin = place.boxes[atom].origin + Affine(run.piece.start + block.at * extent, terms)
    scope = here.straight({atom: Box(origin, extent)})
    begins, begun = (here.register,) if looped else (), place.first.get(atom, ())
    goes_on = number > 0 or begun is None
    scope.first = {**place.first, atom: None if goes_on else (*(begun or ()), *begins)}
    return scope
