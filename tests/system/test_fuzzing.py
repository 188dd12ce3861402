"""Damaged and odd model files: never a traceback, never a hang, always a code.

150 cases here, 2,000 in the matrix, 10,000 in minutes by `python -m tests.system.test_fuzzing`;
every case is reproducible from its number.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache

import pytest

from compiler.frontend.isolated import Reader
from tests.support.fuzzing import (
    consistent_text,
    mutated_proto,
    mutated_text,
    sources,
    verdict,
)

CASE_TIMEOUT_S = 30
BLOCK = 500  # cases that a process of the long run takes at a time, with one reader
KINDS: tuple[tuple[Callable[[bytes, random.Random], bytes], int], ...] = (
    (mutated_text, 0),
    (mutated_proto, 1),
    (consistent_text, 0),
)


@pytest.fixture(scope="module")
def programs() -> list[tuple[bytes, bytes]]:
    return sources()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader(timeout_s=CASE_TIMEOUT_S) as made:
        yield made


def case(number: int, programs: list[tuple[bytes, bytes]]) -> tuple[str, bytes]:
    """(name, content) of the damaged file with this number."""
    rng = random.Random(number)
    mutate, form = rng.choice(KINDS)
    return mutate.__name__, mutate(rng.choice(programs)[form], rng)


def run_cases(numbers: range, programs: list[tuple[bytes, bytes]], reader: Reader) -> Counter[str]:
    tally: Counter[str] = Counter()
    for number in numbers:
        try:
            answer = verdict(case(number, programs)[1], reader)
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
        assert answer != "SW_INTERNAL", f"case {number}"
        tally[answer] += 1
    print(dict(tally))
    return tally


def test_damaged_models_are_refused_with_a_code(
    programs: list[tuple[bytes, bytes]], reader: Reader
) -> None:
    tally = run_cases(range(150), programs, reader)
    assert tally["compiled"] and len(tally) > 3


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(4))
def test_two_thousand_damaged_models(
    block: int, programs: list[tuple[bytes, bytes]], reader: Reader
) -> None:
    tally = run_cases(range(1000 + 500 * block, 1500 + 500 * block), programs, reader)
    assert sum(tally.values()) == 500


def judged(numbers: range) -> tuple[Counter[str], list[str]]:
    """The answers to these cases, and each finding with its number and trace."""
    programs, tally, findings = _programs(), Counter[str](), []
    with Reader(timeout_s=CASE_TIMEOUT_S) as reader:
        for number in numbers:
            kind, data = case(number, programs)
            trace = ""
            try:
                answer = verdict(data, reader)
            except Exception:
                answer, trace = "raised", traceback.format_exc(limit=-6)
            if answer in ("raised", "SW_INTERNAL"):
                findings.append(f"FINDING {answer}: case {number}, {kind}\n{trace}")
            tally[answer] += 1
    return tally, findings


@cache
def _programs() -> list[tuple[bytes, bytes]]:
    """Once per process: lowering them takes longer than a hundred cases."""
    return sources()


def long_run(numbers: range, workers: int) -> int:
    """The number of findings among these cases, blocks of cases in `workers` processes."""
    tally, findings = Counter[str](), 0
    blocks = [numbers[at : at + BLOCK] for at in range(0, len(numbers), BLOCK)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(judged, block) for block in blocks]):
            answers, found = future.result()
            tally += answers
            findings += len(found)
            print("".join(found) + f"{tally.total()} of {len(numbers)}: {_text(tally)}", flush=True)
    return findings


def _text(tally: Counter[str]) -> str:
    return ", ".join(f"{answer} {count}" for answer, count in tally.most_common())


def main() -> None:
    """The long run: `python -m tests.system.test_fuzzing [FIRST [COUNT]]`, on every core."""
    first, count = (*map(int, sys.argv[1:3]), *(10_000, 10_000)[len(sys.argv) - 1 :])
    sys.exit(1 if long_run(range(first, first + count), os.cpu_count() or 1) else 0)


if __name__ == "__main__":
    main()
