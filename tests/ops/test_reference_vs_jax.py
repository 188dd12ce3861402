"""Each op's NumPy reference against XLA:CPU, on every row of the harness, with ordinary values and
with special ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from jax._src.lib.mlir import ir

from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.reference import evaluate
from tests.harnesses.agreement import assert_same_as_xla
from tests.harnesses.all_cases import CASES, GAPS
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.harnesses.special import special_inputs
from tests.support import xla

BY_OP = {op: [c for c in CASES if c.op == op] for op in OPS}


def assert_close(ours: np.ndarray, theirs: np.ndarray, case: OpCase) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, case.id
    a, b = ours, theirs
    if ours.dtype.kind not in "biu":
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if case.rtol == 0:
        np.testing.assert_array_equal(a, b, err_msg=case.id)
        return
    finite = b[np.isfinite(b)]
    scale = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    np.testing.assert_allclose(a, b, rtol=case.rtol, atol=case.rtol * scale, err_msg=case.id)


def loaded(op: str, text: str) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    try:
        return xla.load(text)
    except ir.MLIRError as error:
        raise AssertionError(
            f"{op} requires a spelling that StableHLO has (compiler/ir/printer_ops.py, printer.py,"
            f" spelling.py; docs/extending.md has the cases), got\n{text}"
        ) from error


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("op", [op for op in sorted(OPS) if op not in GAPS])
def test_reference_equals_xla(op: str) -> None:
    rows = BY_OP[op]
    assert rows, (
        f"{op} requires a row in tests/harnesses, or a reason in GAPS there: it has neither"
    )
    for row in rows:
        graph, inputs = build_graph(row), case_inputs(row)
        theirs = loaded(op, to_stablehlo(graph))
        for mine, other in zip(evaluate(graph, inputs), theirs(inputs), strict=True):
            assert_close(mine, other, row)
        special = special_inputs(row)
        if special is not None:
            assert_same_as_xla(row, special, theirs(special))


def test_gaps_are_real() -> None:
    covered = {c.op for c in CASES}
    assert set(GAPS) <= set(OPS)
    assert not covered & set(GAPS), "a declared gap has rows"


def test_row_ids_are_distinct() -> None:
    ids = [c.id + repr(c) for c in CASES]
    assert len(ids) == len(set(ids))


def test_references_do_not_write_their_operands() -> None:
    for row in CASES:
        inputs = case_inputs(row)
        copies = [array.copy() for array in inputs]
        for array in inputs:
            array.flags.writeable = False  # a write raises; one through a view of ours shows below
        evaluate(build_graph(row), inputs)
        for array, copy in zip(inputs, copies, strict=True):
            assert array.tobytes() == copy.tobytes(), row.id


def test_flops_are_counted() -> None:
    for row in CASES:
        op = build_graph(row).ops[0]
        flops = OPS[op.name].flops(op)
        assert flops >= 0
        if OPS[op.name].elementwise and op.name != "bitcast_convert":
            assert flops == op.result.type.num_elements
