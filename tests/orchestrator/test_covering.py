"""No preset ends in a defect at any setting: a pairwise covering array of models, types, compiler
options, machines and strategies, planned (timing only), and every preset as it comes.

    python -m tests.orchestrator.test_covering [FIRST [COUNT]]    # all of it, less than an hour

An answer is a report, or a refusal with a code; how long it takes nobody asks here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.orchestrator import api
from shardwright.orchestrator.models.presets import PRESETS, SIZED
from tests.support.cells import long_in_matrix
from tests.support.pairwise import Row, covering, pairs_of

NAMES = (*PRESETS, *SIZED)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model__preset": NAMES,
    "model__dtype": ("float32", "bfloat16"),
    "compiler__optlevel": (1, 2, 3),
    "compiler__auto_cast": ("none", "matmult", "all"),
    "strategy__remat": ("none", "selective", "full"),
    "cluster__target": (
        "trn1n.32xlarge",
        "trn2.48xlarge",
        "trn3-gen1-ultraserver",
        "inf2.48xlarge",
    ),
    "compiler__model_type": ("generic", "transformer"),
    "strategy__name": ("fsdp", "llm-training"),
}
ALONE = ("inf2.48xlarge",)
"""Machines without a network between instances for training."""
ROWS = covering(SETTINGS)
SAMPLE = range(5, len(ROWS), 16)
"""What the tests have of the array, two of it in the matrix; all of it is a long run."""


def answer(folder: Path, row: Row) -> str:
    """ "fits", "does not fit" or the code of the refusal. Raises what is no refusal."""
    usual: dict[str, object] = {"cache__dir": folder, "run__executor": "inline"}
    usual["cluster__instances"] = 1 if row.get("cluster__target") in ALONE else 4
    try:
        report = api.plan(api.job(**usual, **row))
    except DiagnosticError as error:
        if error.code == "SW_INTERNAL":
            raise
        return error.code
    assert report.step_time_s > 0
    return "fits" if report.fits else "does not fit"


def test_every_pair_of_settings_stands_in_a_row() -> None:
    found = set().union(*map(pairs_of, ROWS))
    two = {"compiler__optlevel": 3, "model__preset": "bert-base"}
    assert pairs_of(two) <= found
    assert len(found) == sum(
        len(SETTINGS[a]) * len(SETTINGS[b])
        for i, a in enumerate(SETTINGS)
        for b in list(SETTINGS)[i + 1 :]
    )


@pytest.mark.parametrize("number", long_in_matrix(SAMPLE, SAMPLE[:2], SAMPLE[2:]))
def test_rows_of_the_array_have_an_answer(number: int, tmp_path: Path) -> None:
    assert answer(tmp_path, ROWS[number])


def main() -> None:
    """Plan rows of the array, and behind them every preset as it comes; say what each came to."""
    first, count = (*map(int, sys.argv[1:]), *(0, 10**6)[len(sys.argv) - 1 :])
    rows = [*ROWS, *({"model__preset": name} for name in NAMES)][first : first + count]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows, first):
            try:
                came = answer(Path(folder), row)
            except Exception as error:
                failed += 1
                came = f"FINDING {type(error).__name__}: {str(error)[:500]}"
            print(number, *row.values(), came, sep="\t", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
