"""docs/pytorch-operators.md lists every row of the table of ATen's operators, and no other. What it
says of torch's own table is held by test_operators.py, which needs torch."""

from __future__ import annotations

from shardwright.compiler.frontend.pytorch.operators import ATEN
from tests.support.torch_operators_page import PAGE, listed


def test_every_row_is_listed() -> None:
    page = PAGE.read_text().partition("## Every operator")[0]
    assert listed(page) == set(ATEN), "run: python -m tests.support.torch_operators_page"
