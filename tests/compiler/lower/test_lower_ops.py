"""Every op case of the harness lowers to kernels that compute the op's reference, or is refused
with a code.
"""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import CompileError
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import build_graph, case_inputs
from tests.support.kernel_reference import check_lowering

REFUSED = {
    "add-0x3f32-0x3f32-empty": "NCC_EVRF001",
    "constant--empty": "NCC_EVRF001",
    "dot_general-0x4f32-4x3f32-empty": "NCC_EVRF001",
    "reduce-3x0f32-empty": "NCC_EVRF001",
    "slice-9x11f32-(1, 1)1": "NCC_EVRF001",
}
"""What this version refuses, and with which code: later issues shorten the list."""


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_op_case(case) -> None:
    graph, index = build_graph(case), CASES.index(case)
    ids = [c.id for c in CASES]
    name = case.id + (str(ids[:index].count(case.id)) if ids.count(case.id) > 1 else "")
    if name in REFUSED:
        with pytest.raises(CompileError) as caught:
            check_lowering(graph, case_inputs(case))
        assert caught.value.code == REFUSED[name]
        return
    check_lowering(graph, case_inputs(case), tolerance=1e-5)
