"""Attributes of an op on stacks, held against its NumPy reference on every row of the harness."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.roles import is_stackable, stacked
from shardwright.compiler.ir.types import Value, tensor_type
from tests.compiler.ir.test_traits import op_of
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase, case_inputs

ROWS = [pytest.param(case, id=case.id) for case in CASES if is_stackable(case.attrs)]
MOVES = (Kind.VIEW, Kind.JOIN)


@pytest.mark.parametrize("case", ROWS)
def test_on_a_stack_an_op_gives_the_stack(case: OpCase) -> None:
    """Of two sets of operands; what pads is one number for all."""
    op, inputs = op_of(case), case_inputs(case)
    others = [x if not x.ndim else np.flip(x) for x in inputs]
    pairs = zip(inputs, others, strict=True)
    given = [np.stack(pair) if pair[0].ndim or case.op != "pad" else pair[0] for pair in pairs]
    values = [Value(tensor_type(x.shape, DType.from_numpy(x.dtype))) for x in given]
    both = make_op(case.op, values, stacked(case.attrs, 2))
    (found,) = OPS[case.op].reference(both, given)
    for have, args in zip(found, (inputs, others), strict=True):
        (want,) = OPS[case.op].reference(op, args)
        np.testing.assert_allclose(
            np.asarray(have, np.float64), np.asarray(want, np.float64), rtol=1e-2, atol=1e-2
        )


def test_views_and_joins_are_stacked() -> None:
    assert {name for name, op in OPS.items() if op.kind in MOVES} <= {
        c.op for p in ROWS for c in p.values
    }
