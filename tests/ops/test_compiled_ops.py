"""Harness rows of arithmetic, sums, contractions and shapes as tile programs: L1 and L0 against the
reference, with ordinary values and with special ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Op, Value
from tests.harnesses import dot, elementwise, reduce, shape
from tests.harnesses.agreement import assert_same
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.harnesses.special import special_inputs
from tests.support.compiled import levels_of, link


def _is_empty(case: OpCase) -> bool:
    """Whether the target refuses a row for tensors without elements."""
    graph = build_graph(case)
    return not all(v.type.num_elements for v in (*graph.inputs, *graph.outputs))


ROWS = [
    case
    for case in (*elementwise.CASES, *reduce.CASES, *dot.CASES, *shape.CASES)
    if not _is_empty(case)
]
BY_OP = {op: [c for c in ROWS if c.op == op] for op in OPS}
ROUNDED = 4e-6  # of the result's scale, fp32
BF16_ROUNDED = 2.0**-7


def _rows_in_one(rows: list[OpCase]) -> tuple[Graph, list[np.ndarray], list[np.ndarray]]:
    """All rows as one graph: one compilation instead of dozens; with ordinary values and with
    special ones.
    """
    inputs: list[Value] = []
    ops: list[Op] = []
    arrays: list[np.ndarray] = []
    special: list[np.ndarray] = []
    for row in rows:
        operands = [Value(t) for t in row.types]
        inputs += operands
        given = case_inputs(row)
        arrays += given
        special += special_inputs(row) or given
        ops.append(make_op(row.op, operands, row.attrs))
    return Graph(tuple(inputs), tuple(ops), tuple(op.result for op in ops)), arrays, special


def _assert_close(have: np.ndarray, want: np.ndarray, name: str) -> None:
    assert have.dtype == want.dtype and have.shape == want.shape, name
    if have.dtype.kind in "biu":
        np.testing.assert_array_equal(have, want, err_msg=name)
        return
    rtol = BF16_ROUNDED if DType.from_numpy(want.dtype).bytes == 2 else ROUNDED
    have, want = have.astype(np.float64), want.astype(np.float64)
    finite = want[np.isfinite(want)]
    scale = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    np.testing.assert_allclose(have, want, rtol=rtol, atol=rtol * scale, err_msg=name)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("op", [op for op in sorted(BY_OP) if BY_OP[op]])
def test_tile_programs_equal_the_reference(op: str) -> None:
    graph, arrays, special = _rows_in_one(BY_OP[op])
    program = link(graph)
    wanted = evaluate(graph, arrays)
    for level, found in zip(("L0", "L1"), levels_of(program, arrays), strict=True):
        for row, have, want in zip(BY_OP[op], found, wanted, strict=True):
            _assert_close(have, want, f"{row.id} {level}")
    wanted, left = evaluate(graph, special), iter(special)
    given = [[next(left) for _ in row.types] for row in BY_OP[op]]
    for level, found in zip(("L0", "L1"), levels_of(program, special), strict=True):
        for row, inputs, have, want in zip(BY_OP[op], given, found, wanted, strict=True):
            assert_same(row, level, inputs, [have], [want])
