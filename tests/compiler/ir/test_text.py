"""Text of graphs reads back to the same graph, byte for byte; what does not fit is refused at its
line and column."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import DiagnosticError, Loc, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import ConstantAttrs
from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.types import Graph, Op, tensor_type
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.support.fields import hints
from shardwright.compiler.text.fields import conforms
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import build_graph
from tests.support.building import Builder
from tests.support.graphs import layer_stack
from tests.support.random_graphs import random_module
from tests.support.random_ops import GROWTHS


def assert_reads_back(graph: Graph) -> str:
    """The text of `graph`, which is one text for one graph."""
    for with_locs in (True, False):
        text = to_text(graph, with_locs)
        copy = parse(text)
        assert dump(copy, with_locs) == dump(graph, with_locs), text
        assert to_text(copy, with_locs) == text
    return text


def constant(data: bytes, shape: tuple[int, ...], dtype: DType) -> Graph:
    op = make_op("constant", (), ConstantAttrs(data, tensor_type(shape, dtype)))
    return Graph((), (op,), op.results)


def test_form() -> None:
    b = Builder(loc=Loc("net.py", 3, "jit(f)/add"))
    x = b.input((2, 3))
    y = b.all_reduce(b.add(x, b.full((2, 3), 1.5)), ("dp_shard",), 4)
    graph = b.finish(b.convert(y, DType.BF16))
    assert assert_reads_back(graph) == (
        "main(%in0: tensor<2x3xf32>) {\n"
        "  %0 = constant 1.5 : tensor<2x3xf32>\n"
        "  %1 = add %in0, %0 : tensor<2x3xf32>\n"
        "  %2 = all_reduce %1 {axes=[dp_shard], group_size=4} : tensor<2x3xf32>\n"
        "  %3 = convert %2 {dtype=bf16} : tensor<2x3xbf16>\n"
        "  return %3\n"
        "}\n"
    )
    assert '%1 = add %in0, %0 : tensor<2x3xf32> loc("net.py":3, "jit(f)/add")\n' in to_text(
        graph, True
    )


def test_loops_read_back_with_names_and_locations() -> None:
    text = assert_reads_back(layer_stack())
    assert "    body(%in0: tensor<i32>, %in1: tensor<4x6xf32>" in text
    assert to_text(layer_stack(), True) == to_text(layer_stack(), True)


def test_every_row_of_the_op_harness_reads_back() -> None:
    for case in CASES:
        assert_reads_back(build_graph(case))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_random_graphs_read_back(rng: random.Random) -> None:
    assert_reads_back(import_module(random_module(rng, GROWTHS, 8).text))


def test_every_attribute_of_every_op_has_a_text_type() -> None:
    """A field of another kind would print and not read back: `conforms` has to know it."""
    samples = {
        "int": 1, "bool": True, "str": "a", "DType": DType.F32, "bytes": b"",
        "TensorType": tensor_type((), DType.F32),
    }  # fmt: skip
    for opdef in OPS.values():
        for name, annotation in (hints(opdef.attrs) if opdef.attrs else {}).items():
            leaves = re.findall(r"\w+", str(annotation).replace("shardwright.compiler.dtypes.", ""))
            known = any(conforms(v, annotation) for v in (*samples.values(), ()))
            deep = {"tuple", *samples} >= set(leaves)
            assert known or deep, f"{opdef.name}.{name}: {annotation}"


class TestConstants:
    @given(st.data())
    def test_any_bits_read_back(self, data: st.DataObject) -> None:
        """Elements of any pattern, alone (a splat), few (a list) and many (bytes)."""
        dtype = data.draw(st.sampled_from(DType))
        shape = data.draw(st.sampled_from([(), (1,), (3,), (2, 2, 2), (0, 3), (17,), (4, 5)]))
        count = data.draw(st.sampled_from([1, tensor_type(shape, dtype).num_elements]))
        bits = data.draw(st.binary(min_size=count * dtype.bytes, max_size=count * dtype.bytes))
        assert_reads_back(constant(bits, shape, dtype))

    @pytest.mark.parametrize(
        ("dtype", "bits", "text"),
        [
            (DType.F32, "00000080", "-0.0"),
            (DType.F32, "0000807F", "inf"),
            (DType.F32, "0000C07F", "nan"),
            (DType.F32, "0100C07F", "bits<0x7FC00001>"),
            (DType.F32, "0000C0FF", "bits<0xFFC00000>"),
            (DType.F32, "CDCCCC3D", "0.1"),
            (DType.F32, "01000000", "1e-45"),
            (DType.BF16, "CD3D", "0.1"),
            (DType.BF16, "80FF", "-inf"),
            (DType.F16, "FF7B", "65500.0"),
            (DType.F8E4M3FN, "7E", "450.0"),
            (DType.F8E5M2, "7C", "inf"),
            (DType.F64, "9A9999999999B93F", "0.1"),
            (DType.I8, "80", "-128"),
            (DType.U64, "FFFFFFFFFFFFFFFF", "18446744073709551615"),
            (DType.PRED, "01", "true"),
            (DType.PRED, "02", "bits<0x02>"),
        ],
    )
    def test_spelling(self, dtype: DType, bits: str, text: str) -> None:
        printed = assert_reads_back(constant(bytes.fromhex(bits), (3,), dtype))
        assert f"  %0 = constant {text} : tensor<3x{dtype.value}>\n" in printed

    def test_lists_have_the_dims_of_their_type(self) -> None:
        b = Builder()
        graph = b.finish(b.constant(np.arange(6).reshape(2, 3), DType.I32))
        assert "constant [[0, 1, 2], [3, 4, 5]] : tensor<2x3xi32>" in assert_reads_back(graph)

    def test_a_repeated_element_in_full_is_no_splat(self) -> None:
        full = constant(np.ones(2, np.float32).tobytes(), (2,), DType.F32)
        assert "constant [1.0, 1.0] : tensor<2xf32>" in assert_reads_back(full)

    def test_elided_constants_are_for_people_alone(self) -> None:
        b = Builder()
        table, few = b.constant(np.arange(100), DType.F32), b.constant(np.arange(20), DType.F32)
        graph = b.finish(table, few)
        assert_reads_back(graph)
        text = to_text(graph, elide=True)
        assert re.search(r"%0 = constant dense<elided 400 bytes [0-9a-f]{12}> :", text)
        assert re.search(r"%1 = constant dense<0x[0-9A-F]{160}> :", text)
        with pytest.raises(UsageError, match="requires all elements of a constant") as caught:
            parse(text)
        assert (caught.value.code, str(caught.value.loc)) == ("SW_TEXT_ELIDED", "<text>:2")


NAMES = st.text(
    st.characters(exclude_categories=("Cs",)), max_size=12
) | st.sampled_from(["loc", "return", "a b", "tensor", '"', "\\", "f32", "%0"])  # fmt: skip


@given(NAMES, NAMES, NAMES, st.integers(0, 2**31))
def test_any_name_and_place_read_back(name: str, file: str, scope: str, line: int) -> None:
    b = Builder(loc=Loc(file, line, scope))
    x = b.input((2,))
    graph = b.finish(b.all_reduce(x, (name, "dp"), 2), *b.loop(2, [x], lambda i, n, c: c))
    assert_reads_back(Graph(graph.inputs, graph.ops, graph.outputs, name))


def module(*lines: str) -> str:
    return "\n".join(("main(%x: tensor<2xf32>) {  // a comment", *lines, "  return %x", "}"))


REFUSED = {
    "an op nobody knows": ("  %y = plus %x : tensor<2xf32>", 8, "the name of a known op", "plus"),
    "a value that is not there": ("  %y = abs %z : tensor<2xf32>", 12, "defined before", "%z"),
    "a name given twice": ("  %x = abs %x : tensor<2xf32>", 3, "no other value", "%x"),
    "a name given twice at once": ("  %a, %a = abs %x : tensor<2xf32>", 7, "no other value", "%a"),
    "no type": ("  %y = abs %x", 3, "`:`", "return"),
    "a type of no size": ("  %y = abs %x : tensor<axf32>", 17, "sizes and one of", "tensor<axf32>"),
    "a size nobody has": (
        f"  %y = abs %x : tensor<{'9' * 20}xf32>", 17, "sizes and one of", "tensor<99",
    ),
    "another attribute": (
        "  %y = convert %x {type=f32} : tensor<2xf32>", 25, "one of dtype rounds in convert", "f32",
    ),
    "an attribute of another type": (
        "  %y = reshape %x {shape=[2, f32]} : tensor<2xf32>",
        26, "shape of reshape as [int, ...]", "[",
    ),
    "a truth value for a number": (
        "  %y = iota {dim=true} : tensor<2xf32>", 18, "dim of iota as int", "true",
    ),
    "an attribute that lacks": (
        "  %y = convert %x {} : tensor<2xf32>", 8, "dtype of convert", "convert",
    ),
    "an attribute twice": ("  %y = iota {dim=0, dim=0} : tensor<2xf32>", 21, "once", "dim"),
    "attributes of an op without": ("  %y = abs %x {} : tensor<2xf32>", 8, "with attr", "abs"),
    "an element too large": ("  %y = constant 1e39 : tensor<2xf32>", 17, "range of f32", "1e39"),
    "an element of no number": ("  %y = constant x : tensor<2xf32>", 17, "element of f32", "x"),
    "a fraction": ("  %y = constant 1.5 : tensor<2xi32>", 17, "element of i32", "1.5"),
    "a byte too large": ("  %y = constant 128 : tensor<2xi8>", 17, "element of i8", "128"),
    "a list too short": ("  %y = constant [1] : tensor<2xi8>", 17, "list of 2, got 1 entries", "["),
    "bytes too few": ("  %y = constant dense<0x00> : tensor<2xi8>", 23, "2 bytes", "0x00"),
    "half a byte": ("  %y = constant dense<0x001> : tensor<2xi8>", 23, "two hexadecimal", "0x001"),
    "a pattern too wide": ("  %y = constant bits<0x00> : tensor<2xf32>", 22, "8 hexa", "0x00"),
    "a constant without a type": ("  %y = constant 1", 2, "`:`", "the end of the text"),
    "a character": ("  %y = abs ? : tensor<2xf32>", 12, "a name, a value", "?"),
    "a string without an end": ('  %y = abs %x : tensor<2xf32> loc("a', 35, "a name, a", '"'),
    "an escape of no meaning": (r'  %y = abs %x : tensor<2xf32> loc("\q":1)', 35, "JSON", r'"\q"'),
    "half of a pair": (r'  %y = abs %x : tensor<2xf32> loc("\ud800":1)', 35, "JSON", r'"\ud800"'),
    "a number of 70 bits": (
        f"  %y = iota {{dim={2**70}}} : tensor<2xf32>", 18, "64 bits", str(2**70),
    ),
    "a number of a million digits": (
        f"  %y = iota {{dim={'9' * 10**6}}} : tensor<2xf32>", 18, "64 bits", "9" * 72 + "...",
    ),
    "lists without end": ("  %y = iota {dim=" + "[" * 10**5, 81, "at most 64 levels", "["),
}  # fmt: skip


@pytest.mark.parametrize(("line", "column", "required", "got"), REFUSED.values(), ids=REFUSED)
def test_refusal(line: str, column: int, required: str, got: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(module(line), "net.txt")
    said = caught.value.diagnostic
    assert said.code == "SW_TEXT_SYNTAX" and required in said.message, said.message
    assert f", got {got}" in said.message and f" in column {column}\n" in said.message
    seen_later = {"return": 3, "the end of the text": 4}  # what the line lacks
    assert said.loc == Loc("net.txt", seen_later.get(got, 2))
    pointer = said.message.split("\n")[2]
    assert pointer.strip() == "^"


def test_regions_without_end_are_refused() -> None:
    text = "f() {\n%a = loop {trip=1, induction=0} : tensor<f32>\n" * 1000
    with pytest.raises(UsageError, match="at most 64 levels inside each other"):
        parse(text)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_text_is_a_graph_or_a_refusal(data: st.DataObject) -> None:
    """Pieces of the text taken out, put twice or exchanged: never another exception."""
    pieces = re.split(r"(\W)", to_text(layer_stack(), True)[:2500])
    for _ in range(data.draw(st.integers(1, 3))):
        at, other = (data.draw(st.integers(0, len(pieces) - 1)) for _ in range(2))
        kind = data.draw(st.sampled_from(("drop", "twice", "other")))
        pieces[at] = {"drop": "", "twice": 2 * pieces[at], "other": pieces[other]}[kind]
    try:
        graph = parse("".join(pieces))
        dump(graph, True)
        verify(graph)
    except DiagnosticError as error:
        assert error.code in ("SW_TEXT_SYNTAX", "SW_IR_INVALID")


def test_a_graph_that_is_not_sound_has_a_text() -> None:
    """Dumps are written before a pass is verified: the broken graph is what one wants to see."""
    b, other = Builder(), Builder()
    broken = Op("abs", (other.input((2,)),), (other.input((2,)),))
    text = to_text(Graph((b.input((2,)),), (broken,), broken.operands))
    assert "%0 = abs _ : tensor<2xf32>" in text and "return _" in text
    with pytest.raises(UsageError):
        parse(text)
