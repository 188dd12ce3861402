"""Programs of `tests/corpus/programs.toml` that PyTorch and Keras build, value and gradient: the
values of the reference and of the compiled kernels are those of the framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.ir.reference import evaluate
from tests.corpus.keras_programs import KERAS
from tests.corpus.programs import check_equal, missing
from tests.corpus.torch_programs import TORCHVISION, TRANSFORMERS, program
from tests.support.compiled import graph_of, levels_of, link

pytestmark = pytest.mark.exhaustive

REFUSED = {
    "autoformer": ("SW_TASK_RAISED", "is invalid for input of size"),
}
"""Correlations by Fourier transform, of complex numbers, which no engine has and torch.export gives
another shape."""
BOUND = 1e-5


def compiled_and_held(
    fn: Callable[..., Any], arguments: tuple[Any, ...], wanted: list[np.ndarray]
) -> None:
    graph = graph_of(fn, *arguments)
    leaves = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    check_equal(evaluate(graph, leaves), wanted, BOUND)
    (found,) = levels_of(link(graph), leaves, ("L1",))
    check_equal(found, wanted, BOUND)


def of_jax(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> list[np.ndarray]:
    results = jax.jit(fn, keep_unused=True)(*arguments)
    return [np.asarray(x) for x in jax.tree.leaves(results)]


@pytest.mark.parametrize("name", [*TRANSFORMERS, *TORCHVISION])
def test_torch(name: str) -> None:
    if absent := missing(name):
        pytest.skip(f"needs {', '.join(absent)}")
    if name in REFUSED:
        code, words = REFUSED[name]
        with pytest.raises(UsageError, match=words) as caught:
            program(name)
        told = caught.value.diagnostic
        assert told.code == code and told.loc is not None
        return
    found = program(name)
    compiled_and_held(found.function, found.arguments, found.wanted)


@pytest.mark.parametrize("name", KERAS)
def test_keras(name: str) -> None:
    if absent := missing(name):
        pytest.skip(f"needs {', '.join(absent)}")
    fn, arguments = KERAS[name]()
    compiled_and_held(fn, arguments, of_jax(fn, arguments))
