"""`opt`: text in, passes, text out; what does not fit is a coded error."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.pipeline import step_passes, unit_passes
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.compiler.rewriting.specs import without
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.dump.names import FILES, about
from shardwright.orchestrator.opt import registry
from shardwright.orchestrator.opt.registry import REWRITES, STAGES, TEXTUAL, passes_of

TEXT = """main(%in0: tensor<4xf32>) {
  %0 = constant 0.0 : tensor<4xf32>
  %1 = add %in0, %0 : tensor<4xf32> loc("net.py":7)
  %2 = tanh %1 : tensor<4xf32> loc("net.py":8)
  return %2
}
"""
FOLDED = """main(%in0: tensor<4xf32>) {
  %0 = tanh %in0 : tensor<4xf32> loc("net.py":8)
  return %0
}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "net.txt").write_text(TEXT)
    return str(tmp_path / "net.txt")


def test_text_goes_in_and_comes_out(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", file, "--pass", "fold,dce"]) == 0
    assert capsys.readouterr().out == FOLDED


def test_a_dash_reads_what_another_opt_writes(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["opt", file, "--pass", "fold"]) == 0
    between = io.TextIOWrapper(io.BytesIO(capsys.readouterr().out.encode()))
    monkeypatch.setattr(sys, "stdin", between)
    assert main(["opt", "-", "--pass", "dce"]) == 0
    assert capsys.readouterr().out == FOLDED


def test_output_goes_to_a_file(file: str, tmp_path: Path) -> None:
    assert main(["opt", file, "--pass", "fold,dce", "-o", str(tmp_path / "out.txt")]) == 0
    assert (tmp_path / "out.txt").read_text() == FOLDED


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--pass", "folds"], 2, "requires one of narrow_doubles, unroll"),
        (["--pass", "localized"], 2, "got 'localized', which also reads where every value lives"),
        (["--pass", "fold,"], 2, "requires at least one name, and one behind every comma"),
        (["--pass", "fold dce"], 2, "requires names separated by commas"),
        (["--pass", "fold{x=1}"], 2, "settings of fold: none"),
        (["--pass", "simplify{keep=true}"], 2, "settings of simplify: keep_sums"),
        (["--pass", "simplify{keep_sums=1}"], 2, "requires true or false for keep_sums"),
        (["--pass", "shifted{gather=-1}"], 2, "requires a number for gather of shifted"),
        (["--pass", "auto_cast{cast=some}"], 2, "cast requires one of none, matmult, all"),
        (["--pass", "ring{batch=3}"], 2, "batch requires an input of the graph, 0 to 0, got 3"),
        ([], 2, "opt requires --pass"),
    ],
)
def test_what_is_no_pass_is_refused(
    file: str, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", file, *words]) == code
    err = capsys.readouterr().err
    assert "error[SW_USAGE]" in err and said in err


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("main(%in0: tensor<4xf32>) {\n  return %1\n}\n", 2, "net.txt:2: error[SW_TEXT_SYNTAX]"),
        (TEXT.replace('tensor<4xf32> loc("net.py":8)', "tensor<5xf32>"), 70, "SW_IR_INVALID"),
        ("\xff", 2, "requires text in UTF-8"),
    ],
)
def test_a_text_that_is_no_graph_is_refused(
    text: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.txt").write_bytes(text.encode("latin-1"))
    assert main(["opt", str(tmp_path / "net.txt"), "--pass", "cse"]) == code
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "nowhere.txt", "--pass", "cse"]) == 2
    assert (
        "opt requires a file with the text of a graph, got nowhere.txt" in capsys.readouterr().err
    )


def broken(graph: Graph) -> Graph:
    """Loses the first op."""
    return Graph(graph.inputs, graph.ops[1:], graph.outputs, graph.name)


def raising(graph: Graph) -> Graph:
    """A defect."""
    raise KeyError(graph.name)


def keeping(graph: Graph) -> Graph:
    """Breaks its promise."""
    return graph


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (broken, 70, "SW_IR_INVALID"),
        (raising, 70, "SW_INTERNAL"),
        (keeping, 70, "rewrite defect promises no tanh, got tanh of tensor<4xf32>"),
    ],
)
def test_a_pass_with_a_defect_is_a_coded_error(
    function: Callable[[Graph], Graph],
    code: int,
    said: str,
    file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defect = Rewrite("defect", function, "", leaves=(without("tanh", ("tanh",)),))
    monkeypatch.setattr(registry, "TEXTUAL", {"defect": defect})
    assert main(["opt", file, "--pass", "defect"]) == code
    assert said in capsys.readouterr().err


def test_every_pass_is_listed_and_runs_with_its_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["opt", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TEXTUAL)
    graph = parse("main(%in0: tensor<4xf32>) {\n  %0 = tanh %in0 : tensor<4xf32>\n  return %0\n}\n")
    for line, (name, rewrite) in zip(lines, TEXTUAL.items(), strict=True):
        head, help_text = line.split("  ", 1)
        assert head.partition("{")[0] == name and help_text.strip() == rewrite.help
        (one,) = passes_of(head)
        assert to_text(one(graph)) == to_text(graph), name


def test_passes_of_the_pipeline_have_their_names_here() -> None:
    options = CompileOptions(saturate_infinity=True)
    names = {one.name for one in (*step_passes(DEFAULTS, 1), *unit_passes(options, "v2"))}
    assert names <= REWRITES.keys()
    assert len(REWRITES) == sum(map(len, STAGES.values())), "every name is given once"
    for name in REWRITES:
        assert about("", name) == about("functions/f", name) == REWRITES[name].help
    assert not REWRITES.keys() & {name for part in FILES.values() for name in part}


def test_a_broken_graph_is_refused_before_the_first_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = parse(TEXT)
    wrong = Graph(graph.inputs, (Op("tanh", (), graph.outputs),), graph.outputs)
    (tmp_path / "net.txt").write_text(to_text(wrong))
    assert main(["opt", str(tmp_path / "net.txt"), "--pass", "dce"]) == 70
    assert "SW_IR_INVALID" in capsys.readouterr().err
