"""ONNX files that are refused: each with its code, and at the node that is at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.detect import Asked, read_module
from shardwright.compiler.frontend.graphs.program import Program
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.onnx.model import read_model
from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.wire import read
from shardwright.compiler.frontend.onnx.writing import encoded, sized, varint
from tests.fixtures.onnx_models import MODELS, stored
from tests.support.onnx_bytes import graph, model, node, tensor, value

FILE = str(stored("quantized").path.with_name("made.onnx"))
GOOD = stored("convnet").path.read_bytes()
X, Y = value("x", 2, 3), value("y", 2, 3)
W = np.ones((3, 3), np.float32)


def of(
    *nodes: Any, inputs: Any = (X,), results: Any = (Y,), opset: int = 17, **tensors: Any
) -> Any:
    return model(graph(nodes, inputs, results, **tensors), opset)


def nested(count: int) -> Any:
    """Branches in branches."""
    made = graph([node("Relu", "x", "y")], (), [Y])
    for _ in range(count):
        made = graph([node("If", "x", "y", then_branch=made, else_branch=made)], (), [Y])
    return of(*made["nodes"])


def chain(count: int) -> bytes:
    """A branch in a branch, without a second one."""
    content = b""
    for _ in range(count):
        content = sized(1, sized(5, sized(6, content)))
    return varint(8) + varint(8) + sized(7, content)


def without(key: str) -> Any:
    return {**of(node("Relu", "x", "y")), key: None}


def calling_itself() -> Any:
    own = {**node("Own", "a", "b"), "domain": "my"}
    function = {"name": "Own", "domain": "my", "inputs": ["a"], "outputs": ["b"], "nodes": [own]}
    return {**of({**node("Own", "x", "y"), "domain": "my"}), "functions": [function]}


def doubling() -> Any:
    """Functions that each call the one before twice."""
    functions = []
    for number in range(30):
        inner = "Relu" if not number else f"F{number - 1}"
        calls = [node(inner, "a", "b"), node(inner, "b", "c")]
        nodes = calls if not number else [{**call, "domain": "my"} for call in calls]
        row = {"name": f"F{number}", "domain": "my", "inputs": ["a"], "outputs": ["c"]}
        functions.append({**row, "nodes": nodes})
    return {**of({**node("F29", "x", "y"), "domain": "my"}), "functions": functions}


def beside(**entries: str) -> Any:
    """A weight in a file beside the model."""
    rows = [{"key": key, "value": text} for key, text in entries.items()]
    far = {"name": "w", "dims": (3, 3), "type": 1, "location": 1, "external": rows}
    found = of(node("MatMul", "x w", "y"))
    found["graph"]["initializers"] = [far]
    return found


def with_tensor(**fields: Any) -> Any:
    found = of(node("MatMul", "x w", "y"))
    found["graph"]["initializers"] = [{**tensor("w", W), **fields}]
    return found


def sequence() -> Any:
    return of(node("Relu", "x", "y"), inputs=({"name": "x", "type": {}},))


BYTES: dict[str, tuple[bytes, str, str]] = {
    "half of it": (GOOD[: len(GOOD) // 2], "SW_MODEL_FILE", "bytes fewer"),
    "all but a byte": (GOOD[:-1], "SW_MODEL_FILE", "bytes fewer"),
    "its first byte": (GOOD[:1], "SW_MODEL_FILE", "does not end"),
    "its first field": (GOOD[:2], "SW_MODEL_FILE", "without a graph"),
    "a group": (GOOD + b"\x0b", "SW_MODEL_FILE", "wire type 3"),
    "a length behind the end": (GOOD + b"\x12\x7fa", "SW_MODEL_FILE", "126 bytes fewer"),
    "a number without an end": (GOOD + b"\x08" + b"\xff" * 11, "SW_MODEL_FILE", "does not end"),
    "a field 0": (GOOD + b"\x00\x00", "SW_MODEL_FILE", "number 0"),
    "another wire type": (
        GOOD + b"\x3a"[:0] + varint(7 << 3) + b"\x01",
        "SW_MODEL_FILE",
        "of graph",
    ),
    "a name of other bytes": (GOOD + sized(2, b"\xff\xfe"), "SW_MODEL_FILE", "UTF-8"),
    "a hundred branches deep": (chain(100), "SW_MODEL_FILE", "within each other"),
    "odd bytes of floats": (
        b"\x08\x08" + sized(7, sized(5, sized(4, b"abc"))),
        "SW_MODEL_FILE",
        "3 bytes of numbers",
    ),
}
RELU = node("Relu", "x", "y")
MESSAGES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no opset": (lambda: without("opsets"), "SW_MODEL_OPERATOR", "got no opset"),
    "an opset to come": (lambda: of(RELU, opset=99), "SW_MODEL_OPERATOR", "7 to 21, got 99"),
    "no result": (lambda: of(RELU, results=()), "SW_MODEL_FILE", "without results"),
    "no operator": (lambda: of(node("", "x", "y")), "SW_MODEL_FILE", "without an operator"),
    "operators without a row": (
        lambda: of(node("Multinomial", "x", "a"), node("Rellu", "a", "y")),
        "SW_MODEL_OPERATOR",
        "Multinomial (Multinomial the_Multinomial, node 1), Rellu",
    ),
    "an operator of others": (
        lambda: of({**RELU, "domain": "com.vendor"}),
        "SW_MODEL_OPERATOR",
        "com.vendor.Relu",
    ),
    "a value that is not there": (
        lambda: of(node("Add", "x z", "y")),
        "SW_MODEL_FILE",
        "'z', which is not there",
    ),
    "nodes in another order": (
        lambda: of(node("Neg", "a", "y"), node("Relu", "x", "a")),
        "SW_MODEL_FILE",
        "which is not there",
    ),
    "one value of two nodes": (lambda: of(RELU, RELU), "SW_MODEL_FILE", "two nodes make: 2"),
    "a result that nothing makes": (
        lambda: of(node("Relu", "x", "z")),
        "SW_MODEL_FILE",
        "which no node makes",
    ),
    "two inputs of one name": (lambda: of(RELU, inputs=(X, X)), "SW_MODEL_FILE", "two inputs"),
    "fewer elements than dims say": (
        lambda: with_tensor(dims=(3, 4)),
        "SW_MODEL_FILE",
        "9 elements of tensor w",
    ),
    "a part of an element": (
        lambda: with_tensor(raw=b"abcde"),
        "SW_MODEL_FILE",
        "5 bytes of tensor w",
    ),
    "dims below 0": (lambda: with_tensor(dims=(-3, -3)), "SW_MODEL_FILE", "shape [-3, -3]"),
    "a weight of strings": (lambda: with_tensor(type=8), "SW_MODEL_TYPE", "got strings"),
    "a weight of complex numbers": (lambda: with_tensor(type=14), "SW_MODEL_TYPE", "complex64"),
    "an input that is a sequence": (sequence, "SW_MODEL_TYPE", "a sequence"),
    "weights in a file that is not there": (
        lambda: beside(location="w.bin"),
        "SW_MODEL_FILE",
        "cannot be read",
    ),
    "weights in a file somewhere else": (
        lambda: beside(location="../../etc/passwd"),
        "SW_MODEL_FILE",
        "outside of the folder",
    ),
    "weights behind the end of their file": (
        lambda: beside(location="quantized.weights", offset="9000", length="4096"),
        "SW_MODEL_FILE",
        "bytes 9000 to 13096",
    ),
    "weights at no number": (
        lambda: beside(location="quantized.weights", offset="-4"),
        "SW_MODEL_FILE",
        "at -4",
    ),
    "a function that calls itself": (calling_itself, "SW_MODEL_FILE", "call themselves"),
    "functions of a thousand million nodes": (doubling, "SW_MODEL_FILE", "of 1048576 nodes"),
    "a window of a thousand million points": (
        lambda: of(node("HannWindow", "n", "w"), RELU, n=np.asarray(10**9)),
        "SW_MODEL_NODE",
        "a window of 1 to 65536 points, got 1000000000",
    ),
    "an image that grows a million times": (
        lambda: of(node("Resize", "x - - s", "y"), s=np.asarray([2, 10**9])),
        "SW_MODEL_NODE",
        "got 3 x 1000000000",
    ),
    "a shape below 0": (
        lambda: of(node("ConstantOfShape", "s", "y"), s=np.asarray([-1, 3])),
        "SW_MODEL_NODE",
        "requires a shape without negative dims, got [-1, 3]",
    ),
    "an attribute of another kind": (
        lambda: of(node("Softmax", "x", "y", axis="last")),
        "SW_MODEL_NODE",
        "requires an attribute axis that is a whole number, got 'last'",
    ),
    "an axis that is not there": (
        lambda: of(node("Softmax", "x", "y", axis=5)),
        "SW_MODEL_NODE",
        "requires an axis from -2 to 1, got 5",
    ),
    "operands that do not fit": (
        lambda: of(node("MatMul", "x w", "y"), w=np.ones((4, 3), np.float32)),
        "SW_MODEL_NODE",
        "MatMul the_MatMul: requires operands and attributes that fit",
    ),
    "an operand too few": (
        lambda: of(node("MatMul", "x", "y")),
        "SW_MODEL_NODE",
        "requires 2 operands, got 1",
    ),
    "a shape that depends on values": (
        lambda: of(node("Reshape", "x s", "y"), inputs=(X, value("s", 2, dtype=7))),
        "SW_MODEL_VALUES",
        "requires operand 2, 's' to be known",
    ),
    "a loop of unknown length": (
        lambda: of(
            node("Loop", "n - x", "y", body=graph([RELU], (), [Y])),
            inputs=(X, value("n", dtype=7)),
        ),
        "SW_MODEL_VALUES",
        "requires operand 1, 'n' to be known",
    ),
    "a form without a row": (
        lambda: of(node("Dropout", "x r t", "y"), r=np.float32(0.5), t=np.asarray(True)),
        "SW_MODEL_OPERATOR",
        "training_mode",
    ),
}


def refused(data: bytes) -> DiagnosticError:
    """The error of a file, up to what is traced of it."""
    with pytest.raises(DiagnosticError) as caught:
        program = Program.read(data, FILE)
        shapes = program.inputs(Sizes.of("batch=2") if data[:9] == GOOD[:9] else Sizes())
        jax.eval_shape(lambda inputs: program(program.weights, inputs), shapes)
    return caught.value


@pytest.mark.parametrize("name", BYTES)
def test_damaged_bytes(name: str) -> None:
    data, code, words = BYTES[name]
    error = refused(data)
    assert error.code == code and words in error.diagnostic.message
    assert error.diagnostic.hint and str(error.loc) == FILE


@pytest.mark.parametrize("name", MESSAGES)
def test_a_model_that_is_none(name: str) -> None:
    make, code, words = MESSAGES[name]
    error = refused(encoded(make()))
    assert error.code == code and words in error.diagnostic.message
    assert error.loc is not None and error.loc.file == FILE
    if code in ("SW_MODEL_NODE", "SW_MODEL_VALUES"):
        assert error.loc.line == 1 and error.loc.scope.startswith(error.diagnostic.message[:4])


@pytest.mark.parametrize("name", MODELS)
def test_what_the_writer_of_these_tests_writes_is_what_was_read(name: str) -> None:
    data = stored(name).path.read_bytes()
    found = read(data, MODEL, SCHEMA)
    assert read(encoded(found), MODEL, SCHEMA) == found
    assert len(found["graph"]["nodes"]) > 10


def test_bytes_that_change_are_read_or_refused() -> None:
    """No flip of a bit makes anything but a model or an error with a code."""
    rng = np.random.default_rng(0)
    counts = {"read": 0, "refused": 0}
    quantized = stored("quantized").path
    data = quantized.read_bytes()
    for place in rng.integers(0, len(data), 200):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(0, 8))
        try:
            read_model(bytes(damaged), str(quantized))
            counts["read"] += 1
        except DiagnosticError as error:
            assert error.code.startswith("SW_MODEL_")
            counts["refused"] += 1
    assert min(counts.values()) > 20, counts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch", "name=size of a dim"),
        ("batch=four", "name=size of a dim"),
        ("batch=-1", "name=size of a dim"),
        ("rows=4", "open dims, batch, x, got rows"),
        ("batch=4x4", "one size of dim batch, got 4x4"),
        ("x=4x3x8", "x of [batch, 3, 8, 8], got [4, 3, 8]"),
        ("x=4x5x8x8", "x of [batch, 3, 8, 8], got [4, 5, 8, 8]"),
    ],
)
def test_sizes_that_do_not_fit(text: str, words: str) -> None:
    with pytest.raises(DiagnosticError, match="SW_MODEL_SHAPE") as caught:
        read_module(GOOD, Asked(input_shape=text))
    assert words in caught.value.diagnostic.message


def test_sizes_of_another_form_are_refused() -> None:
    with pytest.raises(DiagnosticError, match="SW_MODEL_SHAPE"):
        read_module(b"HloModule m", Asked(input_shape="x=4"))


def test_dims_without_a_size_are_told_with_the_words_that_give_them_one() -> None:
    program = Program.read(stored("transformer").path.read_bytes())
    with pytest.raises(DiagnosticError, match="NCC_EMOD025") as caught:
        program.inputs(Sizes.of("batch=2"))
    assert "--input-shape seq=1;" in caught.value.diagnostic.hint
    unnamed = of(RELU, inputs=(value("x", "", 3),))
    with pytest.raises(DiagnosticError, match="NCC_EMOD025") as caught:
        Program.read(encoded(unnamed)).inputs(Sizes())
    assert "--input-shape x=1x3;" in caught.value.diagnostic.hint
