"""Modules of PyTorch with one thing wrong: each is refused with a code, at the user's line."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.entry import load_task
from shardwright.compiler.frontend.roles import check_parameters
from tests.models import torch_broken

FOLDER = Path(torch_broken.__file__).parent
BROKEN = [
    name
    for name, made in vars(torch_broken).items()
    if inspect.isfunction(made) and made.__module__ == torch_broken.__name__
]


def line_at_fault(name: str) -> int:
    """The number of the line of a function that is marked, 0 where none is."""
    lines, first = inspect.getsourcelines(getattr(torch_broken, name))
    return next((first + n for n, line in enumerate(lines) if line.endswith("# here\n")), 0)


def test_there_are_twenty() -> None:
    assert len(BROKEN) >= 20


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused_at_its_line(name: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        task = load_task(f"torch_broken:{name}", FOLDER)
        infos = capture(task, 8).inputs
        check_parameters(task.name, [(i.name, i.role) for i in infos if i.role != "batch"])
    told = caught.value.diagnostic
    assert told.code == getattr(torch_broken, name).__doc__, told
    assert told.message and "Traceback" not in told.message
    if line := line_at_fault(name):
        assert told.loc is not None and told.loc.file.endswith("torch_broken.py"), told.loc
        assert told.loc.line == line
