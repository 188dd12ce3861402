"""Text of kernels reads back to the same kernel; what does not fit is refused at its line and
column, and a listing of a program shows nodes in the same form."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import DiagnosticError, UsageError
from shardwright.compiler.driver import with_ordinals
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.isa.kernel import Affine, Bound, KernelProgram, Node, View
from shardwright.compiler.isa.kernel_text import parse, to_text
from shardwright.compiler.neff.listing import function_lines
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import unit_passes
from shardwright.compiler.rewriting.driver import run
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase, build_graph
from tests.support.compiled import link
from tests.support.kernel_bytes import pack_kernel
from tests.support.kernel_reference import lower_function


def assert_reads_back(*programs: KernelProgram) -> str:
    text = to_text(*programs)
    copies = parse(text)
    assert list(map(pack_kernel, copies)) == list(map(pack_kernel, programs)), text
    assert to_text(*copies) == text
    return text


ONE_PER_OP = tuple({case.op: case for case in reversed(CASES)}.values())


def assert_rows_read_back(cases: Iterable[OpCase]) -> set[str]:
    """What the nodes compute of all rows that one core runs."""
    nodes: set[str] = set()
    for case in cases:
        graph = run(with_ordinals(build_graph(case)), unit_passes(DEFAULTS))
        try:
            kernels = lower_function(graph).kernels
        except DiagnosticError as refusal:
            assert refusal.code.startswith("NCC_"), case.id  # the machine has no such op
            continue
        assert_reads_back(*kernels)
        nodes.update(node.op for kernel in kernels for node in kernel.nodes)
    return nodes


def test_kernels_of_every_op_read_back() -> None:
    nodes = assert_rows_read_back(ONE_PER_OP)
    assert nodes > {"load", "load_indexed", "store_indexed", "contract", "iota", "convert"}


@pytest.mark.exhaustive
def test_kernels_of_every_row_of_the_op_harness_read_back() -> None:
    assert_rows_read_back(CASES)


def test_form() -> None:
    load = View(0, Affine(8, ((3, -4),)), (16, 0, 1))
    edges = (Bound(-1, 9, 72, (0, 1, 0)),)
    program = KernelProgram(
        "compute",
        "dot general",
        (4, 8, 16),
        (
            Node("load", (), (0, 2), DType.BF16, {"view": load, "bounds": edges}),
            Node("iota", (), (2,), DType.I32, {"step": 1, "start": Affine(7), "atom": 2}),
            Node("reduce", (0,), (0,), DType.F32, {"over": (2,), "kind": "add"}),
            Node("constant", (), (), DType.F32, {"value": -0.0}),
            Node("add", (2, 3), (0,), DType.F32),
        ),
        loc=3,
    )
    assert assert_reads_back(program) == (
        'kernel compute "dot general" loc 3 {\n'
        "  iter_dims [4, 8, 16]\n"
        "  %0 = load() {bounds=[bound{offset=-1, size=9, unit=72, strides=[0, 1, 0]}],"
        " view=tensor 0+8+-4*r3[16, 0, 1]} : bf16 over [0, 2]\n"
        "  %1 = iota() {atom=2, start=<7>, step=1} : i32 over [2]\n"
        "  %2 = reduce(%0) {kind=add, over=[2]} : f32 over [0]\n"
        "  %3 = constant() {value=-0.0} : f32 over []\n"
        "  %4 = add(%2, %3) : f32 over [0]\n"
        "}\n"
    )


def test_kernels_without_nodes() -> None:
    view = View(5, Affine(0, ((0, 1), (2, 8))), ())
    fields = {"register": 0, "view": view, "low": 0, "high": 7}
    text = assert_reads_back(
        KernelProgram("register_load", "register.0", attrs=fields), KernelProgram("idle", "copy")
    )
    assert text == (
        "kernel register_load register.0"
        " attributes {high=7, low=0, register=0, view=tensor 5+1*r0+8*r2[]} {\n}\n"
        "kernel idle copy {\n}\n"
    )


AFFINES = st.builds(
    Affine, st.integers(-99, 99), st.lists(st.tuples(st.integers(0, 9), st.integers())).map(tuple)
).filter(lambda a: all(-(2**63) <= c < 2**64 for _, c in a.terms))  # fmt: skip
NUMBERS = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3).map(tuple)
FLOATS = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0])
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ["f32", "true", "none", "inf", "tensor", "bound", "bits", "loc", "r3"]
)
LEAVES = (
    st.integers(-(2**63), 2**64 - 1)
    | FLOATS
    | st.sampled_from([True, False, None, math.inf, -math.inf, math.nan, -0.0, *DType])
    | NAMES
    | st.binary(max_size=9)
    | AFFINES
    | st.builds(View, st.integers(0, 99), AFFINES, NUMBERS)
    | st.builds(Bound, *3 * [st.integers(-99, 99)], NUMBERS)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, VALUES, max_size=3), NAMES, NAMES)
def test_any_attributes_read_back(attrs: dict[str, Any], name: str, op: str) -> None:
    """Every value that a file can hold, of the kind it had: 1 is no 1.0, "f32" no type."""
    node = Node(op, (), (1,), DType.U8, attrs)
    copy = parse(assert_reads_back(KernelProgram("compute", name, (3, 4), (node,), attrs)))
    assert [type(v) for v in copy[0].attrs.values()] == [type(attrs[k]) for k in sorted(attrs)]


def test_numpy_scalars_are_numbers_as_in_files() -> None:
    attrs = {"value": np.float32(0.1), "flag": np.bool_(True), "size": np.int64(3)}
    (copy,) = parse(to_text(KernelProgram("compute", "x", attrs=attrs)))
    assert copy.attrs == {"value": float(np.float32(0.1)), "flag": True, "size": 3}


REFUSED = {
    "a node that is not there": ("%0 = abs(%1) : f32 over []", 10, "a node before", "%1"),
    "a node given twice": (
        "%0 = load() : f32 over [] %0 = load() : f32 over []", 27, "no other node", "%0",
    ),
    "no such type": ("%0 = load() : float over []", 15, "one of the types", "float"),
    "no span": ("%0 = load() : f32", 1, "`over`", "}"),
    "a span of no numbers": ("%0 = load() : f32 over [f32]", 25, "a number", "f32"),
    "a view without strides": ("%0 = load() {v=tensor 0+1} : f32 over []", 26, "strides", "}"),
    "a view of no offset": ("%0 = load() {v=tensor 0[1]} : f32 over []", 24, "`+`", "["),
    "no register": ("%0 = load() {v=<1+2*x>} : f32 over []", 21, "a register like r3", "x"),
    "two numbers": ("%0 = load() {v=<1+2>} : f32 over []", 20, "`*`", ">"),
    "a bound that lacks": (
        "%0 = load() {v=bound{size=1}} : f32 over []", 21, "offset unit strides of a bound", "{",
    ),
    "a bound of text": (
        "%0 = load() {v=bound{size=a}} : f32 over []", 27, "size of a bound as int", "a",
    ),
    "a number too large": ("%0 = load() {v=1e999} : f32 over []", 16, "range of f64", "1e999"),
    "no value": ("%0 = load() {v=} : f32 over []", 16, "a value", "}"),
    "a name twice": ("%0 = load() {v=1, v=1} : f32 over []", 19, "once", "v"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "column", "required", "got"), REFUSED.values(), ids=REFUSED)
def test_refusal(line: str, column: int, required: str, got: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"kernel compute x {{\n{line}\n}}")
    said = caught.value.diagnostic
    assert said.code == "SW_TEXT_SYNTAX" and required in said.message, said.message
    assert f", got {got} in column {column}\n" in said.message, said.message


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_text_is_a_kernel_or_a_refusal(data: st.DataObject) -> None:
    b = Builder()
    x = b.input((5, 6))
    graph = b.finish(b.op("tanh", b.dot(x, b.transpose(x, (1, 0)))))
    pieces = re.split(r"(\W)", to_text(*lower_function(graph).kernels))
    at, other = (data.draw(st.integers(0, len(pieces) - 1)) for _ in range(2))
    pieces[at] = data.draw(st.sampled_from(("", 2 * pieces[at], pieces[other])))
    try:
        list(map(pack_kernel, parse("".join(pieces))))
    except UsageError as error:
        assert error.code == "SW_TEXT_SYNTAX"


def test_listings_show_nodes_in_this_form() -> None:
    b = Builder()
    x = b.input((5, 6))
    program = link(b.finish(b.op("tanh", x)))
    (function,) = program.functions
    listed = [line.strip() for line in function_lines(function, program.locations)]
    (kernel,) = function.kernels
    _, *body, _ = (line.strip() for line in to_text(kernel.program).splitlines())
    at = listed.index("kernel 0 compute tanh")
    assert listed[at + 1 : at + 1 + len(body)] == body
