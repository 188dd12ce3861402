"""Small modules as producers write them (jax.export, torch_xla, XLA's dumps, converters), chosen
before the first of them was run: what each is of, its text, and `refused` where it has to be.

Text after `main:` of a row is the body of `func.func @main`; rows with a whole module begin with
`module` or `HloModule`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Module:
    """A module, and a part of the message with which it is refused, if it is to be."""

    text: str
    refused: str = ""


def main(signature: str, body: str, others: str = "") -> str:
    """A module of one public function, and of what it calls."""
    return f"module {{\nfunc.func public @main{signature} {{\n{body}\n}}\n{others}\n}}"


def xy(body: str, result: str = "tensor<4x6xf32>", others: str = "") -> str:
    return main(f"(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> {result}", body, others)


MODULES: dict[str, Module] = {
    "sort of three operands by two keys": Module(
        main(
            "(%a: tensor<8xi32>, %b: tensor<8xf32>, %c: tensor<8xi32>)"
            " -> (tensor<8xi32>, tensor<8xf32>, tensor<8xi32>)",
            """%r:3 = "stablehlo.sort"(%a, %b, %c) ({
^bb0(%l0: tensor<i32>, %r0: tensor<i32>, %l1: tensor<f32>, %r1: tensor<f32>,
     %l2: tensor<i32>, %r2: tensor<i32>):
  %lt = stablehlo.compare LT, %l0, %r0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %eq = stablehlo.compare EQ, %l0, %r0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %gt = stablehlo.compare GT, %l1, %r1, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
  %o = stablehlo.select %eq, %gt, %lt : tensor<i1>, tensor<i1>
  stablehlo.return %o : tensor<i1>
}) {dimension = 0 : i64, is_stable = true}
  : (tensor<8xi32>, tensor<8xf32>, tensor<8xi32>) -> (tensor<8xi32>, tensor<8xf32>, tensor<8xi32>)
