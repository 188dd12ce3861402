"""MXNet's files that are refused: each with its code, and at the node that is at fault."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.detect import Asked, read_module
from shardwright.compiler.frontend.graphs.program import Program
from shardwright.compiler.frontend.mxnet.parameters import V1, V3, read_parameters
from shardwright.compiler.frontend.mxnet.symbol import read_model, value_of
from tests.fixtures.mxnet_models import MODELS, stored
from tests.support.mxnet_json import one_array, operator, parameters, symbol, variable

GOOD = stored("bert").path.read_text()
PARAMETERS = stored("bert").path.with_name("bert-0000.params").read_bytes()
X = variable("x", __shape__="(2, 3)")


def of(*nodes: Any, **rest: Any) -> str:
    return symbol(X, *nodes, **rest)


def node(op: str = "relu", **said: Any) -> str:
    return of(operator(op, "n", 0, **said))


def changed(**rest: Any) -> str:
    return json.dumps({**json.loads(node()), **rest})


def with_row(**rest: Any) -> str:
    found = json.loads(node())
    found["nodes"][1] |= rest
    return json.dumps(found)


FILE, OPERATOR, NODE, TYPE = (f"SW_MODEL_{k}" for k in ("FILE", "OPERATOR", "NODE", "TYPE"))
SYMBOLS: dict[str, tuple[str, str, str, int]] = {
    "half of it": (GOOD[: len(GOOD) // 2], FILE, "no JSON", 0),
    "a brace": ("{", FILE, "no JSON", 0),
    "too deep": ('{"nodes": ' + "[" * 100_000, FILE, "no JSON", 0),
    "nothing in it": ("{}", FILE, "without heads", 0),
    "no nodes": (changed(nodes=[]), FILE, "without nodes", 0),
    "nodes that are none": (changed(nodes=[1, 2]), FILE, "node 1 without op", 1),
    "no heads": (changed(heads=[]), FILE, "without heads", 0),
    "a head of no node": (changed(heads=[[9, 0, 0]]), FILE, "a head [9, 0, 0]", 0),
    "a head of text": (changed(heads=["n"]), FILE, "a head 'n'", 0),
    "itself": (with_row(inputs=[[1, 0, 0]]), FILE, "no node in front", 2),
    "a circle": (of(operator("relu", "a", 2), operator("relu", "b", 1)), FILE, "in front", 2),
    "a result far away": (with_row(inputs=[[0, 10**9, 0]]), FILE, "no node in front", 2),
    "a second result of a variable": (with_row(inputs=[[0, 1, 0]]), FILE, "2 results", 1),
    "attributes that are no texts": (with_row(attrs={"axis": [1]}), FILE, "no texts", 2),
    "a variable of something": (with_row(op="null"), FILE, "has none of", 2),
    "no name": (with_row(name=None), FILE, "without op, name", 2),
    "a type without a number": (
        symbol(variable("x", __dtype__="99", __shape__="(2,)"), operator("relu", "n", 0)),
        *(TYPE, "element type 99", 0),
    ),
    "a shape of words": (
        symbol(variable("x", __shape__="wide"), operator("relu", "n", 0)),
        *(FILE, "no list of sizes", 1),
    ),
    "an unknown operator": (node("ReLU6"), OPERATOR, "ReLU6 n, node 2", 2),
    "a word that is none": (node("Activation", act_type="bent"), NODE, "act_type", 2),
    "an axis that is not there": (node("expand_dims", axis=7), NODE, "an axis from", 2),
    "a shape that does not fit": (node("Reshape", shape="(4, 4)"), NODE, "fit each other", 2),
    "a code that is none": (node("Reshape", shape="(-9,)"), NODE, "codes from -4", 2),
    "a text for a number": (node("clip", a_min="low"), NODE, "a number", 2),
    "too few operands": (node("elemwise_add"), NODE, "2 operands", 2),
    "too many operands": (of(operator("relu", "n", 0, 0)), NODE, "1 operands", 2),
    "too many results": (of(operator("relu", "n", 0), heads=[[1, 3, 0]]), NODE, "1 results", 2),
    "parts that do not share it out": (node("split", num_outputs=2), NODE, "of one size", 2),
    "a huge shape": (node("broadcast_to", shape="(99999999999, 99999999999)"), NODE, "n:", 2),
    "a huge number": (node("tile", reps="(9" + "9" * 30 + ",)"), NODE, "n:", 2),
    "a form without a row": (node("Dropout", mode="always"), OPERATOR, "mode always", 2),
    "a loop": (node("_foreach", num_args="1"), OPERATOR, "_foreach", 2),
}


def refused(call: Callable[[], Any]) -> Any:
    with pytest.raises(DiagnosticError) as caught:
        call()
    return caught.value.diagnostic


@pytest.mark.parametrize("name", SYMBOLS)
def test_damaged_symbol(name: str) -> None:
    text, code, words, number = SYMBOLS[name]
    found = refused(lambda: read_module(text.encode(), Asked(file="model-symbol.json")))
    assert found.code == code and words in found.message
    assert found.loc is not None and found.loc.file == "model-symbol.json"
    assert found.loc.line == number
    assert found.hint


def array_at(number: int, at: int, form: str, value: int) -> bytes:
    """Parameters whose header has another word, counted from the first array."""
    found = bytearray(parameters(w=np.ones((2, 3), np.float32)))
    struct.pack_into(form, found, 24 + at, value)
    return bytes(found)


BYTES: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", FILE, "ends in the middle"),
    "half of it": (PARAMETERS[: len(PARAMETERS) // 2], FILE, "bytes of array"),
    "all but a byte": (PARAMETERS[:-1], FILE, "bytes of name"),
    "a byte more": (PARAMETERS + b"\0", FILE, "behind the last name"),
    "another beginning": (b"\x13" + PARAMETERS[1:], FILE, "begins with 0x113"),
    "more arrays than bytes": (
        PARAMETERS[:16] + struct.pack("<Q", 1 << 60) + PARAMETERS[24:],
        *(FILE, "arrays of"),
    ),
    "more arrays than names": (
        struct.pack("<QQQ", 0x112, 0, 1) + one_array(np.ones(1, np.float32)) + bytes(8),
        *(FILE, "0 names of 1 arrays"),
    ),
    "a sparse array": (array_at(0, 4, "<i", 1), TYPE, "sparse"),
    "a rank of a thousand": (array_at(0, 8, "<i", 1000), FILE, "1000 dims"),
    "a dim below 0": (array_at(0, 12, "<q", -2), FILE, "shape [-2, 3]"),
    "a dim beyond the file": (array_at(0, 12, "<q", 1 << 40), FILE, "bytes of array 1"),
    "no dims": (array_at(0, 8, "<i", 0), FILE, "without a shape"),
    "an unknown type": (array_at(0, 36, "<i", 77), TYPE, "element type 77"),
    "two of one name": (
        parameters(a=np.ones(1, np.float32), b=np.ones(1, np.float32)).replace(b"arg:b", b"arg:a"),
        *(FILE, "two arrays of one name"),
    ),
    "a name of other bytes": (PARAMETERS[:-3] + b"\xff\xfe\xff", FILE, "no text"),
}


@pytest.mark.parametrize("name", BYTES)
def test_damaged_parameters(name: str, tmp_path: Path) -> None:
    data, code, words = BYTES[name]
    (tmp_path / "m-symbol.json").write_text(node())
    (tmp_path / "m-0000.params").write_bytes(data)
    path = str(tmp_path / "m-symbol.json")
    found = refused(lambda: read_module(node().encode(), Asked(file=path)))
    assert found.code == code and words in found.message
    assert "m-0000.params" in f"{found.message} {found.loc}"


def test_bits_that_flip() -> None:
    """A model or a code, nothing else."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(PARAMETERS)
        data[rng.integers(0, len(data))] ^= 1 << rng.integers(0, 8)
        try:
            read_parameters(bytes(data), "bert-0000.params")
        except DiagnosticError as error:
            assert error.code in (FILE, TYPE)
    for _ in range(40):
        text = bytearray(GOOD.encode())
        text[rng.integers(0, len(text))] ^= 1 << rng.integers(0, 7)
        try:
            Program.read(bytes(text), str(stored("bert").path))
        except DiagnosticError as error:
            assert error.code.startswith("SW_MODEL")


