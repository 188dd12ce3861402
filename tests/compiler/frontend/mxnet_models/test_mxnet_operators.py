"""Every row of the table against what MXNet computes, which is kept in a file."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.graphs.graph import Model
from shardwright.compiler.frontend.graphs.interpreter import evaluate
from shardwright.compiler.frontend.graphs.table import Training
from shardwright.compiler.frontend.graphs.types import computed_type
from shardwright.compiler.frontend.mxnet.operators import MXNET
from shardwright.compiler.frontend.mxnet.symbol import read_model
from tests.compiler.frontend.mxnet_models.mxnet_cases import Case, cases, losses
from tests.fixtures.mxnet_models import FOLDER, titles_of, unpacked
from tests.support.mxnet_json import of_node

KINDS = sorted({case.operator for case in cases()})


@cache
def kept(name: str) -> list[list[np.ndarray]]:
    return unpacked(FOLDER / f"{name}.npz")


def model_of(case: Case) -> Model:
    text = of_node(case.operator, len(case.operands), case.attributes, case.results)
    return read_model(text.encode())


def values(case: Case, is_known: bool) -> dict[str, Any]:
    row = MXNET.find(case.operator, 0)
    assert row is not None
    return {
        f"x{n}": array if is_known else jnp.asarray(array) for n, array in enumerate(case.operands)
    }


def check_equal(found: Any, right: np.ndarray, most: float) -> None:
    ours = np.asarray(found)
    assert ours.shape == right.shape
    assert computed_type(ours.dtype) == computed_type(right.dtype)
    a, b = ours.astype(np.float64), right.astype(np.float64)
    finite = np.isfinite(b)
    assert (np.isfinite(a) == finite).all()
    np.testing.assert_array_equal(a[~finite], b[~finite])
    scale = max(1.0, float(np.abs(b[finite]).max(initial=0.0)))
    np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=most * scale)


def check(operator: str, is_known: bool) -> None:
    for case, right in zip(cases(), kept("operators"), strict=True):
        if case.operator != operator:
            continue
        found = evaluate(model_of(case), values(case, is_known))
        assert len(found) == len(right) == case.results, str(case)
        for ours, theirs in zip(found, right, strict=True):
            check_equal(ours, theirs, case.most)


@pytest.mark.matrix
@pytest.mark.parametrize("operator", KINDS)
def test_operator(operator: str) -> None:
    check(operator, is_known=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("operator", KINDS)
def test_operator_of_known_values(operator: str) -> None:
    check(operator, is_known=True)


def loss_gradient(case: Case) -> Any:
    model = model_of(case)
    first, *rest = (jnp.asarray(array) for array in case.operands)

    def total(x: Any) -> Any:
        said = Training()
        given = {"x0": x} | {f"x{n}": array for n, array in enumerate(rest, 1)}
        results = evaluate(model, given, said)
        return sum(said.losses) if said.losses else jnp.sum(results[0])

    return jax.grad(total)(first)


@pytest.mark.parametrize("number", range(len(losses())), ids=lambda n: str(losses()[n]))
def test_gradient_of_a_head(number: int) -> None:
    """What a head adds to the loss has the gradient that MXNet gives it."""
    case, (right,) = losses()[number], kept("losses")[number]
    check_equal(loss_gradient(case), right, 2e-6)


@pytest.mark.parametrize(("name", "every"), [("operators", cases), ("losses", losses)])
def test_numbers_are_those_of_the_cases(name: str, every: Any) -> None:
    """In their order: one that moved asks for `python -m tests.fixtures.mxnet_models`."""
    with np.load(FOLDER / f"{name}.npz") as found:
        np.testing.assert_array_equal(found["titles"], titles_of(every()))


def test_every_row_has_a_case() -> None:
    """Other names of an operator are the same row."""
    held = {row.function for case in cases() if (row := MXNET.find(case.operator, 0)) is not None}
    assert {row.operator for row in MXNET if row.function not in held} == set()
