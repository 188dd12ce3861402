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
from tests.support.torch_operators import Kind, outcome  # noqa: E402

FUNCTIONS = {
    name: made
    for name, made in vars(torch_selections).items()
    if inspect.isfunction(made) and made.__module__ == torch_selections.__name__
}
REFUSED = {
    name: made
    for name, made in vars(torch_selections).items()
    if isinstance(made, type) and issubclass(made, torch.nn.Module)
}
LABELS = torch.tensor([[1, -100, 2, 3], [-100, 4, -100, 0], [0, 1, -100, -100]])


def given() -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, w = (torch.randn(shape, requires_grad=True) for shape in ((3, 4, 8), (8, 5)))
    return x, LABELS, w


def test_there_are_enough() -> None:
    assert len(FUNCTIONS) >= 30 and len(REFUSED) >= 4


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_what_torch_computes(name: str) -> None:
    found = outcome(FUNCTIONS[name], given(), {}, bound=1e-5)
    assert found.kind == Kind.EQUAL, found.why


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_its_line(name: str) -> None:
    tensors = given()
    with pytest.raises(UsageError) as caught:
        exported = checked(export(REFUSED[name](), tensors, {}))
        evaluate(exported, Values({}, {}, [array_of(t) for t in tensors]))
    told = caught.value.diagnostic
    lines, first = inspect.getsourcelines(REFUSED[name])
    line = next(first + n for n, line in enumerate(lines) if line.endswith("# here\n"))
    assert told.code == REFUSED[name].__doc__ and told.hint, told
    assert told.loc is not None and told.loc.file.endswith("torch_selections.py")
    assert told.loc.line == line
