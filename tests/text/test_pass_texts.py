"""One pass on one text: every file of `passes/` says what a graph becomes.

    // What the case shows, in a sentence.
    // pass: fold,dce
    main(...) { ... }
    // becomes:
    main(...) { ... }

Behind `becomes:` stands the text, `// the same`, or `// refused: CODE message`. With
`--update-golden` it is written anew; a review reads the difference.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.traits import of
from shardwright.compiler.ir.types import Graph, Value
from shardwright.orchestrator.opt.command import rewritten
from shardwright.orchestrator.opt.registry import REWRITES, passes_of

FOLDER = Path(__file__).parent / "passes"
FILES = sorted(FOLDER.glob("*/*.txt"))
SAME = "// the same\n"
SPLIT = "// becomes:\n"
ROUNDING = ("auto_cast", "rounded")
"""Passes that round to shorter types on purpose."""
LEAST = 20
"""Rewrites with a case that fires and one that does not."""


@dataclass(frozen=True)
class Case:
    """A file, taken apart."""

    passes: str
    head: str
    text: str
    expected: str


def read(path: Path) -> Case:
    whole = path.read_text()
    given, _, expected = whole.partition(SPLIT)
    found = re.match(r"// \S.*\.\n// pass: (\S.*)\n", given)
    assert found, f"{path} requires a sentence, `// pass: NAMES` and a graph"
    return Case(found[1], found[0], given[found.end() :], expected)


def made_of(case: Case, path: Path) -> tuple[Graph, Graph | None, str]:
    """The graph, what it becomes, and what the file should say of that."""
    graph = parse(case.text, str(path))
    try:
        made = rewritten(graph, passes_of(case.passes))
    except DiagnosticError as error:
        d = error.diagnostic
        return graph, None, f"// refused: {d.code} {d.message.splitlines()[0]}\n"
    text = to_text(made, with_locs=True)
    return graph, made, SAME if text == to_text(graph, with_locs=True) else text


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_graph_becomes_what_its_file_says(path: Path, request: pytest.FixtureRequest) -> None:
    case = read(path)
    assert re.split(r"[,{]", case.passes)[0] == path.parent.name
    graph, made, found = made_of(case, path)
    assert to_text(graph, with_locs=True) == case.text, "the input is as `to_text` prints it"
    if made is not None:
        same_values(graph, made, 1e-2 if path.parent.name in ROUNDING else 1e-5)
    if request.config.getoption("--update-golden"):
        if found != case.expected:
            path.write_text(case.head + case.text + SPLIT + found)
            request.node.user_properties.append(("golden", f"{path.stem}: written"))
        return
    names = (f"{path.name} as it is", "what the pass makes")
    lines = difflib.unified_diff(case.expected.splitlines(True), found.splitlines(True), *names)
    difference = "".join(lines)
    if difference:
        pytest.fail(f"{path}: pass {case.passes}\n{difference}", pytrace=False)


def same_values(before: Graph, after: Graph, bound: float) -> None:
    """Both compute the same, where one core alone computes anything."""
    ops = {op.name for graph in (before, after) for op in graph.walk()}
    if ops & of(Kind.COLLECTIVE, Kind.RANK) or len(before.inputs) != len(after.inputs):
        return
    rng = np.random.default_rng(0)
    arrays = [random(value, rng) for value in before.inputs]
    pairs = zip(evaluate(before, arrays), evaluate(after, arrays), strict=True)
    for one, other in pairs:
        a, b = (np.asarray(found, np.float64) for found in (one, other))
        np.testing.assert_allclose(b, a, rtol=bound, atol=bound)


def random(value: Value, rng: np.random.Generator) -> np.ndarray:
    kind = value.type
    if kind.dtype.is_float:
        return rng.normal(size=kind.shape).astype(kind.dtype.numpy)
    return rng.integers(0, 4, size=kind.shape).astype(kind.dtype.numpy)


def test_rewrites_have_a_case_that_fires_and_one_that_does_not() -> None:
    found: dict[str, set[bool]] = defaultdict(set)
    for path in FILES:
        found[path.parent.name].add(read(path).expected == SAME)
    assert found.keys() <= REWRITES.keys()
    both = [name for name, cases in found.items() if cases == {True, False}]
    assert len(both) >= LEAST, both
