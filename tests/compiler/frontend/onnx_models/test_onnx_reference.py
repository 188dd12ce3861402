"""Every row of the table against ONNX's own reference, on arrays of JAX and, where values are known
while a graph is traced, in NumPy."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

reference = pytest.importorskip("onnx.reference", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402
from onnx import AttributeProto, TensorProto, helper, numpy_helper  # noqa: E402

from shardwright.compiler.frontend.graphs.interpreter import evaluate  # noqa: E402
from shardwright.compiler.frontend.graphs.program import Program  # noqa: E402
from shardwright.compiler.frontend.graphs.types import computed_type  # noqa: E402
from shardwright.compiler.frontend.onnx.model import read_model  # noqa: E402
from shardwright.compiler.frontend.onnx.operators import ONNX  # noqa: E402
from shardwright.compiler.frontend.onnx.schema import SCHEMA  # noqa: E402
from shardwright.compiler.frontend.onnx.tensors import TYPES, array_of  # noqa: E402
from shardwright.compiler.frontend.onnx.wire import read  # noqa: E402
from tests.compiler.frontend.onnx_models.operator_cases import Case, alike, cases  # noqa: E402
from tests.compiler.frontend.onnx_models.promised import OPERATORS  # noqa: E402

GRAPHS = {"If", "Loop", "Scan"}
CASES, ALIKE = cases(), list(alike())


def proto(case: Case) -> Any:
    """A model of one node."""
    names = ["" if array is None else f"x{n}" for n, array in enumerate(case.operands)]
    said = {
        name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for name, value in case.attributes.items()
    }
    results = [f"y{n}" for n in range(case.results)]
    node = helper.make_node(case.operator, names, results, **said)
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in zip(names, case.operands, strict=True)
        if name
    ]
    empty = [helper.make_empty_tensor_value_info(name) for name in results]
    graph = helper.make_graph([node], "case", inputs, empty)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)])


def given(case: Case) -> dict[str, Any]:
    return {f"x{n}": array for n, array in enumerate(case.operands) if array is not None}


def wanted(model: Any, values: dict[str, Any]) -> list[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found: list[Any] = reference.ReferenceEvaluator(model).run(None, values)
    return found


def check_equal(found: list[Any], right: list[Any], most: float, is_known: bool) -> None:
    assert len(found) == len(right) > 0
    for ours, theirs in zip(map(np.asarray, found), map(np.asarray, right), strict=True):
        assert ours.shape == theirs.shape
        assert computed_type(ours.dtype) == computed_type(theirs.dtype)
        assert is_known or ours.dtype.itemsize < 8 or ours.dtype == theirs.dtype
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        finite = np.isfinite(b)
        assert (np.isfinite(a) == finite).all()
        np.testing.assert_array_equal(a[~finite], b[~finite])
        scale = max(1.0, float(np.abs(b[finite]).max(initial=0.0)))
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=most * scale)


def ours(case: Case, is_known: bool) -> list[Any]:
    """What our rows compute; operands that have to be known are, the others where asked for."""
    model = read_model(proto(case).SerializeToString())
    row = ONNX.find(case.operator, case.opset)
    assert row is not None
    values = {
        name: array if is_known or int(name[1:]) in row.static else jnp.asarray(array)
        for name, array in given(case).items()
    }
    return evaluate(model, values)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    right = wanted(proto(case), given(case))
    for is_known in (False, True):
        check_equal(ours(case, is_known), right, case.most, is_known)


@pytest.mark.parametrize(("case", "same"), ALIKE, ids=str)
def test_case_that_the_reference_has_in_other_words(case: Case, same: Case) -> None:
    check_equal(ours(case, False), wanted(proto(same), given(same)), same.most, False)


def test_every_row_has_a_case() -> None:
    every = [*CASES, *(case for case, _ in ALIKE)]
    held = {ONNX.find(case.operator, case.opset) for case in every}
    missing = {(row.operator, row.since) for row in ONNX} - {
        (row.operator, row.since) for row in held if row is not None
    }
    assert {name for name, _ in missing} == GRAPHS
    assert {row.operator for row in ONNX} == set(OPERATORS)


def graph(nodes: list[Any], inputs: dict[str, Any], results: list[str], name: str = "body") -> Any:
    given = [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()]
    empty = [helper.make_empty_tensor_value_info(n) for n in results]
    return helper.make_graph(nodes, name, given, empty)


def whole(graph: Any, **rest: Any) -> Any:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], **rest)


NODE = helper.make_node
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def chosen() -> Any:
    """A branch of values around it."""
    then = graph([NODE("Add", ["x", "x"], ["t"])], {}, ["t"], "then")
    other = graph([NODE("Neg", ["x"], ["o"])], {}, ["o"], "else")
    node = NODE("If", ["c"], ["y"], then_branch=then, else_branch=other)
    return whole(graph([node], {"c": (BOOL, ()), "x": (FLOAT, (3,))}, ["y"]))


def looped() -> Any:
    """A sum that grows, and what it was in every turn."""
    nodes = [
        NODE("Add", ["state", "x"], ["next"]),
        NODE("Cast", ["turn"], ["number"], to=FLOAT),
        NODE("Mul", ["next", "number"], ["row"]),
        NODE("Identity", ["cond"], ["goes_on"]),
    ]
    taken = {"turn": (INT, ()), "cond": (BOOL, ()), "state": (FLOAT, (3,))}
    body = graph(nodes, taken, ["goes_on", "next", "row"])
    node = NODE("Loop", ["n", "c", "x"], ["end", "rows"], body=body)
    taken = {"n": (INT, ()), "c": (BOOL, ()), "x": (FLOAT, (3,))}
    return whole(graph([node], taken, ["end", "rows"]))


def scanned(**said: Any) -> Any:
    """Sums along an axis, by a body of one row."""
    nodes = [NODE("Add", ["sum", "row"], ["next"]), NODE("Identity", ["next"], ["out"])]
    body = graph(nodes, {"sum": (FLOAT, (2,)), "row": (FLOAT, (2,))}, ["next", "out"])
    node = NODE("Scan", ["s", "x"], ["end", "rows"], num_scan_inputs=1, body=body, **said)
    return whole(graph([node], {"s": (FLOAT, (2,)), "x": (FLOAT, (2, 2))}, ["end", "rows"]))


def called() -> Any:
    """A function of the model's own, with an attribute that it hands on."""
    inner = NODE("LeakyRelu", ["a"], ["b"])
    inner.attribute.append(
        AttributeProto(name="alpha", ref_attr_name="by", type=AttributeProto.FLOAT)
    )
    own = helper.make_function(
        *("my", "Bent", ["a"], ["c"], [inner, NODE("Neg", ["b"], ["c"])]),
        *([helper.make_opsetid("", 17)], ["by"]),
    )
    node = NODE("Bent", ["x"], ["y"], domain="my", by=0.25)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    made = graph([node], {"x": (FLOAT, (3,))}, ["y"])
    return helper.make_model(made, opset_imports=imports, functions=[own])


