"""Trying tilings: the planners estimate, the evaluator decides where estimates are close.

A nest of a kernel offers candidates, cheapest estimate first. Level 1 takes the first that fits;
the other levels generate the best few of each nest in turn and keep the code with the shortest
simulated time on the nominal machine. Nothing here knows what a candidate is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardwright.compiler.codegen.planning import Candidate
from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.model_types import MODEL_TYPES
from shardwright.compiler.options import CompileOptions

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Effort:
    """How many candidates of a nest are tried, up to how many times the best estimate, and how many
    iterations of an innermost loop lie side by side: tilings are compared at the first number of
    each row of `unroll`, the rest of the row with the best of them. The best code of loop fusions
    and rows is tried with `loads_apart` too. A `thorough` search asks the planners for variants.
    """

    tries: int
    spread: float
    unroll: tuple[tuple[int, ...], ...]
    thorough: bool = False
    loads_apart: bool = False


# Our choice, by `benchmarks/optlevels.py`: more tries than these change next to nothing there.
EFFORTS = {
    1: Effort(1, 1.0, ((1,),)),
    2: Effort(4, 1.5, ((1, 2, 4), (4,)), loads_apart=True),
    3: Effort(12, 4.0, ((1, 2, 4, 8), (2,), (4, 8)), thorough=True, loads_apart=True),
}

# Reduction fusions lay their tiles side by side themselves, and their code takes long to make.
ROW_EFFORTS = {
    1: Effort(1, 1.0, ((1,),)),
    2: Effort(2, 1.5, ((1, 4),), loads_apart=True),
    3: Effort(12, 4.0, ((1, 2, 4),), loads_apart=True),
}


def effort_of(options: CompileOptions, kinds: Collection[str]) -> Effort:
    """The effort for a kernel with nests of `kinds`."""
    if "reduction" in kinds:
        return ROW_EFFORTS[options.optlevel]
    searched = MODEL_TYPES[options.model_type].searched
    thorough = options.optlevel > 1 and any(kind in searched for kind in kinds)
    return EFFORTS[3 if thorough else options.optlevel]


def worth_trying(candidates: Sequence[Candidate], effort: Effort) -> Sequence[Candidate]:
    """The candidates a level tries, cheapest estimate first, and then as many variants."""
    ranked = sorted(candidates, key=lambda c: c.cost)
    most = effort.spread * ranked[0].cost
    own, variants = ([c for c in ranked if c.variant is kind] for kind in (False, True))
    return [c for c in (*own[: effort.tries], *variants[: effort.tries]) if c.cost <= most]


def fastest(
    nests: Sequence[Sequence[Candidate]],
    effort: Effort,
    build: Callable[[Sequence[Candidate], int, float], Made | None],
    time: Callable[[Made], int],
) -> tuple[Made, Sequence[Candidate], int]:
    """The fastest code found for `nests` on the walks that `effort` allows, the candidate of each
    nest, and the unroll factor; `build` as for `walk`. Walks meet, and planners may offer one
    tiling several times: who builds and times remembers what it was asked.

    Raises CapacityError (the first) when nothing that was tried fits on chip.
    """

    def built(chosen: Sequence[Any], below: float) -> Made | None:
        return build(chosen[:-1], chosen[-1], below)

    found: list[tuple[Made, Sequence[Any]]] = []
    failure: CapacityError | None = None
    for factors in effort.unroll:
        try:
            found.append(walk([*nests, factors], built, time))
        except CapacityError as error:
            failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    best = min(found, key=lambda f: time(f[0])) if len(found) > 1 else found[0]
    return best[0], best[1][:-1], best[1][-1]


def walk(
    choices: Sequence[Sequence[Any]],
    build: Callable[[Sequence[Any], float], Made | None],
    time: Callable[[Made], int],
) -> tuple[Made, Sequence[Any]]:
    """The best code found by changing one choice at a time, from the first option of each on, and
    its choices. `build` is given the time to beat, and may answer None where code cannot.

    Raises CapacityError (the first) when nothing that was tried fits on chip.
    """
    chosen = [options[0] for options in choices]
    best: Made | None = None
    shortest, failure = math.inf, None
    alone = all(len(options) == 1 for options in choices)
    for number, options in enumerate(choices):
        for option in options:
            if best is not None and option is chosen[number]:
                continue
            trial = [*chosen[:number], option, *chosen[number + 1 :]]
            try:
                made = build(trial, shortest)
            except CapacityError as error:
                failure = failure or error
                continue
            if made is None:
                continue
            taken = 0 if alone else time(made)
            if taken < shortest:
                best, shortest, chosen = made, taken, trial
    if best is None:
        assert failure is not None
        raise failure
    return best, chosen
