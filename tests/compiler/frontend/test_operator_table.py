"""The 62 operators of the published table, one model each: compiled and equal to XLA, or refused
with a code; and the page that says which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.coverage import is_supported
from shardwright.compiler.surface.operators import DOCUMENTED
from tests.support.op_coverage import PAGE, page
from tests.support.operator_examples import EXAMPLES, compile_and_run

ROWS = {row.name: row for row in DOCUMENTED}


def test_every_row_has_an_example() -> None:
    assert set(EXAMPLES) == set(ROWS) and len(EXAMPLES) == 62


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_operator_computes_what_xla_computes_or_is_refused(name: str) -> None:
    example = EXAMPLES[name]
    if not is_supported(ROWS[name]):
        with pytest.raises(DiagnosticError, match="NCC_"):
            compile_and_run(example.text(), example.arguments, "L1")
        return
    expected = example.expected()
    for level in ("L0", "L1"):
        found = compile_and_run(example.text(), example.arguments, level)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if not example.bits:
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_coverage_page_is_up_to_date() -> None:
    root = Path(__file__).resolve().parents[3]
    assert (root / PAGE).read_text() == page(), "run `make docs`"
