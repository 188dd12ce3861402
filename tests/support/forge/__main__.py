"""The long run: `python -m tests.support.forge KIND --cases N --seed S --shard I/N`.

Case `n` of seed `s` is number `1_000_000 * s + n`. With `--journal FILE` answers are kept, and a
second run goes on behind what it holds: remove it after a change. The exit code is 1 when there are
findings.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.forge.kinds import KINDS
from tests.support.forge.pool import Outcome, run_cases

_SEED_STEP = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases of one kind or of all."""
    args = _arguments(argv)
    index, count = map(int, args.shard.split("/"))
    first = _SEED_STEP * args.seed
    numbers = range(first + args.first, first + args.first + args.cases)[index::count]
    failed = 0
    for kind in args.kinds or [kind for kind in KINDS if kind != args.but]:
        outcome = _run(kind, numbers, args.workers, args.journal)
        failed += len(outcome.findings)
        answers = ", ".join(f"{a} {n}" for a, n in outcome.tally.most_common())
        print(f"{kind}: {len(outcome.findings)} findings in {outcome.tally.total()}: {answers}")
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.support.forge", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--but", choices=list(KINDS), default="", help="a kind to leave out")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard", default="0/1", help="index/count")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--journal", type=Path, help="a file that keeps answers")
    return parser.parse_args(argv)


def _run(kind: str, numbers: Sequence[int], workers: int, journal: Path | None) -> Outcome:
    before = _read(journal, kind) if journal else {}
    left = [n for n in numbers if n not in before]
    with tempfile.TemporaryDirectory() as folder:
        made = KINDS[kind]
        material = made.material(Path(folder))

        def tell(number: int, answer: str, finding: str) -> None:
            if journal:
                with journal.open("a") as file:
                    file.write(f"{kind}\t{number}\t{answer}\n")
            if finding:
                print(f"{kind} {number}: {answer}\n{finding}", flush=True)

        outcome = run_cases(left, made.prepare, (str(folder), material), workers, tell)
    outcome.tally.update(before[n] for n in numbers if n in before)
    outcome.findings |= {
        n: before[n] for n in numbers if before.get(n, "").startswith(("FINDING", "exit", "hang"))
    }
    return outcome


def _read(journal: Path, kind: str) -> dict[int, str]:
    """The answers a journal holds."""
    if not journal.exists():
        return {}
    rows = (line.rstrip("\n").split("\t") for line in journal.read_text().splitlines())
    return {int(number): answer for name, number, answer in rows if name == kind}


if __name__ == "__main__":
    sys.exit(main())
