"""Models of transformers at tiny width: loss and gradients of the unmodified module are those of
torch, within 1e-5 of the largest."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)

from shardwright.compiler.diagnostics import UsageError  # noqa: E402
from tests.support.torch_models import MODELS, REFUSED, held  # noqa: E402

BOUND = 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UsageError) as caught:
            held(name)
        assert caught.value.diagnostic.code == "SW_TORCH_VALUES", REFUSED[name]
        return
    found = held(name)
    assert found.loss < BOUND and found.gradients < BOUND, found
    assert found.parameters > 10
