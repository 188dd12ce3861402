"""docs/onnx.md lists every row of the table, and the table is what was promised."""

from __future__ import annotations

import pytest

from shardwright.compiler.frontend.graphs.table import Row
from shardwright.compiler.frontend.onnx.operators import ONNX
from shardwright.orchestrator.cli import main
from tests.compiler.frontend.onnx_models.promised import OPERATORS
from tests.support.graph_pages import DOCS, page


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "onnx.md").read_text() == page("onnx.md"), "run `make docs`"


def test_the_operators_that_were_promised_have_rows() -> None:
    assert {row.operator for row in ONNX} == set(OPERATORS) and len(OPERATORS) == 157


def test_the_command_lists_the_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list-operators", "--framework", "ONNX"]) == 0
    assert capsys.readouterr().out.split() == sorted(OPERATORS)


def test_an_operator_has_one_row_from_an_opset_on() -> None:
    old, new = (ONNX.find("Squeeze", opset) for opset in (12, 13))
    assert old is not None and new is not None and (old.since, new.since) == (1, 13)
    assert ONNX.find("Scatter", 10) is not None and ONNX.find("Scatter", 11) is None
    with pytest.raises(KeyError, match="two rows"):
        ONNX.add(Row("Squeeze", 13, print))
