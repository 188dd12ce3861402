"""One module, command line or call per documented error code that makes the compiler raise it.

The offending operator of every module stands at net.py:7; `line` is empty for codes that belong to
the whole module or to the command line. `patched` shrinks a limit, so that a small model meets it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import AllReduceAttrs, ReduceScatterAttrs
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.formats import check_formats
from shardwright.compiler.passes.integers import check_integers

AT = 'loc("net.py":7:1)'


@dataclass(frozen=True, slots=True)
class Trigger:
    """How a code is met: a module compiled with `flags`, or `call` where one core cannot."""

    text: str = ""
    flags: str = ""
    line: str = "net.py:7"
    patched: tuple[tuple[str, object], ...] = ()
    call: Callable[[], object] | None = None


def module(arguments: str, result: str, *body: str) -> str:
    """A main function; the last value of the body is `%r`."""
    lines = "\n  ".join((*body, f"return %r : {result}"))
    return f"func.func public @main({arguments}) -> {result} {{\n  {lines}\n}}\n"


def one(op: str, arguments: str, result: str) -> str:
    """A module of one op at net.py:7."""
    return module(arguments, result, f"%r = {op} {AT}")


def typed(dtype: str) -> str:
    t = f"tensor<4x{dtype}>"
    return one(f"stablehlo.add %a, %a : {t}", f"%a: {t}", t)


def call(target: str) -> str:
    t = "tensor<4xf32>"
    return one(f"stablehlo.custom_call @{target}(%a) : ({t}) -> {t}", f"%a: {t}", t)


def convolution(window: str) -> str:
    kernel, image = "tensor<3x1x1xf32>", "tensor<1x16x1xf32>"
    size = {"lhs_dilate = [2], rhs_dilate = [2]": 27, "stride = [2], lhs_dilate = [2]": 15}[window]
    result = f"tensor<1x{size}x1xf32>"
    return one(
        "stablehlo.convolution(%a, %k) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window ="
        f" {{{window}}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}"
        f" : ({image}, {kernel}) -> {result}",
        f"%a: {image}, %k: {kernel}",
        result,
    )


def window(dilations: str, size: int) -> str:
    region = (
        "({ ^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32>"
        " stablehlo.return %s : tensor<f32> })"
    )
    return module(
        "%a: tensor<8xf32>",
        f"tensor<{size}xf32>",
        "%z = stablehlo.constant dense<0.0> : tensor<f32>",
        '%r = "stablehlo.reduce_window"(%a, %z) <{window_dimensions = array<i64: 2>,'
        f" {dilations}}}> {region} : (tensor<8xf32>, tensor<f32>) -> tensor<{size}xf32> {AT}",
    )


TWO_WINDOWS = module(
    "%a: tensor<8xf32>",
    "tensor<7xf32>",
    "%z = stablehlo.constant dense<0.0> : tensor<f32>",
    '%r, %q = "stablehlo.reduce_window"(%a, %a, %z, %z) <{window_dimensions = array<i64: 2>}>'
    " ({ ^bb0(%w: tensor<f32>, %x: tensor<f32>, %y: tensor<f32>, %v: tensor<f32>):"
    " %s = stablehlo.add %w, %y : tensor<f32> %t = stablehlo.multiply %x, %v : tensor<f32>"
    " stablehlo.return %s, %t : tensor<f32>, tensor<f32> })"
    " : (tensor<8xf32>, tensor<8xf32>, tensor<f32>, tensor<f32>)"
    f" -> (tensor<7xf32>, tensor<7xf32>) {AT}",
)
MIXED_REDUCTION = module(
    "%a: tensor<8xf32>, %i: tensor<8xf32>",
    "tensor<f32>",
    "%z = stablehlo.constant dense<0.0> : tensor<f32>",
    '%r, %q = "stablehlo.reduce"(%a, %i, %z, %z) <{dimensions = array<i64: 0>}>'
    " ({ ^bb0(%w: tensor<f32>, %x: tensor<f32>, %y: tensor<f32>, %v: tensor<f32>):"
    " %s = stablehlo.add %w, %v : tensor<f32> %t = stablehlo.multiply %x, %y : tensor<f32>"
    " stablehlo.return %s, %t : tensor<f32>, tensor<f32> })"
    " : (tensor<8xf32>, tensor<8xf32>, tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<f32>)"
    f" {AT}",
)


def gather(index: str) -> str:
    return module(
        "%a: tensor<8x3xf32>",
        "tensor<9x3xf32>",
        f"%i = {index}",
        '%r = "stablehlo.gather"(%a, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],'
        " collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes ="
        " array<i64: 1, 3>, indices_are_sorted = false}>"
        f" : (tensor<8x3xf32>, tensor<9x1xi32>) -> tensor<9x3xf32> {AT}",
    )


def scatter(dtype: str, combine: str, rows: int, index: str = "") -> str:
    """Rows of a tensor combined at computed, or counted, indices."""
    t, u = f"tensor<8x3x{dtype}>", f"tensor<{rows}x3x{dtype}>"
    return module(
        f"%a: {t}, %u: {u}" + ("" if index else f", %i: tensor<{rows}x1xi32>"),
        t,
        *([f"%i = {index}"] if index else []),
        '%r = "stablehlo.scatter"(%a, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<'
        "update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],"
        f" index_vector_dim = 1>}}> ({{ ^bb0(%x: tensor<{dtype}>, %y: tensor<{dtype}>):"
        f" %s = stablehlo.{combine} %x, %y : tensor<{dtype}> stablehlo.return %s : tensor<{dtype}>"
        f" }}) : ({t}, tensor<{rows}x1xi32>, {u}) -> {t} {AT}",
    )


IOTA = "stablehlo.iota dim = 0 : tensor<9x1xi32>"
CONSTANT = "stablehlo.constant dense<[[0],[1],[2],[3],[4],[5],[6],[7],[11]]> : tensor<9x1xi32>"
DOT = module(
    "%a: tensor<1024x1024xf32>",
    "tensor<1024x1024xf32>",
    f"%r = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]"
    f" : (tensor<1024x1024xf32>, tensor<1024x1024xf32>) -> tensor<1024x1024xf32> {AT}",
)
DOT_BYTES = 2 * 4 * 1024 * 1024
SMALL = "tensor<16x16xf32>"
TILE = 4 * 16 * 16
WEIGHTS = bytes(range(1, 65)).hex().upper() * 16
_PRODUCT = f"contracting_dims = [1] x [0] : ({SMALL}, {SMALL}) -> {SMALL} {AT}"
PRODUCT = module(
    f"%a: {SMALL}",
    SMALL,
    f'%w = stablehlo.constant dense<"0x{WEIGHTS}"> : {SMALL}',
    f"%r = stablehlo.dot_general %a, %w, {_PRODUCT}",
)
STAGES = (
    f"func.func public @main(%a: {SMALL}, %b: {SMALL}) -> ({SMALL}, {SMALL}) {{\n"
    f'  %w = stablehlo.constant dense<"0x{WEIGHTS}"> : {SMALL}\n'
    f'  %v = stablehlo.constant dense<"0x{WEIGHTS[8:]}{WEIGHTS[:8]}"> : {SMALL}\n'
    f"  %r = stablehlo.dot_general %a, %w, {_PRODUCT}\n"
    f"  %q = stablehlo.dot_general %b, %v, {_PRODUCT}\n"
    f"  return %r, %q : {SMALL}, {SMALL}\n}}\n"
)
"""Two products with weights of three tensors each."""
CARRIED = module(
    "%a: tensor<16xf32>",
    "tensor<f32>",
    f"%x = stablehlo.broadcast_in_dim %a, dims = [0] : (tensor<16xf32>) -> {SMALL}",
    "%k = stablehlo.constant dense<0> : tensor<i32>",
    "%n = stablehlo.constant dense<3> : tensor<i32>",
    "%z = stablehlo.constant dense<0.0> : tensor<f32>",
    f"%l:2 = stablehlo.while(%i = %k, %v = %x) : tensor<i32>, {SMALL}",
    "cond { %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>",
    "stablehlo.return %p : tensor<i1> }",
    "do { %o = stablehlo.constant dense<1> : tensor<i32> %j = stablehlo.add %i, %o : tensor<i32>",
    f"%d = stablehlo.dot_general %v, %v, contracting_dims = [1] x [0] : ({SMALL}, {SMALL})"
    f" -> {SMALL} %t = stablehlo.tanh %d : {SMALL}",
    f"stablehlo.return %j, %t : tensor<i32>, {SMALL} }}",
    "%r = stablehlo.reduce(%l#1 init: %z) applies stablehlo.add across dimensions = [0, 1]"
    f" : ({SMALL}, tensor<f32>) -> tensor<f32>",
)
"""A loop whose carry is stored between its turns."""
LIMIT = "shardwright.compiler.machine.target.Target.limit_bytes"


def over_cores(kind: str) -> Callable[[], object]:
    """The pass over a program of several cores that sums integers."""

    def run() -> object:
        b = Builder(loc=Loc("net.py", 7, ""))
        x = b.input((8, 3), DType.I32)
        over = {"axes": ("dp",), "reduction": "add", "group_size": 2}
        attrs = (
            AllReduceAttrs(**over) if kind == "all_reduce" else ReduceScatterAttrs(dim=0, **over)
        )
        graph = b.finish(b.op(kind, x, attrs=attrs))
        return check_integers(graph, CompileOptions(implicit_integer_downcast="none"), "v2")

    return run


def newer_than_trn3() -> object:
    """No machine file is newer than trn3: the pass itself."""
    b = Builder(loc=Loc("net.py", 7, ""))
    x = b.input((8,), DType.F8E4M3)
    return check_formats(b.finish(b.op("negate", x)), CompileOptions(), "v5")


MX_INPUT, MX_DATA, MX_SCALE = "4x64xbf16", "4x16xui32", "4x2xui8"


def mx_quantize(
    config: str = "", x: str = MX_INPUT, data: str = MX_DATA, count: int = 1, results: int = 2
) -> Trigger:
    """A `QuantizeMX` whose configuration has these fields beside dtype and dim."""
    types = [f"tensor<{t}>" for t in (data, MX_SCALE)[:results]]
    given = ", ".join([f"tensor<{x}>"] * count)
    made = f"({', '.join(types)})" if results > 1 else types[0]
    fields = "" if config == "none" else f'{{"dtype": "float8_e5m2", "dim": -1{config}}}'
    text = fields.replace('"', "\\22")
    body = (
        f"%r{f':{results}' if results > 1 else ''} = stablehlo.custom_call"
        f' @QuantizeMX({", ".join(["%x"] * count)}) {{backend_config = "{text}"}}'
        f" : ({given}) -> {made} {AT}"
    )
    used = "%r#0" if results > 1 else "%r"
    return Trigger(
        f"func.func public @main(%x: tensor<{x}>) -> {types[0]} {{\n"
        f"  {body}\n  return {used} : {types[0]}\n}}\n",
        "--target trn3",
    )


def scaled_dot(
    config: str = "",
    lhs: str = MX_DATA,
    rhs: str = MX_DATA,
    result: str = "4x4xf32",
    scales: tuple[str, ...] = (MX_SCALE, MX_SCALE),
) -> Trigger:
    """A block-scaled dot with these fields in its configuration, or this text of one."""
    types = [f"tensor<{t}>" for t in (lhs, rhs, *scales)]
    names = [f"%a{i}" for i in range(len(types))]
    fields = f", {config}" if config else ""
    text = '{"scaled_dot_backend_config": {"element_dtype": "float8_e5m2"' + fields + "}}"
    if config.startswith("{"):
        text = config
    call = f'stablehlo.custom_call @"__op$block_scaled_dot"({", ".join(names)})'
    text = text.replace('"', "\\22")
    return Trigger(
        one(
            f'{call} {{backend_config = "{text}"}} : ({", ".join(types)}) -> tensor<{result}>',
            ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True)),
            f"tensor<{result}>",
        ),
        "--target trn3",
    )


def kernel(name: str, *shapes: str, **fields: str) -> Trigger:
    """A call of a kernel of NKI, as front ends write it."""
    text = base64.b64encode(json.dumps({"func_name": name, **fields}).encode()).decode()
    types = [f"tensor<{shape}>" for shape in shapes]
    names = [f"%a{i}" for i in range(len(types))]
    call = f"stablehlo.custom_call @AwsNeuronCustomNativeKernel({', '.join(names)})"
    return Trigger(
        one(
            f'{call} {{backend_config = "{text}"}} : ({", ".join(types)}) -> {types[0]}',
            ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True)),
            types[0],
        )
    )


TRACED = {"kernel_file": str(Path(__file__).resolve()), "nki_version": "0.3.0"}
"""What a call says of an artifact that is there."""
MARKED_TUPLE = module(
    "%a: tensor<4xf32>",
    "tensor<4xf32>",
    f"%t = stablehlo.tuple %a, %a : tuple<tensor<4xf32>, tensor<4xf32>> {AT}",
    '%m = stablehlo.custom_call @"NeuronBoundaryMarker-Start"(%t) :'
    f" (tuple<tensor<4xf32>, tensor<4xf32>>) -> tuple<tensor<4xf32>, tensor<4xf32>> {AT}",
    "%r = stablehlo.get_tuple_element %m[0] :"
    f" (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32> {AT}",
)
BATCHES = ('"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]', "3x4x16xui32", "2x4x16xui32")


def integer(op: str, dtype: str) -> str:
    t = f"tensor<4x{dtype}>"
    return one(f"stablehlo.{op} %a, %b : {t}", f"%a: {t}, %b: {t}", t)


TRIGGERS: dict[str, Trigger] = {
    "NCC_EARG001": Trigger(typed("f32"), "--logical-nc-config 2", line=""),
    "NCC_EMOD025": Trigger(
        one("stablehlo.add %a, %a : tensor<?x4xf32>", "%a: tensor<?x4xf32>", "tensor<?x4xf32>"),
        line="m.mlir:1",
    ),
    "NCC_EVRF001": Trigger(
        one(
            "stablehlo.cholesky %a, lower = true : tensor<4x4xf32>",
            "%a: tensor<4x4xf32>",
            "tensor<4x4xf32>",
        )
    ),
    "NCC_EUOC002": Trigger(
        one(
            '"stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = true, unit_diagonal ='
            " false, transpose_a = #stablehlo<transpose NO_TRANSPOSE>}"
            " : (tensor<4x4xf32>, tensor<4x2xf32>) -> tensor<4x2xf32>",
            "%a: tensor<4x4xf32>, %b: tensor<4x2xf32>",
            "tensor<4x2xf32>",
        )
    ),
    "NCC_EHCA005": Trigger(call("cublas")),
    "NCC_EVRF015": Trigger(call("AwsNeuronGelo")),
    "NCC_EVRF004": Trigger(typed("complex<f32>"), line="m.mlir:1"),
    "NCC_EVRF006": Trigger(
        module(
            "%a: tensor<2xui64>",
            "tensor<4xui32>",
            "%s, %r = stablehlo.rng_bit_generator %a, algorithm = PHILOX"
            f" : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui32>) {AT}",
        )
    ),
    "NCC_EVRF010": Trigger(convolution("lhs_dilate = [2], rhs_dilate = [2]")),
    "NCC_EVRF011": Trigger(convolution("stride = [2], lhs_dilate = [2]")),
    "NCC_EVRF013": Trigger(
        module(
            "%a: tensor<8xi32>",
            "tensor<3xi32>",
            "%r, %i = chlo.top_k(%a, k = 3) : tensor<8xi32> -> (tensor<3xi32>, tensor<3xi32>)"
            f" {AT}",
        )
    ),
    "NCC_EVRF016": Trigger(scatter("i1", "or", 5)),
    "NCC_EVRF017": Trigger(window("base_dilations = array<i64: 2>", 14)),
    "NCC_EVRF018": Trigger(window("window_dilations = array<i64: 2>", 6)),
    "NCC_EVRF019": Trigger(TWO_WINDOWS, "--compiler-version-profile 2.22.12471"),
    "NCC_EVRF022": Trigger(integer("shift_right_arithmetic", "i16")),
    "NCC_EVRF024": Trigger(
        one(
            "stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> tensor<1100000000xf32>",
            "%a: tensor<f32>",
            "tensor<1100000000xf32>",
        ),
        "--compiler-version-profile 2.22.12471",
    ),
    "NCC_EVRF031": Trigger(scatter("f32", "add", 9, IOTA)),
    "NCC_EVRF056": Trigger(gather(IOTA)),
    "NCC_ESMP002": Trigger(gather(CONSTANT)),
    "NCC_ESFH002": Trigger(
        module(
            "%a: tensor<4xui64>",
            "tensor<4xui64>",
            f"%c = stablehlo.constant dense<4294967296> : tensor<4xui64> {AT}",
            f"%r = stablehlo.multiply %a, %c : tensor<4xui64> {AT}",
        )
    ),
    "NCC_ESPP004": Trigger(typed("f4E2M1FN"), line="m.mlir:1"),
    "NCC_ESPP047": Trigger(typed("f8E3M4"), line="m.mlir:1"),
    "NCC_EVRF005": Trigger(typed("f8E5M2FNUZ"), line="m.mlir:1"),
    "NCC_EVRF051": Trigger(typed("f8E4M3FN")),
    "NCC_EVRF052": Trigger(call=newer_than_trn3),
    "NCC_EVRF064": Trigger(
        one(
            "stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]"
            " : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x4xf32>",
            "%a: tensor<4x5xf32>",
            "tensor<4x4xf32>",
        )
    ),
    "NCC_EVRF035": Trigger(
        one(
            "stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]"
            " : (tensor<4x4xi32>, tensor<4x4xi32>) -> tensor<4x4xi32>",
            "%a: tensor<4x4xi32>",
            "tensor<4x4xi32>",
        ),
        "--target trn2 --lnc 1 --implicit-integer-downcast none",
    ),
    "NCC_EVRF060": Trigger(scatter("i32", "add", 5), "--implicit-integer-downcast none"),
    "NCC_EVRF061": Trigger(call=over_cores("all_reduce")),
    "NCC_EVRF062": Trigger(integer("power", "i64"), "--implicit-integer-downcast none"),
    "NCC_EVRF063": Trigger(call=over_cores("reduce_scatter")),
    "NCC_ETUP002": Trigger(MARKED_TUPLE),
    "NCC_EBIR023": kernel("my.mlp_kernel", "8x64xf32", "64x4224xf32", "4224x64xf32", **TRACED),
    "NCC_EVRF059": kernel("attend", "4xf32", kernel_file="/nowhere/1f2e/attend", nki_version="0.3"),
    "NCC_EVRF065": kernel("attend", "4xf32", kernel_file=TRACED["kernel_file"]),
    "NCC_EVRF036": mx_quantize("none"),
    "NCC_EVRF037": mx_quantize(count=2),
    "NCC_EVRF038": mx_quantize(x="2x4x64xbf16", config=', "dim": 0'),
    "NCC_EVRF039": mx_quantize(', "block_size": 16'),
    "NCC_EVRF040": mx_quantize(', "scale_method": "RNE"'),
    "NCC_EVRF041": mx_quantize(x="4x64xf32"),
    "NCC_EVRF042": mx_quantize(data="4x64xf8E5M2"),
    "NCC_EVRF043": scaled_dot(scales=(MX_SCALE,)),
    "NCC_EVRF044": scaled_dot(lhs="4x64xf8E5M2"),
    "NCC_EVRF045": scaled_dot(result="4x4xf16"),
    "NCC_EVRF046": scaled_dot(lhs="16xui32", result="4xf32"),
    "NCC_EVRF047": scaled_dot(rhs="16xui32", result="4xf32"),
    "NCC_EVRF048": scaled_dot(*BATCHES, "3x4x4xf32", ("3x4x2xui8", "2x4x2xui8")),
    "NCC_EVRF049": scaled_dot("{scaled_dot_backend_config}"),
    "NCC_EVRF050": scaled_dot(rhs="4x8xui32", scales=(MX_SCALE, "4x1xui8")),
    "NCC_EVRF053": scaled_dot('"lhs_batch_dimensions": [1], "rhs_batch_dimensions": [0]'),
    "NCC_EVRF054": scaled_dot('"lhs_batch_dimensions": [2], "rhs_batch_dimensions": [0]'),
    "NCC_EVRF055": scaled_dot('"lhs_contracting_dimensions": [-1]'),
    "NCC_EVRF057": mx_quantize(results=1),
    "NCC_EVRF058": mx_quantize(x="4x66xbf16"),
    "NCC_ISPP027": Trigger(MIXED_REDUCTION),
    "NCC_EVRF007": Trigger(DOT, "--instruction-limit 10", line=""),
    "NCC_EBVF030": Trigger(DOT, "--instruction-limit 160", line=""),
    "NCC_EXTP004": Trigger(
        DOT, patched=(("shardwright.compiler.linking.budget.OPERATOR_LIMIT", 20),)
    ),
    "NCC_EOOM002": Trigger(DOT, line="", patched=((LIMIT, DOT_BYTES - 1),)),
    "NCC_EVRF009": Trigger(PRODUCT, patched=((LIMIT, 3 * TILE - 1),)),
    "NCC_EXSP001": Trigger(CARRIED, line="", patched=((LIMIT, TILE // 2),)),
    "NCC_EOOM001": Trigger(STAGES, line="", patched=((LIMIT, 6 * TILE - 1),)),
}
