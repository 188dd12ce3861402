"""Campaigns: what is drawn, which tests a damage is given to, what a journal keeps, and one run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.mutants.areas import AREAS, area_of
from tests.mutants.campaign import (
    Verdict,
    constants,
    drawn,
    of_figures,
    read_journal,
    summary,
    unjudged,
    write_journal,
)
from tests.mutants.coverage_map import Covered, Map
from tests.mutants.damage import Damage, damages_of, module_name
from tests.mutants.runs import _import_error
from tests.mutants.selection import LIMIT_S, TABLES, batches, telling_lines
from tests.mutants.trees import ROOT

SOURCE = "WIDTH = 3\n\n\ndef time(a):\n    b = a + 1\n    return b * WIDTH\n"


def damage_at(line: int) -> Damage:
    return next(d for d in damages_of("compiler/timing/evaluate.py", SOURCE) if d.line == line)


def test_every_area_has_its_part_and_a_longer_draw_begins_like_a_shorter_one() -> None:
    areas, damages = area_of(ROOT), drawn(ROOT, 60, seed=3)
    assert Counter(areas[d.path] for d in damages) == dict.fromkeys(AREAS, 60 // len(AREAS))
    assert damages[:24] == drawn(ROOT, 24, seed=3)


def test_sources_as_they_are_can_be_imported_and_tables_have_readers() -> None:
    """Else every damage would be noticed by an import that fails, or by no test at all."""
    paths = area_of(ROOT)
    first = {area: path for path, area in reversed(paths.items()) if path.endswith(".py")}
    assert {_import_error(module_name(path)) for path in first.values()} == {""}
    tables = [path for path in paths if not path.endswith(".py")]
    assert all(path.startswith(tuple(TABLES)) for path in tables) and len(tables) > 10
    assert set(TABLES.values()) <= set(paths)


def test_every_constant_is_moved_once_and_figures_alone_judge_it() -> None:
    found = constants(ROOT)
    places = [(d.path, d.start) for d in found]
    assert len(set(places)) == len(places) > 100
    assert (
        sum(d.path.endswith(".toml") for d in found) == 8
    )  # three values, three bands, one end of them 0
    assert {d.operator for d in found} == {"number"} and found[0].ordinal == 0
    known = Map({"tests/golden/test_a.py::a": 1.0, "tests/x/test_y_by_hand.py::b": 1.0, "t": 1.0})
    assert len(of_figures(known).seconds) == 2


def test_lines_that_tell() -> None:
    assert telling_lines(damage_at(5), SOURCE) == {5}
    assert telling_lines(damage_at(1), SOURCE) == {5, 6}  # of the function that names it
    through = (
        SOURCE.replace("WIDTH = 3\n", "DEPTH = 3\nWIDTH = {0: DEPTH}\n") + "def f(a):\n    a()\n"
    )
    (damage,) = {d for d in damages_of("m.py", through) if d.symbol == "DEPTH" and not d.ordinal}
    assert telling_lines(damage, through) == {6, 7}  # of what is made of it
    at_import = through + "B = f(2)\ndef g():\n    return B\n"
    (inner,) = [d for d in damages_of("m.py", at_import) if d.symbol == "f"]
    assert telling_lines(inner, at_import) == {9, 12}  # and of what is made by it at import
    made = "DEEP = 3\ndef h():\n    return DEEP\nB = h()\ndef g():\n    return B\n"
    deep = next(d for d in damages_of("m.py", made) if d.symbol == "DEEP")
    assert telling_lines(deep, made) == {3, 6}  # and of what a function made of it
    elsewhere = through.replace("DEPTH}", "4}")
    assert telling_lines(damage, elsewhere) == {6, 7, 9}  # of every function: others may name it


def test_by_hand_first_golden_last_and_no_more_than_the_limit() -> None:
    seconds = {
        "tests/golden/test_cells.py::a": 1.0,
        "tests/orchestrator/test_far.py::a": 0.1,
        "tests/compiler/test_near.py::a": 3.0,
        "tests/compiler/test_near.py::other": 1.0,
        "tests/compiler/test_evaluate_by_hand.py::a": 0.3,
        "tests/compiler/test_evaluate_by_hand.py::other": 0.3,
        "tests/sharding/test_long.py::a": LIMIT_S,
    }
    known = Map(seconds)
    masks = {test: 1 << 5 for test in seconds if not test.endswith("::other")}
    known.sources["compiler/timing/evaluate.py"].append(Covered(SOURCE, masks))
    (batch,) = batches(damage_at(5), SOURCE, known)
    assert batch.tests == (
        "tests/compiler/test_evaluate_by_hand.py::a",
        "tests/compiler/test_evaluate_by_hand.py::other",
        "tests/compiler/test_near.py::a",
        "tests/orchestrator/test_far.py::a",
        "tests/golden/test_cells.py::a",
    )
    assert not list(batches(damage_at(6), SOURCE, known))


def test_the_map_outlives_edits_elsewhere_in_a_file() -> None:
    known = Map({"t": 1.0})
    known.sources["m.py"].append(Covered(SOURCE, {"t": 1 << 6}))
    moved = "DEPTH = 2\n" + SOURCE
    assert known.tests_of("m.py", moved, {7}) == {"t"}
    assert known.tests_of("m.py", moved, {6}) == set()
    assert known.tests_of("m.py", SOURCE.replace("a + 1", "a + 2"), {5}) == {"t"}


def test_a_journal_goes_on_where_it_ended(tmp_path: Path) -> None:
    (tmp_path / "compiler" / "timing").mkdir(parents=True)
    (tmp_path / "compiler" / "timing" / "evaluate.py").write_text(SOURCE)
    noticed, survived, changed, new = damages_of("compiler/timing/evaluate.py", SOURCE)[:4]
    journal = tmp_path / "journal.jsonl"
    write_journal(journal, Verdict(noticed.address, noticed.diff(SOURCE), "noticed", "t"))
    write_journal(journal, Verdict(survived.address, survived.diff(SOURCE), "survived"))
    write_journal(journal, Verdict(changed.address, "-b = a + 7", "noticed", "t"))
    with journal.open("a") as file:
        file.write('{"address": "cut sho')
    found = read_journal(journal)
    damages = [noticed, survived, changed, new]
    assert list(unjudged(damages, found, tmp_path, again=False)) == [changed, new]
    assert list(unjudged(damages, found, tmp_path, again=True)) == [survived, changed, new]


def test_the_summary_names_survivors() -> None:
    first, second, third = damages_of("compiler/timing/evaluate.py", SOURCE)[:3]
    verdicts = [
        Verdict(first.address, "", "noticed", "t"),
        Verdict(second.address, "-a\n+b", "survived"),
    ]
    lines = list(summary([first, second, third], {v.address: v for v in verdicts}, ROOT))
    assert "all                     2 of 3 damages    1 noticed (50.0%)" in lines
    assert f"\n{second.address} survived\n-a\n+b" in lines


RUN = """
from pathlib import Path
from tests.mutants import campaign, coverage_map, damage, named
from tests.mutants.trees import Tree

