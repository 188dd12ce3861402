"""Branches, loops and functions of ONNX models, compiled and run: no package is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.onnx.writing import encoded
from tests.support.compiled import levels_of, link
from tests.support.onnx_bytes import attribute, graph, model, node, value

BOOL, INT = 9, 7
X, Y = value("x", 3), value("y", 3)
ARRAY = np.asarray([1.0, -2.0, 3.0], np.float32)


def run(made: Any, *inputs: Any) -> list[np.ndarray]:
    """The results of a compiled model."""
    found, _ = import_file(encoded(made))
    (results,) = levels_of(link(found), inputs, ("L1",))
    return results


def branches(other: Any) -> Any:
    then = graph([node("Add", "x x", "t")], (), [value("t", 3)])
    otherwise = graph([other], (), [value("o", 3)])
    chosen = node("If", "c", "y", then_branch=then, else_branch=otherwise)
    return model(graph([chosen], [value("c", dtype=BOOL), X], [Y]))


@pytest.mark.parametrize("condition", [True, False])
def test_a_branch_that_a_value_chooses(condition: bool) -> None:
    (y,) = run(branches(node("Neg", "x", "o")), np.asarray(condition), ARRAY)
    np.testing.assert_array_equal(y, ARRAY * 2 if condition else -ARRAY)


def test_branches_of_two_shapes_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="SW_MODEL_VALUES") as caught:
        import_file(encoded(branches(node("Concat", "x x", "o", axis=0))))
    assert "branches whose results differ" in caught.value.diagnostic.message
    assert str(caught.value.loc) == "<module>:1"


def loop(condition: str, goes_on: Any) -> Any:
    """Sums that grow, and each of them times its number."""
    nodes = [
        node("Add", "state x", "next"),
        node("Cast", "turn", "number", to=1),
        node("Mul", "next number", "row"),
        goes_on,
    ]
    inputs = [value("turn", dtype=INT), value("cond", dtype=BOOL), value("state", 3)]
    results = [value("on", dtype=BOOL), value("next", 3), value("row", 3)]
    held = node("Loop", f"n {condition} x", "y rows", body=graph(nodes, inputs, results))
    made = graph([held], [X], [Y, value("rows", "n", 3)], n=np.asarray(4), yes=np.asarray(True))
    return model(made)


@pytest.mark.parametrize("condition", ["-", "yes"])
def test_a_loop_of_known_length(condition: str) -> None:
    y, rows = run(loop(condition, node("Identity", "cond", "on")), ARRAY)
    np.testing.assert_allclose(y, ARRAY * 5)
    np.testing.assert_allclose(rows, [ARRAY * (n + 2) * n for n in range(4)])


def test_a_loop_that_its_values_end_is_refused() -> None:
    one = node("Less", "number number", "on")
    with pytest.raises(DiagnosticError, match="SW_MODEL_VALUES") as caught:
        import_file(encoded(loop("yes", one)))
    assert "the condition of a loop" in caught.value.diagnostic.message


def test_a_scan() -> None:
    body = graph(
        [node("Add", "sum row", "next"), node("Identity", "next", "out")],
        [value("sum", 3), value("row", 3)],
        [value("next", 3), value("out", 3)],
    )
    held = node("Scan", "s x", "end rows", num_scan_inputs=1, body=body, scan_input_axes=[1])
    made = graph([held], [value("s", 3), value("x", 3, 4)], [value("end", 3), value("rows", 4, 3)])
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    end, sums = run(model(made), ARRAY, rows)
    np.testing.assert_allclose(sums, ARRAY + np.cumsum(rows.T, 0))
    np.testing.assert_allclose(end, ARRAY + rows.sum(1))


def test_a_function_of_the_model() -> None:
    """With an attribute that a node of it takes of the call, or of its default."""
    inner = node("LeakyRelu", "a", "b")
    inner["attributes"] = [{"name": "alpha", "type": 1, "reference": "by"}]
    own = {
        "name": "Bent",
        "domain": "my",
        "inputs": ["a"],
        "outputs": ["c"],
        "nodes": [inner, node("Neg", "b", "c")],
        "defaults": [attribute("by", 0.5)],
    }
    calls = [{**node("Bent", "x", "m", by=0.25), "domain": "my"}]
    calls.append({**node("Bent", "m", "y"), "domain": "my"})
    (y,) = run({**model(graph(calls, [X], [Y])), "functions": [own]}, ARRAY)
    bent = -np.where(ARRAY < 0, 0.25 * ARRAY, ARRAY)
    np.testing.assert_allclose(y, -np.where(bent < 0, 0.5 * bent, bent))


def test_shape_arithmetic_leaves_nothing_behind() -> None:
    """Of numbers beyond 32 bits too: INT64_MAX is how exporters say the end."""
    end = np.asarray([2**63 - 1])
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s i", "n", axis=0),
        node("Mul", "n two", "m"),
        node("Concat", "m one", "to", axis=0),
        node("Slice", "x zero end", "all"),
        node("Reshape", "all to", "y"),
    ]
    held = graph(
        *(nodes, [value("x", 4, 2)], [value("y", 8, 1)]),
        i=np.asarray([0]),
        two=np.asarray([2]),
        one=np.asarray([1]),
        zero=np.asarray([0]),
        end=end,
    )
    found, _ = import_file(encoded(model(held)))
    assert [op.name for op in found.ops] == ["reshape"]
