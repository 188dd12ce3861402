"""Mechanical damages of the product's sources: which does no test notice?

`python -m tests.mutants --count N --seed S --shard I/M` draws damages, each is written into a copy
of the repository, and the tests that execute it are run, those of the matrices too. A call stops
after its budget of minutes and the next one goes on from the journal. Coverage of the tests is
measured first, once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.mutants import runs
from tests.mutants.areas import area_of
from tests.mutants.campaign import (
    constants,
    drawn,
    judged,
    of_figures,
    read_journal,
    summary,
    unjudged,
    write_journal,
)
from tests.mutants.coverage_map import entry_of, load_map, map_file, test_files
from tests.mutants.damage import Damage, read_damages, resolve
from tests.mutants.named import judge, named_damages
from tests.mutants.trees import ROOT, Tree

STORE = ROOT / "out" / "mutants"
Item = TypeVar("Item")
Found = TypeVar("Found")


def main(argv: Sequence[str] | None = None) -> None:
    """List the damages, or judge them and print what they add up to."""
    args = _arguments(argv)
    if args.named:
        _judge_named()
        return
    damages = _damages(args)
    if args.list:
        for damage in damages:
            print(f"{damage.path}:{damage.line} {damage.address}")
        return
    deadline = time.monotonic() + 60 * args.budget_minutes
    runs.warm()
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree.copied(Path(folder) / f"tree{n}") for n in range(args.workers)]
        _measure(args.store, trees, deadline)
        _judge(args, damages, trees, deadline)
    for line in summary(damages, read_journal(args.journal), ROOT):
        print(line)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard", default="0/1", help="index/count")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget-minutes", type=float, default=20.0)
    parser.add_argument("--journal", type=Path, help="verdicts, in the folder of the coverage")
    parser.add_argument("--store", type=Path, default=STORE, help="folder of the coverage")
    parser.add_argument("--only", metavar="SYMBOL", help="damages of a symbol, or one by address")
    parser.add_argument("--again", action="store_true", help="run survivors of the journal again")
    parser.add_argument("--list", action="store_true", help="print the damages and run nothing")
    parser.add_argument("--constants", action="store_true", help="every constant, by figures alone")
    parser.add_argument("--named", action="store_true", help="the damages of named.toml instead")
    args = parser.parse_args(argv)
    # What figures alone do not notice other tests may.
    args.journal = (
        args.journal or args.store / f"{'constants' if args.constants else 'journal'}.jsonl"
    )
    return args


def _judge_named() -> None:
    """Make every damage that has a name, and say which test notices it."""
    every, seen = named_damages(), 0
    runs.warm()
    with tempfile.TemporaryDirectory() as folder:
        for damage, test in judge(every, Tree.copied(Path(folder) / "tree")):
            seen += bool(test)
            print(f"{'noticed' if test else 'SURVIVED':8} {damage.name}: {test}", flush=True)
    print(f"{seen} of {len(every)} damages with a name are noticed")


def _damages(args: argparse.Namespace) -> list[Damage]:
    if args.constants:
        return constants(ROOT)
    if not args.only:
        index, count = map(int, args.shard.split("/"))
        return drawn(ROOT, args.count, args.seed)[index::count]
    every = read_damages(ROOT, area_of(ROOT))
    if "#" in args.only:
        return [resolve(args.only, every)]
    return [damage for damage in every if f"{damage.module}:{damage.symbol}" == args.only]


def _measure(store: Path, trees: Sequence[Tree], deadline: float) -> None:
    """Run every file of tests that changed under coverage."""
    sources = sorted(area_of(ROOT))
    files = [file for file in test_files(ROOT) if not entry_of(ROOT, file, store).exists()]

    def measure(file: str, tree: Tree) -> str:
        map_file(tree, file, sources, store)
        return file

    for file in _each(measure, files, trees, deadline):
        print(f"coverage of {file}", flush=True)


def _judge(
    args: argparse.Namespace, damages: Sequence[Damage], trees: Sequence[Tree], deadline: float
) -> None:
    """Judge what has no verdict in the journal."""
    known = load_map(ROOT, test_files(ROOT), args.store)
    known = of_figures(known) if args.constants else known
    again = args.again or bool(args.only)
    left = list(unjudged(damages, read_journal(args.journal), ROOT, again))
    for verdict in _each(lambda damage, tree: judged(damage, tree, known), left, trees, deadline):
        write_journal(args.journal, verdict)
        line = f"{verdict.cpu_s:6.1f} s {verdict.result:8} {verdict.address} {verdict.by}"
        print(line, flush=True)


def _each(
    work: Callable[[Item, Tree], Found],
    items: Iterable[Item],
    trees: Iterable[Tree],
    deadline: float,
) -> Iterator[Found]:
    """What `work` finds, as it comes, one item per tree at a time; none is begun too late."""
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(item: Item) -> list[Found]:
        if time.monotonic() > deadline:
            return []
        tree = free.get()
        try:
            return [work(item, tree)]
        finally:
            free.put(tree)

    pool = ThreadPoolExecutor(free.qsize())
    try:
        for future in as_completed([pool.submit(one, item) for item in items]):
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
