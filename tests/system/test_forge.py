"""Files that were made to harm their reader, of every kind: never a traceback, never a hang, always
a code or an end. Each case is reproducible from its number: `python -m tests.support.forge`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.forge import pool
from tests.support.forge.kinds import KINDS, mixed_judge
from tests.support.forge.pool import Judge, run_cases

FEW: dict[str, tuple[int, frozenset[str]]] = {
    "programs": (500, frozenset(("done", "SW_NEFF_CONTENT", "SW_NEFF_CHECKSUM"))),
    "stablehlo": (30, frozenset(("compiled", "SW_STABLEHLO_PARSE at"))),
    "bytecode": (15, frozenset(("SW_STABLEHLO_PARSE at",))),
    "hlo text": (20, frozenset(("compiled", "SW_HLO_PARSE at"))),
    "hlo proto": (20, frozenset(("compiled", "SW_HLO_PARSE"))),
    "jobs": (100, frozenset(("done", "SW_USAGE", "SW_MODEL"))),
    "configs": (60, frozenset(("done", "SW_MODEL_CONFIG", "SW_MODEL"))),
    "targets": (40, frozenset(("done", "SW_TARGET"))),
    "points": (60, frozenset(("done", "SW_USAGE"))),
    "plans": (30, frozenset(("done", "set aside"))),
    "reports": (30, frozenset(("done", "SW_REPORT"))),
    "journals": (60, frozenset(("done",))),
    "entries": (60, frozenset(("done", "SW_UNIT_FORMAT"))),
}
"""Of every kind, the cases here, and answers that must be among theirs."""
TOGETHER = (
    ("programs",),
    ("stablehlo", "bytecode", "hlo text", "hlo proto"),
    ("jobs", "configs", "targets", "points", "plans", "reports", "journals", "entries"),
)
"""Kinds that one process judges."""


def test_every_kind_has_cases_here() -> None:
    assert FEW.keys() == KINDS.keys() == {kind for kinds in TOGETHER for kind in kinds}


EVERY = 10
"""`make test` has every tenth case, from the first on; `make matrix` those between."""


@pytest.mark.parametrize("kinds", TOGETHER, ids=lambda kinds: kinds[0])
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_forged_files_end_or_are_refused_with_a_code(
    kinds: tuple[str, ...], sample: bool, tmp_path: Path
) -> None:
    rows = [(kind, KINDS[kind].material(tmp_path), FEW[kind][0]) for kind in kinds]
    cases = [n for n in range(sum(row[2] for row in rows)) if sample is (n % EVERY == 0)]
    outcome = run_cases(cases, mixed_judge, (str(tmp_path), rows))
    assert not outcome.findings, "\n".join(outcome.findings.values())
    assert outcome.tally.total() == len(cases)
    expected = {f"{kind}: {answer}" for kind in kinds for answer in FEW[kind][1]}
    assert sample or outcome.tally.keys() >= expected, outcome.tally
    assert {answer.partition(":")[0] for answer in outcome.tally} == set(kinds), outcome.tally


def harmful(_: object) -> Judge:
    """What a judge may meet at worst, by number; this runs in the process of the cases."""
    pool.CASE_S = 1

    def judge(number: int) -> str:
        if number == 1:
            raise KeyError("view")
        if number == 2:
            os.abort()
        if number == 3:
            time.sleep(60)
        if number == 4:
            return str(len(bytearray(8 * 10**9)))
        return "done"

    return judge


def test_the_forge_finds_what_it_looks_for() -> None:
    outcome = run_cases(range(6), harmful, None)
    assert outcome.findings.keys() == {1, 2, 3, 4}
    answers = ("FINDING KeyError", "exit -6", "FINDING CaseTimeout", "FINDING MemoryError")
    assert outcome.tally == {**dict.fromkeys(answers, 1), "done": 2}