X = np.asarray([1.0, -2.0, 3.0], np.float32)
SQUARE = np.arange(4, dtype=np.float32).reshape(2, 2)
HELD = {
    "then": (chosen, {"c": np.asarray(True), "x": X}, ()),
    "else": (chosen, {"c": np.asarray(False), "x": X}, ()),
    "then of a known condition": (chosen, {"c": np.asarray(True), "x": X}, ("c",)),
    "loop": (looped, {"n": np.asarray(3), "c": np.asarray(True), "x": X}, ("n", "c")),
    "scan": (scanned, {"s": X[:2], "x": SQUARE}, ()),
}


@pytest.mark.parametrize("name", HELD)
def test_graph_in_a_node(name: str) -> None:
    make, values, known = HELD[name]
    model = make()
    found = read_model(model.SerializeToString())
    arrays = {n: v if n in known else jnp.asarray(v) for n, v in values.items()}
    check_equal(evaluate(found, arrays), wanted(model, values), 2e-6, False)


def test_scan_along_other_axes_and_backwards() -> None:
    said = {"scan_input_axes": [1], "scan_input_directions": [1], "scan_output_axes": [1]}
    found = read_model(scanned(**said).SerializeToString())
    end, rows = evaluate(found, {"s": jnp.asarray(X[:2]), "x": jnp.asarray(SQUARE)})
    sums = X[:2, None] + np.cumsum(SQUARE[:, ::-1], 1)
    np.testing.assert_array_equal(rows, sums)
    np.testing.assert_array_equal(end, sums[:, -1])


def test_function_of_the_model() -> None:
    """Its attribute is handed on to a node of it, which the reference refuses."""
    found = read_model(called().SerializeToString())
    (y,) = evaluate(found, {"x": jnp.asarray(X)})
    np.testing.assert_allclose(y, -np.where(X < 0, 0.25 * X, X), rtol=1e-6)


@pytest.mark.parametrize("is_raw", [True, False])
@pytest.mark.parametrize("number", TYPES)
def test_tensors_of_every_type(number: int, is_raw: bool) -> None:
    """As ONNX's own functions write and read them, also where a byte holds two elements."""
    values = [0, 1, 1, 0, 1] if number == TensorProto.BOOL else [0, 1, 3, 7, 5]
    dtype = helper.tensor_dtype_to_np_dtype(number)
    array = np.asarray(values).astype(dtype)
    made = numpy_helper.from_array(array, "t")
    if not is_raw:
        made = helper.make_tensor("t", number, [5], values)
        assert not made.raw_data
    content = read(made.SerializeToString(), "tensor", SCHEMA)
    found = array_of(content, Path())
    assert found.dtype == TYPES[number] and found.shape == (5,)
    np.testing.assert_array_equal(found.astype(np.float64), array.astype(np.float64))


def test_weights_of_four_bits() -> None:
    """Blocks of them with a scale each, as exporters quantize linear layers."""
    numbers = np.asarray([[-8, 7, 0, 1], [3, -4, 5, -6]]).astype(TYPES[TensorProto.INT4])
    scales = np.asarray([[0.5, 2.0], [0.25, 1.0]], np.float32)
    nodes = [
        NODE("DequantizeLinear", ["w", "s"], ["d"], axis=1, block_size=2),
        NODE("MatMul", ["x", "d"], ["y"]),
    ]
    made = graph(nodes, {"x": (FLOAT, (2, 2))}, ["y"])
    made.initializer.extend(
        [numpy_helper.from_array(numbers, "w"), numpy_helper.from_array(scales, "s")]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)])
    program = Program(read_model(model.SerializeToString()))
    assert {n: str(a.dtype) for n, a in program.weights.items()} == {"w": "int8", "s": "float32"}
    found = program(program.weights, {"x": SQUARE})["y"]
    right = SQUARE @ (numbers.astype(np.float32) * np.repeat(scales, 2, 1))
    np.testing.assert_allclose(found, right, rtol=1e-6)
