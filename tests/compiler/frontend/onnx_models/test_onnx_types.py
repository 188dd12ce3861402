"""Element types of ONNX models, compiled and run, and a loss that is a part of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import optax
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.graphs.training import train_task
from shardwright.compiler.frontend.onnx.writing import encoded
from tests.support.compiled import levels_of, link
from tests.support.onnx_bytes import graph, model, node, value

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 8), (8, 6)))
HALF, BF16 = 10, 16
NARROW = {
    HALF: (np.float16, 2e-3),
    BF16: (ml_dtypes.bfloat16, 2e-2),
}


def run(made: Any, *inputs: Any) -> list[np.ndarray]:
    found, _ = import_file(encoded(made))
    (results,) = levels_of(link(found), inputs, ("L1",))
    return results


@pytest.mark.parametrize("number", NARROW)
def test_numbers_of_16_bits(number: int) -> None:
    dtype, most = NARROW[number]
    nodes = [node("MatMul", "x w", "m"), node("Softmax", "m", "y")]
    made = graph(
        *(nodes, [value("x", 4, 8, dtype=number)], [value("y", 4, 6, dtype=number)]),
        w=W.astype(dtype),
    )
    (y,) = run(model(made), W.astype(dtype), X.astype(dtype))
    assert y.dtype == dtype
    scores = np.exp(X @ W)
    np.testing.assert_allclose(
        y.astype(np.float32), scores / scores.sum(1, keepdims=True), rtol=0, atol=most
    )


def with_weights(stored: np.ndarray) -> Any:
    """A product with weights that have a scale."""
    nodes = [node("DequantizeLinear", "w s", "d"), node("MatMul", "x d", "y")]
    scale = np.asarray(0.5, np.float32)
    made = graph(nodes, [value("x", 4, 8)], [value("y", 4, 6)], w=stored, s=scale)
    return model(made, 21)


def test_weights_of_8_bits() -> None:
    for dtype in (ml_dtypes.float8_e5m2, np.int8):
        stored = (W * 10).astype(dtype)
        (y,) = run(with_weights(stored), stored, X)
        np.testing.assert_allclose(y, X @ (stored.astype(np.float32) * 0.5), atol=1e-4)


def test_a_type_that_the_machine_does_not_have_is_refused_at_its_node() -> None:
    """As the real compiler refuses F8E4M3FN for trn1."""
    stored = W.astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(DiagnosticError, match="NCC_EVRF051") as caught:
        run(with_weights(stored), stored, X)
    assert str(caught.value.loc) == "<module>:1"


def test_whole_numbers_and_truths() -> None:
    """64 bits are computed in 32."""
    nodes = [
        node("Greater", "x zero", "above"),
        node("Where", "above x minus", "kept"),
        node("Div", "kept two", "y"),
    ]
    numbers = {"zero": 0, "minus": -7, "two": 2}
    made = graph(
        *(nodes, [value("x", 5, dtype=7)], [value("y", 5, dtype=7)]),
        **{name: np.asarray(number) for name, number in numbers.items()},
    )
    (y,) = run(model(made), np.asarray([-3, 0, 3, 5, 2**31 - 1], np.int32))
    np.testing.assert_array_equal(y, [-3, -3, 1, 2, 2**30 - 1])
    assert y.dtype == np.int32


def with_loss() -> bytes:
    nodes = [
        node("MatMul", "x w", "scores"),
        node("SoftmaxCrossEntropyLoss", "scores labels", "loss"),
    ]
    inputs = [value("x", "n", 8), value("labels", "n", dtype=7)]
    return encoded(model(graph(nodes, inputs, [value("scores", "n", 6), value("loss")], w=W)))


def test_a_loss_of_the_graph() -> None:
    task = train_task(Path("made.onnx"), with_loss(), "loss", optax.sgd(0.5), "")
    assert set(task.batch(4)) == {"x", "labels"} and task.init is not None
    labels = np.asarray([0, 5, 2, 1], np.int32)
    state = task.init(None)
    *after, metrics = task.step(*state, {"x": X, "labels": labels})
    scores = X @ W
    right = np.log(np.exp(scores).sum(1)) - scores[np.arange(4), labels]
    assert float(metrics["loss"]) == pytest.approx(right.mean(), rel=1e-5)
    made = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    made[np.arange(4), labels] -= 1
    np.testing.assert_allclose(after[0]["w"], W - 0.5 * X.T @ made / 4, rtol=0, atol=1e-5)
    with pytest.raises(DiagnosticError, match=r"SW_MODEL_LOSS.*got los and"):
        train_task(Path("made.onnx"), with_loss(), "los", optax.sgd(0.5), "")