return %r#0, %r#1, %r#2 : tensor<8xi32>, tensor<8xf32>, tensor<8xi32>""",
        )
    ),
    "sort by a negated comparison": Module(
        main(
            "(%a: tensor<8xf32>) -> tensor<8xf32>",
            """%r = "stablehlo.sort"(%a) ({
^bb0(%l: tensor<f32>, %r: tensor<f32>):
  %ge = stablehlo.compare GE, %l, %r, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
  %lt = stablehlo.not %ge : tensor<i1>
  stablehlo.return %lt : tensor<i1>
}) {dimension = 0 : i64, is_stable = true} : (tensor<8xf32>) -> tensor<8xf32>
return %r : tensor<8xf32>""",
        )
    ),
    "sort by absolute values": Module(
        main(
            "(%a: tensor<8xf32>) -> tensor<8xf32>",
            """%r = "stablehlo.sort"(%a) ({
^bb0(%l: tensor<f32>, %r: tensor<f32>):
  %p = stablehlo.abs %l : tensor<f32>
  %q = stablehlo.abs %r : tensor<f32>
  %lt = stablehlo.compare LT, %p, %q, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
  stablehlo.return %lt : tensor<i1>
}) {dimension = 0 : i64, is_stable = true} : (tensor<8xf32>) -> tensor<8xf32>
return %r : tensor<8xf32>""",
        )
    ),
    "scatter of a product": Module(
        main(
            "(%t: tensor<5x3xf32>, %i: tensor<2x1xi32>, %u: tensor<2x3xf32>) -> tensor<5x3xf32>",
            """%r = "stablehlo.scatter"(%t, %i, %u) ({
^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %m = stablehlo.multiply %b, %a : tensor<f32>
  stablehlo.return %m : tensor<f32>
}) {scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1],
  inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
  : (tensor<5x3xf32>, tensor<2x1xi32>, tensor<2x3xf32>) -> tensor<5x3xf32>
return %r : tensor<5x3xf32>""",
        )
    ),
    "scatter of two operands": Module(
        main(
            "(%t: tensor<5xf32>, %v: tensor<5xi32>, %i: tensor<2x1xi32>, %u: tensor<2xf32>,"
            " %w: tensor<2xi32>) -> (tensor<5xf32>, tensor<5xi32>)",
            """%r:2 = "stablehlo.scatter"(%t, %v, %i, %u, %w) ({
^bb0(%a: tensor<f32>, %b: tensor<i32>, %c: tensor<f32>, %d: tensor<i32>):
  %m = stablehlo.add %a, %c : tensor<f32>
  stablehlo.return %m, %d : tensor<f32>, tensor<i32>
}) {scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
  scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
  : (tensor<5xf32>, tensor<5xi32>, tensor<2x1xi32>, tensor<2xf32>, tensor<2xi32>)
  -> (tensor<5xf32>, tensor<5xi32>)
return %r#0, %r#1 : tensor<5xf32>, tensor<5xi32>""",
        )
    ),
    "scatter of a maximum with batching dims": Module(
        main(
            "(%t: tensor<2x5xf32>, %i: tensor<2x3x1xi32>, %u: tensor<2x3xf32>) -> tensor<2x5xf32>",
            """%r = "stablehlo.scatter"(%t, %i, %u) ({
^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %m = stablehlo.maximum %a, %b : tensor<f32>
  stablehlo.return %m : tensor<f32>
}) {scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [1],
  input_batching_dims = [0], scatter_indices_batching_dims = [0],
  scatter_dims_to_operand_dims = [1], index_vector_dim = 2>}
  : (tensor<2x5xf32>, tensor<2x3x1xi32>, tensor<2x3xf32>) -> tensor<2x5xf32>
return %r : tensor<2x5xf32>""",
        )
    ),
    "scatter of a difference": Module(
        main(
            "(%t: tensor<5xf32>, %i: tensor<2x1xi32>, %u: tensor<2xf32>) -> tensor<5xf32>",
            """%r = "stablehlo.scatter"(%t, %i, %u) ({
^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %m = stablehlo.subtract %a, %b : tensor<f32>
  stablehlo.return %m : tensor<f32>
}) {scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
  scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
  : (tensor<5xf32>, tensor<2x1xi32>, tensor<2xf32>) -> tensor<5xf32>
return %r : tensor<5xf32>""",
        )
    ),
    "gather with batching dims": Module(
        main(
            "(%t: tensor<2x5x3xf32>, %i: tensor<2x4x1xi32>) -> tensor<2x4x3xf32>",
            """%r = "stablehlo.gather"(%t, %i) {dimension_numbers = #stablehlo.gather<
  offset_dims = [2], collapsed_slice_dims = [1], operand_batching_dims = [0],
  start_indices_batching_dims = [0], start_index_map = [1], index_vector_dim = 2>,
  slice_sizes = array<i64: 1, 1, 3>}
  : (tensor<2x5x3xf32>, tensor<2x4x1xi32>) -> tensor<2x4x3xf32>
return %r : tensor<2x4x3xf32>""",
        )
    ),
    "dynamic slice beyond the end": Module(
        main(
            "(%x: tensor<4x6xf32>, %i: tensor<i32>, %j: tensor<i32>) -> tensor<2x3xf32>",
            """%big = stablehlo.constant dense<100> : tensor<i32>
%k = stablehlo.add %i, %big : tensor<i32>
%r = stablehlo.dynamic_slice %x, %k, %j, sizes = [2, 3]
  : (tensor<4x6xf32>, tensor<i32>, tensor<i32>) -> tensor<2x3xf32>
return %r : tensor<2x3xf32>""",
        )
    ),
    "reduce_precision": Module(
        xy(
            """%a = stablehlo.reduce_precision %x, format = e5m10 : tensor<4x6xf32>
%b = stablehlo.reduce_precision %y, format = e8m3 : tensor<4x6xf32>
%r = stablehlo.add %a, %b : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "optimization_barrier of two values": Module(
        xy(
            """%a:2 = stablehlo.optimization_barrier %x, %y : tensor<4x6xf32>, tensor<4x6xf32>
%r = stablehlo.add %a#0, %a#1 : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "composites of odml and chlo": Module(
        xy(
            """%a = stablehlo.composite "odml.gelu" %x {decomposition = @gelu,
  composite_attributes = {approximate = false}} : (tensor<4x6xf32>) -> tensor<4x6xf32>
%b = stablehlo.composite "chlo.asinh" %y {decomposition = @asinh, version = 1 : i32}
  : (tensor<4x6xf32>) -> tensor<4x6xf32>
%r = stablehlo.add %a, %b : tensor<4x6xf32>
return %r : tensor<4x6xf32>""",
            others="""func.func private @gelu(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  %h = stablehlo.constant dense<0.5> : tensor<4x6xf32>
  %s = stablehlo.constant dense<0.707106769> : tensor<4x6xf32>
  %one = stablehlo.constant dense<1.0> : tensor<4x6xf32>
  %a = stablehlo.multiply %x, %s : tensor<4x6xf32>
  %e = chlo.erf %a : tensor<4x6xf32> -> tensor<4x6xf32>
  %g = stablehlo.add %e, %one : tensor<4x6xf32>
  %b = stablehlo.multiply %x, %h : tensor<4x6xf32>
  %r = stablehlo.multiply %b, %g : tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}
func.func private @asinh(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  %r = chlo.asinh %x : tensor<4x6xf32> -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}""",
        )
    ),
    "a sharding of one device and a placement": Module(
        xy(
            """%a = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{replicated}"}
  : (tensor<4x6xf32>) -> tensor<4x6xf32>
%b = stablehlo.custom_call @annotate_device_placement(%y) {has_side_effect = true,
  mhlo.frontend_attributes = {_xla_buffer_placement = "device"}}
  : (tensor<4x6xf32>) -> tensor<4x6xf32>
%r = stablehlo.add %a, %b : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "mhlo.topk as a custom call": Module(
        xy(
            """%a:2 = stablehlo.custom_call @mhlo.topk(%x) {mhlo.attributes = {k = 3 : i64,
  largest = true}, mhlo.version = 1 : i64}
  : (tensor<4x6xf32>) -> (tensor<4x3xf32>, tensor<4x3xi32>)
return %a#0, %a#1 : tensor<4x3xf32>, tensor<4x3xi32>""",
            "(tensor<4x3xf32>, tensor<4x3xi32>)",
        )
    ),
    "mhlo.erf and mhlo.tan as custom calls": Module(
        xy(
            """%a = stablehlo.custom_call @mhlo.erf(%x) {
  mhlo.attributes = {}, mhlo.version = 1 : i64} : (tensor<4x6xf32>) -> tensor<4x6xf32>
%b = stablehlo.custom_call @mhlo.tan(%y) {mhlo.attributes = {}, mhlo.version = 1 : i64}
  : (tensor<4x6xf32>) -> tensor<4x6xf32>
%r = stablehlo.add %a, %b : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "chlo.top_k of bf16": Module(
        main(
            "(%x: tensor<4x6xbf16>) -> (tensor<4x2xbf16>, tensor<4x2xi32>)",
            """%a, %b = chlo.top_k(%x, k = 2)
  : tensor<4x6xbf16> -> (tensor<4x2xbf16>, tensor<4x2xi32>)
return %a, %b : tensor<4x2xbf16>, tensor<4x2xi32>""",
        )
    ),
    "an if with a loop in each branch": Module(
        main(
            "(%x: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32>",
            """%zero = stablehlo.constant dense<0> : tensor<i32>
%n = stablehlo.constant dense<3> : tensor<i32>
%one = stablehlo.constant dense<1> : tensor<i32>
%r = "stablehlo.if"(%p) ({
  %w:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %t = stablehlo.compare LT, %i, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  } do {
    %d = stablehlo.sine %c : tensor<4xf32>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %d : tensor<i32>, tensor<4xf32>
  }
  stablehlo.return %w#1 : tensor<4xf32>
}, {
  %w:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %t = stablehlo.compare LT, %i, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  } do {
    %d = func.call @twice(%c) : (tensor<4xf32>) -> tensor<4xf32>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %d : tensor<i32>, tensor<4xf32>
  }
  stablehlo.return %w#1 : tensor<4xf32>
}) : (tensor<i1>) -> tensor<4xf32>
return %r : tensor<4xf32>""",
            """func.func private @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %r = stablehlo.add %x, %x : tensor<4xf32>
  return %r : tensor<4xf32>
}""",
        )
    ),
    "a tuple and its elements": Module(
        xy(
            """%t = stablehlo.tuple %x, %y : tuple<tensor<4x6xf32>, tensor<4x6xf32>>
