"""Every family of the table computes what the library transformers computes: logits, loss and
gradients of a tiny config with the same weights, in fp32."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwright.orchestrator.models import blocks, decoder, leaves
from shardwright.orchestrator.models.architecture import Architecture
from shardwright.orchestrator.models.family_rows import FAMILIES
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import EXACT, How
from tests.support.tiny_configs import tiny

pytest.importorskip("transformers", reason="the extra `reference` brings it")
from tests.support.hugging_face import Reference, written

MOST = 1e-5


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative distance of two arrays."""
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(np.asarray(found) - expected)) / max(size, 1e-30)


def drawn(
    rng: np.random.Generator, model: Architecture, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What two samples are read from, what they are to tell, and what an encoder reads."""
    if model.patches:
        images = rng.standard_normal((2, model.patches.count, model.patches.pixels))
        return images.astype(np.float32), rng.integers(0, model.vocab, 2), None
    tokens, targets, sources = rng.integers(1, model.vocab, (3, 2, length))
    return tokens, targets, sources if model.encoder else None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [7, 12])
def test_values_and_gradients_are_the_librarys(family: str, length: int) -> None:
    config = tiny(family)
    model, reference = architecture_of(config), Reference(config)
    assert leaves.count_params(model) == reference.count()
    rng = np.random.default_rng(1)
    read, targets, sources = drawn(rng, model, length)
    params = reference.params(model)

    def loss(params: dict) -> tuple[jax.Array, jax.Array]:
        logits = decoder.logits(model, params, read, How(), sources)
        return blocks.cross_entropy(EXACT, logits, targets), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
    expected_logits, expected, expected_grads = reference.run(model, read, targets, sources)
    assert distance(logits, expected_logits) <= MOST
    assert abs(float(value) / expected - 1) <= MOST
    largest = max(float(np.linalg.norm(leaf)) for leaf in jax.tree.leaves(expected_grads))
    for path, leaf in jax.tree.leaves_with_path(grads):
        name, wanted = jax.tree_util.keystr(path), expected_grads
        for key in path:
            wanted = wanted[key.key]
        if np.linalg.norm(wanted) <= 1e-6 * largest:  # of keys' biases: rounding alone
            assert np.linalg.norm(leaf) <= 1e-5 * largest, name
        else:
            assert distance(leaf, wanted) <= MOST, (name, distance(leaf, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_library_writes_is_read(family: str) -> None:
    """A config as transformers 5 saves it, every key of it: the same model as of the short one."""
    given = tiny(family)
    assert architecture_of(written(given)) == architecture_of(given)
