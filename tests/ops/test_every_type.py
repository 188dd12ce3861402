"""Every operator in every element type is what docs/op-types.md says: equal to XLA, computed in
fewer bits with a warning, or refused with a code.
"""

from __future__ import annotations

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS
from tests.harnesses.typed import TYPES, outcome, rows_of
from tests.support.cells import diagonals
from tests.support.type_page import PAGE, listed

QUICK = ("add", "clamp", "dot_general", "select_and_scatter")
"""One op of each road: elementwise, truth values, sums in fp32, windows."""
CELLS = [(op, dtype) for op in sorted(OPS) if rows_of(op) for dtype in TYPES]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("op", "dtype"), diagonals(CELLS, 5, [cell for cell in CELLS if cell[0] in QUICK])
)
def test_an_operator_in_every_type(op: str, dtype: DType) -> None:
    for case in rows_of(op):
        assert outcome(case, dtype) == listed(PAGE.read_text(), case)[dtype], case.id