%a = stablehlo.get_tuple_element %t[1]
  : (tuple<tensor<4x6xf32>, tensor<4x6xf32>>) -> tensor<4x6xf32>
%r = stablehlo.subtract %a, %x : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "tokens that order nothing": Module(
        xy(
            """%a = stablehlo.create_token : !stablehlo.token
%b = stablehlo.create_token : !stablehlo.token
%c = stablehlo.after_all %a, %b : !stablehlo.token
%r = stablehlo.add %x, %y : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "rng_bit_generator of Threefry and Philox": Module(
        main(
            "(%s: tensor<2xui64>, %t: tensor<3xui64>) -> (tensor<8xui32>, tensor<8xui32>)",
            """%a, %b = stablehlo.rng_bit_generator %s, algorithm = THREE_FRY
  : (tensor<2xui64>) -> (tensor<2xui64>, tensor<8xui32>)
%c, %d = stablehlo.rng_bit_generator %t, algorithm = PHILOX
  : (tensor<3xui64>) -> (tensor<3xui64>, tensor<8xui32>)
return %b, %d : tensor<8xui32>, tensor<8xui32>""",
        ),
        refused="PHILOX",
    ),
    "rng_bit_generator of 64 bits": Module(
        main(
            "(%s: tensor<2xui64>) -> tensor<4xui32>",
            """%a, %b = stablehlo.rng_bit_generator %s, algorithm = DEFAULT
  : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui64>)
%c = stablehlo.convert %b : (tensor<4xui64>) -> tensor<4xui32>
return %c : tensor<4xui32>""",
        )
    ),
    "complex numbers": Module(
        xy(
            """%a = stablehlo.complex %x, %y : tensor<4x6xcomplex<f32>>
%b = stablehlo.multiply %a, %a : tensor<4x6xcomplex<f32>>
%r = stablehlo.real %b : (tensor<4x6xcomplex<f32>>) -> tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        ),
        refused="complex",
    ),
    "a Fourier transform": Module(
        xy(
            """%a = stablehlo.fft %x, type = RFFT, length = [6]
  : (tensor<4x6xf32>) -> tensor<4x4xcomplex<f32>>
%r = stablehlo.real %a : (tensor<4x4xcomplex<f32>>) -> tensor<4x4xf32>
return %r : tensor<4x4xf32>""",
            "tensor<4x4xf32>",
        ),
        refused="complex",
    ),
    "integers of four bits": Module(
        main(
            "(%x: tensor<8xi32>) -> tensor<8xi32>",
            """%a = stablehlo.convert %x : (tensor<8xi32>) -> tensor<8xi4>
%b = stablehlo.convert %a : (tensor<8xi4>) -> tensor<8xi32>
return %b : tensor<8xi32>""",
        ),
        refused="i4",
    ),
    "fp8 with a scale": Module(
        xy(
            """%a = stablehlo.convert %x : (tensor<4x6xf32>) -> tensor<4x6xf8E5M2>
%b = stablehlo.convert %a : (tensor<4x6xf8E5M2>) -> tensor<4x6xf32>
%r = stablehlo.multiply %b, %y : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "bits of another width": Module(
        main(
            "(%x: tensor<4xf32>, %y: tensor<4x2xui16>) -> (tensor<4x2xui16>, tensor<4xf32>)",
            """%a = stablehlo.bitcast_convert %x : (tensor<4xf32>) -> tensor<4x2xui16>
%b = stablehlo.bitcast_convert %y : (tensor<4x2xui16>) -> tensor<4xf32>
return %a, %b : tensor<4x2xui16>, tensor<4xf32>""",
        )
    ),
    "a dynamic shape": Module(
        main(
            "(%x: tensor<?x6xf32>) -> tensor<?x6xf32>",
            """%r = stablehlo.sine %x : tensor<?x6xf32>
return %r : tensor<?x6xf32>""",
        ),
        refused="static size",
    ),
    "a broadcast to a computed shape": Module(
        xy(
            """%n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<4x6xf32>) -> tensor<i32>
%m = stablehlo.get_dimension_size %x, dim = 1 : (tensor<4x6xf32>) -> tensor<i32>
%p = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
%q = stablehlo.reshape %m : (tensor<i32>) -> tensor<1xi32>
%s = stablehlo.concatenate %p, %q, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
%o = stablehlo.constant dense<2.0> : tensor<f32>
%b = stablehlo.dynamic_broadcast_in_dim %o, %s, dims = [] : (tensor<f32>, tensor<2xi32>)
  -> tensor<4x6xf32>
%i = stablehlo.dynamic_iota %s, dim = 1 : (tensor<2xi32>) -> tensor<4x6xf32>
%c = stablehlo.multiply %x, %b : tensor<4x6xf32>
%r = stablehlo.add %c, %i : tensor<4x6xf32>
return %r : tensor<4x6xf32>"""
        )
    ),
    "a convolution with dynamic padding known": Module(
        main(
            "(%x: tensor<1x8x2xf32>, %w: tensor<3x2x4xf32>) -> tensor<1x8x4xf32>",
            """%p = stablehlo.constant dense<[[1, 1]]> : tensor<1x2xi32>
%r = "stablehlo.dynamic_conv"(%x, %w, %p) {
  dimension_numbers = #stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>,
  feature_group_count = 1 : i64, batch_group_count = 1 : i64}
  : (tensor<1x8x2xf32>, tensor<3x2x4xf32>, tensor<1x2xi32>) -> tensor<1x8x4xf32>
return %r : tensor<1x8x4xf32>""",
        )
    ),
    "HLO text of torch_xla": Module(
        """HloModule SyncTensorsGraph.12

ENTRY %SyncTensorsGraph.12 (p0.1: f32[4], p1.2: f32[3,4]) -> (f32[3,4]) {
  %p1.2 = f32[3,4]{1,0} parameter(1), sharding={replicated}
  %p0.1 = f32[4]{0} parameter(0)
  %constant.3 = f32[] constant(1)
  %broadcast.4 = f32[4]{0} broadcast(f32[] %constant.3), dimensions={}
  %multiply.5 = f32[4]{0} multiply(f32[4]{0} %p0.1, f32[4]{0} %broadcast.4)
  %reshape.6 = f32[1,4]{1,0} reshape(f32[4]{0} %multiply.5)
  %broadcast.7 = f32[1,4]{1,0} broadcast(f32[1,4]{1,0} %reshape.6), dimensions={0,1}
  %reshape.8 = f32[4]{0} reshape(f32[1,4]{1,0} %broadcast.7)
  %broadcast.9 = f32[3,4]{1,0} broadcast(f32[4]{0} %reshape.8), dimensions={1}
  %add.10 = f32[3,4]{1,0} add(f32[3,4]{1,0} %p1.2, f32[3,4]{1,0} %broadcast.9)
  ROOT %tuple.11 = (f32[3,4]{1,0}) tuple(f32[3,4]{1,0} %add.10)
}
"""
    ),
}