def test_parameters_that_lie_elsewhere_are_not_read(tmp_path: Path) -> None:
    """What a symbol says is no path: its parameters are those beside it, of the last epoch."""
    (tmp_path / "far").mkdir()
    (tmp_path / "w-0009.params").write_bytes(parameters(w=np.ones(3, np.float32)))
    rows = variable("../w", __shape__="(3,)"), operator("relu", "n", 0)
    path = tmp_path / "far" / "m-symbol.json"
    path.write_text(symbol(*rows))
    assert Program.read(path.read_bytes(), str(path)).weights == {}
    for epoch, value in ((0, 1.0), (12, 2.0), (3, 3.0)):
        data = parameters(**{"../w": np.full(3, value, np.float32)})
        (path.parent / f"m-{epoch:04d}.params").write_bytes(data)
    found = Program.read(path.read_bytes(), str(path)).weights
    np.testing.assert_array_equal(found["../w"], np.full(3, 2.0))


@pytest.mark.parametrize("release", ["0", "1", "3"])
def test_headers_of_every_release(release: str) -> None:
    """As the sources of MXNet write and read them."""
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    rest = struct.pack("<iii", 1, 0, 2) + array.tobytes()
    heads = {
        "0": struct.pack("<III", 2, 2, 3),
        "1": struct.pack("<Iiqq", V1, 2, 2, 3),
        "3": struct.pack("<Iiiqq", V3, 0, 2, 2, 3),
    }
    data = struct.pack("<QQQ", 0x112, 0, 1) + heads[release] + rest
    data += struct.pack("<QQ", 1, 5) + b"aux:w"
    np.testing.assert_array_equal(read_parameters(data, "w")["w"], array)


