"""Every operator in every element type is what docs/op-types.md says: equal to XLA, computed in
fewer bits with a warning, or refused with a code.
"""

from __future__ import annotations

import pytest

from compiler.ir.opdef import OPS
from tests.harnesses.typed import TYPES, outcome, rows_of
from tests.support.type_page import PAGE, listed

QUICK = ("add", "clamp", "dot_general", "select_and_scatter")
"""One op of each road: elementwise, truth values, sums in fp32, windows."""


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    "op",
    [
        op if op in QUICK else pytest.param(op, marks=pytest.mark.matrix)
        for op in sorted(OPS)
        if rows_of(op)
    ],
)
def test_an_operator_in_every_type(op: str) -> None:
    for case in rows_of(op):
        found = {dtype: outcome(case, dtype) for dtype in TYPES}
        assert found == listed(PAGE.read_text(), case), case.id
