"""Every op case of the harness lowers to regions that compute the op's reference, or is refused with a code."""

from __future__ import annotations

import pytest

from compiler.diagnostics import CompileError
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import build_graph, case_inputs
from tests.support.region_reference import check_lowering


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_op_case(case) -> None:
    graph = build_graph(case)
    check_lowering(graph, case_inputs(case), tolerance=1e-5)
