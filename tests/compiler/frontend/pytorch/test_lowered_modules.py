"""Modules of PyTorch that were lowered where it is installed: values of the graph and of the
compiled kernels are torch's. Where it is, the same is lowered again."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.ir.reference import evaluate
from tests.fixtures import torch_modules
from tests.support.compiled import levels_of, link

BOUND = 1e-5
NAMES = ("attention", "divided-0", "divided-1", "joint", "loss", "norms")


def test_the_file_has_all_of_them() -> None:
    assert tuple(sorted(torch_modules.read())) == NAMES
    assert torch_modules.FILE.stat().st_size < 60_000


@pytest.mark.parametrize("name", NAMES)
def test_values_are_torchs(name: str) -> None:
    stored = torch_modules.read()[name]
    graph, _ = import_file(stored.artifact)
    assert stored.results and len(graph.outputs) == len(stored.results)
    leaves = list(stored.arguments)
    (compiled,) = levels_of(link(graph), leaves, ("L1",))
    for made in (evaluate(graph, leaves), compiled):
        for one, other in zip(made, stored.results, strict=True):
            np.testing.assert_allclose(one, other, rtol=BOUND, atol=BOUND)


def test_places_are_those_of_the_modules() -> None:
    graph, _ = import_file(torch_modules.read()["norms"].artifact)
    assert any(op.loc.file == "tests/fixtures/torch_modules.py" for op in graph.walk())
    scopes = {op.loc.scope.split("/")[1] for op in graph.walk() if "/" in op.loc.scope}
    assert {"conv", "group", "last"} <= scopes


def test_the_file_is_what_is_lowered_now(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    before = torch_modules.read()
    monkeypatch.setattr(torch_modules, "FILE", tmp_path / "again.npz")  # type: ignore[operator]
    torch_modules.write()
    for name, stored in torch_modules.read().items():
        for one, other in zip(stored.results, before[name].results, strict=True):
            np.testing.assert_allclose(one, other, rtol=BOUND, atol=BOUND)
