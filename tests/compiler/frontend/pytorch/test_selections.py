"""Rows that a mask selects: value and gradient are torch's, or it is refused at its line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from shardwright.compiler.diagnostics import UsageError  # noqa: E402
from shardwright.compiler.frontend.pytorch.exporting import export  # noqa: E402
from shardwright.compiler.frontend.pytorch.interpreter import (  # noqa: E402
    Values,
    checked,
    evaluate,
)
from shardwright.compiler.frontend.pytorch.types import array_of  # noqa: E402
from tests.models import torch_selections  # noqa: E402
from tests.support.torch_operators import Called, Kind, outcome  # noqa: E402

FUNCTIONS = {
    name: made
    for name, made in vars(torch_selections).items()
    if inspect.isfunction(made) and made.__module__ == torch_selections.__name__
}
REFUSED = {name for name, made in FUNCTIONS.items() if made.__doc__}
LABELS = torch.tensor([[1, -100, 2, 3], [-100, 4, -100, 0], [0, 1, -100, -100]])


def given() -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, w = (torch.randn(shape, requires_grad=True) for shape in ((3, 4, 8), (8, 5)))
    return x, LABELS, w


def test_there_are_enough() -> None:
    assert len(FUNCTIONS) >= 30 and 3 <= len(REFUSED) <= 6


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - REFUSED))
def test_it_is_what_torch_computes(name: str) -> None:
    found = outcome(FUNCTIONS[name], given(), {}, bound=1e-5)
    assert found.kind == Kind.EQUAL, found.why


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_it_is_refused_at_its_line(name: str) -> None:
    called = Called(FUNCTIONS[name], given(), {})
    with pytest.raises(UsageError) as caught:
        exported = checked(export(called.module, called.tensors, {}))
        evaluate(exported, Values({}, {}, [array_of(t) for t in called.tensors]))
    told = caught.value.diagnostic
    lines, first = inspect.getsourcelines(FUNCTIONS[name])
    line = next(first + n for n, line in enumerate(lines) if line.endswith("# here\n"))
    assert told.code == FUNCTIONS[name].__doc__ and told.hint, told
    assert told.loc is not None and told.loc.file.endswith("torch_selections.py")
    assert told.loc.line == line
