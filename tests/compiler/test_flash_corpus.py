"""With attention `flash`, no spelling of the corpus keeps scores in HBM, and all have JAX's values.

Whole programs are compiled at -O1, here with every reduction fusion that has code, however slow: at
these sizes storing may win. Scores that are a result (a bias gradient, probabilities) or an
argument (a bias) are there by the user's wish, once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.compiler.isa.program import Program
from shardwright.compiler.lower import accept
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.run_single import run_single
from tests.corpus.all_spellings import ALL
from tests.corpus.case import CORPUS, Function, Spelling, is_score
from tests.support.cells import diagonals, long_in_matrix
from tests.support.compiled import graph_of, link

KEPT_ON_CHIP = CompileOptions(optlevel=1, attention="flash")
BOUND = {"float32": 1e-5, "bfloat16": 2e-2}
WAYS = ("forward", "backward")
LEAST = 60  # spellings that hold both ways
FEW = ALL[::11]

HEADS = "a contraction over the heads is not part of reduction fusions"
GAPS = {("talking_heads", way): HEADS for way in WAYS}
"""(spelling, way) whose scores still cross HBM, and why. Their values are held all the same, and
one that keeps its scores on chip after all fails until it is taken off the list.
"""


def both_ways(spellings: Sequence[Spelling]) -> list[tuple[str, str]]:
    return [(case.name, way) for case in spellings for way in WAYS]


@pytest.fixture(autouse=True, scope="module")
def _whatever_it_takes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept, "QUICK_MARGIN", math.inf)
        yield


class ScoresInMemoryError(Exception):
    """A function keeps score tensors in HBM."""


@cache
def compiled(name: str, way: str) -> Program:
    """The program of a spelling."""
    case = CORPUS[name]
    graph = graph_of(_function(case, way), *case.arguments())
    return link(run(graph, step_passes(KEPT_ON_CHIP)), KEPT_ON_CHIP)


def _function(case: Spelling, way: str) -> Function:
    return case.gradient if way == "backward" else case.fn


def stored_scores(name: str, way: str) -> list[tuple[int, ...]]:
    """Shapes of score tensors in HBM: of functions, less the arguments and results of the case."""
    case, program = CORPUS[name], compiled(name, way)
    results = jax.tree.leaves(jax.eval_shape(_function(case, way), *case.arguments()))
    wished = Counter(_dims(a.shape) for a in (*case.arguments(), *results))
    kept = Counter(_dims(t.shape) for f in program.functions for t in f.tensors)
    return [shape for shape in (kept - wished).elements() if is_score(shape)]


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def check_values(name: str, way: str, level: str) -> None:
    """Hold every output of the program at a level against JAX."""
    case = CORPUS[name]
    arguments = case.arguments()
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(_function(case, way))(*arguments))]
    given = {f"arg{i}": a for i, a in enumerate(arguments)}
    outputs = run_single(compiled(name, way), given, level)
    for number, want in enumerate(wanted):
        have = outputs[f"out{number}"].astype(np.float64)
        error = np.linalg.norm(have - want) / max(np.linalg.norm(want.astype(np.float64)), 1e-12)
        assert error <= BOUND[case.dtype], (level, number, error)


def gaps(params: Sequence[Any]) -> list[Any]:
    """Parameters (name, way); gaps must fail, and for their scores only."""
    return [
        pytest.param(*p.values, marks=[*p.marks, *_marks(*p.values)], id="-".join(p.values))
        for p in params
    ]


def _marks(name: str, way: str) -> list[pytest.MarkDecorator]:
    why = GAPS.get((name, way))
    if why is None:
        return []
    return [pytest.mark.xfail(raises=ScoresInMemoryError, strict=True, reason=why)]


def check(name: str, way: str, *levels: str) -> None:
    for level in levels:
        check_values(name, way, level)
    if stored := stored_scores(name, way):
        raise ScoresInMemoryError(f"{name} {way} keeps {stored}")


@pytest.mark.parametrize(("name", "way"), gaps(long_in_matrix(both_ways(FEW), ())))
def test_scores_stay_on_chip(name: str, way: str) -> None:
    check(name, way, "L1")


def test_samples_do_not_count_for_what_a_row_takes() -> None:
    """A bias gradient adds up samples behind the loop over them: a row holds one at a time."""
    case = CORPUS["learned_bias"]
    many = [np.repeat(a, 128, 0) if a.ndim == 4 else a for a in case.arguments()]
    graph = run(graph_of(case.gradient, *many), step_passes(KEPT_ON_CHIP))
    tensors = [t for f in link(graph, KEPT_ON_CHIP).functions for t in f.tensors]
    assert sum(is_score(t.shape) for t in tensors) == 2  # the bias and its gradient


@pytest.mark.parametrize(("name", "way"), gaps(diagonals(both_ways(ALL), 4)))
def test_scores_of_every_spelling_stay_on_chip(name: str, way: str) -> None:
    check(name, way, "L1", "L0")


@pytest.mark.exhaustive
def test_most_spellings_hold_both_ways() -> None:
    hold = [c.name for c in ALL if not any(stored_scores(c.name, way) for way in WAYS)]
    print(f"{len(hold)} of {len(ALL)} spellings keep no score tensor in HBM, both ways")
    assert len(hold) >= LEAST


def test_gaps_are_spellings() -> None:
    names = {name for name, _ in GAPS}
    assert names <= set(CORPUS)
    assert len(ALL) - len(names) >= LEAST
