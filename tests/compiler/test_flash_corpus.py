"""With attention `flash`, no spelling of the corpus keeps scores in HBM, and all have JAX's values.

Whole programs are compiled as a user would get them at -O1, which takes every row region that has
code (-O2 compares simulated times, and at these sizes storing may win). Scores that are a result (a
bias gradient, probabilities) or an argument (a bias) are there by the user's wish.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from compiler.isa.program import Program
from compiler.options import CompileOptions
from compiler.passes.pipeline import run, step_passes
from sim_cluster.run_single import run_single
from tests.corpus.all_spellings import ALL
from tests.corpus.case import Spelling, is_score
from tests.support.compiled import graph_of, link

FEW = ALL[::11]
KEPT_ON_CHIP = CompileOptions(optlevel=1, attention="flash")
BOUND = {"float32": 1e-5, "bfloat16": 2e-2}

ONE_OPERAND = "the sum over rows took the additions behind it as an epilogue first"
NO_CODE = "the row region has no code at these sizes and is taken apart"
GAPS = {
    **dict.fromkeys(
        ("jax_nn_local_window", "segment_ids", "padding_of_rows_and_keys", "clipped_exponential"),
        "the backward region of this mask or clip has no tile code",
    ),
    "concatenated_sink": "a concatenation along the keys is not part of row regions",
    **dict.fromkeys(
        (
            "self_attention",
            "values_are_keys",
            "rotary_and_normalised",
            "checkpointed",
            "checkpoint_that_saves_products",
            "scanned",
            "scanned_and_checkpointed",
            "scanned_with_segments",
            "two_layers",
        ),
        ONE_OPERAND,
    ),
    **dict.fromkeys(
        (
            "dropout",
            "dropout_by_product",
            "learned_temperature",
            "linen_dropout",
            "linen_padding",
            "row_scale_and_key_bias",
            "scanned_with_dropout",
            "soft_cap",
            "talking_heads",
        ),
        NO_CODE,
    ),
}
"""Spellings whose scores may still cross HBM, and why. Their values are held all the same."""


def stored_scores(program: Program, case: Spelling) -> Iterator[tuple[int, ...]]:
    """Shapes of score tensors in HBM: of functions, less the arguments and results of the case."""
    if case.stored:
        return
    for function in program.functions:
        yield from (t.shape for t in function.tensors if is_score(t.shape))


def check(case: Spelling, backward: bool) -> None:
    fn, arguments = case.gradient if backward else case.fn, case.arguments()
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(fn)(*arguments))]
    graph = run(graph_of(fn, *arguments), step_passes(KEPT_ON_CHIP))
    program = link(graph, KEPT_ON_CHIP)
    outputs = run_single(program, {f"arg{i}": a for i, a in enumerate(arguments)}, "L1")
    for number, want in enumerate(wanted):
        have = outputs[f"out{number}"].astype(np.float64)
        error = np.linalg.norm(have - want) / max(np.linalg.norm(want.astype(np.float64)), 1e-12)
        assert error <= BOUND[case.dtype], (number, error)
    stored = list(stored_scores(program, case))
    if stored and case.name in GAPS:
        pytest.xfail(GAPS[case.name])
    assert not stored


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", FEW, ids=lambda c: c.name)
def test_scores_stay_on_chip(case: Spelling, backward: bool) -> None:
    check(case, backward)


@pytest.mark.matrix
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_scores_of_every_spelling_stay_on_chip(case: Spelling, backward: bool) -> None:
    check(case, backward)


def test_gaps_are_spellings() -> None:
    assert set(GAPS) <= {case.name for case in ALL}