here = Path.cwd()
tree = Tree(here / "tree")
coverage_map.map_file(tree, "tests/test_it.py", ["sim_cluster/it.py"], here)
known = coverage_map.load_map(tree.path, ["tests/test_it.py"], here)
source = (tree.path / "sim_cluster" / "it.py").read_text()
for each in damage.damages_of("sim_cluster/it.py", source):
    verdict = campaign.judged(each, tree, known)
    print(verdict.address.partition(":")[2], verdict.result, verdict.by)
for new in ("a * 2", "a * 3"):
    row = named.Named("twice", "sim_cluster/it.py", "double", "a + a", new, ("tests/test_it.py",))
    for _, test in named.judge([row], tree):
        print(new, test)
assert source == (tree.path / "sim_cluster" / "it.py").read_text()
"""


def test_damages_of_a_small_tree_are_judged(tmp_path: Path) -> None:
    texts = {
        "shardwright/__init__.py": "",
        "sim_cluster/__init__.py": "",
        "sim_cluster/it.py": "def double(a):\n    return a + a\n\n\ndef never(a):\n    return -a\n",
        "tests/test_it.py": "from shardwright.sim_cluster.it import double\n\n\n"
        "def test_it():\n    assert double(3) == 6\n",
        "pytest.ini": "[pytest]\npythonpath = .\nmarkers =\n    matrix: long\n    ray: Ray\n",
    }
    for name, text in texts.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tree" / "shardwright" / "sim_cluster").symlink_to("../sim_cluster")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        "a * 2 ",
        "a * 3 tests/test_it.py::test_it",
        "double#operator#0 noticed tests/test_it.py::test_it",
        "double#term#0 noticed tests/test_it.py::test_it",
        "double#term#1 noticed tests/test_it.py::test_it",
        "never#term#0 untested ",
    ]