def test_attributes_of_every_release() -> None:
    """`param`, `attr` and `attrs` mean the same; statistics may be left out of a node."""
    found = json.loads(stored("resnet").path.read_text())
    right = read_model(json.dumps(found).encode())
    for row in found["nodes"]:
        row["attr" if row["op"] == "null" else "param"] = row.pop("attrs", {})
        if row["op"] == "BatchNorm":
            row["inputs"] = row["inputs"][:3]
    file = str(stored("resnet").path)
    old = read_model(json.dumps(found).encode(), file)
    said = [(n.operator, n.attributes) for n in right.graph.nodes]
    assert [(n.operator, n.attributes) for n in old.graph.nodes] == said
    short = [n for n in old.graph.nodes if n.operator == "BatchNorm"]
    assert {len(n.inputs) for n in short} == {3}, "their names are not those of the node"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("(3, 3)", (3, 3)),
        ("[2,]", (2,)),
        ("()", ()),
        ("(None, 1)", (None, 1)),
        ("-7L", -7),
        ("1e-05", 1e-5),
        ("-inf", -np.inf),
        ("relu", "relu"),
        ("NCHW", "NCHW"),
    ],
)
def test_what_a_text_means(text: str, value: Any) -> None:
    assert value_of(text) == value and type(value_of(text)) is type(value)


def test_messages_of_every_model_have_the_node() -> None:
    """A weight of another shape is told at the first node that takes it."""
    for name in MODELS:
        program = Program.read(stored(name).path.read_bytes(), str(stored(name).path))
        wrong = {
            key: jax.ShapeDtypeStruct((*array.shape, 7), array.dtype)
            for key, array in program.weights.items()
        }
        given = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for key, array in stored(name).inputs.items()
        }
        found = refused(lambda p=program, w=wrong, g=given: jax.eval_shape(p, w, g))
        assert found.code == NODE and found.loc.line > 1
