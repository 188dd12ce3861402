"""A campaign: damages drawn with a seed, one verdict each in a journal, and what they add up to."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path

from tests.mutants.areas import AREAS, CONSTANTS, area_of, files_of
from tests.mutants.coverage_map import Map
from tests.mutants.damage import Damage, damages_of, read_damages
from tests.mutants.runs import Recorder, Run, run_tests
from tests.mutants.selection import batches
from tests.mutants.trees import Tree

PAGE = Path("docs") / "testing.md"


@dataclass(frozen=True)
class Verdict:
    """What became of a damage: `noticed`, `survived`, or `untested` (no test executes it)."""

    address: str
    diff: str
    result: str
    by: str = ""  # the test that failed, or did not end
    why: str = ""
    cpu_s: float = 0.0


def drawn(root: Path, count: int, seed: int) -> list[Damage]:
    """As many damages from every area, in an order that begins the same for every count."""
    shuffled = []
    for area in AREAS:
        found = read_damages(root, files_of(root, area))
        random.Random(f"{seed} {area}").shuffle(found)
        shuffled.append(found)
    turns = chain.from_iterable(zip_longest(*shuffled))
    return list(islice((damage for damage in turns if damage), count))


def constants(root: Path) -> list[Damage]:
    """Every constant of the machine's model a tenth more, small whole numbers one more; a tenth of
    nothing is nothing."""
    found: dict[tuple[str, int], Damage] = {}
    for path in CONSTANTS:
        source = (root / path).read_text()
        for damage in damages_of(path, source):
            written = source[damage.start : damage.end]
            if damage.operator == "number" and re.fullmatch(r"[\d._e-]*[1-9][\d._e-]*", written):
                found.setdefault((path, damage.start), damage)
    return list(found.values())


def of_figures(known: Map) -> Map:
    """The tests that compare with golden files or with figures worked out by hand."""
    kept = {t: s for t, s in known.seconds.items() if "by_hand" in t or "tests/golden" in t}
    return Map(kept, known.sources)


def judged(damage: Damage, tree: Tree, known: Map) -> Verdict:
    """Run the tests of a damage until one notices it."""
    source = (tree.path / damage.path).read_text()
    verdict = partial(Verdict, damage.address, damage.diff(source))
    module = damage.module if damage.path.endswith(".py") else ""
    cpu_s, result = 0.0, "untested"
    with tree.holding(damage.path, damage.applied(source)):
        for batch in batches(damage, source, known):
            run = run_tests(
                tree,
                batch.files,
                partial(Recorder, batch.tests),
                budget_s=10 + 3 * batch.seconds,
                module=module,
            )
            cpu_s, result = round(cpu_s + run.end.cpu_s, 1), "survived"
            if found := noticed(run):
                return verdict("noticed", *found, cpu_s)
    return verdict(result, cpu_s=cpu_s)


def noticed(run: Run) -> tuple[str, str] | None:
    """(the test that noticed a damage, how), or None."""
    for row in run.rows:
        if "import" in row:
            return "import", row["import"]
        if row.get("outcome", "passed") != "passed":
            return row["test"], row["why"]
    if run.end.how != "exit" or run.end.status:
        return run.unfinished, run.end.how
    return None


def read_journal(path: Path) -> dict[str, Verdict]:
    """The last verdict on every damage; of a line cut short none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            verdict = Verdict(**json.loads(line))
        except ValueError:
            continue
        found[verdict.address] = verdict
    return found


def write_journal(path: Path, verdict: Verdict) -> None:
    """Add a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")


def unjudged(
    damages: Iterable[Damage], journal: Mapping[str, Verdict], root: Path, again: bool
) -> Iterator[Damage]:
    """Damages without a verdict on the source as it reads now; with `again` also survivors."""
    for damage in damages:
        verdict = journal.get(damage.address)
        is_old = verdict and verdict.diff != damage.diff((root / damage.path).read_text())
        if not verdict or is_old or (again and verdict.result != "noticed"):
            yield damage


def explained(page: str) -> list[str]:
    """Addresses that begin a row of a table on the page about survivors."""
    return re.findall(r"^\| `([^`]+:[^`]+#\w+#\d+)` \|", page, re.MULTILINE)


def summary(damages: Sequence[Damage], journal: Mapping[str, Verdict], root: Path) -> Iterator[str]:
    """A line for every area, one for all of it, and every survivor with what it changed."""
    areas = area_of(root)
    verdicts = [(areas[d.path], journal[d.address]) for d in damages if d.address in journal]
    survivors = [verdict for _, verdict in verdicts if verdict.result != "noticed"]
    total = Counter(area for area, _ in verdicts)
    seen = Counter(area for area, verdict in verdicts if verdict.result == "noticed")
    for area in filter(total.get, AREAS):
        yield f"{area:20} {total[area]:4} damages {seen[area]:4} noticed"
    share = seen.total() / max(1, total.total())
    of_all = f"{total.total():4} of {len(damages)} damages"
    yield f"{'all':20} {of_all} {seen.total():4} noticed ({share:.1%})"
    known = explained((root / PAGE).read_text())
    for verdict in survivors:
        note = f", explained in {PAGE}" if verdict.address in known else ""
        yield f"\n{verdict.address} {verdict.result}{note}\n{verdict.diff}"
